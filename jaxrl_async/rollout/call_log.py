"""A policy's calls, merged in order of arrival into the contexts of one episode. Pure.

    call  P -> x        call  P x r -> y        call  S r -> z        call  P x r -> w
    contexts            P x | r y     one sequence: the second call begins with all of the first
                        S r z         history was rewritten: a separate sequence
                        P x r w       a retry, or one of several answers: x is context here

A call whose prompt begins with a complete context extends that context; any other call starts a new
one. Calls of different players (of one episode, by the header x-session-id) never share a
context. Each sampled token is therefore marked as sampled exactly once, where it was sampled, in
exactly the tokens that the policy saw.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxrl_async.rollout.episode import SavedCalls
from jaxrl_async.rollout.episode_assembly import (
    Turn,
    assemble_episode,
    context_branch,
    joined_contexts,
)
from jaxrl_async.types import (
    Completion,
    Episode,
    FloatArray,
    IntArray,
    StopReason,
)

NOTHING: IntArray = np.zeros(0, np.int32)


@dataclass(slots=True, kw_only=True, eq=False)
class _Context:
    """One growing sequence."""

    prompt_ids: IntArray
    player: str = ""  # that makes its calls
    branch: int = 0  # of its requests: context_branch; 0 for the session's first
    token_ids: IntArray = field(default_factory=lambda: NOTHING)  # all tokens known so far
    turns: list[Turn] = field(default_factory=list)
    busy: bool = True  # a running call extends it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCall:
    """A running call."""

    number: int  # from 0, in start order
    branch: int  # as Request.branch: its context's, plus earlier calls with the same tokens


class Trace:
    """The calls of one session, in start order. Not thread safe."""

    def __init__(self) -> None:
        self._contexts: list[_Context] = []
        self._running: dict[int, tuple[_Context, IntArray]] = {}
        self._ends: dict[int, tuple[_Context, int]] = {}  # of each call: its last sampled token
        self._earlier: Counter[bytes] = Counter()
        self._num_begun = 0
        self.stop = StopReason.CANCELLED  # of the call that ended last
        self._stops: dict[str, StopReason] = {}  # the same for each player

    @property
    def num_calls(self) -> int:
        """Number of calls that have started, including cancelled ones."""
        return self._num_begun

    @property
    def num_turns(self) -> int:
        """Number of calls that generated tokens."""
        return len(self._ends)

    @property
    def length(self) -> int:
        """Number of tokens in all contexts, including the prompts of running calls."""
        running = sum(
            len(prompt) - len(context.token_ids) for context, prompt in self._running.values()
        )
        return running + sum(len(c.token_ids) for c in self._contexts)

    @property
    def num_running(self) -> int:
        """Number of running calls."""
        return len(self._running)

    def begin(self, prompt_ids: IntArray, player: str = "") -> RunningCall:
        """Register a call of a player that continues these tokens, [prompt] int32.

        The context of its output is fixed now, whichever of several calls ends first. Random
        numbers depend on the context, so contexts with different prompts sample differently; the
        first call uses a plain request's random numbers.
        """
        prompt_ids = np.array(prompt_ids, np.int32)
        digest = _digest(prompt_ids)
        earlier = self._earlier[digest]
        context = self._extended_by(prompt_ids, player)
        if context is None:
            branch = context_branch(prompt_ids, earlier) if self._num_begun else 0
            context = _Context(prompt_ids=prompt_ids, player=player, branch=branch)
            self._contexts.append(context)
        begun = RunningCall(number=self._num_begun, branch=context.branch + earlier)
        self._num_begun += 1
        self._earlier[digest] += 1
        context.busy = True
        self._running[begun.number] = (context, prompt_ids)
        return begun

    def end(self, number: int, completion: Completion) -> None:
        """Append a call's output to its context. A call without output is cancelled."""
        if not len(completion.token_ids):
            self.cancel(number)
            return
        context, prompt_ids = self._running.pop(number)
        if context.turns:
            reply = prompt_ids[len(context.token_ids) :]
            context.turns[-1] = replace(context.turns[-1], reply=reply)
        context.turns.append(Turn(completion=completion, reply=NOTHING))
        context.token_ids = np.concatenate([prompt_ids, completion.token_ids]).astype(np.int32)
        context.busy = False
        self._ends[number] = (context, len(context.token_ids) - 1)
        self.stop = self._stops[context.player] = completion.stop

    def cancel(self, number: int) -> None:
        """Remove a call whose output was not used."""
        context, _ = self._running.pop(number)
        context.busy = False
        if not context.turns:
            self._contexts.remove(context)

    def has_output(self, number: int) -> bool:
        """Return whether the call with this number has ended and generated tokens."""
        return number in self._ends

    def sampled_versions(self) -> IntArray:
        """Return the versions of all sampled tokens, [sampled] int32."""
        turns = (turn for context in self._contexts for turn in context.turns)
        return np.concatenate([NOTHING, *(t.completion.versions for t in turns)]).astype(np.int32)

    def stop_of(self, player: str) -> StopReason | None:
        """Return the stop reason of a player's last call; None: it generated nothing."""
        return self._stops.get(player)

    def episode(self, stop: StopReason, player: str | None = None) -> Episode:
        """Return all contexts as one episode, in the order of their first calls. Running calls are
        left out. At least one call has generated tokens. player: include only its contexts; None:
        all."""
        episodes = [
            assemble_episode(c.prompt_ids, c.turns, stop)
            for c in self._contexts
            if c.turns and player in (None, c.player)
        ]
        return replace(joined_contexts(episodes), stop=stop)

    def saved_calls(self) -> tuple[SavedCalls, ...]:
        """Return the calls that have ended, by context, for a checkpoint."""
        numbers: dict[int, list[int]] = {}
        for number, (context, _) in sorted(self._ends.items()):
            numbers.setdefault(id(context), []).append(number)
        return tuple(
            _saved(c, numbers[id(c)], [self._ends[n][1] for n in numbers[id(c)]])
            for c in self._contexts
            if c.turns
        )

    def token_rewards(self, rewards: Mapping[int, float]) -> FloatArray | None:
        """Return the rewards of calls, at each call's last token, [length] of `episode`.

        None: no rewards. Rewards of calls without output are dropped.
        """
        contexts = [c for c in self._contexts if c.turns]
        lengths = [len(c.token_ids) for c in contexts]
        begins = dict(zip(map(id, contexts), np.cumsum([0, *lengths]), strict=False))
        values = np.zeros(sum(lengths), np.float32)
        given = {n: value for n, value in rewards.items() if n in self._ends}
        for number, value in given.items():
            context, last = self._ends[number]
            values[begins[id(context)] + last] += value
        return values if given else None

    def _extended_by(self, prompt_ids: IntArray, player: str) -> _Context | None:
        """Return the longest context that is a prefix of these tokens."""
        found = [
            c
            for c in self._contexts
            if not c.busy
            and c.player == player
            and len(c.token_ids) <= len(prompt_ids)
            and np.array_equal(c.token_ids, prompt_ids[: len(c.token_ids)])
        ]
        return max(found, key=lambda c: len(c.token_ids), default=None)


def _saved(context: _Context, numbers: Sequence[int], ends: Sequence[int]) -> SavedCalls:
    """Return the finished calls of a context. ends: index of each call's last sampled token."""
    completions = tuple(turn.completion for turn in context.turns)
    begins = [end + 1 - len(c.token_ids) for end, c in zip(ends, completions, strict=True)]
    return SavedCalls(
        token_ids=context.token_ids[: max(ends) + 1],
        voice=context.player,
        numbers=tuple(numbers),
        begins=tuple(begins),
        completions=completions,
    )


class SavedAnswers:
    """Answers to a session's calls before a resume: each is given once, to a call with exactly the
    same tokens. Not thread safe.

    A player may have another name than before: its first call that repeats one takes that call's
    player over.
    """

    def __init__(self, calls: Iterable[SavedCalls] = ()) -> None:
        """calls: of the checkpoint."""
        found = [(n, saved, k) for saved in calls for k, n in enumerate(saved.numbers)]
        self._left: dict[bytes, list[tuple[SavedCalls, int]]] = {}
        self._players: dict[str, str] = {}  # current names, by the name before
        for _, saved, k in sorted(found, key=lambda one: one[0]):
            digest = _digest(saved.token_ids[: saved.begins[k]])
            self._left.setdefault(digest, []).append((saved, k))

    def take(self, prompt_ids: IntArray, player: str) -> Completion | None:
        """Return the answer to a call with these tokens, [prompt] int32, and forget it; None: there
        is none."""
        left = self._left.get(_digest(prompt_ids), [])
        is_known = player in self._players.values()
        for index, (saved, k) in enumerate(left):
            if self._players.get(saved.voice, None if is_known else player) == player:
                self._players[saved.voice] = player
                del left[index]
                return saved.completions[k]
        return None

    @property
    def left(self) -> tuple[SavedCalls, ...]:
        """The calls that were not repeated yet, each alone."""
        return tuple(
            replace(
                saved,
                token_ids=saved.token_ids[: saved.begins[k] + len(saved.completions[k].token_ids)],
                numbers=saved.numbers[k : k + 1],
                begins=saved.begins[k : k + 1],
                completions=saved.completions[k : k + 1],
            )
            for answers in self._left.values()
            for saved, k in answers
        )


def _digest(prompt_ids: IntArray) -> bytes:
    data = np.ascontiguousarray(prompt_ids, np.int32).tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def cut_completion(completion: Completion, count: int, prompt: int) -> Completion:
    """Return a completion cut to its first `count` tokens, ended as if by a stop token.

    prompt: number of tokens before them.
    """
    return replace(completion.first(count, prompt), stop=StopReason.EOS)
