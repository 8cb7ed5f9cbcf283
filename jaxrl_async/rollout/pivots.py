"""Pivots: tokens of finished answers from which further continuations are sampled.

    episodes of a group ──choose──> Fork(trunk, position) ──Request: prompt and prefix──> Generate
                                                                                        │
    EpisodeGroup <── members, then continuations: the prefix is read, not sampled <─────┘

The prefix is the new request's prompt. Its KV comes from the sampler's prefix store, where the
trunk left it, and no prefix token is sampled again. Random numbers use the member's key and each
token's position, on a separate branch.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_async.algorithms.forks import ForkPoint
from jaxrl_async.errors import Closed
from jaxrl_async.ports.generate import Generate
from jaxrl_async.rollout.episode import check_kept, make_request
from jaxrl_async.rollout.episode_assembly import NOTHING, Turn, assemble_episode
from jaxrl_async.types import (
    Completion,
    Episode,
    EpisodeLimits,
    FloatArray,
    IntArray,
    Prompt,
    Request,
)

log = logging.getLogger(__name__)

BRANCH_END = 2**31 - 1
"""Branches of continuations are from 1 to this; 0 is the trunk."""
CHOICE = 7
"""Separates the random choice of pivots from all other uses of a prompt's position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PivotPlan:
    """Number and origin of the continuations; see algorithm.pivots."""

    continuations: int
    members: int = 1
    per_member: int = 1
    where: str = "lowest_logprob"
    marked: Callable[[int], bool] = lambda token: False  # whether a token's text has the mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A continuation to sample."""

    point: ForkPoint
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A sampled continuation."""

    episode: Episode  # only tokens after the pivot are sampled: used for training
    whole: Episode  # the trunk's prefix counts as sampled, too: used for scoring


def chosen_members(plan: PivotPlan, prompt: Prompt, count: int) -> list[int]:
    """Return which of `count` members are forked, ascending; deterministic for each prompt."""
    random = np.random.default_rng([CHOICE, prompt.position])
    return sorted(random.permutation(count)[: plan.members].tolist())


def pivot_positions(
    token_ids: IntArray, logprobs: FloatArray, plan: PivotPlan, random: np.random.Generator
) -> list[int]:
    """Return the positions in a trunk's sampled tokens where continuations begin, ascending; never
    the first token, before which nothing is shared.

    Args:
        token_ids: [sampled] int32.
        logprobs: [sampled], of the sampling distribution; NaN: not known, and never the lowest.
        plan: number and kind of pivots.
        random: used where the plan leaves a choice.
    """
    length, count = len(token_ids), plan.per_member
    positions = np.arange(1, length)
    if plan.where == "fractions":
        cuts = np.round(length * np.arange(1, count + 1) / (count + 1)).astype(np.int64)
        return sorted({int(cut) for cut in cuts if 1 <= cut < length})
    if plan.where == "lowest_logprob":
        known = positions[np.isfinite(logprobs[1:])]
        return sorted(known[np.argsort(logprobs[known], kind="stable")][:count].tolist())
    if plan.where == "mark":
        positions = positions[[plan.marked(int(token)) for token in token_ids[:-1]]]
    return sorted(random.permutation(positions)[:count].tolist())


def planned_forks(
    plan: PivotPlan,
    prompt: Prompt,
    episodes: Sequence[tuple[int, Episode]],
    *,
    label: str,
    limits: EpisodeLimits,
) -> list[Fork]:
    """Return the continuations to sample for a group.

    Args:
        plan: number and kind of pivots.
        prompt: the group's prompt.
        episodes: its finished episodes of one turn, each with the number of its member.
        label: the group's part of its request ids.
        limits: sampling settings and limits.
    """
    forks = []
    for trunk in chosen_members(plan, prompt, len(episodes)):
        member, episode = episodes[trunk]
        random = np.random.default_rng([CHOICE, prompt.position, member])
        begin = len(episode.token_ids) - episode.num_drawn
        tokens, logprobs = episode.token_ids[begin:], episode.logprobs[begin:]
        for at in pivot_positions(tokens, logprobs, plan, random):
            point = ForkPoint(trunk, begin + at)
            request = make_request(
                label, prompt, member, 1, episode.token_ids[: point.start], limits
            )
            request = replace(
                request, max_new_tokens=min(request.max_new_tokens, limits.max_new_tokens - at)
            )
            forks += [
                Fork(
                    point=point,
                    request=replace(
                        request, request_id=f"{label}/m{member}/p{at}/b{branch}", branch=branch
                    ),
                )
                for branch in fork_branches(at, plan.continuations)
            ]
    return forks


def fork_branches(position: int, count: int) -> list[int]:
    """Return distinct branches (types.Request.branch) of a pivot's continuations. Branches of
    different positions are unrelated."""
    digest = hashlib.blake2b(f"pivot {position}".encode(), digest_size=4).digest()
    first = int.from_bytes(digest)
    return [1 + (first + i) % BRANCH_END for i in range(count)]


async def sample_forks(
    generate: Generate,
    forks: Sequence[Fork],
    episodes: Sequence[Episode],
    limits: EpisodeLimits,
) -> list[Continuation]:
    """Sample all continuations in parallel; return those that did not fail, in order.

    Cancelling this task cancels its requests. Raises Closed.

    Args:
        generate: the sampler.
        forks: continuations to sample.
        episodes: the group's episodes, for the trunks.
        limits: data that completions must contain.
    """
    if not forks:
        return []
    futures = generate.submit_many([fork.request for fork in forks])
    try:
        answers = await asyncio.gather(*futures, return_exceptions=True)
    finally:
        for future in futures:
            future.cancel()
    done = []
    for fork, answer in zip(forks, answers, strict=True):
        try:
            if isinstance(answer, BaseException):
                raise answer
            done.append(_continuation(fork, answer, episodes[fork.point.trunk], limits))
        except Closed:
            raise
        except (Exception, asyncio.CancelledError) as error:
            log.warning(
                "dropping continuation %s from its group: %s", fork.request.request_id, error
            )
    return done


def _continuation(
    fork: Fork, completion: Completion, trunk: Episode, limits: EpisodeLimits
) -> Continuation:
    prefix, begin = fork.request.token_ids, fork.point.start
    check_kept(completion, limits, begin)
    turn = Turn(completion=completion, reply=NOTHING)
    episode = replace(assemble_episode(prefix, [turn], completion.stop), peers=fork.point.name)
    whole = replace(
        episode,
        drawn=np.concatenate([trunk.drawn[:begin], episode.drawn[begin:]]),
        logprobs=np.concatenate([trunk.logprobs[:begin], episode.logprobs[begin:]]),
        versions=np.concatenate([trunk.versions[:begin], episode.versions[begin:]]),
        kept=None,
    )
    return Continuation(episode=episode, whole=whole)
