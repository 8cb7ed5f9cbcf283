"""Play one group: turns of the policy and replies of its environments become episodes.

    prompt ──Request──> Generate ──Completion──> Env ──Reply──> longer request ── ... ──> Episode

A sequence only ever grows: what was drawn and what was replied is kept token for token, and the
next turn goes on where the last one ended.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jaxrl_async.errors import RolloutError
from jaxrl_async.ports import Env, Generate
from jaxrl_async.rollout.env import MakeEnv
from jaxrl_async.types import (
    NOT_DRAWN,
    Completion,
    Episode,
    IntArray,
    KeptTokens,
    Prompt,
    Request,
    SamplingParams,
    StopReason,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How answers are drawn and when they end."""

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int  # of one turn
    max_length: int  # of the whole sequence, prompt and replies included
    keep_mask: bool = False  # every drawn token comes with its sampling mask
    keep_routing: bool = False  # every drawn token comes with its experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy drew, and what came back."""

    completion: Completion
    reply: IntArray  # [reply] int32


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
        expert_ids=_joined_experts([t.completion for t in turns if len(t.completion.token_ids)]),
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


def _joined_experts(completions: Sequence[Completion]) -> IntArray | None:
    """The experts of all drawn tokens; None where a completion has none."""
    experts = [c.expert_ids for c in completions if c.expert_ids is not None]
    return np.concatenate(experts) if experts and len(experts) == len(completions) else None


def make_request(
    label: str, prompt: Prompt, member: int, turn: int, token_ids: IntArray, limits: Limits
) -> Request:
    """The request for one turn; `label` is the group's part of its id ("g5").

    Randomness is keyed by the prompt's place in the stream, the member, and each token's place in
    the sequence, so that a later turn never draws the numbers of an earlier one again.
    """
    return Request(
        request_id=f"{label}/m{member}/t{turn}",
        token_ids=token_ids,
        max_new_tokens=min(limits.max_new_tokens, limits.max_length - len(token_ids)),
        sampling=limits.sampling,
        stop_token_ids=limits.stop_token_ids,
        key=(prompt.position, member),
        extras=limits.keep_mask or limits.keep_routing,
    )


def check_told(completion: Completion, limits: Limits) -> None:
    """Raise RolloutError where the sampler does not tell what `limits` want kept."""
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
    if limits.keep_routing and told != drawn:
        raise RolloutError(
            f"request {completion.request_id}: the sampler drew {drawn} tokens and gave the "
            f"experts of {told}. algorithm.keep_routing needs a sampler that fills "
            "Completion.expert_ids; set it to false for any other."
        )


def first_requests(label: str, prompt: Prompt, group_size: int, limits: Limits) -> list[Request]:
    """The first turn of each member of a group. Raises RolloutError where there is no room."""
    if len(prompt.token_ids) >= limits.max_length:
        raise RolloutError(
            f"prompt {prompt.prompt_id} has {len(prompt.token_ids)} tokens, which leaves no room "
            f"for an answer in {limits.max_length}. Raise sampler.max_length or lower "
            "data.max_prompt_tokens."
        )
    return [make_request(label, prompt, m, 0, prompt.token_ids, limits) for m in range(group_size)]


async def play_episode(
    generate: Generate,
    env: Env,
    prompt: Prompt,
    first: Awaitable[Completion],
    *,
    label: str,
    member: int,
    limits: Limits,
    spent_s: Callable[[float], None] = lambda seconds: None,
) -> Episode:
    """Play one member to its end.

    consumes      the first turn's completion, then one per turn
    waits for     the sampler, and the environment
    produces      an Episode; `spent_s` is told the seconds that each reply took
    on failure    the environment's exception; RolloutError where it makes no progress, or where
                  the sampler does not tell what is to be kept

    A turn that was cut off (length, cancelled) ends the episode: half a turn has no answer. So does
    a reply that leaves no room for a further token; it is left out: nothing is learnt from it.
    """
    clock = asyncio.get_running_loop().time
    turns: list[Turn] = []
    length = len(prompt.token_ids)
    completion = await first
    while True:
        check_told(completion, limits)
        length += len(completion.token_ids)
        reply: IntArray = np.zeros(0, np.int32)
        done = completion.stop is not StopReason.EOS
        if not done:
            started = clock()
            answer = await env.step(prompt, completion)
            spent_s(clock() - started)
            reply, done = np.asarray(answer.token_ids, np.int32), answer.done
        room = limits.max_length - length - len(reply)
        if room < 0 or (room == 0 and not done):
            turns.append(Turn(completion=completion, reply=reply[:0]))
            stop = completion.stop if done else StopReason.LENGTH
            return assemble_episode(prompt.token_ids, turns, stop)
        turns.append(Turn(completion=completion, reply=reply))
        if done:
            return assemble_episode(prompt.token_ids, turns, completion.stop)
        if not len(reply) and not len(completion.token_ids):
            raise RolloutError(
                f"prompt {prompt.prompt_id}: neither the policy nor the environment adds a token. "
                "Let the environment say done."
            )
        length += len(reply)
        so_far = assemble_episode(prompt.token_ids, turns, completion.stop).token_ids
        request = make_request(label, prompt, member, len(turns), so_far, limits)
        completion = await generate.submit_many([request])[0]


async def play_group(
    generate: Generate,
    make_env: MakeEnv,
    prompt: Prompt,
    first: Sequence[Awaitable[Completion]],
    *,
    label: str,
    limits: Limits,
    spent_s: Callable[[float], None] = lambda seconds: None,
) -> tuple[Episode, ...]:
    """All members of a group, each in an environment of its own; `first` are their first turns.

    The first failure cancels the other members and is raised.
    """
    return await all_or_none(
        play_episode(
            generate,
            make_env(prompt),
            prompt,
            turn,
            label=label,
            member=m,
            limits=limits,
            spent_s=spent_s,
        )
        for m, turn in enumerate(first)
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
