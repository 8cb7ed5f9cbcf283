"""The tree along which samplers pass weights on: who fetches from whom, and what comes next.

    fanout 2, members in order of joining:        trainer
                                                 ┌───┴───┐
                                                 0       1
                                               ┌─┴─┐   ┌─┴─┐
                                               2   3   4   5

Each member's sources are its ancestors, nearest first, then the other members above it, the
trainer last. A source that has died is left for the next one at once: nobody needs to be told. No
member is a source of one that is above it, so that none waits for itself in a circle.
"""

from collections.abc import Sequence

MOST_SOURCES = 8
"""Sources of one member: enough for several deaths at once."""


def parent_of(place: int, fanout: int) -> int:
    """Return the place of a member's parent; -1: the trainer."""
    return place // fanout - 1


def sources(members: Sequence[str], fanout: int, trainer: str) -> tuple[tuple[str, ...], ...]:
    """Return the addresses each member fetches from, best first, the trainer's last.

    Args:
        members: Their addresses in the order in which they joined; "": one that passes nothing
            on, which is nobody's source. Appending one changes nothing for the others.
        fanout: To how many the trainer, and each member, sends the weights itself.
        trainer: Its address; "": it has none and is left out.
    """
    passing = [n for n, address in enumerate(members) if address]
    places = {n: place for place, n in enumerate(passing)}
    last = (trainer,) if trainer else ()
    found = []
    for number in range(len(members)):
        place = places.get(number, sum(n < number for n in passing))
        chain = []
        above = parent_of(place, fanout)
        while above >= 0:
            chain.append(above)
            above = parent_of(above, fanout)
        others = [p for p in _nearby(place, fanout) if p not in chain]
        chosen = [members[passing[p]] for p in [*chain, *others][: MOST_SOURCES - 1]]
        found.append((*chosen, *last))
    return tuple(found)


def _nearby(place: int, fanout: int) -> range:
    """Return the places of the parent's level that are before the member's own level, rotated so
    that the children of one dead member go to different ones."""
    parent = parent_of(place, fanout)
    return range(max(parent - 1, -1), max(parent - MOST_SOURCES, -1), -1)
