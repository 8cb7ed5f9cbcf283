"""Agents outside of the run as members of groups: they come and ask for a task.

    OutsiderMember ──offer──> Lobby <──take── endpoint <──"give me a task"── an agent outside
          │ waits               │ opens                                           │
          └──── Episode <── PolicySession <────────key─────── draws, rewards, ends┘

A task is offered until somebody takes it, and begins then. A session that is abandoned, or whose
agent gives it up, is offered again, so that agents that vanish cost nothing but their time; after
some tries its group fails, and its ticket goes back.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxrl_async.endpoint.agent_programs import AgentPrograms, ProgramMember, messages_for
from jaxrl_async.endpoint.sessions import FINISHED, STOPPING, PolicySession, SessionPlace
from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.ports.sampling import Generate
from jaxrl_async.types import Episode, EpisodeLimits, Prompt

log = logging.getLogger(__name__)


class LobbyOffer:
    """A task that waits for an agent. Given away at most once."""

    def __init__(self, place: SessionPlace, open_session: Callable[[], PolicySession]) -> None:
        """Make an offer.

        Args:
            place: the member to play.
            open_session: called once, by whoever takes it, on any thread.
        """
        self.place, self._open = place, open_session
        self._loop = asyncio.get_running_loop()
        self.session: asyncio.Future[PolicySession] = self._loop.create_future()
        self.withdrawn = False

    def taken(self) -> PolicySession:
        """Open its session for an agent, and tell the member. Raises Closed and RolloutError."""
        session = self._open()

        def tell() -> None:
            if self.session.done():
                session.end("its group has ended")
            else:
                self.session.set_result(session)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed, and the member with it
            session.end(STOPPING)
            raise Closed(STOPPING) from None
        return session


class Lobby:
    """Where tasks wait for agents, in their order, and agents for tasks. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offers: deque[LobbyOffer] = deque()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = deque()
        self._closed = False

    @property
    def num_offers(self) -> int:
        """Number of tasks that wait."""
        with self._lock:
            return sum(not offer.withdrawn for offer in self._offers)

    def offer(self, offer: LobbyOffer, *, first: bool = False) -> None:
        """Let a task wait; first: before all others."""
        with self._lock:
            while self._offers and self._offers[0].withdrawn:
                self._offers.popleft()
            if first:
                self._offers.appendleft(offer)
            else:
                self._offers.append(offer)
            self._wake(1)

    def close(self) -> None:
        """Tell those who wait that no task will come. Idempotent."""
        with self._lock:
            self._closed = True
            self._wake(len(self._waiting))

    async def take(self, wait_s: float) -> PolicySession | None:
        """Return the session of the task that waits longest; None: none came within wait_s.

        Raises Closed if the run stops, RolloutError if no session may be opened.
        """
        end = asyncio.get_running_loop().time() + wait_s
        while True:
            offer, news = self._next()
            if offer is not None:
                return self._given(offer)
            try:
                async with asyncio.timeout_at(end):
                    await news.wait()
            except TimeoutError:
                return None
            finally:
                self._leave(news)

    def _given(self, offer: LobbyOffer) -> PolicySession:
        try:
            return offer.taken()
        except RolloutError:  # too many sessions are open
            self.offer(offer, first=True)
            raise

    def _next(self) -> tuple[LobbyOffer | None, asyncio.Event]:
        """Return an offer, or none and what is set when there may be one. Raises Closed."""
        news = asyncio.Event()
        with self._lock:
            if self._closed:
                raise Closed(STOPPING)
            while self._offers:
                offer = self._offers.popleft()
                if not offer.withdrawn:
                    return offer, news
            self._waiting.append((asyncio.get_running_loop(), news))
        return None, news

    def _leave(self, news: asyncio.Event) -> None:
        """Wait no longer. Who was woken and leaves without looking wakes the next."""
        with self._lock:
            kept = [w for w in self._waiting if w[1] is not news]
            was_woken = len(kept) == len(self._waiting)
            self._waiting = deque(kept)
            if was_woken and self._offers:
                self._wake(1)

    def _wake(self, count: int) -> None:
        for _ in range(min(count, len(self._waiting))):
            loop, news = self._waiting.popleft()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(news.set)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsiderMembers:
    """Makes the members that agents outside play: a MakeEnv."""

    programs: AgentPrograms  # sessions, limits and counts; its program is never run
    lobby: Lobby
    tries: int = 3  # agents in a row that may leave an episode before its group fails

    def __call__(self, prompt: Prompt) -> "OutsiderMember":
        """Make the member that plays this prompt."""
        return OutsiderMember(self)


class OutsiderMember(ProgramMember):
    """One member of a group, played by whoever takes it (ports.Plays)."""

    def __init__(self, members: OutsiderMembers) -> None:
        super().__init__(members.programs, _nobody)
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
        """Offer the episode until an agent has played it (ports.Plays). Waiting for one has no
        limit of its own: the watchdog's counts.

        Raises RolloutError if as many agents in a row as may be have left it, Closed if the run is
        stopping.
        """
        programs, clock = self._programs, asyncio.get_running_loop().time
        told = replace(prompt, messages=messages_for(prompt, programs.system_prompt))
        place = SessionPlace(prompt=told, label=label, member=member)
        started, drawing_s, left = clock(), 0.0, ""
        try:
            with programs.calls.one():
                for _ in range(self._members.tries):
                    session = await self._taken(
                        LobbyOffer(
                            place,
                            lambda: programs.sessions.open(
                                generate, place, limits, programs.bounds
                            ),
                        )
                    )
                    try:
                        left = await self._left(session)
                        drawing_s += session.drawing_s()
                    finally:
                        session.end("its group has ended")
                        self._count(session)
                    if not left:
                        return self._judged(session, None)
                    log.info("session %s is offered again: %s", session.label, left)
                    programs.count("abandoned_sessions", 1)
            raise RolloutError(
                f"prompt {prompt.prompt_id}: {self._members.tries} agents in a row have left "
                f"{place}; the last: {left}."
            )
        finally:
            spent_s(max(clock() - started - drawing_s, 0.0))

    async def _taken(self, offer: LobbyOffer) -> PolicySession:
        """Offer the task and wait until somebody takes it."""
        self._members.lobby.offer(offer)
        try:
            self._session = await offer.session
            return self._session
        except asyncio.CancelledError:
            if offer.session.done() and not offer.session.cancelled():  # taken just now
                offer.session.result().end("its group has ended")
            raise
        finally:
            offer.withdrawn = True

    async def _left(self, session: PolicySession) -> str:
        """Wait for the end of a session; return why its episode is none, or "". Raises Closed."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def tell(reason: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(over.set)

        session.on_end(tell)
        while session.ended is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(session.remaining_s(), 0.0)):
                    await over.wait()
            session.expire()
        if session.ended == STOPPING:
            raise Closed(STOPPING)
        played = session.drew or session.too_long
        if played and (session.ended == FINISHED or session.exhausted is not None):
            return ""
        return session.ended if session.ended != FINISHED else "it was finished without a token"


async def _nobody(agent: object) -> None:
    """Play nothing: outsiders do."""
