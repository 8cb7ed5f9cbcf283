"""The tree by which samplers pass weights on: each fetches from the one above it."""

from collections.abc import Sequence


def sources(members: Sequence[str], fanout: int, trainer: str) -> tuple[tuple[str, ...], ...]:
    """Return where each member fetches from, the best source first, the trainer last.

    Args:
        members: data addresses in the order of their offers; "": passes nothing on.
        fanout: members that the trainer, and each member, sends to.
        trainer: its address; "": none.
    """
    relays: list[int] = []  # members that pass on
    found: list[tuple[str, ...]] = []
    for number, address in enumerate(members):
        above = (number // fanout) - 1
        best = [members[relays[above]]] if 0 <= above < len(relays) else []
        if address:
            relays.append(number)
        found.append((*best, *([trainer] if trainer else [])))
    return tuple(found)
