"""Seams of rollouts: scorers, environments, players, chat formats, and the buffer on both sides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxrl_async.ports.generate import Generate
from jaxrl_async.types import (
    CancelledGroup,
    Completion,
    Draw,
    Drop,
    Episode,
    EpisodeGroup,
    EpisodeLimits,
    IntArray,
    Message,
    Prompt,
    Score,
    Ticket,
)


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
        limits: EpisodeLimits,
        spent_s: Callable[[float], None],
    ) -> Episode | tuple[Episode, ...]:
        """Return the finished episode, or several: one for each seat of a game. If its task is
        cancelled, so is what it draws.

        Args:
            generate: the sampler.
            prompt: the task.
            label: the group's part of the ids of its requests.
            member: of the group.
            limits: of the episode.
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
