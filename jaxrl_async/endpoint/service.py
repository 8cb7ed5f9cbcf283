"""The endpoint's service: callers, limits, and the path from a checked call to its answers.

    body ──parse──> call ──prompt──> tokens ──sampling──> answers ──writer──> body, or a stream
            │                │
            └ CallRefused    └ Conversations: generated tokens are never tokenised again

Used on the server's event loop; `counts` may be read from any thread.
"""

import asyncio
import gc
import hmac
import itertools
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from jaxrl_async.data.tokenizer import BARE, Tokenizer
from jaxrl_async.endpoint.adapter_admin import AdapterAdmin
from jaxrl_async.endpoint.body_fields import SHOWN_NAME
from jaxrl_async.endpoint.callers import Caller, Guest, Member
from jaxrl_async.endpoint.conversations import Conversations
from jaxrl_async.endpoint.generation import CallGeneration
from jaxrl_async.endpoint.http_answers import (
    AnswerFormat,
    AnswerHeader,
)
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.progress_watch import ProgressWatch
from jaxrl_async.endpoint.responses_call import PREFIX
from jaxrl_async.endpoint.sampling_request import (
    TOO_LONG,
    CallerLimits,
    RequestDraft,
    SamplingOptions,
    draft_request,
)
from jaxrl_async.endpoint.sessions import REWARD_KEY, PolicySession, Sessions
from jaxrl_async.endpoint.task_lease import TaskLeases
from jaxrl_async.errors import (
    Closed,
    ConfigError,
    DataError,
    MissingExtraError,
    RequestRefused,
    RolloutError,
    SessionEnded,
    SessionLimit,
    TextTooLong,
)
from jaxrl_async.host import give_back_memory
from jaxrl_async.ports.generate import Generate, PreparesConstraints
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.types import IntArray

log = logging.getLogger(__name__)

T = TypeVar("T")
LONG_BODY = 2**16
"""Bodies with more bytes are parsed and tokenised on a separate thread."""
SHORT_THREADS = 2
"""Threads for texts of other calls. A tokenizer serves one thread at a time."""
BODY_LEAST, BYTES_PER_TOKEN = 2**20, 128
"""Maximum size of a body: BODY_LEAST plus BYTES_PER_TOKEN for each token of the longest context."""
MOST_HELD = 2**30
"""Maximum bytes of bodies held in memory. Beyond it, long bodies are rejected (429). Short ones
count, but are not rejected."""
SERVER_BYTES = 6
"""Random bytes in the ids of a server's answers."""
MAX_LOGGED = 256
"""Maximum number of fields without effect that are logged."""
TRIM_S = 3.0
"""Delay after a long body before freed memory is returned to the system, seconds."""
BUSY_S = 1.0
"""Retry-After for a rejected client, seconds."""
PARAMS = {
    "logprobs.ids": "logprob_token_ids",
    "logprobs.top": "top_logprobs",
    "max_new_tokens": "max_tokens",
    "sampling.min_p": "min_p",
    "sampling.temperature": "temperature",
    "sampling.top_k": "top_k",
    "sampling.top_p": "top_p",
    "shaping.bias": "logit_bias",
    "shaping.constraint": "response_format",
    "shaping.frequency_penalty": "frequency_penalty",
    "shaping.min_tokens": "min_tokens",
    "shaping.presence_penalty": "presence_penalty",
    "shaping.repetition_penalty": "repetition_penalty",
    "stop_token_ids": "stop_token_ids",
    "token_ids": "prompt",
}
"""Fields of calls, by the field of the sampler's request that they become."""
STOPPED_S = 5.0
"""Retry-After for a client of a run that is stopping, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The served model and how it is sampled."""

    name: str
    generate: Generate
    tokenizer: Tokenizer
    chat: ChatFormat | None  # None: no chat template; chat calls are rejected
    terms: CallerLimits  # of guests
    label: str = "weights"  # prefix of weight versions; without a dash
    streams_early: bool = True  # False: nothing is sent before an answer is complete


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLimits:
    """Limits of the endpoint. Calls beyond them are rejected (429) or cut off."""

    max_open_calls: int = 1024  # concurrent calls
    max_guests: int = 1024  # stored conversations of guests: named, and as many unnamed
    guest_idle_s: float = 3600.0  # idle time after which a conversation is dropped, seconds
    max_body_bytes: int | None = None  # None: derived from the longest context
    body_s: float = 30.0  # timeout for a body to arrive, seconds
    call_s: float = 3600.0  # timeout of one answer, seconds
    stall_s: float = 60.0  # maximum time for a client to read its answer, seconds
    ping_s: float = 10.0  # maximum silence of a stream, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCounts:
    """Counts of the endpoint since the start."""

    calls: int = 0  # started calls
    refused: int = 0  # answered with a client error (4xx)
    busy: int = 0  # of those, because too many calls were open
    failed: int = 0  # answered with a server error (5xx)
    capped: int = 0  # requested more tokens than allowed
    disconnected: int = 0  # client disconnected before the answer was ready
    stalled: int = 0  # client did not read the answer
    continued: int = 0  # chat prompts that start with the tokens of an earlier call
    opened: int = 0  # chat prompts that were tokenised from the start
    ignored: int = 0  # fields of calls that were accepted without effect

    def by_name(self) -> dict[str, int]:
        """Return them by the names of their metrics."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class EndpointService:
    """Serves checked calls."""

    def __init__(
        self,
        served: Served,
        limits: EndpointLimits,
        *,
        sessions: Sessions | None = None,
        guest_keys: tuple[str, ...] = (),
        leases: TaskLeases | None = None,
        adapters: AdapterAdmin | None = None,
        cors_origins: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve nothing yet.

        Args:
            served: the model to serve.
            limits: limits of the endpoint.
            sessions: sessions of a run, found by their keys; None: none.
            guest_keys: keys of callers whose answers do not become an episode; (): none.
            leases: gives tasks to external agents; None: programs of the run play.
            adapters: resolves the model that a guest names; None: any name is the one model.
            cors_origins: pages whose scripts may call, such as https://example.org; *: all.
            clock: for idle guests.
        """
        self.served, self.limits, self.counts = served, limits, EndpointCounts()
        self.words = AnswerFormat(
            text_of=served.tokenizer.token_text,
            bytes_of=served.tokenizer.token_bytes,
            decode=served.tokenizer.decode,
            bytes_in_text=served.tokenizer.bytes_in_text,
            label=served.label,
        )
        self._sessions, self._guest_keys, self._clock = sessions, guest_keys, clock
        self._leases, self.adapters, self.cors_origins = leases, adapters, cors_origins
        self._server, self._numbers = secrets.token_hex(SERVER_BYTES), itertools.count()
        self._ignored: set[str] = set()  # fields whose first time was logged
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

    def ignore(self, fields: Sequence[str]) -> None:
        """Count fields of a call that have no effect; each name is logged once."""
        self.count(ignored=len(fields))
        for name in fields:
            kind = re.sub(r"\d+", "", name)[:SHOWN_NAME]
            if kind not in self._ignored and len(self._ignored) < MAX_LOGGED:
                self._ignored.add(kind)
                log.info("the field %s of calls has no effect here (docs/endpoint.md)", kind)

    async def close(self) -> None:
        """Stop reading progress, and cancel work that waits for a thread."""
        await self._watch.close()
        if self._trimming is not None:
            self._trimming.cancel()
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- callers

    def session(self, key: str | None) -> PolicySession:
        """Return the session of a key. Raises CallRefused."""
        if key is None:
            raise CallRefused(
                "no key: send it as `Authorization: Bearer KEY`, `x-api-key: KEY` or "
                "`x-session-key: KEY`, or in the address: http://any:KEY@HOST:PORT",
                status=401,
                code="invalid_api_key",
            )
        if self._is_guest(key):
            raise CallRefused("this is a guest's key: it has no session of a run", status=404)
        if key.startswith(REWARD_KEY):
            raise CallRefused("this key rewards a session, but does not sample", status=403)
        try:
            if self._sessions is None:
                raise SessionEnded("this key is wrong.")
            return self._sessions.find(key)
        except SessionEnded as error:
            raise CallRefused(str(error), status=401, code="invalid_api_key") from None

    def rewarded(self, key: str | None) -> PolicySession:
        """Return the session that a key rewards. Raises CallRefused, 403 for a sampling key."""
        if key is None or self._sessions is None or not key.startswith(REWARD_KEY):
            session = self.session(key)
            raise CallRefused(
                f"this key samples session {session.label}, and may not reward or end it. Use the "
                "session's reward key: a command requests it at POST /v1/session/reward_key "
                "before its first call, a function has it as reward_key, an external agent in "
                "its task",
                status=403,
            )
        try:
            return self._sessions.find_rewarded(key)
        except SessionEnded as error:
            raise CallRefused(str(error), status=401, code="invalid_api_key") from None

    def leases(self) -> TaskLeases:
        """Return the TaskLeases for external agents. Raises CallRefused if there are none."""
        if self._leases is None:
            raise CallRefused("external agents are not enabled (endpoint.external_agents)", 404)
        return self._leases

    def caller(
        self,
        key: str | None,
        conversation: str | None,
        model: object = None,
        *,
        player: str | None = None,
    ) -> Caller:
        """Return the caller with a key. Raises CallRefused.

        Args:
            key: key of a guest or a session.
            conversation: name of one of a guest's conversations; None: nothing is stored.
            model: the model that a guest names; None: the base.
            player: name of one of a session's players; None: there is only one.
        """
        if key is None or not self._is_guest(key):
            session = self.session(key)
            return Member(session, self._of_member(session), player or "")
        served = self.served
        adapter = "" if self.adapters is None else self.adapters.adapter_of(model)
        known = Conversations() if conversation is None else self._of_guest(key, conversation)
        return Guest(served.generate, served.terms, known, adapter=adapter)

    def check_guest(self, key: str | None) -> None:
        """Raise CallRefused unless this is the key of a guest."""
        if key is None or not self._is_guest(key):
            raise CallRefused("a session's key may not do that", status=403)

    def _is_guest(self, key: str) -> bool:
        encoded = key.encode()
        return any(hmac.compare_digest(encoded, known.encode()) for known in self._guest_keys)

    def _of_member(self, session: PolicySession) -> Conversations:
        if session.key not in self._members:
            self._members[session.key] = Conversations()
            session.on_end(lambda _: self._members.pop(session.key, None))
        return self._members.get(session.key) or Conversations()

    def _of_guest(self, key: str, name: str) -> Conversations:
        """Return a guest's conversation. Conversations started by a response are limited
        separately, because every call without a name starts one."""
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
        """Hold a slot among the open calls. Raises CallRefused (429) if all are taken."""
        if self._open >= self.limits.max_open_calls:
            raise self._busy(f"{self._open} calls are open")
        self._open += 1
        self.count(calls=1)
        try:
            yield
        finally:
            self._open -= 1

    def _busy(self, why: str) -> CallRefused:
        """Count a call that must be retried, and return its error (429)."""
        self.count(busy=1)
        return CallRefused(
            f"{why}, and no more are accepted; try again",
            status=429,
            code="rate_limit_exceeded",
            retry_after_s=BUSY_S,
        )

    def heading(self, caller: Caller, prefix: str, *, mark: str = "-") -> AnswerHeader:
        """Return the heading of a new answer. mark: separates the two parts of its id."""
        model = caller.adapter or self.served.name
        server = self._server if mark == "-" else ""  # a response's prefix is unguessable
        name = f"{prefix}{mark}{server}{next(self._numbers)}"
        return AnswerHeader(id=name, created=int(time.time()), model=model)

    @property
    def num_open(self) -> int:
        """Number of open calls."""
        return self._open

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a call's body."""
        if self.limits.max_body_bytes is not None:
            return self.limits.max_body_bytes
        return BODY_LEAST + BYTES_PER_TOKEN * self.served.terms.max_length

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts more bytes of a body, until the block ends. It raises
        CallRefused (429) for a long body if too many bytes are held; a short body counts, but is
        never rejected."""
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
        """Free the memory of long bodies, and return it to the system: errors hold it in reference
        cycles, and it is spread over the threads' heaps."""
        self._trimming = None
        self._long.submit(_free)

    async def text_prompt(
        self, caller: Caller, text: str, *, adds_special: bool = True, is_long: bool = False
    ) -> IntArray:
        """Return a text as tokens. Raises CallRefused.

        Args:
            caller: the caller.
            text: of the prompt.
            adds_special: add the tokenizer's initial tokens.
            is_long: for a long body.
        """
        tokenizer = self.served.tokenizer
        return await self.tokenise(
            caller,
            lambda: tokenizer.encode_prompt(text, BARE) if adds_special else tokenizer.encode(text),
            is_long,
        )

    async def tokenise(self, caller: Caller, work: Callable[[], T], is_long: bool) -> T:
        """Run the work that tokenises a prompt. Raises CallRefused."""
        try:
            return await self.run(work, is_long=is_long)
        except TextTooLong as error:
            most = caller.terms.max_length
            refused = CallRefused(
                f"This model's maximum context length is {most} tokens: {error} Shorten it, or "
                "start a new conversation.",
                code=TOO_LONG,
            )
            caller.exhaust(refused.message, error.token_ids)
            raise refused from None

    async def run(self, work: Callable[[], T], *, is_long: bool = False) -> T:
        """Run slow work in a thread; it is dropped if the call ends before it starts. is_long: for
        a long body, which uses a separate thread and blocks no other call.

        Raises CallRefused for messages that a chat format does not support, and TextTooLong.
        """
        pool = self._long if is_long else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except TextTooLong:
            raise
        except (ConfigError, DataError) as error:
            raise CallRefused(str(error), field="messages") from None

    def chat(self) -> ChatFormat:
        """Return the model's chat format. Raises CallRefused if it has none."""
        if self.served.chat is None:
            raise CallRefused(
                f"{self.served.name} has no chat template; use /v1/completions", status=400
            )
        return self.served.chat

    @asynccontextmanager
    async def sample(
        self, caller: Caller, prompts: Sequence[IntArray], options: SamplingOptions, *, parts: bool
    ) -> AsyncIterator[CallGeneration]:
        """Sample the answers of a call; unfinished ones are cancelled when the block is left.

        Args:
            caller: the caller.
            prompts: [prompt] int32 each.
            options: the call's sampling parameters.
            parts: whether the answers are streamed.
        """
        drafts: list[RequestDraft] = []
        for token_ids in prompts:
            try:
                drafts.append(draft_request(options, caller.terms, len(token_ids)))
            except CallRefused as refused:
                if refused.code == TOO_LONG:
                    caller.exhaust(refused.message, token_ids)
                raise
        self.count(capped=any(draft.capped for draft in drafts))
        await self._prepare(options)
        watches = self.served.streams_early and (parts or bool(options.stops))
        generation = CallGeneration(
            caller,
            prompts,
            drafts,
            options,
            decode=self.served.tokenizer.decode,
            watch=self._watch if watches else None,
        )
        try:
            async with asyncio.timeout(self.limits.call_s):
                yield generation
        finally:
            await generation.close()

    async def _prepare(self, options: SamplingOptions) -> None:
        """Compile a call's constraint on another thread, if it is new. Raises CallRefused."""
        constraint = None if options.shaping is None else options.shaping.constraint
        generate = self.served.generate
        if constraint is None or not isinstance(generate, PreparesConstraints):
            return
        pool = self._long
        try:
            await asyncio.get_running_loop().run_in_executor(pool, generate.prepare, constraint)
        except RequestRefused as error:
            raise CallRefused(error.reason, field=options.constrained_by or "tools") from None


def _free() -> None:
    gc.collect()
    give_back_memory()


def refusal_of(error: BaseException) -> CallRefused:
    """Convert an error that ended a call to the error for its client."""
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
        case RequestRefused() if error.field in PARAMS:
            return CallRefused(error.reason, field=PARAMS[error.field])
        case RolloutError() | MissingExtraError():
            return CallRefused(str(error))
    log.error("a call failed: %s", error, exc_info=error)
    return CallRefused(f"the call failed: {type(error).__name__}", status=500)
