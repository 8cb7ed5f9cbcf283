"""The seams: Protocols that the parts meet at, so that no part imports another, and null objects
for what a part can do without."""

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
    """A two-way stream of messages (remote.wire.messages) with one other process: in order,
    bounded, and checked where it comes in. Any thread may use it."""

    @property
    def peer(self) -> str:
        """Name of the other side, for people."""
        ...

    @property
    def ended(self) -> str | None:
        """Why it ended; None: it is open."""
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
        sending. A message without a handler waits for one, and later ones behind it. A handler must
        return soon; if it raises, the session ends with that reason."""
        ...

    def on_end(self, callback: Callable[[str], None]) -> None:
        """Call a function once with the reason when the session has ended, or now if it has. After
        it no handler is called."""
        ...

    def end(self, reason: str) -> None:
        """Send what is queued, tell the other side the reason, and close. Idempotent."""
        ...


class Generate(Protocol):
    """Whatever turns requests into completions: our sampler, a router, a scripted double."""

    @property
    def seed(self) -> int | None:
        """Seed of the Partials that it can continue; None: it continues none."""
        ...

    def submit_many(self, requests: Sequence[Request | Partial]) -> "Sequence[Future[Completion]]":
        """Queue all requests at once, in this order; return a future of the running event loop for
        each.

        Queuing is atomic (no plan sees half of them), so that the same requests given to an idle
        sampler always run on the same schedule. Cancelling a future frees its slot. A Partial in
        place of a request, of this `seed`, continues where it was saved.
        """
        ...

    def progress(self) -> tuple[Partial, ...]:
        """Return all running requests that have drawn a token, as data. Callable from any thread.
        A request that is missing here and was submitted has its result in its future already, or
        has drawn nothing."""
        ...


class ReplicaStats(Protocol):
    """Statistics of one replica, which know how to merge."""

    @property
    def work_done(self) -> tuple[int, ...]:
        """Counters of which at least one rises while the replica is making progress."""
        ...

    def after(self, earlier: Self) -> Self:
        """Return these statistics plus those of the replica that this one replaced."""
        ...

    def since(self, earlier: Self) -> Self:
        """Return these statistics less the counts of an earlier reading of the same replica."""
        ...

    def ended(self) -> Self:
        """Return the statistics of a replica that is gone: its gauges are 0."""
        ...

    def beside(self, others: Sequence[Self]) -> Self:
        """Return one reading for this replica and the others that work beside it."""
        ...

    def with_waiting(self, count: int) -> Self:
        """Return these statistics with so many more requests that wait for a place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """How a replica left on its own accord."""

    reason: str
    # of its running requests: what they had drawn, by the future of each; others had drawn nothing
    partials: Mapping["ThreadFuture[Completion]", Partial] = field(default_factory=dict)


class Replica(Protocol):
    """One of the samplers behind a router: all that the router uses of it."""

    @property
    def replaceable(self) -> bool:
        """Whether `successor` makes another in its place. False: it is in a process of its own, and
        its seat is gone once it has failed or left."""
        ...

    @property
    def departure(self) -> Departure | None:
        """How it left, set before `error` is; None: it is there, or it failed."""
        ...

    @property
    def seed(self) -> int | None:
        """See Generate.seed; the same for all replicas of a router."""
        ...

    @property
    def places(self) -> int:
        """Number of requests that it holds at once."""
        ...

    @property
    def rows(self) -> int:
        """Number of those that draw in a step; `places` where that is not known."""
        ...

    @property
    def has_logprobs(self) -> bool:
        """Whether its completions carry log-probs; False: they are NaN, and no sign of a fault."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The exception that ended its thread, set before the futures of its requests fail;
        Disconnected: the connection to its process has ended, which is no request's fault."""
        ...

    @property
    def blamed(self) -> frozenset[str]:
        """Ids of the requests that were on its device, or may have been, when it ended with
        `error`."""
        ...

    def start(self) -> None:
        """Start its thread unless that was done before."""
        ...

    def close(self) -> None:
        """Stop it; requests that are not done fail with Closed. Idempotent."""
        ...

    def check_waits(self) -> None:
        """Raise RolloutError where waiting for this replica would never end: on its own thread, or
        in a forked process."""
        ...

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Return the requests as any replica will serve them. Raises RolloutError for one that
        cannot be served, which names the field. Works after the replica has failed, too."""
        ...

    def start_many(self, requests: Sequence[Request | Partial]) -> "list[ThreadFuture[Completion]]":
        """Queue all requests at once, in this order; return a future for each. Raises `error` if
        its thread has ended, Closed if it was closed."""
        ...

    def progress(self) -> tuple[Partial, ...]:
        """See Generate.progress."""
        ...

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """Return a running request as data. Raises RolloutError if it is not running here.

        Args:
            stop: end it, with its tokens so far and StopReason.CANCELLED.
            with_kv: include its KV if one version of the weights made all of it.
        """
        ...

    def stats(self) -> ReplicaStats:
        """Return a consistent reading of its statistics."""
        ...

    def abandon(self) -> None:
        """Detach from its thread, which is dead or hung: it produces nothing that counts from now
        on, and no weight update waits for it."""
        ...

    def successor(self) -> "Replica":
        """Return a fresh replica in the place of this one, which was abandoned: the same settings,
        the newest weights, no requests. May wait for weights. Raises Closed and WeightsError, as
        the weight source does."""
        ...


class Scorer(Protocol):
    """Whatever judges a group."""

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Return one score per episode, in the same order. Must not change its arguments. Called
        once per group, and again if it raised or timed out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An environment's answer to one turn of the policy."""

    token_ids: IntArray  # [reply] int32, appended unchanged; with done=True it may be empty
    done: bool
    reward: float = 0.0  # for the turn that it answers
    parts: Mapping[str, float] = field(default_factory=dict)  # named components of the reward
    # [next context] int32: the policy's next turn continues these tokens alone, since the
    # environment has rewritten history; token_ids is then empty. None: the sequence goes on
    opening: IntArray | None = None
    cut_off: bool = False  # with done: a limit ended the episode (StopReason.LENGTH)
    # for scorers, as plain JSON: what was said before the first turn, with its reply alone, and the
    # policy's message with what followed; (): only the tokens are known
    opened: tuple[Message, ...] = ()
    messages: tuple[Message, ...] = ()


class Env(Protocol):
    """The environment of one episode: made afresh for each episode, used once."""

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """Return the answer to the policy's last turn."""
        ...


@runtime_checkable
class Opens(Protocol):
    """An environment that writes the beginning of its episode itself."""

    async def open(self, prompt: Prompt) -> IntArray:
        """Return the tokens that the policy continues, [opening] int32, in place of the prompt's.
        Called once, before the first turn, and not in a resumed episode that has begun."""
        ...


@runtime_checkable
class Concludes(Protocol):
    """An environment that judges its whole episode, or holds something that must be given back."""

    async def verdict(self) -> Score | None:
        """Return what the whole episode earned beside its turns' rewards; None: nothing. Called
        once, after the last turn, also where a limit cut the episode off."""
        ...

    async def close(self) -> None:
        """Give back what it holds. Called once its episode is over, finished or not."""
        ...


@runtime_checkable
class Plays(Protocol):
    """An environment that plays its whole episode itself, and draws from the sampler as it likes:
    an agent program. Its `step` is never called."""

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
        """Return the finished episode, or several: one for each seat of a game. If its task is
        cancelled, so is what it draws.

        Args:
            generate: the sampler.
            prompt: the task.
            label: the group's part of the ids of its requests.
            member: of the group.
            limits: a rollout.episode.EpisodeLimits.
            spent_s: called once with the seconds in which nothing was drawn.
        """
        ...

    def drawn_versions(self) -> IntArray:
        """Return the versions of the tokens that its finished calls have drawn, [drawn] int32."""
        ...


class Player(Protocol):
    """Who fills a seat of a game in the policy's place: an older version, another model."""

    @property
    def name(self) -> str:
        """Who it is, for people and metrics."""
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
            tools: what may be called.
            prompt: of the group.
            member: of the group; with the prompt's position all that randomness depends on.
            turn: number of the seat's messages so far.
        """
        ...


class ChatFormat(Protocol):
    """Chat messages to tokens and back in a model's own format. Any thread may use it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the policy's turn."""
        ...

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> IntArray:
        """Return the tokens of a conversation up to where the policy's turn begins, [length] int32.
        Raises DataError for messages that the format cannot hold.

        Args:
            messages: the conversation, the policy's own turns of before included.
            tools: what may be called, as OpenAI's function tools.
        """
        ...

    def message(self, token_ids: IntArray, tools: Sequence[Mapping[str, Any]]) -> Message:
        """Return what the policy drew, [drawn] int32, as an assistant's message with its tool calls
        and reasoning. A tool call that is not well formed stays text."""
        ...

    def continuation(
        self, before: IntArray, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> IntArray | None:
        """Return the tokens to append to a sequence, so that the policy's next turn begins.

        None: this format rewrites earlier turns at this point, and a new context must begin with
        `opening`.

        Args:
            before: [length] int32, the sequence so far; it ends with what the policy drew, and is
                never tokenised again.
            messages: what others say now (tool, user, system).
            tools: as in `opening`.
        """
        ...


@runtime_checkable
class SavesState(Protocol):
    """An environment that a resumed run can continue. An episode whose environment lacks these
    methods starts over."""

    def state(self) -> Any:
        """Return its state between two replies: plain values, lists, mappings and arrays. None: it
        cannot be continued, and its episode starts over."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from this state; called once, before the first reply."""
        ...


class Gate(Protocol):
    """The rollout side of the replay buffer."""

    def admit(self, timeout_s: float | None = None) -> tuple[Ticket, ...]:
        """Block until a group may start, then return tickets for all that may start now.

        Empty after timeout_s. Raises Closed when the run stops.
        """
        ...

    def put(self, group: EpisodeGroup) -> Drop | None:
        """Hand in a finished group; return the reason if it was dropped at once."""
        ...

    def fail(self, ticket: Ticket, prompt: Prompt, reason: Drop) -> None:
        """Return a ticket whose group will never come. Its slot is free again."""
        ...

    def cancel(self, group: CancelledGroup) -> None:
        """Return the ticket of a group that has become too old while it was drawn. Its slot is free
        again."""
        ...

    def watch(self, aged: Callable[[int], None], stop: Callable[[int], None]) -> None:
        """Say which groups have become too old while they are drawn. Both functions are called on
        any thread, and must return at once.

        Args:
            aged: called with a version whenever it rises: a group with an older token will be
                dropped. Never called where rollouts wait instead (staleness.when_too_old).
            stop: called in a replay with the number of a group that was cancelled at this point.
        """
        ...


class WeightSource(Protocol):
    """Where one sampler gets new weights from, between two decode blocks."""

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Return the newest complete version if it is newer than the last one returned, else None.

        Never blocks, unless wait=True (an idle sampler): then it finishes a running transfer first.
        """
        ...

    def live(self, version: int) -> None:
        """Take note that every new token of this sampler comes from this version."""
        ...

    def attach(self, wake: threading.Event) -> None:
        """Set this event whenever new weights arrive, and now if some are there already."""
        ...

    def leave(self) -> None:
        """Stop waiting for this sampler: it draws no more. Callable from any thread. Idempotent."""
        ...

    def rejoin(self) -> "WeightSource":
        """Return a source for the sampler that replaces this one, which has left. Its first poll
        gives the newest weights, or None if this sampler drew from them already. Raises Closed."""
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
    """What a sampler must take in between two decode blocks, as it was recorded."""

    requests: tuple[str, ...] = ()  # ids, in the order of their queue
    cancelled: tuple[str, ...] = ()  # ids of those whose futures were cancelled
    version: int | None = None  # of new weights; None: no new weights


class NotYet(Enum):
    """Nothing may be taken in yet: something else was recorded to happen before."""

    NOT_YET = "not yet"


class Schedule(Protocol):
    """Records in which order a run's threads did what; a replay prescribes it. Any thread."""

    def write(self, **event: Any) -> None:
        """Record that this event has happened, after all events written before."""
        ...

    def due(self, sampler: str, block: int, working: bool) -> Intake | NotYet | None:
        """Return what this sampler must take in now; None: whatever has come.

        Args:
            sampler: its name.
            block: number of blocks that it has decoded.
            working: whether it has something to decode, and could continue without taking anything.
        """
        ...


class Unrecorded:
    """A Schedule that records nothing and prescribes nothing."""

    def write(self, **event: Any) -> None:
        """Do nothing."""

    def due(self, sampler: str, block: int, working: bool) -> None:
        """Return None: whatever has come is taken in."""


UNRECORDED = Unrecorded()


class Clock(Protocol):
    """A monotone clock."""

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
        """Undo the last draw, which no step was made from. For a run that ends here."""
        ...

    def pause(self) -> None:
        """Admit no more groups until resume()."""
        ...

    def resume(self) -> None:
        """Admit groups again."""
        ...

    def set_limit(self, limit: int) -> None:
        """Set the staleness target, in versions; the hard bound stays."""
        ...


class Publisher(Protocol):
    """The trainer side of the weight channel."""

    def publish(self, version: int, params: Any, probe_logprobs: Any = None) -> None:
        """Send weights to every sampler, device to device, without waiting for the copies."""
        ...

    def wait_taken(self) -> None:
        """Block until every sampler has taken the last weights that were sent. Raises Closed."""
        ...

    def wait_live(
        self, version: int, timeout_s: float, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Block until every sampler draws from this version, or the wait is given up. Raises
        WeightsError after timeout_s."""
        ...
