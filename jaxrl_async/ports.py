"""The interfaces between components: Protocols, so no component imports another, and null objects
for optional components."""

import threading
from asyncio import Future
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from jaxrl_async.types import (
    CancelledGroup,
    Completion,
    Draw,
    Drop,
    Episode,
    EpisodeGroup,
    IntArray,
    Message,
    Partial,
    Prompt,
    Request,
    Score,
    Ticket,
    VersionedParams,
)

WireMessage = TypeVar("WireMessage")


class Session(Protocol):
    """A two-way stream of messages (remote.wire.messages) with one other process: ordered, bounded,
    and validated on arrival. Any thread may use it."""

    @property
    def peer(self) -> str:
        """Name of the other side, for messages."""
        ...

    @property
    def ended(self) -> str | None:
        """The reason why it ended; None: it is open."""
        ...

    def send(self, message: Any) -> None:
        """Queue a message; block while too many bytes are queued. Raises Disconnected once it has
        ended."""
        ...

    def send_now(self, message: Any) -> bool:
        """Queue a message as `send` does if there is room; if not, return False immediately."""
        ...

    def on(self, kind: type[WireMessage], handler: Callable[[WireMessage], None]) -> None:
        """Call a function with each message of a kind, on the session's own thread, in the order of
        sending. A message without a handler waits for one and delays the messages behind it. A
        handler must return soon; if it raises, the session ends with that reason."""
        ...

    def on_end(self, callback: Callable[[str], None]) -> None:
        """Call a function once with the reason when the session has ended, or now if it already
        has.
        No handler is called afterwards."""
        ...

    def end(self, reason: str) -> None:
        """Send what is queued, tell the other side the reason, and close. Idempotent."""
        ...


class Generate(Protocol):
    """Turns requests into completions: a sampler, a router, or a scripted test double."""

    @property
    def seed(self) -> int | None:
        """Seed of the Partials that it can continue; None: it cannot continue any."""
        ...

    def submit_many(self, requests: Sequence[Request | Partial]) -> "Sequence[Future[Completion]]":
        """Queue all requests together, in this order; return a future of the running event loop for
        each.

        Queuing is atomic (no scheduling step sees only part of them), so the same requests given to
        an idle sampler always run on the same schedule. Cancelling a future frees its slot. A
        Partial of this `seed` in place of a request continues where it was saved.
        """
        ...

    def progress(self) -> tuple[Partial, ...]:
        """Return all running requests that have generated a token, as data. Callable from any
        thread.
        A submitted request that is missing here already has its result in its future, or has
        generated nothing yet."""
        ...


class ReplicaStats(Protocol):
    """Statistics of one replica, with methods to merge them."""

    @property
    def work_done(self) -> tuple[int, ...]:
        """Counters; at least one rises while the replica is making progress."""
        ...

    def after(self, earlier: Self) -> Self:
        """Return these statistics plus the statistics of the replica that this one replaced."""
        ...

    def since(self, earlier: Self) -> Self:
        """Return these statistics minus the counts of an earlier reading of the same replica."""
        ...

    def ended(self) -> Self:
        """Return the statistics of a replica that is gone: its gauges are 0."""
        ...

    def beside(self, others: Sequence[Self]) -> Self:
        """Return one reading for this replica and the others that work alongside it."""
        ...

    def with_waiting(self, count: int) -> Self:
        """Return these statistics with `count` more requests waiting for a slot."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """The voluntary departure of a replica: its reason, and its running requests."""

    reason: str
    # what its running requests had generated, by the future of each; others had generated nothing
    partials: Mapping["ThreadFuture[Completion]", Partial] = field(default_factory=dict)


class Replica(Protocol):
    """One of the samplers behind a router, with all that the router uses of it."""

    @property
    def replaceable(self) -> bool:
        """Whether `successor` makes a replacement. False: the replica is in a separate process, and
        its slot is removed once it has failed or left."""
        ...

    @property
    def departure(self) -> Departure | None:
        """Its departure, set before `error`; None: it is running, or it failed."""
        ...

    @property
    def seed(self) -> int | None:
        """See Generate.seed. All replicas of a router have the same seed."""
        ...

    @property
    def places(self) -> int:
        """Maximum number of requests that it holds at the same time."""
        ...

    @property
    def rows(self) -> int:
        """Maximum number of requests that generate in one step; `places` if that is not known."""
        ...

    @property
    def has_logprobs(self) -> bool:
        """Whether its completions carry log-probs; False: they are NaN, which is not a fault."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The exception that ended its thread, set before the futures of its requests fail.
        Disconnected: the connection to its process has ended, which no request caused."""
        ...

    @property
    def blamed(self) -> frozenset[str]:
        """Ids of the requests that were on its device, or may have been, when it ended with
        `error`."""
        ...

    def start(self) -> None:
        """Start its thread unless it is already started."""
        ...

    def close(self) -> None:
        """Stop it; unfinished requests fail with Closed. Idempotent."""
        ...

    def check_waits(self) -> None:
        """Raise RolloutError if waiting for this replica would never end: on its own thread, or in
        a forked process."""
        ...

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Return the requests in the form that any replica serves. Raises RolloutError, naming the
        field, for one that cannot be served. Also works after the replica has failed."""
        ...

    def start_many(self, requests: Sequence[Request | Partial]) -> "list[ThreadFuture[Completion]]":
        """Queue all requests together, in this order; return a future for each. Raises `error` if
        its thread has ended, Closed if it was closed."""
        ...

    def progress(self) -> tuple[Partial, ...]:
        """See Generate.progress."""
        ...

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """Return a running request as data. Raises RolloutError if it is not running here.

        Args:
            stop: end the request, with its tokens so far and StopReason.CANCELLED.
            with_kv: include its KV if a single version of the weights computed all of it.
        """
        ...

    def stats(self) -> ReplicaStats:
        """Return a consistent reading of its statistics."""
        ...

    def abandon(self) -> None:
        """Detach from its thread, which is dead or hung: its results no longer count, and no weight
        update waits for it."""
        ...

    def successor(self) -> "Replica":
        """Return a new replica in place of this one, which was abandoned: the same settings, the
        newest weights, no requests. May wait for weights. Raises Closed and WeightsError, as the
        weight source does."""
        ...


class Scorer(Protocol):
    """Judges a group of episodes."""

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Return one score per episode, in the same order. Must not change its arguments. Called
        once per group, and again if it raised or timed out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An environment's answer to one turn of the policy."""

    token_ids: IntArray  # [reply] int32, appended unchanged; may be empty if done=True
    done: bool
    reward: float = 0.0  # for the turn that this answers
    parts: Mapping[str, float] = field(default_factory=dict)  # named components of the reward
    # [next context] int32: the policy's next turn continues these tokens alone, since the
    # environment has rewritten history; token_ids is then empty. None: the sequence continues
    opening: IntArray | None = None
    cut_off: bool = False  # with done: a limit ended the episode (StopReason.LENGTH)
    # for scorers, as plain JSON. opened: what was said before the first turn, in its reply only.
    # messages: the policy's message and what followed. (): only the tokens are known
    opened: tuple[Message, ...] = ()
    messages: tuple[Message, ...] = ()


class Env(Protocol):
    """The environment of one episode: created for each episode, used once."""

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """Return the answer to the policy's last turn."""
        ...


@runtime_checkable
class Opens(Protocol):
    """An environment that writes the beginning of its episode."""

    async def open(self, prompt: Prompt) -> IntArray:
        """Return the tokens that the policy continues instead of the prompt's, [opening] int32.
        Called once, before the first turn, but not in a resumed episode that has already begun."""
        ...


@runtime_checkable
class Concludes(Protocol):
    """An environment that judges its whole episode, or holds resources that it must release."""

    async def verdict(self) -> Score | None:
        """Return what the whole episode earned in addition to its turns' rewards; None: nothing.
        Called once, after the last turn, even if a limit cut the episode off."""
        ...

    async def close(self) -> None:
        """Release its resources. Called once its episode is over, finished or not."""
        ...


@runtime_checkable
class Plays(Protocol):
    """An environment that plays its whole episode itself and samples as it likes, such as an agent
    program. Its `step` is never called."""

    async def play(
        self,
        generate: Generate,
        prompt: Prompt,
        *,
        label: str,
        member: int,
        limits: Any,
        spent_s: Callable[[float], None],
    ) -> Episode | tuple[Episode, ...]:
        """Return the finished episode, or several: one for each seat of a game. Cancelling its task
        also cancels its requests.

        Args:
            generate: the sampler.
            prompt: the task.
            label: the group's part of the ids of its requests.
            member: index within the group.
            limits: a rollout.episode.EpisodeLimits.
            spent_s: called once with the time in which nothing was generated, seconds.
        """
        ...

    def drawn_versions(self) -> IntArray:
        """Return the versions of the tokens generated by its finished calls, [drawn] int32."""
        ...


class Player(Protocol):
    """Fills a seat of a game instead of the policy: an older version, or another model."""

    @property
    def name(self) -> str:
        """Its name, for messages and metrics."""
        ...

    async def answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        prompt: Prompt,
        member: int,
        turn: int,
    ) -> Message:
        """Return the seat's next message. Raises RolloutError.

        Args:
            messages: the seat's conversation so far, its own messages as the assistant's.
            tools: the tools that may be called.
            prompt: the group's prompt.
            member: index within the group; randomness depends only on it and the prompt's position.
            turn: number of the seat's messages so far.
        """
        ...


class ChatFormat(Protocol):
    """Converts chat messages to tokens and back in a model's own format. Any thread may use it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the policy's turn."""
        ...

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> IntArray:
        """Return the tokens of a conversation up to where the policy's turn begins, [length] int32.
        Raises DataError for messages that the format cannot represent.

        Args:
            messages: the conversation, including the policy's earlier turns.
            tools: the tools that may be called, as OpenAI's function tools.
        """
        ...

    def message(self, token_ids: IntArray, tools: Sequence[Mapping[str, Any]]) -> Message:
        """Return what the policy generated, [drawn] int32, as an assistant's message with its tool
        calls and reasoning. A malformed tool call stays text."""
        ...

    def continuation(
        self, before: IntArray, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> IntArray | None:
        """Return the tokens to append to a sequence up to where the policy's next turn begins.

        None: this format rewrites earlier turns at this point, and a new context must begin with
        `opening`.

        Args:
            before: [length] int32, the sequence so far; it ends with what the policy generated, and
                is never tokenized again.
            messages: the new messages of others (tool, user, system).
            tools: as in `opening`.
        """
        ...


@runtime_checkable
class SavesState(Protocol):
    """An environment that a resumed run can continue. An episode whose environment lacks these
    methods starts over."""

    def state(self) -> Any:
        """Return its state between two replies: plain values, lists, mappings and arrays. None: the
        state cannot be saved, and the episode starts over."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from this state. Called once, before the first reply."""
        ...


class Gate(Protocol):
    """The rollout side of the replay buffer."""

    def admit(self, timeout_s: float | None = None) -> tuple[Ticket, ...]:
        """Block until a group may start, then return tickets for all groups that may start now.

        Empty after timeout_s. Raises Closed when the run stops.
        """
        ...

    def put(self, group: EpisodeGroup) -> Drop | None:
        """Add a finished group; return the reason if it was dropped immediately."""
        ...

    def fail(self, ticket: Ticket, prompt: Prompt, reason: Drop) -> None:
        """Return the ticket of a group that will never finish, which frees its slot."""
        ...

    def cancel(self, group: CancelledGroup) -> None:
        """Return the ticket of a group that became too old while it was generated, which frees its
        slot."""
        ...

    def watch(self, aged: Callable[[int], None], stop: Callable[[int], None]) -> None:
        """Report which groups have become too old while they are generated. Both functions are
        called on any thread, and must return immediately.

        Args:
            aged: called with a version whenever it rises: a group with an older token will be
                dropped. Never called if rollouts wait instead (staleness.when_too_old).
            stop: called in a replay with the number of a group that was cancelled at this point.
        """
        ...


class WeightSource(Protocol):
    """The source of new weights for one sampler, polled between two decode blocks."""

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Return the newest complete version if it is newer than the last one returned, else None.

        Never blocks, unless wait=True (an idle sampler): it then completes a running transfer
        first.
        """
        ...

    def live(self, version: int) -> None:
        """Record that every new token of this sampler comes from this version."""
        ...

    def attach(self, wake: threading.Event) -> None:
        """Set this event whenever new weights arrive, and now if some already have."""
        ...

    def leave(self) -> None:
        """Stop waiting for this sampler, which no longer generates. Callable from any thread.
        Idempotent."""
        ...

    def rejoin(self) -> "WeightSource":
        """Return a source for the sampler that replaces this one, which has left. Its first poll
        gives the newest weights, or None if this sampler already used them. Raises Closed."""
        ...


class FixedWeights:
    """A WeightSource whose weights never change."""

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Return None."""
        return None

    def live(self, version: int) -> None:
        """Do nothing."""

    def attach(self, wake: threading.Event) -> None:
        """Do nothing: no weights will arrive."""

    def leave(self) -> None:
        """Do nothing: no update waits for this sampler."""

    def rejoin(self) -> "FixedWeights":
        """Return this source, which has no state."""
        return self


FIXED_WEIGHTS = FixedWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Recorded inputs that a sampler must take in between two decode blocks."""

    requests: tuple[str, ...] = ()  # ids, in the order of their queue
    cancelled: tuple[str, ...] = ()  # ids of requests whose futures were cancelled
    version: int | None = None  # of new weights; None: no new weights


class NotYet(Enum):
    """Nothing may be taken in yet: another event was recorded before this point."""

    NOT_YET = "not yet"


class Schedule(Protocol):
    """Records the order of events in a run's threads; a replay prescribes it. Any thread."""

    def write(self, **event: Any) -> None:
        """Record this event, after all events written before."""
        ...

    def due(self, sampler: str, block: int, working: bool) -> Intake | NotYet | None:
        """Return what this sampler must take in now; None: everything that has arrived.

        Args:
            sampler: its name.
            block: number of blocks that it has decoded.
            working: whether it has something to decode, and could continue without new input.
        """
        ...


class Unrecorded:
    """A Schedule that records nothing and prescribes nothing."""

    def write(self, **event: Any) -> None:
        """Do nothing."""

    def due(self, sampler: str, block: int, working: bool) -> None:
        """Return None: everything that has arrived is taken in."""


UNRECORDED = Unrecorded()


class Clock(Protocol):
    """A monotonic clock."""

    def __call__(self) -> float:
        """Return the seconds since some fixed moment."""
        ...


class GroupSource(Protocol):
    """The trainer side of the replay buffer."""

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """Block until the groups of one step may be trained on at this version, and return them.
        Raises Closed, and TimeoutError after timeout_s."""
        ...

    def give_back(self) -> None:
        """Undo the last draw, which no step used. For a run that ends here."""
        ...

    def pause(self) -> None:
        """Admit no more groups until resume()."""
        ...

    def resume(self) -> None:
        """Admit groups again."""
        ...

    def set_limit(self, limit: int) -> None:
        """Set the staleness target, in versions; the hard bound is unchanged."""
        ...


class Publisher(Protocol):
    """The trainer side of the weight channel."""

    def publish(self, version: int, params: Any, probe_logprobs: Any = None) -> None:
        """Send weights to every sampler, device to device, without waiting for the copies."""
        ...

    def wait_taken(self) -> None:
        """Block until every sampler has taken the last published weights. Raises Closed."""
        ...

    def wait_live(
        self, version: int, timeout_s: float, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Block until every sampler generates with this version, or `given_up` returns True. Raises
        WeightsError after timeout_s."""
        ...
