"""Play one group: combine the policy's turns and its environments' replies into episodes.

    prompt ──Request──> Generate ──Completion──> Env ──Reply──> longer request ── ... ──> Episode

A sequence only grows: sampled tokens and replies are kept token for token, and the next turn
continues where the last one ended. If the environment has rewritten history, the next turn begins
a new context.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np

from jaxrl_async.errors import RolloutError, StartOver, in_a_line
from jaxrl_async.outages import ENVIRONMENT, Outages
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import Concludes, Env, KeepsCalls, Opens, Plays, Reply
from jaxrl_async.ports.run import SavesState
from jaxrl_async.rollout.env import MakeEnv, SingleTurn, snapshot
from jaxrl_async.rollout.episode_assembly import (
    NOTHING,
    Turn,
    assemble_contexts,
    current_context,
    next_branch,
    unplayed_episode,
)
from jaxrl_async.rollout.quorum import Quota, first_ended
from jaxrl_async.types import (
    Completion,
    Episode,
    EpisodeLimits,
    IntArray,
    LogitShaping,
    Partial,
    Prompt,
    Request,
    Score,
    StopReason,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EpisodeProgress:
    """An unfinished episode, owned by the loop's thread."""

    env: Env
    waiting: "asyncio.Future[Completion] | None" = None  # the policy's next turn
    turns: list[Turn] = field(default_factory=list)
    stop: StopReason | None = None  # set once the episode is over
    env_state: Any = None  # a ports.SavesState environment's state after opening and last reply
    opening: IntArray | None = (
        None  # written by the environment; None: the prompt's tokens, or not written yet
    )
    verdict: Score | None = None  # of a ports.Concludes environment, once the episode is over
    left_out: bool = False  # failed or not needed: its group continues without it


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCalls:
    """Finished calls of a program in one growing sequence, for checkpoints."""

    token_ids: IntArray  # [length] int32, up to the end of the last answer
    voice: str
    numbers: tuple[int, ...]  # of the calls, in the order in which the session's calls started
    begins: tuple[int, ...]  # number of tokens before each answer
    completions: tuple[Completion, ...]  # the answers


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEpisode:
    """An EpisodeProgress as data, for checkpoints."""

    turns: tuple[Turn, ...] = ()
    stop: StopReason | None = None
    completion: Completion | None = None  # the next turn, sampled but without a reply yet
    partial: Partial | None = None  # the next turn, partly sampled
    env_state: Any = None  # as in EpisodeProgress
    opening: IntArray | None = None
    verdict: Score | None = None
    left_out: bool = False  # as in EpisodeProgress
    calls: tuple[SavedCalls, ...] = ()  # of a program, which repeats them
    restarts: bool = False  # it has tokens of the policy, but cannot continue

    @property
    def continues(self) -> bool:
        """Whether it is unfinished, and continues with the policy's tokens so far."""
        begun = self.calls or self.turns or self.completion is not None or self.partial is not None
        return bool(begun) and self.stop is None and not self.left_out


def request_id(label: str, member: int, turn: int) -> str:
    """Return the id of a turn's request; `label` is the group's part ("g5")."""
    return f"{label}/m{member}/t{turn}"


def make_request(
    label: str,
    prompt: Prompt,
    member: int,
    turn: int,
    token_ids: IntArray,
    limits: EpisodeLimits,
    branch: int = 0,
) -> Request:
    """Make the request for one turn.

    Randomness is keyed by the prompt's position in the stream, the member, and each token's
    position in the sequence, so no turn reuses an earlier turn's random numbers. The request is
    limited to the rest of max_length; an answer cut there ends with StopReason.LENGTH. Raises
    RolloutError if nothing is left, or if the task's constraint raises an exception. branch:
    accounts for its context, and for earlier requests with the same tokens.
    """
    if len(token_ids) >= limits.max_length:
        raise RolloutError(
            f"prompt {prompt.prompt_id} has {len(token_ids)} tokens, which leaves no room for an "
            f"answer in {limits.max_length}. Raise sampler.max_length or lower "
            "data.max_prompt_tokens."
        )
    return Request(
        request_id=request_id(label, member, turn),
        token_ids=token_ids,
        max_new_tokens=min(limits.max_new_tokens, limits.max_length - len(token_ids)),
        sampling=limits.sampling,
        stop_token_ids=limits.stop_token_ids,
        key=(prompt.position, member),
        branch=branch,
        priority=limits.priority.of(prompt, turn),
        extras=limits.keep_mask,
        for_training=limits.for_training,
        shaping=_shaping(prompt, limits),
    )


def _shaping(prompt: Prompt, limits: EpisodeLimits) -> LogitShaping | None:
    """Return what shapes the logits of a prompt's answers. Raises RolloutError."""
    if limits.constraint is None:
        return None
    try:
        constraint = limits.constraint(prompt)
    except Exception as error:
        raise RolloutError(
            f"prompt {prompt.prompt_id}: the task's constraint raised {type(error).__name__}: "
            f"{in_a_line(error)}"
        ) from error
    return None if constraint is None else LogitShaping(constraint=constraint)


def check_kept(completion: Completion, limits: EpisodeLimits, before: int) -> None:
    """Raise RolloutError if the completion lacks the masks or experts that `limits` require.

    before: number of tokens in the request.
    """
    count = len(completion.token_ids)
    if not count:
        return
    masks = 0 if completion.kept is None else completion.kept.num_tokens
    if limits.keep_mask and masks != count:
        raise RolloutError(
            f"request {completion.request_id}: the sampler returned {count} tokens, but sampling "
            f"masks for {masks}. algorithm.keep_sampling_mask needs a sampler that fills "
            "Completion.kept; set it to false for other samplers."
        )
    routed = 0 if completion.expert_ids is None else len(completion.expert_ids)
    if limits.keep_routing and routed != before + count - 1:
        raise RolloutError(
            f"request {completion.request_id}: the sampler returned {count} tokens after {before}, "
            f"but the experts of {routed}, not of {before + count - 1}. algorithm.keep_routing "
            "needs a sampler that fills Completion.expert_ids; set it to false for other samplers."
        )


def saved_episode(progress: EpisodeProgress, partial: Partial | None) -> SavedEpisode:
    """Convert an unfinished episode to data; `partial` is the sampled part of its next turn."""
    turns, waiting, completion = tuple(progress.turns), progress.waiting, None
    opening = progress.opening
    if progress.left_out and not isinstance(progress.env, Plays):  # else: start over like the rest
        return SavedEpisode(left_out=True)
    if progress.stop is not None:
        return SavedEpisode(
            turns=turns, stop=progress.stop, opening=opening, verdict=progress.verdict
        )
    if isinstance(progress.env, Plays):
        calls = tuple(progress.env.calls()) if isinstance(progress.env, KeepsCalls) else ()
        return SavedEpisode(
            calls=calls, restarts=not calls and len(progress.env.sampled_versions()) > 0
        )
    if (turns or opening is not None) and progress.env_state is None:
        return SavedEpisode(restarts=bool(turns))  # the environment cannot be restored
    if waiting is not None and waiting.done() and not waiting.cancelled():
        completion = None if waiting.exception() else waiting.result()
    return SavedEpisode(
        turns=turns,
        completion=completion,
        partial=None if completion is not None else partial,
        env_state=progress.env_state,
        opening=opening,
    )


def resumed_progress(saved: SavedEpisode, env: Env) -> EpisodeProgress:
    """Convert saved data back, with a new environment; the next turn is not requested yet."""
    if saved.env_state is not None and isinstance(env, SavesState):
        env.restore(saved.env_state)
    if saved.calls and isinstance(env, KeepsCalls):
        env.keep(saved.calls)
    waiting = None
    if saved.completion is not None:
        waiting = asyncio.get_running_loop().create_future()
        waiting.set_result(saved.completion)
    return EpisodeProgress(
        env=env,
        waiting=waiting,
        turns=list(saved.turns),
        stop=saved.stop,
        env_state=saved.env_state,
        opening=saved.opening,
        verdict=saved.verdict,
        left_out=saved.left_out,
    )


def new_progress(saved: SavedEpisode, make_env: MakeEnv, prompt: Prompt) -> EpisodeProgress:
    """Call `resumed_progress` with a new environment; if that fails, the episode will fail."""
    try:
        return resumed_progress(saved, make_env(prompt))
    except RolloutError as error:
        waiting: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        waiting.set_exception(error)
        return EpisodeProgress(env=SingleTurn(prompt), waiting=waiting)


def next_request(
    label: str,
    prompt: Prompt,
    member: int,
    opening: IntArray | None,
    turns: Sequence[Turn],
    limits: EpisodeLimits,
) -> Request:
    """Make the request for the turn after these; opening: see EpisodeProgress."""
    first = prompt.token_ids if opening is None else opening
    branch = next_branch(first, turns)
    tokens = current_context(first, turns)
    return make_request(label, prompt, member, len(turns), tokens, limits, branch)


def resumed_request(
    saved: SavedEpisode,
    label: str,
    prompt: Prompt,
    member: int,
    limits: EpisodeLimits,
    seed: int | None,
) -> Request | Partial | None:
    """Return the next request of a saved episode: a partial turn, a whole turn, or None.

    seed: the sampler's seed; None: this sampler cannot continue a partial turn.
    """
    if saved.left_out or saved.stop is not None or saved.completion is not None:
        return None
    request = next_request(label, prompt, member, saved.opening, saved.turns, limits)
    partial = saved.partial
    fits = (
        partial is not None
        and partial.seed == seed
        and len(partial.token_ids) < request.max_new_tokens
        and np.array_equal(partial.request.token_ids, request.token_ids)
        and (not request.extras or partial.has_extras)
        and (not limits.keep_routing or partial.expert_ids is not None)
    )
    return replace(partial, request=request) if fits and partial is not None else request


def begin_groups(
    generate: Generate,
    make_env: MakeEnv,
    groups: Sequence[tuple[str, Prompt, Sequence[SavedEpisode]]],
    limits: EpisodeLimits,
) -> list[tuple[EpisodeProgress, ...]]:
    """Queue the next turn of every episode of these groups in one call; return their progress.

    An episode whose environment cannot be made fails when it is played. If the environment writes
    the opening, the request is made when that is available.

    Args:
        generate: The sampler.
        make_env: Makes each episode's environment.
        groups: Label, prompt and saved episodes of each group; SavedEpisode() is a new episode.
        limits: Sampling settings and limits, of each prompt's task.

    Raises RolloutError if a prompt leaves no room, and errors of submit_many.
    """
    begun, requesting = [], []
    requests: list[Any] = []
    for label, prompt, episodes in groups:
        members = tuple(new_progress(saved, make_env, prompt) for saved in episodes)
        for m, (saved, member) in enumerate(zip(episodes, members, strict=True)):
            if isinstance(member.env, Plays) or _must_open(member):
                continue  # it makes requests itself, or once its environment has opened
            request = resumed_request(saved, label, prompt, m, limits.of(prompt), generate.seed)
            if request is not None and member.waiting is None:
                requests.append(request)
                requesting.append(member)
        begun.append(members)
    for member, future in zip(requesting, generate.submit_many(requests), strict=True):
        member.waiting = future
    return begun


def cancel(progress: EpisodeProgress) -> None:
    """Cancel an episode's pending turn: its slot becomes free at the next block."""
    if progress.waiting is not None:
        progress.waiting.cancel()


def _must_open(progress: EpisodeProgress) -> bool:
    """Return whether the environment still has to write the opening of its episode."""
    begun = progress.opening is not None or progress.turns or progress.waiting is not None
    over = progress.stop is not None or progress.left_out
    return not over and not begun and isinstance(progress.env, Opens)


async def play_episode(
    generate: Generate,
    prompt: Prompt,
    progress: EpisodeProgress,
    *,
    label: str,
    member: int,
    limits: EpisodeLimits,
    spent_s: Callable[[float], None] = lambda seconds: None,
) -> tuple[Episode, ...]:
    """Play one member until its episode ends; a game returns one episode for each seat.

    consumes      the completion that `progress` waits for, then one per turn
    waits for     the sampler, and the environment
    produces      an Episode; calls `spent_s` with the seconds that each reply took
    on failure    the environment's exception; RolloutError if no progress is made, or if the
                  sampler does not return the data that must be kept

    An environment that plays itself (ports.Plays) controls its own turns.

    An opening without room for an answer is the whole episode (`unplayed_episode`). A turn that was
    cut off (length, cancelled) gets no reply and ends the episode. A reply that leaves no room for
    another token also ends it and is dropped, because nothing is trained on it. An environment that
    concludes is always closed.
    """
    if isinstance(progress.env, Plays):
        played = await progress.env.play(
            generate, prompt, label=label, member=member, limits=limits, spent_s=spent_s
        )
        return (played,) if isinstance(played, Episode) else played
    env, clock = progress.env, asyncio.get_running_loop().time

    def request_turn() -> None:
        request = next_request(label, prompt, member, progress.opening, progress.turns, limits)
        progress.waiting = generate.submit_many([request])[0]

    try:
        if _must_open(progress):
            started = clock()
            await _open(prompt, progress, limits)
            spent_s(clock() - started)
            if progress.stop is None:
                progress.env_state = snapshot(env)
                request_turn()
        while progress.stop is None:
            assert progress.waiting is not None, "the next turn has been requested"
            completion = await progress.waiting
            started = clock()
            await _play_turn(prompt, progress, completion, limits)
            spent_s(clock() - started)
            if progress.stop is None:
                request_turn()
    finally:
        if isinstance(env, Concludes):
            await env.close()
    first = prompt.token_ids if progress.opening is None else progress.opening
    if not progress.turns:
        return (unplayed_episode(first, limits, progress.verdict),)
    return (assemble_contexts(first, progress.turns, progress.stop, progress.verdict),)


async def _open(prompt: Prompt, progress: EpisodeProgress, limits: EpisodeLimits) -> None:
    """Get the environment's opening; set `stop` and `verdict` if it leaves no room for an
    answer."""
    env = progress.env
    assert isinstance(env, Opens)
    opening = await env.open(prompt)
    if len(opening) >= limits.max_length:
        progress.verdict = await env.verdict() if isinstance(env, Concludes) else None
        progress.stop = StopReason.LENGTH
    progress.opening = opening


async def _play_turn(
    prompt: Prompt, progress: EpisodeProgress, completion: Completion, limits: EpisodeLimits
) -> None:
    """Get the reply to a turn, and append both; set `stop` and `verdict` if the episode is over.

    `progress` is updated only at the end, so it holds nothing that a resumed run must redo.
    """
    env = progress.env
    first = prompt.token_ids if progress.opening is None else progress.opening
    length = len(current_context(first, progress.turns))
    check_kept(completion, limits, length)
    length += len(completion.token_ids)
    reply, state = Reply(token_ids=NOTHING, done=True), progress.env_state
    if completion.stop is StopReason.EOS:
        reply = await env.step(prompt, completion)
        state = snapshot(env)
    tokens = np.asarray(reply.token_ids, np.int32)
    next_length = length + len(tokens) if reply.opening is None else len(reply.opening)
    room = limits.max_length - next_length
    turn = Turn(
        completion=completion,
        reply=tokens,
        opening=None if reply.opening is None else np.asarray(reply.opening, np.int32),
        reward=float(reply.reward),
        parts=reply.parts,
        opened=reply.opened,
        messages=reply.messages,
    )
    ended = StopReason.LENGTH if reply.cut_off else completion.stop
    stop = ended if reply.done else None
    if room < 0 or (room == 0 and not reply.done):
        turn = replace(turn, reply=NOTHING, messages=turn.messages[:1])
        stop = ended if reply.done else StopReason.LENGTH
    if stop is not None:
        turn = replace(turn, opening=None)
        verdict = await env.verdict() if isinstance(env, Concludes) else None
        progress.verdict = verdict
    elif not len(turn.reply) and not len(completion.token_ids) and turn.opening is None:
        raise RolloutError(
            f"prompt {prompt.prompt_id}: neither the policy nor the environment adds a token. "
            "Set done in the environment's reply."
        )
    progress.turns.append(turn)
    progress.waiting, progress.stop, progress.env_state = None, stop, state


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayAgain:
    """Plays an episode again from its beginning with a new environment, while a service that its
    environment needs is unavailable."""

    make_env: MakeEnv
    outages: Outages
    on_restart: Callable[[], None] = lambda: None  # called for a saved episode that restarts

    async def play(
        self,
        generate: Generate,
        prompt: Prompt,
        progress: EpisodeProgress,
        *,
        label: str,
        member: int,
        limits: EpisodeLimits,
        spent_s: Callable[[float], None],
    ) -> tuple[Episode, ...]:
        """Play as `play_episode` does."""
        begun = False
        restart = partial(
            restart_episode, generate, self.make_env, prompt, progress, label, member, limits
        )
        begin = partial(play_episode, generate, prompt, progress, label=label, member=member)
        play = partial(begin, limits=limits, spent_s=spent_s)

        async def attempt() -> tuple[Episode, ...]:
            nonlocal begun
            if begun:
                restart()
            begun = True
            try:
                return await play()
            except StartOver as error:
                log.warning("prompt %d: %s It starts over.", prompt.prompt_id, error)
                self.on_restart()
                restart()
                return await play()

        return await self.outages.until_answered(ENVIRONMENT, attempt, about=prompt.prompt_id)


def restart_episode(
    generate: Generate,
    make_env: MakeEnv,
    prompt: Prompt,
    progress: EpisodeProgress,
    label: str,
    member: int,
    limits: EpisodeLimits,
) -> None:
    """Reset an episode and queue its first turn; arguments as for `begin_groups`."""
    limits = limits.of(prompt)
    cancel(progress)
    fresh = new_progress(SavedEpisode(), make_env, prompt)
    for each in fields(EpisodeProgress):
        setattr(progress, each.name, getattr(fresh, each.name))
    if progress.waiting is None and not (isinstance(progress.env, Plays) or _must_open(progress)):
        request = next_request(label, prompt, member, progress.opening, progress.turns, limits)
        progress.waiting = generate.submit_many([request])[0]


async def play_group(
    generate: Generate,
    prompt: Prompt,
    members: Sequence[EpisodeProgress],
    *,
    label: str,
    limits: EpisodeLimits,
    again: PlayAgain | None = None,
    quota: Quota | None = None,
    left_out: Callable[[int, BaseException | None], None] = lambda member, error: None,
    spent_s: Callable[[float], None] = lambda seconds: None,
) -> tuple[Episode, ...]:
    """Play the members of a group until enough of their episodes have ended; return those, in the
    order of the members.

    A failure that makes the quota unreachable cancels the other members and is raised.

    Args:
        generate: The sampler.
        prompt: The group's prompt.
        members: All members that were started.
        label: The group's part of its request ids.
        limits: Sampling settings and limits.
        again: Plays an episode again in an outage; None: the outage fails it.
        quota: Number of episodes that must end; None: all.
        left_out: Called with each member that the group continues without, and its error; None: it
            was not needed, and is about to be cancelled.
        spent_s: Called with the seconds that each reply took.
    """
    playing = [(m, member) for m, member in enumerate(members) if not member.left_out]

    def leave_out(index: int, error: BaseException | None) -> None:
        m, member = playing[index]
        member.left_out = True
        left_out(m, error)

    play = play_episode if again is None else again.play
    ended = await first_ended(
        [
            play(generate, prompt, member, label=label, member=m, limits=limits, spent_s=spent_s)
            for m, member in playing
        ],
        quota or Quota(wanted=len(members), least=len(members)),
        leave_out,
    )
    return tuple(episode for episodes in ended for episode in episodes)


def sampled_versions(progress: EpisodeProgress, partials: Iterable[Partial]) -> IntArray:
    """Return the versions of an unfinished episode's sampled tokens, [sampled] int32.

    partials: the sampled parts of its running turns.
    """
    versions = [p.versions for p in partials]
    waiting = progress.waiting
    if isinstance(progress.env, Plays):
        versions.append(progress.env.sampled_versions())
    elif not versions and waiting is not None and waiting.done() and not waiting.cancelled():
        versions += [] if waiting.exception() else [waiting.result().versions]
    versions += [turn.completion.versions for turn in progress.turns]
    return np.concatenate([NOTHING, *versions]).astype(np.int32)
