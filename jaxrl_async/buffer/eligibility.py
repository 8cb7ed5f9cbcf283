"""Checks which finished groups may be trained on, once per group, version and bound."""

from itertools import takewhile

from jaxrl_async.staleness import drop_reason
from jaxrl_async.types import Drop, EpisodeGroup


class Eligibility:
    """Finds the groups that may not be trained on. A waiting trainer checks after each new group,
    so groups that were fit at the last check are not checked again. Not locked."""

    def __init__(self) -> None:
        self._at = (-1, -1)  # version and bound of the last check
        self._fit = set[int]()  # numbers of groups that were fit then

    def unfit(
        self, groups: dict[int, EpisodeGroup], version: int, max_staleness: int
    ) -> dict[int, Drop]:
        """Return the groups that may not be trained on at this version, with the reasons, by
        number.

        groups: groups added since the last check must come last, and groups found unfit must have
        been removed; else call `forget` first.
        """
        if self._at != (version, max_staleness):
            self._at, self._fit = (version, max_staleness), set()
        new = list(takewhile(lambda n: n not in self._fit, reversed(groups)))
        reasons = {n: drop_reason(groups[n], version, max_staleness) for n in reversed(new)}
        self._fit |= {n for n, reason in reasons.items() if reason is None}
        return {n: reason for n, reason in reasons.items() if reason is not None}

    def forget(self) -> None:
        """Check every group again at the next call."""
        self._at, self._fit = (-1, -1), set()
