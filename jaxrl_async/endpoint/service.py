"""Where calls are served: who calls, how many at once, and from a checked call to its answers.

    body ──parse──> call ──prompt──> tokens ──Drawing──> answers ──writer──> body, or a stream
            │                │
            └ CallRefused    └ Conversations: what was drawn is never tokenised again

Used on the server's event loop; `counts` on any thread.
"""

import asyncio
import gc
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from jaxrl_async.data.tokenizer import BARE, Tokenizer
from jaxrl_async.endpoint.adapter_admin import AdapterDoor
from jaxrl_async.endpoint.callers import Caller, Guest, Member
from jaxrl_async.endpoint.conversations import Conversations, PromptTokens
from jaxrl_async.endpoint.generation import Drawing, Strand
from jaxrl_async.endpoint.http_answers import ChatAnswer, Heading, Words, chat_answer
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.openai_chat import ChatCall
from jaxrl_async.endpoint.progress_watch import ProgressWatch
from jaxrl_async.endpoint.responses_call import PREFIX
from jaxrl_async.endpoint.sampling_request import TOO_LONG, Draft, Terms, Wish, drafted
from jaxrl_async.endpoint.sessions import REWARD_KEY, PolicySession, Sessions
from jaxrl_async.endpoint.task_lease import AgentDoor
from jaxrl_async.errors import (
    Closed,
    DataError,
    RolloutError,
    SessionEnded,
    SessionLimit,
    TextTooLong,
)
from jaxrl_async.host import give_back_memory
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.ports.sampling import Generate
from jaxrl_async.types import IntArray

log = logging.getLogger(__name__)

T = TypeVar("T")
LONG_BODY = 2**16
"""Bodies with more bytes are parsed by a thread of their own, which tokenizes their texts, too."""
SHORT_THREADS = 2
"""Threads for texts of other calls. A tokenizer serves one at a time."""
BODY_LEAST, BYTES_PER_TOKEN = 2**20, 128
"""Longest body: so many bytes, and for each token of the longest context so many."""
MOST_HELD = 2**30
"""Bytes of bodies that are held at once: beyond it a long one is told to come back (429). Short
ones count, but are not refused."""
TRIM_S = 3.0
"""How long after a long body freed memory is given back to the system, seconds."""
BUSY_S = 1.0
"""When a client that was turned away may try again, seconds."""
STOPPED_S = 5.0
"""When a client of a run that stops may see whether it goes on, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is served: a model, and how it is drawn from."""

    name: str
    generate: Generate
    tokenizer: Tokenizer
    chat: ChatFormat | None  # None: the tokenizer has no chat template, and chat is refused
    terms: Terms  # of guests
    label: str = "weights"  # of the weights, before their version; without a dash
    streams_early: bool = True  # False: nothing is sent before an answer is whole


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLimits:
    """What the endpoint takes on at once. What is beyond it is refused (429) or cut off."""

    max_open_calls: int = 1024  # calls that are being answered
    max_guests: int = 1024  # conversations of guests remembered: named, and as many unnamed
    guest_idle_s: float = 3600.0  # after which one is forgotten, seconds
    max_body_bytes: int | None = None  # None: what follows from the longest context
    body_s: float = 30.0  # longest time for a body to arrive, seconds
    call_s: float = 3600.0  # longest time for one answer, seconds
    stall_s: float = 60.0  # longest time that a client may keep an answer from being sent, seconds
    ping_s: float = 10.0  # a stream is never silent for longer, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCounts:
    """What the endpoint has done since the start."""

    calls: int = 0  # that were begun
    refused: int = 0  # answered with an error of the client's (4xx)
    busy: int = 0  # of those, because too many were open
    failed: int = 0  # answered with an error of ours (5xx)
    capped: int = 0  # that asked for more tokens than there may be
    disconnected: int = 0  # whose client went away before the answer was there
    stalled: int = 0  # whose client did not read the answer
    continued: int = 0  # chat prompts that begin with the tokens of an earlier call
    opened: int = 0  # chat prompts that were tokenised from the start

    def by_name(self) -> dict[str, int]:
        """Return them by the names of their metrics."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class Desk:
    """Serves checked calls."""

    def __init__(
        self,
        served: Served,
        limits: EndpointLimits,
        *,
        sessions: Sessions | None = None,
        guest_keys: tuple[str, ...] = (),
        door: AgentDoor | None = None,
        adapters: AdapterDoor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve nobody yet.

        Args:
            served: what is served.
            limits: how much at once.
            sessions: of a run, found by their keys; None: none.
            guest_keys: keys of callers whose answers become no episode; (): there are none.
            door: gives tasks to agents outside of the run; None: programs of the run play.
            adapters: finds them by the model that a guest names; None: any name is the one model's.
            clock: of idle guests.
        """
        self.served, self.limits, self.counts = served, limits, EndpointCounts()
        self.words = Words(
            text_of=served.tokenizer.token_text,
            bytes_of=served.tokenizer.token_bytes,
            decode=served.tokenizer.decode,
            bytes_in_text=served.tokenizer.bytes_in_text,
            label=served.label,
        )
        self._sessions, self._guest_keys, self._clock = sessions, guest_keys, clock
        self._door, self.adapters = door, adapters
        self._watch = ProgressWatch(served.generate)
        self._open = self._held = 0
        self._trimming: asyncio.TimerHandle | None = None
        self._short = ThreadPoolExecutor(SHORT_THREADS, "endpoint-short")
        self._long = ThreadPoolExecutor(1, "endpoint-long")
        if served.tokenizer.max_tokens is None:
            served.tokenizer.max_tokens = served.terms.max_length
        self._guests: dict[tuple[str, str], tuple[float, Conversations]] = {}
        self._unnamed: dict[tuple[str, str], tuple[float, Conversations]] = {}  # by response
        self._members: dict[str, Conversations] = {}

    def count(self, **more: int) -> None:
        """Add to the counts."""
        self.counts = replace(
            self.counts, **{name: getattr(self.counts, name) + n for name, n in more.items()}
        )

    async def close(self) -> None:
        """End the reading of progress, and what waits for a thread."""
        await self._watch.close()
        if self._trimming is not None:
            self._trimming.cancel()
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- who calls

    def session(self, key: str | None) -> PolicySession:
        """Return the session of a key. Raises CallRefused."""
        if key is None:
            raise CallRefused(
                "no key: send it as `Authorization: Bearer KEY`, `x-api-key: KEY` or "
                "`x-session-key: KEY`",
                status=401,
                code="invalid_api_key",
            )
        if self._is_guest(key):
            raise CallRefused("this key is a guest's: it names no session of a run", status=404)
        if key.startswith(REWARD_KEY):
            raise CallRefused("this key rewards a session, and does not sample", status=403)
        try:
            if self._sessions is None:
                raise SessionEnded("this key is wrong.")
            return self._sessions.find(key)
        except SessionEnded as error:
            raise CallRefused(str(error), status=401, code="invalid_api_key") from None

    def rewarded(self, key: str | None) -> PolicySession:
        """Return the session that a key rewards. Raises CallRefused, 403 for a key that samples."""
        if key is None or self._sessions is None or not key.startswith(REWARD_KEY):
            session = self.session(key)
            raise CallRefused(
                f"this key samples session {session.label}, and may not reward or end it. Use the "
                "session's reward key: a command asks for it at POST /v1/session/reward_key "
                "before its first call, a function has it as reward_key, an agent outside in "
                "its task",
                status=403,
            )
        try:
            return self._sessions.find_rewarded(key)
        except SessionEnded as error:
            raise CallRefused(str(error), status=401, code="invalid_api_key") from None

    def door(self) -> AgentDoor:
        """Return who gives tasks to agents outside. Raises CallRefused if nobody does."""
        if self._door is None:
            raise CallRefused(
                "no agents outside of the run are asked (endpoint.external_agents)", 404
            )
        return self._door

    def caller(
        self,
        key: str | None,
        conversation: str | None,
        model: Any = None,
        *,
        voice: str | None = None,
    ) -> Caller:
        """Return who calls with a key. Raises CallRefused.

        Args:
            key: of a guest or a session.
            conversation: names one of a guest's conversations; None: nothing is remembered.
            model: that a guest names; None: the base.
            voice: names one of a session's players; None: there is one.
        """
        if key is None or not self._is_guest(key):
            session = self.session(key)
            return Member(session, self._of_member(session), voice or "")
        served = self.served
        adapter = "" if self.adapters is None else self.adapters.adapter_of(model)
        known = Conversations() if conversation is None else self._of_guest(key, conversation)
        return Guest(served.generate, served.terms, known, adapter=adapter)

    def check_guest(self, key: str | None) -> None:
        """Raise CallRefused unless this is the key of a guest."""
        if key is None or not self._is_guest(key):
            raise CallRefused("a session's key may not do that", status=403)

    def _is_guest(self, key: str) -> bool:
        given = key.encode()
        return any(hmac.compare_digest(given, known.encode()) for known in self._guest_keys)

    def _of_member(self, session: PolicySession) -> Conversations:
        if session.key not in self._members:
            self._members[session.key] = Conversations()
            session.on_end(lambda _: self._forget(session.key))
        return self._members.get(session.key) or Conversations()

    def _forget(self, key: str) -> None:
        """Forget the conversations of a session that has ended."""
        self._members.pop(key, None)

    def _of_guest(self, key: str, name: str) -> Conversations:
        """Return a guest's conversation. Those that a response began crowd out each other only:
        every call without a name begins one."""
        now, limits = self._clock(), self.limits
        guests = self._unnamed if name.startswith(PREFIX) else self._guests
        known = guests.pop((key, name), None)
        if known is not None and now - known[0] > limits.guest_idle_s:
            known = None
        oldest = next(iter(guests), None)
        while oldest is not None and (
            now - guests[oldest][0] > limits.guest_idle_s or len(guests) >= limits.max_guests
        ):
            del guests[oldest]
            oldest = next(iter(guests), None)
        conversations = Conversations() if known is None else known[1]
        guests[key, name] = (now, conversations)  # last: the most recent
        return conversations

    # ---- calls

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold a place among the open calls. Raises CallRefused (429) if there is none."""
        if self._open >= self.limits.max_open_calls:
            raise self._busy(f"{self._open} calls are open")
        self._open += 1
        self.count(calls=1)
        try:
            yield
        finally:
            self._open -= 1

    def _busy(self, why: str) -> CallRefused:
        """Count a call that has to come again, and return its refusal (429)."""
        self.count(busy=1)
        return CallRefused(
            f"{why}, and no more are taken; try again",
            status=429,
            code="rate_limit_exceeded",
            retry_after_s=BUSY_S,
        )

    def heading(self, caller: Caller, prefix: str, number: int, *, mark: str = "-") -> Heading:
        """Return what the beginning of an answer says. mark: between the two parts of its id."""
        model = caller.adapter or self.served.name
        return Heading(id=f"{prefix}{mark}{number}", created=int(time.time()), model=model)

    @property
    def max_body_bytes(self) -> int:
        """Longest body of a call."""
        if self.limits.max_body_bytes is not None:
            return self.limits.max_body_bytes
        return BODY_LEAST + BYTES_PER_TOKEN * self.served.terms.max_length

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Give a function that takes note of more bytes of a body, as long as the block lasts. It
        raises CallRefused (429) for a long body if too many are held; a short one counts, but is
        never refused."""
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            mine += size
            self._held += size
            if mine > LONG_BODY and self._held > MOST_HELD:
                raise self._busy(f"{MOST_HELD >> 20} MiB of bodies are held")

        try:
            yield hold
        finally:
            self._held -= mine
            if mine > LONG_BODY and self._trimming is None:
                loop = asyncio.get_running_loop()
                self._trimming = loop.call_later(TRIM_S, self._trim)

    def _trim(self) -> None:
        """Free what long bodies took, and give it back to the system: errors hold on to it in
        cycles, and it is scattered over the threads."""
        self._trimming = None
        self._long.submit(_free)

    async def chat_prompt(
        self, caller: Caller, call: ChatCall, *, is_long: bool = False
    ) -> PromptTokens:
        """Return a chat call's prompt as tokens; is_long: of a long body. Raises CallRefused."""
        chat, conversations = self._chat(), caller.conversations
        return await self._prompt(
            caller, lambda: conversations.prompt(chat, call.messages, call.tools), is_long
        )

    async def text_prompt(self, caller: Caller, text: str, *, is_long: bool = False) -> IntArray:
        """Return a text as tokens, with what the tokenizer begins one with; is_long: of a long
        body. Raises CallRefused."""
        encode = self.served.tokenizer.encode_prompt
        return await self._prompt(caller, lambda: encode(text, BARE), is_long)

    async def _prompt(self, caller: Caller, work: Callable[[], T], is_long: bool) -> T:
        """Do the work that makes a prompt's tokens. Raises CallRefused."""
        try:
            return await self.aside(work, is_long=is_long)
        except TextTooLong as error:
            most = caller.terms.max_length
            refused = CallRefused(
                f"This model's maximum context length is {most} tokens: {error} Shorten it, or "
                "begin a new conversation.",
                code=TOO_LONG,
            )
            caller.exhaust(refused.message, error.token_ids)
            raise refused from None

    async def aside(self, work: Callable[[], T], *, is_long: bool = False) -> T:
        """Do work that takes a while in a thread; it is dropped if the call ends before
        it begins. is_long: of a long body, behind which no other call waits.

        Raises CallRefused for what a chat format cannot hold, and TextTooLong.
        """
        pool = self._long if is_long else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except TextTooLong:
            raise
        except DataError as error:
            raise CallRefused(str(error), field="messages") from None

    def _chat(self) -> ChatFormat:
        if self.served.chat is None:
            raise CallRefused(
                f"{self.served.name} has no chat template; use /v1/completions", status=400
            )
        return self.served.chat

    @asynccontextmanager
    async def drawing(
        self, caller: Caller, token_ids: IntArray, wish: Wish, *, parts: bool
    ) -> AsyncIterator[Drawing]:
        """Draw the answers of a call; what is not done when the block is left is ended.

        Args:
            caller: who asks.
            token_ids: [prompt] int32.
            wish: what is asked.
            parts: whether the answers are wanted bit by bit.
        """
        try:
            draft: Draft = drafted(wish, caller.terms, len(token_ids))
        except CallRefused as refused:
            if refused.code == TOO_LONG:
                caller.exhaust(refused.message, token_ids)
            raise
        self.count(capped=draft.capped)
        watches = self.served.streams_early and (parts or bool(wish.stops))
        drawing = Drawing(
            caller,
            token_ids,
            draft,
            wish,
            decode=self.served.tokenizer.decode,
            watch=self._watch if watches else None,
        )
        try:
            async with asyncio.timeout(self.limits.call_s):
                yield drawing
        finally:
            await drawing.close()

    async def said(
        self, caller: Caller, call: ChatCall, prompt: PromptTokens, strand: Strand
    ) -> ChatAnswer:
        """Return a finished answer as a message, and remember it."""
        answer, chat = strand.answer, self._chat()
        assert answer is not None, "it is finished"
        drawn = answer.completion.token_ids
        message = await self.aside(lambda: chat.message(drawn, call.tools))
        said = chat_answer(answer, message, reads_tools=call.reads_tools)
        caller.conversations.remember(prompt, drawn, said.message())
        caller.talked(call.messages, said.message())
        return said

    async def so_far(self, call: ChatCall, strand: Strand) -> Mapping[str, Any]:
        """Return an unfinished answer as a message."""
        chat = self._chat()
        return await self.aside(lambda: chat.message(strand.token_ids, call.tools))


def _free() -> None:
    gc.collect()
    give_back_memory()


def refusal_of(error: BaseException) -> CallRefused:
    """Return what a client is told of an error that ended its call."""
    match error:
        case CallRefused():
            return error
        case SessionEnded():
            return CallRefused(str(error), status=401, code="session_ended")
        case SessionLimit():
            return CallRefused(str(error), code=TOO_LONG)
        case Closed():
            return CallRefused("the run is stopping", status=503, retry_after_s=STOPPED_S)
        case TimeoutError():
            return CallRefused("the answer took too long", status=503, retry_after_s=BUSY_S)
        case RolloutError():
            return CallRefused(str(error))
    log.error("a call failed: %s", error, exc_info=error)
    return CallRefused(f"the call failed: {type(error).__name__}", status=500)
