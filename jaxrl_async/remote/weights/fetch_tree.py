"""The tree along which samplers pass weights on: who fetches from whom, and from whom next.

    fanout 2, members in order of joining:      trainer
                                              ┌────┴────┐
                                              0         1
                                            ┌─┴─┐     ┌─┴─┐
                                            2   3     4   5      sources of 5:  1, 0, trainer

A member's sources are its parent, its parent's siblings, its grandparent and so on; the trainer is
the last. A source that has died is left for the next one at once: nobody needs to be told. All of a
member's sources joined before it, so that nobody waits for himself in a circle.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

MOST_SOURCES = 8
"""Sources of one member: enough for several deaths at once."""


def sources(members: Sequence[str], fanout: int, trainer: str) -> tuple[tuple[str, ...], ...]:
    """Return the addresses each member fetches from, best first, the trainer's last.

    Args:
        members: Their addresses in the order in which they joined; "": one that passes nothing
            on, and is nobody's source. Appending one changes nothing for the others.
        fanout: To how many the trainer, and each member, sends the weights itself.
        trainer: Its address; "": it has none, and is left out.
    """
    passing: list[str] = []
    found = []
    for member in members:
        found.append(sources_of_next(len(passing), passing.__getitem__, fanout, trainer))
        if member:
            passing.append(member)
    return tuple(found)


def sources_of_next(
    place: int, address_at: Callable[[int], str], fanout: int, trainer: str
) -> tuple[str, ...]:
    """Return the addresses from which the next member fetches, best first, the trainer's last.

    Args:
        place: How many joined before it that pass weights on.
        address_at: Returns the address of each of them, by its place from 0 on.
        fanout, trainer: See `sources`.
    """
    last = (trainer,) if trainer else ()
    above = islice(_places_above(place, fanout), MOST_SOURCES - len(last))
    return (*map(address_at, above), *last)


def _places_above(place: int, fanout: int) -> Iterator[int]:
    """Yield parent and its siblings, grandparent and its siblings, and so on; all before `place`.

    Children of one parent begin at different siblings of it, so that they part when it dies.
    """
    parent, turn = place // fanout - 1, place % fanout
    while parent >= 0:
        yield parent
        eldest = parent // fanout * fanout
        siblings = min(fanout, place - eldest) - 1
        for number in range(siblings):
            sibling = eldest + (turn + number) % siblings
            yield sibling + (sibling >= parent)  # the parent itself is left out
        parent = parent // fanout - 1
