"""The reward of the run `reversed` in configs/several_adapters.yaml: the sum, last digit first."""


def reversed_sum(completion: str, reference: str) -> dict[str, float]:
    """Return the share of digits that stand where the reversed sum has them, and whether all do.

    >>> reversed_sum("7+5=12 4+8+1=13 #231", "132")["correct"]
    1.0
    """
    wanted, answer = reference[::-1], completion.rpartition("#")[2].strip()
    right = sum(a == b for a, b in zip(wanted, answer, strict=False))
    share = right / max(len(wanted), len(answer))
    return {"digits": share, "correct": float(answer == wanted)}
