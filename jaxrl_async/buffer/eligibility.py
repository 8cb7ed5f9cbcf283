"""Which finished groups may be trained on: each is looked at once for a version and a bound."""

from itertools import takewhile

from jaxrl_async.staleness import drop_reason
from jaxrl_async.types import Drop, EpisodeGroup


class Judge:
    """Finds the groups that may not be trained on. A trainer that waits asks after each group that
    comes in, and those that were fit at the last question still are. Not locked."""

    def __init__(self) -> None:
        self._at = (-1, -1)  # version and bound of the last question
        self._fit = set[int]()  # numbers of groups that were fit at those

    def unfit(
        self, groups: dict[int, EpisodeGroup], version: int, max_staleness: int
    ) -> dict[int, Drop]:
        """Return why groups may not be trained on at this version, by number.

        groups: what has come since the last question is last in it, and what was unfit then is
            gone; else `forget` first.
        """
        if self._at != (version, max_staleness):
            self._at, self._fit = (version, max_staleness), set()
        new = list(takewhile(lambda n: n not in self._fit, reversed(groups)))
        reasons = {n: drop_reason(groups[n], version, max_staleness) for n in reversed(new)}
        self._fit |= {n for n, reason in reasons.items() if reason is None}
        return {n: reason for n, reason in reasons.items() if reason is not None}

    def forget(self) -> None:
        """Look at every group at the next question."""
        self._at, self._fit = (-1, -1), set()
