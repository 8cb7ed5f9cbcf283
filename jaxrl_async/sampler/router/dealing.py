"""Which replica gets a request: a pure function of the requests dealt before and of the loads now.

All members of a group (equal prompts, one after another) go to one replica, where they share a
prefill: to the one that had their prefix last, unless it is much busier than the least loaded.
Requests under suspicion (RouterJob.suspect) get a seat of their own, one at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxrl_async.sampler.router.job import RouterJob

AFFINITY_TOKENS = 32
"""Leading tokens that say which replica is likely to hold a request's prefix."""
AFFINITY_SLACK = 0.25
"""How much more loaded than the least loaded replica that one may be, as a share of its places."""
REMEMBERED = 4096
"""Prefixes whose replica is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the choice depends on, of one replica at work."""

    in_flight: int  # requests dealt to it and not answered
    places: int  # requests that it holds at once
    seat: int = 0  # number of its seat
    tries_suspect: bool = False  # whether one of its requests is under suspicion

    @property
    def load(self) -> float:
        """In flight over places."""
        return self.in_flight / self.places


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """What goes where."""

    shares: dict[int, list[RouterJob]] = field(default_factory=dict)  # by the number of the seat
    waiting: list[RouterJob] = field(default_factory=list)  # what no replica can take now


def choose(candidates: Sequence[Candidate], home: int | None, count: int = 1) -> int:
    """Return the index of the candidate for `count` requests of one prefix.

    home: index of the candidate that had the prefix last, preferred unless it is much busier than
    the least loaded one; None: none had it. Ties go to the lowest index.
    """
    loads = [(c.in_flight + count) / c.places for c in candidates]
    least = min(range(len(loads)), key=loads.__getitem__)
    if home is not None and loads[home] <= loads[least] + AFFINITY_SLACK:
        return home
    return least


def suspects_seat(candidates: Sequence[Candidate], any_wait: bool) -> int | None:
    """Return the seat that is kept for suspects while there are any, else None.

    It is the seat where one runs, or the least loaded one if any wait.
    """
    trying = [c for c in candidates if c.tries_suspect]
    if trying or not (any_wait and candidates):
        return trying[0].seat if trying else None
    return min(candidates, key=lambda c: c.in_flight).seat


def unrecorded(request_id: str) -> int | None:
    """Return None: no request has a recorded seat."""
    return None


class Dealer:
    """Deals requests to seats and remembers which seat had which prefix last."""

    def __init__(self, recorded: Callable[[str], int | None] = unrecorded) -> None:
        """recorded: in a replay, returns the seat of a request; if it returns None, one
        is chosen."""
        self._recorded = recorded
        self._homes: dict[bytes, int] = {}

    def deal(
        self,
        jobs: Sequence[RouterJob],
        candidates: Sequence[Candidate],
        *,
        suspects_wait: bool = False,
        together: bool = False,
    ) -> Deal:
        """Return a seat for each job, and the jobs that must wait.

        Args:
            jobs: In the order of asking.
            candidates: The replicas at work, by their seats.
            suspects_wait: Whether other jobs under suspicion wait already.
            together: Deal all jobs to one seat.
        """
        suspects = [job for job in jobs if job.suspect]
        others = [job for job in jobs if not job.suspect]
        kept = suspects_seat(candidates, suspects_wait or bool(suspects))
        deal = Deal()
        idle = any(c.seat == kept and not c.in_flight for c in candidates)
        if suspects and idle and kept is not None:
            deal.shares[kept] = [suspects.pop(0)]
        deal.waiting.extend(suspects)
        free = {c.seat: c for c in candidates if c.seat != kept}
        if not free:
            deal.waiting.extend(others)
            return deal
        for group in [others] if together and others else _groups(others):
            seat = self._seat_of(group, list(free.values()))
            deal.shares.setdefault(seat, []).extend(group)
            if (dealt := free.get(seat)) is not None:  # with many seats, all anew is too slow
                free[seat] = replace(dealt, in_flight=dealt.in_flight + len(group))
        return deal

    def _seat_of(self, group: Sequence[RouterJob], free: Sequence[Candidate]) -> int:
        """Return the seat for jobs that stay together."""
        job = group[0]
        recorded = self._recorded(job.request.request_id)
        if recorded is not None:
            return recorded
        candidates = [c for c in free if c.seat != job.avoid] or free
        seats = [c.seat for c in candidates]
        prefix = job.request.token_ids[:AFFINITY_TOKENS].tobytes()
        home = self._homes.get(prefix)
        index = choose(candidates, seats.index(home) if home in seats else None, len(group))
        self._remember(prefix, seats[index])
        return seats[index]

    def _remember(self, prefix: bytes, seat: int) -> None:
        """Make this the seat that had the prefix last; forget the oldest prefix of too many."""
        self._homes.pop(prefix, None)
        self._homes[prefix] = seat
        if len(self._homes) > REMEMBERED:
            del self._homes[next(iter(self._homes))]


def _groups(jobs: Sequence[RouterJob]) -> Iterator[list[RouterJob]]:
    """Split jobs into runs of equal prompts."""
    start = 0
    while start < len(jobs):
        content = jobs[start].request.token_ids.tobytes()
        end = start + 1
        while end < len(jobs) and jobs[end].request.token_ids.tobytes() == content:
            end += 1
        yield list(jobs[start:end])
        start = end
