"""Play one group: turn the policy's turns and its environments' replies into episodes.

    prompt ──Request──> Generate ──Completion──> Env ──Reply──> longer request ── ... ──> Episode

A sequence only grows: drawn tokens and replies are kept token for token, and the next turn
continues where the last one ended.
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
    keep_mask: bool = False  # completions must bring every drawn token's sampling mask
    keep_routing: bool = False  # completions must bring every token's experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the policy and the environment's reply."""

    completion: Completion
    reply: IntArray  # [reply] int32


@dataclass(slots=True, kw_only=True)
class EpisodeProgress:
    """An unfinished episode, owned by the loop's thread."""

    env: Env
    waiting: "asyncio.Future[Completion] | None" = None  # the policy's next turn
    turns: list[Turn] = field(default_factory=list)
    stop: StopReason | None = None  # set once the episode is over
    env_state: Any = None  # a ports.SavesState environment's state after the last reply


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEpisode:
    """An EpisodeProgress as data, for checkpoints."""

    turns: tuple[Turn, ...] = ()
    stop: StopReason | None = None
    completion: Completion | None = None  # the next turn, drawn but not yet answered
    partial: Partial | None = None  # the next turn, while it is being drawn
    env_state: Any = None  # as in EpisodeProgress


def assemble_episode(prompt_ids: IntArray, turns: Sequence[Turn], stop: StopReason) -> Episode:
    """Concatenate the prompt and each turn's drawn tokens and reply into one flat sequence."""
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
    """Join the sampling masks of all drawn tokens; None if a completion has none."""
    masks = [c.kept for c in completions if c.kept is not None]
    if not masks or len(masks) < len(completions):
        return None
    counts = np.concatenate([np.diff(m.starts) for m in masks])
    return KeptTokens(
        ids=np.concatenate([m.ids for m in masks]),
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
    )


def _joined_experts(completions: Sequence[Completion], length: int) -> ExpertIds | None:
    """Join the experts of all tokens, [length, layers, k]; None if a completion has none.

    Each turn reports the experts of the whole sequence so far. For tokens of earlier turns the
    first report is kept: it is from the passes that drew them.
    """
    by_turn = [c.expert_ids for c in completions if c.expert_ids is not None]
    if not by_turn or len(by_turn) < len(completions):
        return None
    joined = np.full((length, *by_turn[0].shape[1:]), -1, by_turn[0].dtype)
    known = 0
    for experts in by_turn:
        joined[known : len(experts)] = experts[known:]
        known = max(known, len(experts))
    return joined


def request_id(label: str, member: int, turn: int) -> str:
    """Return the id of a turn's request; `label` is the group's part of it ("g5")."""
    return f"{label}/m{member}/t{turn}"


def make_request(
    label: str, prompt: Prompt, member: int, turn: int, token_ids: IntArray, limits: EpisodeLimits
) -> Request:
    """Make the request for one turn.

    Randomness is keyed by the prompt's position in the stream, the member, and each token's
    position in the sequence, so that no turn reuses an earlier turn's random numbers. The request
    asks for at most what is left of max_length; an answer cut there ends with StopReason.LENGTH.
    Raises RolloutError if nothing is left.
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


def check_kept(completion: Completion, limits: EpisodeLimits, before: int) -> None:
    """Raise RolloutError if the completion lacks the masks or experts that `limits` require.

    before: number of tokens in the request.
    """
    drawn = len(completion.token_ids)
    if not drawn:
        return
    masks = 0 if completion.kept is None else len(completion.kept.starts) - 1
    if limits.keep_mask and masks != drawn:
        raise RolloutError(
            f"request {completion.request_id}: the sampler drew {drawn} tokens and gave sampling "
            f"masks for {masks}. algorithm.keep_sampling_mask needs a sampler that fills "
            "Completion.kept; set it to false for any other."
        )
    routed = 0 if completion.expert_ids is None else len(completion.expert_ids)
    if limits.keep_routing and routed != before + drawn - 1:
        raise RolloutError(
            f"request {completion.request_id}: the sampler drew {drawn} tokens after {before} and "
            f"gave the experts of {routed}, not of {before + drawn - 1}. algorithm.keep_routing "
            "needs a sampler that fills Completion.expert_ids; set it to false for any other."
        )


def saved_episode(progress: EpisodeProgress, partial: Partial | None) -> SavedEpisode:
    """Convert an unfinished episode to data; `partial` is what is drawn of its next turn so far."""
    turns, waiting, completion = tuple(progress.turns), progress.waiting, None
    if progress.stop is not None:
        return SavedEpisode(turns=turns, stop=progress.stop)
    if turns and not isinstance(progress.env, SavesState):
        return SavedEpisode()  # its environment cannot be restored: the episode starts over
    if waiting is not None and waiting.done() and not waiting.cancelled():
        completion = None if waiting.exception() else waiting.result()
    return SavedEpisode(
        turns=turns,
        completion=completion,
        partial=None if completion is not None else partial,
        env_state=progress.env_state,
    )


def resumed_progress(saved: SavedEpisode, env: Env) -> EpisodeProgress:
    """Convert saved data back, with a new environment; the next turn is not requested yet."""
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
    """Call `resumed_progress` with a new environment; without one the episode will fail."""
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
    """Return what a saved episode needs next: the rest of a turn, a whole turn, or nothing (None).

    seed: the sampler's; None: this sampler cannot continue a partial turn.
    """
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


def begin_groups(
    generate: Generate,
    make_env: MakeEnv,
    groups: Sequence[tuple[str, Prompt, Sequence[SavedEpisode]]],
    limits: EpisodeLimits,
) -> list[tuple[EpisodeProgress, ...]]:
    """Queue the next turn of every episode of these groups in one call; return their progress.

    An episode whose environment cannot be made fails when it is played.

    Args:
        generate: The sampler.
        make_env: Makes each episode's environment.
        groups: Label, prompt and saved episodes of each group; SavedEpisode() is a new episode.
        limits: How answers are drawn and when they end.

    Raises RolloutError if a prompt leaves no room, and whatever submit_many raises.
    """
    begun, asking = [], []
    requests: list[Any] = []
    for label, prompt, episodes in groups:
        members = tuple(made_progress(saved, make_env, prompt) for saved in episodes)
        for m, (saved, member) in enumerate(zip(episodes, members, strict=True)):
            request = resumed_request(saved, label, prompt, m, limits, generate.seed)
            if request is not None and member.waiting is None:
                requests.append(request)
                asking.append(member)
        begun.append(members)
    for member, future in zip(asking, generate.submit_many(requests), strict=True):
        member.waiting = future
    return begun


def cancel(progress: EpisodeProgress) -> None:
    """Cancel an episode's pending turn: its slot is free at the next block."""
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
    """Play one member until its episode ends.

    consumes      the completion that `progress` waits for, then one per turn
    waits for     the sampler, and the environment
    produces      an Episode; calls `spent_s` with the seconds that each reply took
    on failure    the environment's exception; RolloutError if it makes no progress, or if the
                  sampler does not return what is to be kept

    A turn that was cut off (length, cancelled) ends the episode: half a turn gets no reply. So does
    a reply that leaves no room for a further token; it is dropped, since nothing is learnt from it.
    """
    clock = asyncio.get_running_loop().time
    turns, env = progress.turns, progress.env
    length = len(prompt.token_ids)
    length += sum(len(t.completion.token_ids) + len(t.reply) for t in turns)
    while progress.stop is None:
        assert progress.waiting is not None, "the next turn has been requested"
        completion = await progress.waiting
        check_kept(completion, limits, length)
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
                "Let the environment set done."
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
    """Play all members of a group until their episodes end.

    The first failure cancels the other members and is raised.
    """
    return await all_or_none(
        play_episode(
            generate, prompt, member, label=label, member=m, limits=limits, spent_s=spent_s
        )
        for m, member in enumerate(members)
    )


async def all_or_none(work: Iterable[Coroutine[None, None, T]]) -> tuple[T, ...]:
    """Return all results in order, or raise the first exception after ending all other work."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
