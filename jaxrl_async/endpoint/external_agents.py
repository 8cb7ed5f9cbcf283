"""External agents as members of groups: they connect and request tasks.

    member ──offer──> TaskQueue <──take── endpoint <──"give me a task"── an external agent
          │ waits               │ opens                                           │
          └──── Episode <── PolicySession <────────key───── samples, rewards, ends┘

A task is offered until an agent takes it, and starts then. A session that is abandoned or given up
is offered again, so agents that disappear cost only their time. After some tries its group fails,
and its ticket is given back.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxrl_async.endpoint.agent_programs import AgentPrograms, ProgramMember, messages_for
from jaxrl_async.endpoint.sessions import FINISHED, STOPPING, PolicySession, SessionMember, call_in
from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.ports.generate import Generate
from jaxrl_async.types import Episode, EpisodeLimits, Prompt

log = logging.getLogger(__name__)


class OfferedTask:
    """A task that waits for an agent. Taken at most once."""

    def __init__(self, member: SessionMember, open_session: Callable[[], PolicySession]) -> None:
        """Make an offer.

        Args:
            member: the member to play.
            open_session: called once, when the offer is taken, on any thread.
        """
        self.member, self._open = member, open_session
        self._loop = asyncio.get_running_loop()
        self.session: asyncio.Future[PolicySession] = self._loop.create_future()
        self.withdrawn = False

    def take(self) -> PolicySession:
        """Open its session for an agent, and notify the member. Raises Closed and RolloutError."""
        session = self._open()

        def notify() -> None:
            if self.session.done():
                session.end("its group has ended")
            else:
                self.session.set_result(session)

        try:
            self._loop.call_soon_threadsafe(notify)
        except RuntimeError:  # the loop is closed, and the member with it
            session.end(STOPPING)
            raise Closed(STOPPING) from None
        return session


class TaskQueue:
    """Queues of tasks that wait for agents, and of agents that wait for tasks. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offers: deque[OfferedTask] = deque()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = deque()
        self._closed = False

    @property
    def num_offers(self) -> int:
        """Number of waiting tasks."""
        with self._lock:
            return sum(not offer.withdrawn for offer in self._offers)

    def offer(self, offer: OfferedTask, *, first: bool = False) -> None:
        """Add a task to the queue; first: before all others."""
        with self._lock:
            while self._offers and self._offers[0].withdrawn:
                self._offers.popleft()
            if first:
                self._offers.appendleft(offer)
            else:
                self._offers.append(offer)
            self._wake(1)

    def close(self) -> None:
        """Notify waiting agents that no task will arrive. Idempotent."""
        with self._lock:
            self._closed = True
            self._wake(len(self._waiting))

    async def take(self, wait_s: float) -> PolicySession | None:
        """Return the session of the longest-waiting task; None: no task arrived within wait_s.

        Raises Closed if the run stops, RolloutError if no session may be opened.
        """
        end = asyncio.get_running_loop().time() + wait_s
        while True:
            offer, event = self._next()
            if offer is not None:
                return self._accept(offer)
            try:
                async with asyncio.timeout_at(end):
                    await event.wait()
            except TimeoutError:
                return None
            finally:
                self._leave(event)

    def _accept(self, offer: OfferedTask) -> PolicySession:
        try:
            return offer.take()
        except RolloutError:  # too many open sessions
            self.offer(offer, first=True)
            raise

    def _next(self) -> tuple[OfferedTask | None, asyncio.Event]:
        """Return an offer, or None and an event that signals a new offer. Raises Closed."""
        event = asyncio.Event()
        with self._lock:
            if self._closed:
                raise Closed(STOPPING)
            while self._offers:
                offer = self._offers.popleft()
                if not offer.withdrawn:
                    return offer, event
            self._waiting.append((asyncio.get_running_loop(), event))
        return None, event

    def _leave(self, event: asyncio.Event) -> None:
        """Stop waiting. An agent that was woken but leaves without an offer wakes the next one."""
        with self._lock:
            others = [w for w in self._waiting if w[1] is not event]
            was_woken = len(others) == len(self._waiting)
            self._waiting = deque(others)
            if was_woken and self._offers:
                self._wake(1)

    def _wake(self, count: int) -> None:
        for _ in range(min(count, len(self._waiting))):
            loop, event = self._waiting.popleft()
            call_in(loop, event.set)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalAgentMembers:
    """A MakeEnv of members that external agents play."""

    programs: AgentPrograms  # sessions, limits and counts; its program is never run
    tasks: TaskQueue
    tries: int = 3  # consecutive agents that may abandon an episode before its group fails

    def __call__(self, prompt: Prompt) -> "ExternalAgentMember":
        """Make the member that plays this prompt."""
        return ExternalAgentMember(self)


class ExternalAgentMember(ProgramMember):
    """One member of a group, played by the agent that takes it (ports.Plays)."""

    def __init__(self, members: ExternalAgentMembers) -> None:
        super().__init__(members.programs)
        self._members = members

    async def play(
        self,
        generate: Generate,
        prompt: Prompt,
        *,
        label: str,
        member: int,
        limits: EpisodeLimits,
        spent_s: Callable[[float], None],
    ) -> Episode:
        """Offer the episode until an agent has played it (ports.Plays). There is no timeout for
        this, except the watchdog's.

        Raises RolloutError if the maximum number of consecutive agents has abandoned it, Closed if
        the run is stopping.
        """
        programs, clock = self._programs, asyncio.get_running_loop().time
        prompt = replace(prompt, messages=messages_for(prompt, programs.system_prompt))
        played = SessionMember(prompt=prompt, label=label, index=member)
        started, sampling_s, reason = clock(), 0.0, ""
        try:
            with programs.calls.one():
                for _ in range(self._members.tries):
                    session = await self._wait_for_agent(
                        OfferedTask(
                            played,
                            lambda: programs.sessions.open(
                                generate, played, limits, programs.bounds
                            ),
                        )
                    )
                    try:
                        reason = await self._wait_for_end(session)
                        sampling_s += session.sampling_s()
                    finally:
                        session.end("its group has ended")
                        self._count(session)
                    if not reason:
                        return self._scored(session, None)
                    log.info("session %s is offered again: %s", session.label, reason)
                    programs.count("abandoned_sessions", 1)
            raise RolloutError(
                f"prompt {prompt.prompt_id}: {self._members.tries} consecutive agents abandoned "
                f"{played}; the last: {reason}."
            )
        finally:
            spent_s(max(clock() - started - sampling_s, 0.0))

    async def _wait_for_agent(self, offer: OfferedTask) -> PolicySession:
        """Offer the task and wait until an agent takes it."""
        self._members.tasks.offer(offer)
        try:
            self._session = await offer.session
            return self._session
        except asyncio.CancelledError:
            if offer.session.done() and not offer.session.cancelled():  # taken just now
                offer.session.result().end("its group has ended")
            raise
        finally:
            offer.withdrawn = True

    async def _wait_for_end(self, session: PolicySession) -> str:
        """Wait for a session to end; return why it has no episode, or "". Raises Closed."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        session.on_end(lambda _: call_in(loop, over.set))
        while session.ended is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(session.remaining_s(), 0.0)):
                    await over.wait()
            session.expire()
        if session.ended == STOPPING:
            raise Closed(STOPPING)
        played = session.has_sampled or session.too_long
        if played and (session.ended == FINISHED or session.exhausted is not None):
            return ""
        return session.ended if session.ended != FINISHED else "it was finished without a token"
