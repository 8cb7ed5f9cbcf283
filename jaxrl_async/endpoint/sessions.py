"""Sessions: members of groups that are played by an external caller, who only sends completion
requests.

    Sessions.open ─> PolicySession ─key─> an agent ──sample──> Generate
                          │ Trace            (an endpoint finds the session by its key)
                          v
                       Episode  <── reward, finish, or a limit

A session is not bound to a thread: `sample` runs on the event loop that calls it, and all other
methods are thread safe. It ends once: by `finish`, by its owner, or by a time limit. Later calls
are rejected with the reason.
"""

import asyncio
import logging
import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_async.endpoint.session_parts import (
    CallOptions,
    GivenRewards,
    PlayerMessages,
    SessionTimes,
    bounded,
    call_number,
    check_call,
    checked_parts,
    limit_reached,
    no_room,
    with_options,
)
from jaxrl_async.endpoint.session_parts import (
    SessionCounts as SessionCounts,
)
from jaxrl_async.endpoint.session_parts import (
    SessionLimits as SessionLimits,
)
from jaxrl_async.errors import Closed, JaxrlError, RolloutError, SessionEnded, SessionLimit
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.run import Clock
from jaxrl_async.rollout.call_log import SavedAnswers, Trace, cut_completion
from jaxrl_async.rollout.episode import SavedCalls, check_kept, make_request
from jaxrl_async.rollout.episode_assembly import unplayed_episode
from jaxrl_async.types import (
    Completion,
    Episode,
    EpisodeLimits,
    IntArray,
    LogitShaping,
    LogprobRequest,
    Message,
    Prompt,
    Request,
    SamplingParams,
    StopReason,
)

log = logging.getLogger(__name__)

FINISHED = "it was finished"
"""End reason of a session that finished normally."""
GAVE_UP = "its agent gave it up: "
"""Prefix of the end reason of a session that its agent could not play."""
STOPPING = "the run is stopping"
"""End reason of a session that its run ended."""
REWARD_KEY = "reward-"
"""Prefix of reward keys."""
KEY_BYTES = 24
"""Random bytes of a session's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMember:
    """The member of a group that a session plays."""

    prompt: Prompt
    label: str  # the group's part of its request ids: "g5"
    index: int = 0

    def __str__(self) -> str:
        return f"{self.label}/m{self.index}"


class PolicySession:
    """One member of a group, played by any caller with its key. Thread safe."""

    def __init__(
        self,
        generate: Generate,
        member: SessionMember,
        limits: EpisodeLimits,
        bounds: SessionLimits,
        *,
        key: str | None = None,
        kept: SavedAnswers | None = None,
        clock: Clock = time.monotonic,
        run_stops: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open it.

        Args:
            generate: the sampler.
            member: the member that it plays.
            limits: sampling settings, and the maximum length of each sequence.
            bounds: limits of the whole session.
            key: key for callers; None: an unguessable one.
            kept: answers to the calls that repeat those before a resume.
            clock: clock of its time limits.
            run_stops: whether the run is stopping, which then is the reason for its end.
        """
        self.key = secrets.token_urlsafe(KEY_BYTES) if key is None else key
        # rewards and ends the session; not `key`, which code written by the policy may have
        self.reward_key = REWARD_KEY + secrets.token_urlsafe(KEY_BYTES)
        self.prompt, self.label = member.prompt, str(member)  # the task; the member, as "g5/m2"
        self.member, self.limits, self.bounds = member, limits, bounds
        self._generate, self._run_stops = generate, run_stops
        self._lock = threading.RLock()
        self._trace, self._rewards, self._reward_key_taken = Trace(), GivenRewards(), False
        self._kept = kept or SavedAnswers()
        self.ended: str | None = None  # the reason for its end; None: it is open
        self.exhausted: str | None = None  # the limit of calls or tokens that rejected a call
        self._refused: IntArray | None = None  # [prompt] of a call that left no room
        self._messages = PlayerMessages()
        self._on_end: list[Callable[[str], object]] = []
        self._running: dict[int, Callable[[], object]] = {}  # cancels a call, by its number
        self._counts, self._times = SessionCounts(), SessionTimes(clock)

    # ---- read by callers

    @property
    def has_sampled(self) -> bool:
        """Whether any call has sampled tokens."""
        return self._trace.num_turns > 0

    @property
    def takes_constraints(self) -> bool:
        """Whether a call may constrain its answer: the trainer takes masks, or needs none."""
        limits = self.limits
        return self.bounds.own_sampling or limits.takes_masks or not limits.for_training

    # ---- calls

    async def sample(
        self,
        token_ids: IntArray,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        shaping: LogitShaping | None = None,
        logprobs: LogprobRequest | None = None,
        cut: Callable[[IntArray], int | None] | None = None,
        early: "asyncio.Future[Completion] | None" = None,
        began: Callable[[str], object] = lambda request_id: None,
        player: str = "",
    ) -> Completion:
        """Sample a continuation of these tokens, [prompt] int32, and record it. On any event loop.

        If the caller's task is cancelled, so is the call: its tokens were not seen, and are not
        trained on.

        Args:
            token_ids: the whole context. If it starts with all of an earlier call's prompt and
                completion, token for token, it continues that sequence.
            max_new_tokens: maximum number of tokens, capped by the run's limit; None: that limit.
            stop_token_ids: end the completion, in addition to the run's.
            sampling, seed: with own_sampling, the distribution and random numbers; else counted.
            shaping: changes of the logits; without own_sampling its constraint alone.
            logprobs: other log-probs that the completion has.
            cut: given the sampled tokens, returns how many of them count; None: all. For stop
                strings. The other tokens are discarded.
            early: set to the first part of the completion by a watcher of Generate.progress that
                finds its end there; its slot becomes free at the next block.
            began: called with the request's id before it is queued.
            player: the player that calls; empty: there is only one.

        Raises SessionEnded if the session has ended or ends meanwhile (Closed if the run stops),
        SessionLimit if it may sample no more, RolloutError for a request that cannot be served.
        """
        options = CallOptions(max_new_tokens, stop_token_ids, sampling, seed, shaping)
        request, number, completion = self._begin(token_ids, options, player)
        try:
            began(request.request_id)
            if completion is None:
                loop = asyncio.get_running_loop()
                future = self._generate.submit_many([replace(request, logprobs=logprobs)])[0]
                self._cancel_at_end(number, lambda: call_in(loop, future.cancel))
                completion = await (future if early is None else first_of(future, early))
            check_kept(completion, self.limits, len(request.token_ids))
            count = None if cut is None else cut(completion.token_ids)
        except BaseException as error:
            self._close_call(number, None)
            stopped = isinstance(error, asyncio.CancelledError | Closed) and not _is_cancelled()
            if stopped and self.ended is not None:
                raise self._end_error() from None
            raise
        if count is not None and count < len(completion.token_ids):
            completion = cut_completion(completion, max(count, 0), len(request.token_ids))
        self._close_call(number, completion)
        return completion

    def take_reward_key(self) -> str:
        """Return the reward key: once, and before the first call, while no code written by the
        policy has run. Raises RolloutError afterwards."""
        with self._lock:
            self._check_open()
            if self._reward_key_taken or self._trace.num_calls:
                why = "it was returned before" if self._reward_key_taken else "calls were made"
                raise RolloutError(
                    f"session {self.label}: {why}, and the reward key is returned only once, "
                    "before the first call. Request it first."
                )
            self._reward_key_taken = True
            return self.reward_key

    def reward(
        self, value: float, *, parts: Mapping[str, float] | None = None, call: str | None = None
    ) -> None:
        """Set the reward of the session, or of one call; a later value replaces it.

        Args:
            value: from -max_reward to max_reward (SessionLimits).
            parts: its named components, within the same range. Only for the whole session.
            call: Completion.request_id of the call; its last sampled token gets the reward. None:
                the whole session.

        Raises SessionEnded, and RolloutError for a value out of range, too many parts, or a call
        without sampled tokens.
        """
        value = bounded("reward", value, self.bounds.max_reward)
        named = checked_parts(parts or {}, self.bounds.max_reward)
        if named and call is not None:
            raise RolloutError(f"session {self.label}: the reward of a call has no parts.")
        with self._lock:
            self._check_open()
            self._times.used()
            if call is None:
                self._rewards.reward, self._rewards.parts = value, named
                return
            self._rewards.of_calls[call_number(self.label, call, self._trace)] = value

    def add_messages(self, messages: Sequence[Message], answer: Message, player: str = "") -> None:
        """Record a player's chat call and its answer, for reward functions. The latest call's
        messages are kept; the first call's messages are the opening."""
        with self._lock:
            self._messages.add(messages, answer, player)

    def exhaust(self, limit: str, token_ids: IntArray | None = None) -> None:
        """Record that a call was rejected for this limit before it reached the session: the episode
        then ends as cut off. token_ids: the call's, [prompt] int32, if they left no room."""
        with self._lock:
            self.exhausted = self.exhausted or limit
            self._refused = token_ids if self._refused is None else self._refused

    def give_up(self, why: str) -> None:
        """End the session as failed. Idempotent."""
        self.end(f"{GAVE_UP}{why}")

    def finish(self) -> None:
        """End the session as done. Idempotent."""
        self.end(FINISHED)

    # ---- used by its owner

    def end(self, reason: str) -> None:
        """End it with this reason: running calls are cancelled, later ones rejected. Idempotent."""
        if reason != FINISHED and self._run_stops():
            reason = STOPPING  # the stop has failed another member of its group first
        with self._lock:
            if self.ended is not None:
                return
            self.ended = reason
            running, self._running = self._running, {}
            callbacks, self._on_end = self._on_end, []
        for cancel in running.values():  # first: slots become free even if a callback raises
            cancel()
        for callback in callbacks:
            callback(reason)

    def on_end(self, callback: Callable[[str], object]) -> None:
        """Call a function once with the end reason when it has ended, or now if it has; on the
        thread that ends it."""
        with self._lock:
            if self.ended is None:
                self._on_end.append(callback)
                return
        callback(self.ended)

    def remaining_s(self) -> float:
        """Return the seconds until a time limit may end it, at least 0; infinite once it has
        ended."""
        return self._remaining()[0]

    def expire(self) -> bool:
        """End it if a time limit is reached; return whether this call ended it."""
        left_s, reason = self._remaining()
        if left_s <= 0:
            self.end(reason)
        return left_s <= 0

    def sampling_s(self) -> float:
        """Return the time during which at least one of its calls was running, seconds."""
        with self._lock:
            return self._times.sampling_s(samples=self._trace.num_running > 0)

    def sampled_versions(self) -> IntArray:
        """Return the versions of the tokens of its finished calls, [tokens] int32."""
        with self._lock:
            return self._trace.sampled_versions()

    def saved_calls(self) -> tuple[SavedCalls, ...]:
        """Return its finished calls, and those before a resume that were not repeated yet."""
        with self._lock:
            return (*self._trace.saved_calls(), *self._kept.left)

    def not_repeated(self) -> tuple[SavedCalls, ...]:
        """Return the calls before a resume that were not repeated yet."""
        with self._lock:
            return self._kept.left

    def counts(self) -> "SessionCounts":
        """Return the counts of its calls so far."""
        with self._lock:
            return self._counts

    def episode(self) -> Episode:
        """Return the sampled contexts as an episode, with the score if there is one. Its stop
        reason is LENGTH if the session was exhausted, else its last call's.

        Raises RolloutError if it has no sampled tokens, unless its first call left no room for an
        answer: that call is then the episode.
        """
        with self._lock:
            if not self._trace.num_turns and self._refused is not None:
                return unplayed_episode(self._refused, self.limits, self._rewards.score(None))
            if not self._trace.num_turns:
                raise RolloutError(
                    f"session {self.label}, prompt {self.prompt.prompt_id}: it ended "
                    f"({self.ended or 'while open'}) and no call sampled any token. Let the "
                    "program use the address and key that it receives."
                )
            score = self._rewards.score(self._trace.token_rewards(self._rewards.of_calls))
            return replace(self._assemble(self._trace.stop, None), score=score)

    def episode_of(self, player: str) -> Episode | None:
        """Return one player's contexts as an episode without a score; None: no sampled tokens."""
        with self._lock:
            stop = self._trace.stop_of(player)
            return None if stop is None else self._assemble(stop, player)

    def _assemble(self, stop: StopReason, player: str | None) -> Episode:
        stop = StopReason.LENGTH if self.exhausted is not None else stop
        opened, messages = self._messages.of(player)
        return replace(self._trace.episode(stop, player), opened=opened, messages=messages)

    @property
    def too_long(self) -> bool:
        """Whether it has no sampled tokens because its first call left no room for an answer."""
        return self._refused is not None and not self.has_sampled

    # ---- one call

    def _begin(
        self, token_ids: IntArray, options: CallOptions, player: str
    ) -> tuple[Request, int, Completion | None]:
        """Check that a call is allowed, and register it; return its request, its number, and the
        answer that a call of the same tokens got before a resume."""
        tokens = np.asarray(token_ids)
        check_call(self.label, tokens, options)
        with self._lock:
            self._check_open()
            self._check_limits(tokens)
            begun = self._trace.begin(tokens, player)
            if self._trace.num_running == 1:
                self._times.began_sampling()
            request = make_request(
                self.member.label, self.prompt, self.member.index, begun.number, tokens, self.limits
            )
            request, overridden = with_options(
                replace(request, branch=begun.branch),
                options,
                own=self.bounds.own_sampling,
                constraints=self.takes_constraints,
                left=max(self.bounds.max_tokens - self._trace.length, 1),
            )
            self._counts = self._counts.plus(calls=1, overridden_calls=overridden)
            kept = self._kept.take(request.token_ids, player)
        kept = None if kept is None else replace(kept, request_id=request.request_id)
        return request, begun.number, kept

    def _check_open(self) -> None:
        if self.ended is not None:
            self._counts = self._counts.plus(late_calls=1)
            raise self._end_error()

    def _end_error(self) -> JaxrlError:
        """Return the error of a call that came too late."""
        text = f"session {self.label} has ended: {self.ended}."
        return Closed(text) if self.ended == STOPPING else SessionEnded(text)

    def _check_limits(self, tokens: IntArray) -> None:
        """Raise SessionLimit if no token may be sampled after these, [prompt] int32."""
        limit, refused = limit_reached(self._trace, self.bounds), None
        if not limit:
            limit, refused = no_room(len(tokens), self.limits.max_length), tokens
        if limit:
            self.exhaust(limit, refused)
            raise SessionLimit(f"session {self.label} may not sample any more: {limit}.")

    def _cancel_at_end(self, number: int, cancel: Callable[[], object]) -> None:
        with self._lock:
            if self.ended is None:
                self._running[number] = cancel
                return
        cancel()

    def _close_call(self, number: int, completion: Completion | None) -> None:
        """Record a call's completion; None: it was cancelled. Raises if the session has ended."""
        with self._lock:
            self._running.pop(number, None)
            if completion is not None and self.ended is None:
                self._trace.end(number, completion)
            else:  # its tokens are not used
                self._trace.cancel(number)
                self._counts = self._counts.plus(cancelled_calls=1)
            self._times.used(stops_sampling=not self._trace.num_running)
            if completion is not None and self.ended is not None:
                raise self._end_error()

    def _remaining(self) -> tuple[float, str]:
        """Return the seconds until a time limit is reached, and its end reason."""
        with self._lock:
            remaining = self._times.remaining(self.bounds, samples=self._trace.num_running > 0)
            return remaining if self.ended is None else (math.inf, "")


class Sessions:
    """The open sessions, by key, up to a maximum number. Thread safe."""

    def __init__(
        self,
        *,
        max_open: int = 4096,
        clock: Clock = time.monotonic,
        count: Callable[[str, int], None] = lambda name, number: None,
    ) -> None:
        """Open none yet.

        Args:
            max_open: maximum number of open sessions.
            clock: clock of their time limits.
            count: called with the name and number of faults (metrics/fault_counts.py).
        """
        self._max_open, self._clock, self._count = max_open, clock, count
        self._lock = threading.Lock()
        self._open: dict[str, PolicySession] = {}  # by key
        self._rewarded: dict[str, PolicySession] = {}  # by reward key
        self._past: OrderedDict[str, str] = OrderedDict()  # end reasons of past sessions, by key
        self._closed = False

    def open(
        self,
        generate: Generate,
        member: SessionMember,
        limits: EpisodeLimits,
        bounds: SessionLimits,
        *,
        key: str | None = None,
        kept: SavedAnswers | None = None,
    ) -> PolicySession:
        """Open a session; its owner must call its `end`. Arguments as PolicySession.

        Raises RolloutError if max_open are open or the key is taken, Closed after `close`.
        """
        session = PolicySession(
            generate,
            member,
            limits,
            bounds,
            key=key,
            kept=kept,
            clock=self._clock,
            run_stops=lambda: self._closed,
        )
        with self._lock:
            if self._closed:
                raise Closed(f"no session may be opened: {STOPPING}")
            if len(self._open) >= self._max_open:
                raise RolloutError(
                    f"{self._max_open} sessions are open, the maximum (max_open). End some, "
                    "or raise it."
                )
            if session.key in self._open:
                raise RolloutError(f"the key of session {session.label} is already in use")
            self._open[session.key] = session
            self._rewarded[session.reward_key] = session
        session.on_end(lambda reason: self._forget(session, reason))
        return session

    def find(self, key: str) -> PolicySession:
        """Return the open session of this key. Raises SessionEnded, with the reason if a session
        with this key ended recently, and Closed after `close`."""
        return self._lookup(self._open, key)

    def find_rewarded(self, reward_key: str) -> PolicySession:
        """Return the open session that this key rewards. Raises as `find`."""
        return self._lookup(self._rewarded, reward_key)

    def _lookup(self, by_key: Mapping[str, PolicySession], key: str) -> PolicySession:
        with self._lock:
            session, reason = by_key.get(key), self._past.get(key)
            closed = self._closed
        if session is not None:
            return session
        if closed:
            raise Closed(f"{STOPPING}; nothing of this session is kept")
        if reason is not None:
            if not self._closed:  # then the run has ended, not the session
                self._count("late_calls", 1)
            raise SessionEnded(f"this session has ended: {reason}.")
        raise SessionEnded("no session has this key: it is wrong, or its session ended long ago.")

    @property
    def closed(self) -> bool:
        """Whether the run is stopping."""
        return self._closed

    def all(self) -> tuple[PolicySession, ...]:
        """Return the open sessions, oldest first."""
        with self._lock:
            return tuple(self._open.values())

    def close(self) -> None:
        """End all sessions because the run is stopping. No more can be opened. Idempotent."""
        with self._lock:
            self._closed = True
        for session in self.all():
            session.end(STOPPING)

    def _forget(self, session: PolicySession, reason: str) -> None:
        with self._lock:
            self._open.pop(session.key, None)
            self._rewarded.pop(session.reward_key, None)
            self._past[session.key] = self._past[session.reward_key] = reason
            while len(self._past) > 2 * self._max_open:
                self._past.popitem(last=False)


async def first_of(
    future: "asyncio.Future[Completion]", early: "asyncio.Future[Completion]"
) -> Completion:
    """Return the sampler's completion, or its first part if that is set first; then, and if the
    caller is cancelled, cancel the rest of the call."""
    try:
        await asyncio.wait({future, early}, return_when=asyncio.FIRST_COMPLETED)
        return future.result() if future.done() else early.result()
    finally:
        future.cancel()


def _is_cancelled() -> bool:
    """Return whether the current task itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call a function on a loop's own thread, unless the loop is closed."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop is closed, and its tasks with it
        log.debug("the loop of a session's call is closed")
