"""Forks: several continuations of one answer, the trunk, compared at the token where they part.

    trunk          P P P a b c d e      drawn: a b c d e      a member of the group
    continuations  P P P a b x y        drawn:     x y        peers = "fork 0@5": of episode 0,
                   P P P a b u v w      drawn:     u v w      before its token 5

All start at the same state s, so their returns r_1 ... r_k and the trunk's R are returns of s. The
estimator compares those k + 1 as it compares the members of a group: with group_mean

    A_j = r_j - mean(R, r_1, ..., r_k)

on the tokens that continuation j drew. The mean estimates the value of s by sampling from it, as
in VinePPO (arXiv:2410.01679, sec. 4), TreeRL (arXiv:2506.11902, sec. 3: the local advantage) and
SPO-tree (arXiv:2505.23564, sec. 4). The trunk is the reference that was there anyway; its tokens
keep the advantage among the members of the group, or those behind s get R - mean(...), too: credit
by segment. Each drawn token is learnt once, by one of the two. Pure host code.
"""

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxrl_async.algorithms.advantages import Doubles, PerToken, StepAdvantages, StepData
from jaxrl_async.types import Episode, EpisodeGroup, FloatArray, Score

FORK = re.compile(r"fork (\d{1,9})@(\d{1,9})", re.ASCII)


class ForkPoint(NamedTuple):
    """Where continuations leave their trunk."""

    trunk: int  # index of the trunk among the group's episodes
    place: int  # first of the trunk's tokens that they do not share

    @property
    def name(self) -> str:
        """The word that they have as Episode.peers."""
        return f"fork {self.trunk}@{self.place}"


def fork_point(episode: Episode) -> ForkPoint | None:
    """Return where an episode left its trunk; None: it is no continuation."""
    found = FORK.fullmatch(episode.peers)
    return None if found is None else ForkPoint(int(found[1]), int(found[2]))


def fork_points(group: EpisodeGroup) -> list[ForkPoint]:
    """List the forks of a group, each once, by trunk and place."""
    return sorted({point for e in group.episodes if (point := fork_point(e)) is not None})


def without_forks(group: EpisodeGroup) -> EpisodeGroup:
    """Return the group with its members alone, which were drawn from the prompt."""
    members = [i for i, e in enumerate(group.episodes) if fork_point(e) is None]
    if len(members) == len(group.episodes):
        return group
    return replace(
        group,
        episodes=tuple(group.episodes[i] for i in members),
        scores=tuple(group.scores[i] for i in members),
    )


def with_references(group: EpisodeGroup) -> EpisodeGroup:
    """Append each fork's reference to a group: its trunk, as if drawn from there on."""
    points = fork_points(group)
    if not points:
        return group
    return replace(
        group,
        episodes=(*group.episodes, *(_reference(group.episodes[p.trunk], p) for p in points)),
        scores=(*group.scores, *(_score_of(group.scores[p.trunk], p) for p in points)),
    )


def data_with_references(data: StepData) -> StepData:
    """Append to each group what `with_references` does, with its rewards and values."""
    points = [fork_points(group) for group in data.groups]
    if not any(points):
        return data
    trunks = [[p.trunk for p in of_group] for of_group in points]
    tokens, values, last = data.token_rewards, data.values, data.last_values
    return replace(
        data,
        groups=tuple(with_references(group) for group in data.groups),
        rewards=tuple(_repeated(r, t) for r, t in zip(data.rewards, trunks, strict=True)),
        token_rewards=tokens
        and tuple(
            (*of, *(_behind(of[p.trunk], p) for p in at))
            for of, at in zip(tokens, points, strict=True)
        ),
        values=values
        and tuple((*of, *(of[t] for t in at)) for of, at in zip(values, trunks, strict=True)),
        last_values=last and tuple(_repeated(v, t) for v, t in zip(last, trunks, strict=True)),
        compared=data.compared
        and tuple(np.append(c, c[t]) for c, t in zip(data.compared, trunks, strict=True)),
    )


def without_references(learnt: StepAdvantages, data: StepData, *, trunk: str) -> StepAdvantages:
    """Return the advantages of a step's own episodes.

    Args:
        learnt: of the episodes and, behind them, of their forks' references.
        data: the step without references.
        trunk: "fork": a trunk's tokens behind a pivot get the last such pivot's comparison;
            "group": that of their group.
    """
    own = [len(group.episodes) for group in data.groups]
    advantages = [list(of) for of in learnt.advantages]
    if trunk == "fork":
        for group, of, count in zip(data.groups, advantages, own, strict=True):
            for point, reference in zip(fork_points(group), of[count:], strict=True):
                behind = np.arange(len(reference)) >= point.place
                of[point.trunk] = np.where(behind, reference, of[point.trunk])
    returns: PerToken | None = None
    if learnt.returns is not None:
        returns = tuple(tuple(of[:n]) for of, n in zip(learnt.returns, own, strict=True))
    return StepAdvantages(
        advantages=tuple(tuple(of[:n]) for of, n in zip(advantages, own, strict=True)),
        returns=returns,
    )


def _reference(trunk: Episode, point: ForkPoint) -> Episode:
    behind = np.arange(len(trunk.token_ids)) >= point.place
    return replace(trunk, drawn=trunk.drawn & behind, kept=None, expert_ids=None, peers=point.name)


def _score_of(score: Score, point: ForkPoint) -> Score:
    return replace(score, token_rewards=_behind(score.token_rewards, point))


def _behind(rewards: FloatArray | None, point: ForkPoint) -> FloatArray | None:
    """Leave out what was earned before the fork: continuations have not earned it."""
    if rewards is None:
        return None
    return np.where(np.arange(len(rewards)) >= point.place, rewards, np.float32(0))


def _repeated(values: Doubles, indices: list[int]) -> Doubles:
    return np.concatenate([values, values[indices]])
