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

from collections.abc import Iterator, Sequence

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
    last = (trainer,) if trainer else ()
    passing: list[str] = []
    found = []
    for member in members:
        above = [passing[place] for place in _places_above(len(passing), fanout)]
        found.append((*above[: MOST_SOURCES - len(last)], *last))
        if member:
            passing.append(member)
    return tuple(found)


def _places_above(place: int, fanout: int) -> Iterator[int]:
    """Yield parent and its siblings, grandparent and its siblings, and so on; all before `place`.

    Children of one parent begin at different siblings of it, so that they part when it dies.
    """
    parent, turn = place // fanout - 1, place % fanout
    while parent >= 0:
        yield parent
        eldest = parent // fanout * fanout
        siblings = [p for p in range(eldest, eldest + fanout) if p != parent and p < place]
        turned = turn % max(len(siblings), 1)
        yield from siblings[turned:] + siblings[:turned]
        parent = parent // fanout - 1
