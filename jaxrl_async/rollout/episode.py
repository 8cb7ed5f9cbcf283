"""Play one group: turns of the policy and replies of its environments become episodes.

    prompt ──Request──> Generate ──Completion──> Env ──Reply──> longer request ── ... ──> Episode

A sequence only ever grows: what was drawn and what was replied is kept token for token, and the
next turn goes on where the last one ended.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from jaxrl_async.errors import RolloutError
from jaxrl_async.ports import Env, Generate, SavesState
from jaxrl_async.rollout.env import MakeEnv, SingleTurn, snapshot
from jaxrl_async.types import (
    NOT_DRAWN,
    Completion,
    Episode,
    ExpertIds,
    IntArray,
    KeptTokens,
    Partial,
    Prompt,
    Request,
    SamplingParams,
    StopReason,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """How answers are drawn and when they end."""

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int  # of one turn
    max_length: int  # of the whole sequence, prompt and replies included
    keep_mask: bool = False  # every drawn token comes with its sampling mask
    keep_routing: bool = False  # every token comes with its experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy drew, and what came back."""

    completion: Completion
    reply: IntArray  # [reply] int32


@dataclass(slots=True, kw_only=True)
class EpisodeProgress:
    """An episode under way, on the loop's thread: what a checkpoint keeps of it."""

    env: Env
    waiting: "asyncio.Future[Completion] | None" = None  # for the policy's next turn
    turns: list[Turn] = field(default_factory=list)
    stop: StopReason | None = None  # where the episode is over
    env_state: Any = None  # after the last reply, of a ports.SavesState environment


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEpisode:
    """The same as data."""

    turns: tuple[Turn, ...] = ()
    stop: StopReason | None = None
    completion: Completion | None = None  # of the next turn, where the environment is to answer it
    partial: Partial | None = None  # of the next turn, where it is being drawn
    env_state: Any = None  # as in Progress


def assemble_episode(prompt_ids: IntArray, turns: Sequence[Turn], stop: StopReason) -> Episode:
    """One flat sequence: the prompt, then each turn's drawn tokens and reply."""
    tokens, drawn = [prompt_ids], [np.zeros(len(prompt_ids), bool)]
    logprobs = [np.zeros(len(prompt_ids), np.float32)]
    versions = [np.full(len(prompt_ids), NOT_DRAWN, np.int32)]
    for turn in turns:
        new, reply = turn.completion, len(turn.reply)
        tokens += [new.token_ids, turn.reply]
        drawn += [np.ones(len(new.token_ids), bool), np.zeros(reply, bool)]
        logprobs += [new.logprobs, np.zeros(reply, np.float32)]
        versions += [new.versions, np.full(reply, NOT_DRAWN, np.int32)]
    return Episode(
        token_ids=np.concatenate(tokens).astype(np.int32),
        drawn=np.concatenate(drawn),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        versions=np.concatenate(versions).astype(np.int32),
        stop=stop,
        num_turns=len(turns),
        kept=_joined_masks([t.completion for t in turns if len(t.completion.token_ids)]),
        expert_ids=_joined_experts(
            [t.completion for t in turns if len(t.completion.token_ids)],
            sum(len(part) for part in tokens),
        ),
    )


def _joined_masks(completions: Sequence[Completion]) -> KeptTokens | None:
    """The sampling masks of all drawn tokens; None where a completion has none."""
    masks = [c.kept for c in completions if c.kept is not None]
    if not masks or len(masks) < len(completions):
        return None
    counts = np.concatenate([np.diff(m.starts) for m in masks])
    return KeptTokens(
        ids=np.concatenate([m.ids for m in masks]),
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
    )


def _joined_experts(completions: Sequence[Completion], length: int) -> ExpertIds | None:
    """The experts of all tokens, [length, layers, k]; None where a completion has none.

    A later turn tells those of the whole sequence so far; what an earlier one told stays: of the
    passes that drew its tokens.
    """
    told = [c.expert_ids for c in completions if c.expert_ids is not None]
    if not told or len(told) < len(completions):
        return None
    joined = np.full((length, *told[0].shape[1:]), -1, told[0].dtype)
    known = 0
    for experts in told:
        joined[known : len(experts)] = experts[known:]
        known = max(known, len(experts))
    return joined


def request_id(label: str, member: int, turn: int) -> str:
    """Of the request for one turn; `label` is the group's part ("g5")."""
    return f"{label}/m{member}/t{turn}"


def make_request(
    label: str, prompt: Prompt, member: int, turn: int, token_ids: IntArray, limits: EpisodeLimits
) -> Request:
    """The request for one turn.

    Randomness is keyed by the prompt's place in the stream, the member, and each token's place in
    the sequence, so that a later turn never draws the numbers of an earlier one again. It asks for
    what is left of max_length where that is less than max_new_tokens: an answer cut there ends with
    StopReason.LENGTH. Raises RolloutError where there is no room.
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
        extras=limits.keep_mask,
    )


def check_told(completion: Completion, limits: EpisodeLimits, before: int) -> None:
    """Raise RolloutError where the sampler does not tell what `limits` want kept. before: tokens of
    the request."""
    drawn = len(completion.token_ids)
    if not drawn:
        return
    told = 0 if completion.kept is None else len(completion.kept.starts) - 1
    if limits.keep_mask and told != drawn:
        raise RolloutError(
            f"request {completion.request_id}: the sampler drew {drawn} tokens and gave sampling "
            f"masks for {told}. algorithm.keep_sampling_mask needs a sampler that fills "
            "Completion.kept; set it to false for any other."
        )
    told = 0 if completion.expert_ids is None else len(completion.expert_ids)
    if limits.keep_routing and told != before + drawn - 1:
        raise RolloutError(
            f"request {completion.request_id}: the sampler drew {drawn} tokens behind {before} and "
            f"gave the experts of {told}, not of {before + drawn - 1}. algorithm.keep_routing "
            "needs a sampler that fills Completion.expert_ids; set it to false for any other."
        )


def saved_episode(progress: EpisodeProgress, partial: Partial | None) -> SavedEpisode:
    """An episode under way as data. partial: what the sampler has drawn of its next turn."""
    turns, waiting, completion = tuple(progress.turns), progress.waiting, None
    if progress.stop is not None:
        return SavedEpisode(turns=turns, stop=progress.stop)
    if turns and not isinstance(progress.env, SavesState):
        return SavedEpisode()  # its environment cannot go on: it starts over
    if waiting is not None and waiting.done() and not waiting.cancelled():
        completion = None if waiting.exception() else waiting.result()
    return SavedEpisode(
        turns=turns,
        completion=completion,
        partial=None if completion is not None else partial,
        env_state=progress.env_state,
    )


def resumed_progress(saved: SavedEpisode, env: Env) -> EpisodeProgress:
    """Where the episode was, in an environment made anew; nobody has asked for its next turn."""
    if saved.env_state is not None and isinstance(env, SavesState):
        env.restore(saved.env_state)
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
    )


def made_progress(saved: SavedEpisode, make_env: MakeEnv, prompt: Prompt) -> EpisodeProgress:
    """The same with an environment of its own; where none can be made, an episode that fails."""
    try:
        return resumed_progress(saved, make_env(prompt))
    except RolloutError as error:
        waiting: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        waiting.set_exception(error)
        return EpisodeProgress(env=SingleTurn(prompt), waiting=waiting)


def resumed_request(
    saved: SavedEpisode,
    label: str,
    prompt: Prompt,
    member: int,
    limits: EpisodeLimits,
    seed: int | None,
) -> Request | Partial | None:
    """What to ask the sampler for, to go on with a saved episode: the rest of a turn, a whole one,
    or nothing. seed: of the sampler; null: it cannot go on with half a turn."""
    if saved.stop is not None or saved.completion is not None:
        return None
    so_far = assemble_episode(prompt.token_ids, saved.turns, StopReason.EOS).token_ids
    request = make_request(label, prompt, member, len(saved.turns), so_far, limits)
    partial = saved.partial
    fits = (
        partial is not None
        and partial.seed == seed
        and len(partial.token_ids) < request.max_new_tokens
        and np.array_equal(partial.request.token_ids, so_far)
        and (not request.extras or partial.full_logprobs is not None)
        and (not limits.keep_routing or partial.expert_ids is not None)
    )
    return replace(partial, request=request) if fits and partial is not None else request


def begin(
    generate: Generate,
    make_env: MakeEnv,
    groups: Sequence[tuple[str, Prompt, Sequence[SavedEpisode]]],
    limits: EpisodeLimits,
) -> list[tuple[EpisodeProgress, ...]]:
    """Queue what every episode of these groups needs next, in one call; where each of them is.

    groups: label, prompt, and where its episodes were: SavedEpisode() is one that starts. An
    episode whose environment cannot be made fails when it is played. Raises RolloutError where a
    prompt leaves no room, and what submit_many raises.
    """
    begun, asking = [], []
    wishes: list[Any] = []
    for label, prompt, episodes in groups:
        members = tuple(made_progress(saved, make_env, prompt) for saved in episodes)
        for m, (saved, member) in enumerate(zip(episodes, members, strict=True)):
            wish = resumed_request(saved, label, prompt, m, limits, generate.seed)
            if wish is not None and member.waiting is None:
                wishes.append(wish)
                asking.append(member)
        begun.append(members)
    for member, future in zip(asking, generate.submit_many(wishes), strict=True):
        member.waiting = future
    return begun


def cancel(progress: EpisodeProgress) -> None:
    """Nobody waits for this episode any more: its slot is free at the next block."""
    if progress.waiting is not None:
        progress.waiting.cancel()


async def play_episode(
    generate: Generate,
    prompt: Prompt,
    progress: EpisodeProgress,
    *,
    label: str,
    member: int,
    limits: EpisodeLimits,
    spent_s: Callable[[float], None] = lambda seconds: None,
) -> Episode:
    """Play one member to its end.

    consumes      the completion that `progress` waits for, then one per turn
    waits for     the sampler, and the environment
    produces      an Episode; `spent_s` is told the seconds that each reply took
    on failure    the environment's exception; RolloutError where it makes no progress, or where
                  the sampler does not tell what is to be kept

    A turn that was cut off (length, cancelled) ends the episode: half a turn has no answer. So does
    a reply that leaves no room for a further token; it is left out: nothing is learnt from it.
    """
    clock = asyncio.get_running_loop().time
    turns, env = progress.turns, progress.env
    length = len(prompt.token_ids)
    length += sum(len(t.completion.token_ids) + len(t.reply) for t in turns)
    while progress.stop is None:
        assert progress.waiting is not None, "somebody has asked for the next turn"
        completion = await progress.waiting
        check_told(completion, limits, length)
        length += len(completion.token_ids)
        reply: IntArray = np.zeros(0, np.int32)
        done = completion.stop is not StopReason.EOS
        if not done:
            started = clock()
            answer = await env.step(prompt, completion)
            spent_s(clock() - started)
            reply, done = np.asarray(answer.token_ids, np.int32), answer.done
            progress.env_state = snapshot(env)
        room = limits.max_length - length - len(reply)
        if room < 0 or (room == 0 and not done):
            turns.append(Turn(completion=completion, reply=reply[:0]))
            progress.stop = completion.stop if done else StopReason.LENGTH
            break
        turns.append(Turn(completion=completion, reply=reply))
        if done:
            progress.stop = completion.stop
            break
        if not len(reply) and not len(completion.token_ids):
            raise RolloutError(
                f"prompt {prompt.prompt_id}: neither the policy nor the environment adds a token. "
                "Let the environment say done."
            )
        length += len(reply)
        so_far = assemble_episode(prompt.token_ids, turns, completion.stop).token_ids
        request = make_request(label, prompt, member, len(turns), so_far, limits)
        progress.waiting = generate.submit_many([request])[0]
    return assemble_episode(prompt.token_ids, turns, progress.stop)


async def play_group(
    generate: Generate,
    prompt: Prompt,
    members: Sequence[EpisodeProgress],
    *,
    label: str,
    limits: EpisodeLimits,
    spent_s: Callable[[float], None] = lambda seconds: None,
) -> tuple[Episode, ...]:
    """All members of a group, from where each of them is.

    The first failure cancels the other members and is raised.
    """
    return await all_or_none(
        play_episode(
            generate, prompt, member, label=label, member=m, limits=limits, spent_s=spent_s
        )
        for m, member in enumerate(members)
    )


async def all_or_none(work: Iterable[Coroutine[None, None, T]]) -> tuple[T, ...]:
    """All results in order, or the first exception; then nothing of it still runs."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
