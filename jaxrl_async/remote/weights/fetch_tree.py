"""The tree along which samplers relay weights: each sampler's source, and its fallback sources.

    fanout 2, members in order of joining:      trainer
                                              ┌────┴────┐
                                              0         1
                                            ┌─┴─┐     ┌─┴─┐
                                            2   3     4   5      sources of 5:  1, 0, trainer

A member's sources are its parent, its parent's siblings, its grandparent and so on; the trainer is
the last. If a source has died, the member immediately uses the next one, without coordination. All
of a member's sources joined before it, so there are no cycles.
"""

from collections.abc import Callable, Iterator
from itertools import islice

MOST_SOURCES = 8
"""Maximum number of sources of one member: enough for several simultaneous failures."""


def sources_of_next(
    place: int, address_at: Callable[[int], str], fanout: int, trainer: str
) -> tuple[str, ...]:
    """Return the addresses from which the next member fetches, best first, the trainer's last.

    Args:
        place: Number of relaying members that joined before it.
        address_at: Returns the address of each of them by its place, from 0.
        fanout: Number of members to which the trainer, and each member, sends the weights directly.
        trainer: Its address; "": it has none, and is omitted.
    """
    last = (trainer,) if trainer else ()
    above = islice(_places_above(place, fanout), MOST_SOURCES - len(last))
    return (*map(address_at, above), *last)


def _places_above(place: int, fanout: int) -> Iterator[int]:
    """Yield parent and its siblings, grandparent and its siblings, and so on; all before `place`.

    Children of one parent start at different siblings of it, so they spread out when it dies.
    """
    parent, turn = place // fanout - 1, place % fanout
    while parent >= 0:
        yield parent
        eldest = parent // fanout * fanout
        siblings = min(fanout, place - eldest) - 1
        for number in range(siblings):
            sibling = eldest + (turn + number) % siblings
            yield sibling + (sibling >= parent)  # skip the parent itself
        parent = parent // fanout - 1
