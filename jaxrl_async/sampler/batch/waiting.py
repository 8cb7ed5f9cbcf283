"""Which of the requests that wait is next. Pure host code.

    put_back ──> [ in front: had a place, or has drawn ]  [ the others, by priority ] ──> head
    add ─────────────────────────────────────────────────────^

Lower priorities go first, as in vLLM's scheduler; equal ones in the order of arrival. Whoever has
waited longest is overtaken by at most `overtakes` admissions in a row and is then next, whatever
its priority: so each request that waits behind n older ones is admitted among the next
(n + 1) * (overtakes + 1), and none starves. This counts admissions and not time: the same requests
in the same order are always admitted in the same order.
"""

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from jaxrl_async.types import Request

OVERTAKES = 64
"""Most admissions in a row that overtake the one that has waited longest."""


class Asks(Protocol):
    """Whatever waits for a request's answer; told apart by identity."""

    @property
    def request(self) -> Request:
        """The request."""
        ...


A = TypeVar("A", bound=Asks)
Entry = tuple[tuple[int, int], int, A]
"""Priority, number in the order of arrival, and who waits."""


class WaitingQueue(Generic[A]):
    """Those that wait. Owned by one thread, or guarded by its owner's lock."""

    def __init__(self, overtakes: int = OVERTAKES) -> None:
        """overtakes: most admissions in a row past the one that has waited longest; 0: priorities
        have no effect."""
        self._most = overtakes
        self._front: deque[A] = deque()
        self._others: list[Entry[A]] = []  # sorted
        self._where: OrderedDict[A, Entry[A]] = OrderedDict()  # of the others, by arrival
        self._numbers = itertools.count()
        self._in_a_row = 0  # admissions past the one that has waited longest

    def __len__(self) -> int:
        return len(self._front) + len(self._others)

    def __iter__(self) -> Iterator[A]:
        """Iterate over those in front, and then over the others by priority."""
        return itertools.chain(list(self._front), [entry[2] for entry in self._others])

    def __contains__(self, one: object) -> bool:
        return one in self._where or one in self._front

    def add(self, incoming: Iterable[A]) -> None:
        """Have these wait, in the order of their arrival."""
        for one in incoming:
            entry = (one.request.priority, next(self._numbers), one)
            insort(self._others, entry)
            self._where[one] = entry

    def put_back(self, those: Sequence[A], *, behind: int = 0) -> None:
        """Put these in front of all others, in this order: they have had their turn.

        behind: how many of those in front stay before them.
        """
        before = [self._front.popleft() for _ in range(behind)]
        self._front.extendleft(reversed([*before, *those]))

    def front(self) -> tuple[A, ...]:
        """Return those in front, whatever the others' priorities."""
        return tuple(self._front)

    def head(self) -> A | None:
        """Return who is next; None: nobody waits."""
        if self._front:
            return self._front[0]
        if not self._others:
            return None
        if self._in_a_row >= self._most:
            return self._oldest()
        return self._others[0][2]

    def admit(self, one: A) -> None:
        """Remove one that has got what it waited for."""
        if one in self._where:
            passes = one is not self._oldest()
            self._in_a_row = self._in_a_row + 1 if passes else 0
        self.remove(one)

    def remove(self, one: A) -> None:
        """Remove one that waits no longer. Raises ValueError if it did not wait."""
        entry = self._where.pop(one, None)
        if entry is None:
            self._front.remove(one)
        else:
            del self._others[bisect_left(self._others, entry)]

    def clear(self) -> None:
        """Remove all."""
        self._front.clear()
        self._others.clear()
        self._where.clear()

    def _oldest(self) -> A:
        """Return the one of the others that has waited longest; there is one."""
        return next(iter(self._where))
