"""Wait for services that are unavailable: the only place that retries calls of environments, tools,
judges and rewards for the duration of an outage.

    attempt ──unavailable──> wait (growing, jittered, at least Retry-After) ──> attempt ──> answered
                 ├──> other calls are answered meanwhile: this call alone is at fault, and fails
                 └──> CALL_S are over: this call fails, and another one is made in its place

Services are identified by their names in messages. A service that has not answered since the run
began may have a wrong address, or was never started. The run waits for it only briefly (FIRST_S),
or for faults.outage_s if that is set.
"""

import asyncio
import contextlib
import logging
import math
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from jaxrl_async.errors import JaxrlError, OutageTooLong, RetriesExhausted, in_a_line
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.ports.run import Clock
from jaxrl_async.unavailable import retry_wait_s, unavailable_cause

T = TypeVar("T")

ENVIRONMENT = "the environment"
"""Name, in Outages, of the policy's counterpart: an environment, a game or a program."""
FIRST_S = 30.0
"""Maximum wait for a service that has never answered in this run if faults.outage_s is not set,
seconds."""
TRIES = 5
"""Minimum number of retries of a call, even if other calls are answered meanwhile."""
CALL_S = 1200.0
"""Maximum time for which one call is retried, seconds: the service may be unable to answer it.
What needs it then fails, and its replacement makes a new call."""
ONE_PROMPT_S = 120.0
"""Maximum time for which calls of one prompt are retried if only that prompt's calls fail,
seconds."""
LEAST_S = 0.1
"""Minimum of the first wait, seconds."""
JITTER = 0.25
"""Jitter of the waits, as a share: it keeps calls from being retried all at the same time."""
REPORT_S = 60.0
"""Time between two reports of one outage, seconds."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Outage:
    """One service that is unavailable."""

    since_s: float  # the time of its first failure, by the clock
    since: float  # the same as time.time()
    given_up_s: float | None  # timeout of its calls if they may be at fault themselves
    error: str = ""  # the latest one
    wait_s: float = 0.0  # the latest one
    reported: bool = False  # in a line of `reports`, or logged
    over: bool = False  # another call was answered; calls that failed still wait


@dataclass(slots=True, kw_only=True)
class _Call:
    """A call that is retried during an outage; see `Outages.until_answered`."""

    service: str
    tries: int
    patience_s: float
    optional: bool
    again: int = 0  # number of retries, the next one included
    first_s: float = 0.0  # time of its first failure, by the clock
    sure_s: float = math.inf  # time of its second failure

    def note_failure(self, now_s: float) -> None:
        """Remember the times of its first two failures."""
        if not self.again:
            self.first_s = now_s
        elif self.again == 1:
            self.sure_s = now_s


class Outages:
    """The unavailable services of one run. Any thread and any event loop."""

    def __init__(
        self,
        *,
        longest_s: float | None = None,
        backoff_first_s: float = 1.0,
        known: bool = False,
        count: Callable[[str], None] = lambda name: None,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Start without outages.

        Args:
            longest_s: maximum wait for a service, seconds; None: no limit, but FIRST_S for a
            service
                that has never answered.
            backoff_first_s: the first wait, seconds; each is twice the last, 60 s at most.
            known: all services have answered before, as in a run that is resumed.
            count: called with the name of each fault (metrics/fault_counts.py).
            clock: for waits and durations.
            wall: for the time of day.
            sleep: waits for a number of seconds.
            chance: a number from 0 to 1 for the jitter of each wait.
        """
        self._longest_s, self._known, self._count = longest_s, known, count
        self._first_s = max(backoff_first_s, LEAST_S)
        self._clock, self._wall, self._sleep, self._chance = clock, wall, sleep, chance
        self._lock = threading.Lock()
        self._outages: dict[str, _Outage] = {}
        self._unanswered: dict[str, tuple[float, float]] = {}  # since when, on both clocks
        # calls that failed and are retried, by service and what they are about
        self._calls = defaultdict[str, Counter[object]](Counter)
        self._answered: dict[str, float] = {}  # time of each service's last answer
        self._reported_s: dict[str, float] = {}  # time of each service's last report
        self._total_s, self._began_s = 0.0, 0.0  # of past outages; start of the current ones
        self.reported = False
        """Whether a Notices object fetches `reports`; if not, outages are logged here, as often."""

    # ---- calls

    async def until_answered(
        self,
        service: str,
        attempt: Callable[[], Awaitable[T]],
        *,
        about: object = None,
        tries: int = TRIES,
        patience_s: float = CALL_S,
        optional: bool = False,
    ) -> T:
        """Return the result of `attempt`; retry it while the service is unavailable.

        The time limits around the call (`time_limit`) are extended by the duration of the outage.

        Args:
            service: the service's name in messages, such as "the environment (reset)".
            attempt: makes the call. Exceptions that do not mean an outage are raised immediately.
            tries: number of retries after which the call is given up if the service has answered
                another call meanwhile, since then this call alone is at fault. An optional call is
                given up after that many in any case.
            about: the prompt that the call is about; None: a different one from all others.
            patience_s: maximum time from the first failure on, seconds, after which the call is
                given up.
            optional: the call itself may be wrong, for example if the policy chooses an address. A
                service that has never answered is then not considered missing, and no wait begins
                that would end after patience_s.

        Raises OutageTooLong if the service was unavailable for longer than the run waits, and
        RetriesExhausted if this call was retried for long enough.
        """
        about = object() if about is None else about
        call = _Call(service=service, tries=tries, patience_s=patience_s, optional=optional)
        try:
            while True:
                began_s = self._clock()
                try:
                    result = await attempt()
                except Exception as error:
                    cause = unavailable_cause(error)
                    if cause is None:
                        raise
                    now_s = self._clock()
                    call.note_failure(now_s)
                    wait_s = self._wait_s(call.again, cause)
                    if self._gives_up(call, now_s, wait_s):
                        raise RetriesExhausted(_message(error)) from error
                    self._note_outage(
                        service,
                        cause,
                        now_s,
                        wait_s,
                        about=None if call.again else about,
                        given_up_s=patience_s if optional else None,
                    )
                    call.again += 1
                    self._raise_if_too_long(service, cause)
                else:
                    self.answered(service)
                    return result
                self._count("outage_retries")
                put_off_limits(now_s - began_s + wait_s)
                await self._sleep(wait_s)
        finally:
            if call.again:
                self._note_end(service, about)

    def answered(self, service: str) -> None:
        """Record that a service has just answered, so it is available. Calls that are waiting as
        Retry-After requested continue to wait."""
        now_s = self._clock()
        with self._lock:
            self._answered[service] = now_s
            self._unanswered.pop(service, None)
            outage = self._outages.get(service)
            if outage is None or outage.over:
                return
            reported, outage.reported, outage.over = outage.reported, False, True
            self._count_if_all_over(now_s)
        if reported:
            log.warning("%s is back after %s", service, duration_text(now_s - outage.since_s))

    def knows(self, service: str) -> None:
        """Record that a service has answered at some time in this run, so it exists."""
        self._answered.setdefault(service, -math.inf)

    # ---- reports

    @property
    def active(self) -> bool:
        """Whether a call is waiting for an unavailable service."""
        return bool(self._outages)

    def total_s(self) -> float:
        """Return the total time for which any service was unavailable, seconds."""
        with self._lock:
            return self._total_s + (self._clock() - self._began_s if self._any_outage() else 0.0)

    def reports(self) -> list[str]:
        """Return a line for each service that is unavailable or for which calls wait, unless it was
        reported within the last minute."""
        with self._lock:
            lines = [self._report(service, self._clock()) for service in self._outages]
        return [line for line in lines if line is not None]

    def _report(self, service: str, now_s: float) -> str | None:
        """Return a line on an unavailable service; None if it was reported recently."""
        if now_s - self._reported_s.get(service, -math.inf) < REPORT_S:
            return None
        outage = self._outages[service]
        self._reported_s[service], outage.reported = now_s, True
        since = time.strftime("%H:%M:%S", time.localtime(outage.since))
        longest_s = self._most_s(service, outage)
        end = "they wait until it answers (faults.outage_s sets an end)"
        if outage.given_up_s is not None:
            end = f"each is given up after {duration_text(outage.given_up_s)}"
        elif longest_s is not None:
            end = f"the run ends if that takes {duration_text(longest_s)}"
        calls, wait_s = self._calls[service].total(), duration_text(max(outage.wait_s, 1.0))
        if outage.over:
            return (
                f"{service} answers again, and calls that it refused since {since} wait: {calls}, "
                f"the newest for {wait_s} ({outage.error})"
            )
        for_s = now_s - outage.since_s
        so_far = f" ({duration_text(for_s)})" if for_s >= 1 else ""
        return (
            f"{service} has been away since {since}{so_far}: {outage.error}. Calls that wait: "
            f"{calls}, each made again every {wait_s}; {end}"
        )

    # ---- the state

    def _wait_s(self, failures: int, cause: BaseException) -> float:
        wait_s = backoff_s(self._first_s, failures) * (1 + JITTER * (2 * self._chance() - 1))
        return max(wait_s, retry_wait_s(cause) or 0.0)

    def _exists(self, service: str) -> bool:
        """Return whether a service has answered in this run, or in the run that it resumes."""
        return self._known or service in self._answered

    def _gives_up(self, call: _Call, now_s: float, wait_s: float) -> bool:
        """Return whether to give up a call that just failed. wait_s: the wait before the next
        retry."""
        service, waited_s = call.service, now_s - call.first_s
        if call.optional and (call.again >= call.tries or waited_s + wait_s > call.patience_s):
            return True
        if call.again >= call.tries:
            if self._answered_since(service, call.sure_s):
                return True  # other calls were answered meanwhile
            if len(self._calls[service]) == 1 and (  # all calls are about one prompt
                self._answered_since(service, call.first_s)
                or (self._exists(service) and waited_s >= ONE_PROMPT_S)
            ):
                return True
        return waited_s >= call.patience_s and self._exists(service)

    def _answered_since(self, service: str, since_s: float) -> bool:
        """Return whether a service has answered another call since then."""
        return self._answered.get(service, -math.inf) > since_s

    def _note_outage(
        self,
        service: str,
        cause: BaseException,
        now_s: float,
        wait_s: float,
        *,
        about: object,
        given_up_s: float | None,
    ) -> None:
        with self._lock:
            if about is not None:
                self._calls[service][about] += 1
            outage = self._outages.get(service)
            if outage is None or outage.over:
                if not self._any_outage():
                    self._began_s = now_s
                since_s, since = self._unanswered.setdefault(service, (now_s, self._wall()))
                outage = _Outage(since_s=since_s, since=since, given_up_s=given_up_s)
                self._outages[service] = outage
                self._count("outages")
            outage.error, outage.wait_s = _message(cause), wait_s
            if not self.reported and (line := self._report(service, now_s)) is not None:
                log.warning("%s", line)

    def _note_end(self, service: str, about: object) -> None:
        """Remove a call that no longer waits; the outage is over when none are left."""
        with self._lock:
            calls = self._calls[service]
            calls[about] -= 1
            if not calls[about]:
                del calls[about]
            if calls:
                return
            outage = self._outages.pop(service, None)
            if outage is not None and not outage.over:
                self._count_if_all_over(self._clock())

    def _any_outage(self) -> bool:
        return any(not outage.over for outage in self._outages.values())

    def _count_if_all_over(self, now_s: float) -> None:
        if not self._any_outage():
            self._total_s += now_s - self._began_s

    def _most_s(self, service: str, outage: _Outage) -> float | None:
        """Return the maximum wait for a service, seconds; None: no limit."""
        if outage.given_up_s is not None:
            return None
        if self._exists(service):
            return self._longest_s
        return FIRST_S if self._longest_s is None else self._longest_s

    def _raise_if_too_long(self, service: str, cause: BaseException) -> None:
        outage = self._outages.get(service)
        most_s = None if outage is None else self._most_s(service, outage)
        if most_s is None or outage is None:
            return
        for_s = self._clock() - outage.since_s
        if for_s < most_s:
            return
        why = (
            f"faults.outage_s ({most_s:g}) ends the run. Everything is saved: --resume continues "
            "once it is available"
            if self._exists(service)
            else "it has not answered once since the run began. See whether it runs and whether "
            "its address is right; faults.outage_s waits for longer, as for a server that loads "
            "its model"
        )
        raise OutageTooLong(
            f"{service} has been away for {duration_text(for_s)} ({outage.error}): {why}."
        ) from cause


def _message(error: BaseException) -> str:
    text, kind = in_a_line(error), type(error).__name__
    if isinstance(error, JaxrlError):
        return text
    return f"{kind}: {text}" if text else kind


def duration_text(seconds: float) -> str:
    """Return a duration as text: 1.5 s, 12 min, 3.4 h."""
    if seconds < 1:
        return "less than 1 s"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---- time limits that an outage extends

_limits: ContextVar[tuple[tuple[asyncio.AbstractEventLoop, asyncio.Timeout], ...]] = ContextVar(
    "limits", default=()
)


@contextlib.asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Like asyncio.timeout, but outages inside, on this loop or on another, extend it."""
    async with asyncio.timeout(seconds) as limit:
        token = _limits.set((*_limits.get(), (asyncio.get_running_loop(), limit)))
        try:
            yield limit
        finally:
            _limits.reset(token)


def put_off_limits(seconds: float) -> None:
    """Extend all time limits around this call by this many seconds."""
    for loop, limit in _limits.get():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_put_off, limit, seconds)


def _put_off(limit: asyncio.Timeout, seconds: float) -> None:
    ends_s = limit.when()
    if ends_s is not None:
        with contextlib.suppress(RuntimeError):  # it has expired
            limit.reschedule(ends_s + seconds)
