"""The reward of the run `brief` in configs/several_adapters.yaml: right sums in few characters."""


def brief_sum(completion: str, reference: str) -> dict[str, float]:
    """Return whether the sum is right, and the price of the characters that it took.

    >>> brief_sum("#132", "132")
    {'correct': 1.0, 'price': -0.125}
    """
    right = completion.rpartition("#")[2].strip() == reference
    return {"correct": float(right), "price": -len(completion) / 32}
