"""Metrics of the policy and the data in one step's groups. Pure, host side.

Names as in metrics.metric.METRICS.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from jaxrl_async.algorithms.forks import without_forks
from jaxrl_async.algorithms.peers import split_group
from jaxrl_async.types import (
    CancelledGroup,
    Drop,
    EpisodeGroup,
    FloatArray,
    IntArray,
    Score,
    StopReason,
)


def group_measures(
    groups: Sequence[EpisodeGroup],
    version: int,
    kl: Sequence[Sequence[FloatArray]] | None = None,
) -> dict[str, float]:
    """Report rewards, lengths and staleness of a step's groups.

    Continuations from pivots do not count in rewards and lengths: their starts were selected.

    Args:
        groups: the groups trained on.
        version: the policy version that learns.
        kl: the divergence from the policy that sampled each token, per group and episode [length].
            None: unknown.
    """
    lags = _lags_of(groups, version)
    members = [without_forks(g) for g in groups]
    episodes = [e for g in members for e in g.episodes]
    rewards = np.array([s.total for g in members for s in g.scores], np.float64)
    lengths = np.array([e.num_drawn for e in episodes])
    flat = [
        all(len({s.total for s in part.scores}) == 1 for part in split_group(g)) for g in members
    ]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_variance_share": float(np.mean(flat)),
        **_part_measures(members),
        **_seat_measures(groups),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        **_length_counts(lengths),
        "rollout/truncated_share": float(np.mean([e.stop is StopReason.LENGTH for e in episodes])),
        "rollout/turns_mean": float(np.mean([e.num_turns for e in episodes])),
        "rollout/contexts_mean": float(np.mean([len(e.starts) for e in episodes])),
        **_mask_measures(groups),
        **_lag_measures(groups, version, lags),
        **_by_lag(groups, lags, kl),
    }


OF_TASKS = {
    "rollout/length_mean": "length_mean",
    "rollout/truncated_share": "truncated_share",
    "rollout/turns_mean": "turns_mean",
    "staleness/mean": "staleness_mean",
}
"""Measures other than rewards that are also reported for each task, by their names there."""


def task_measures(groups: Sequence[EpisodeGroup], version: int) -> dict[str, float]:
    """Report number, rewards, lengths and staleness of each task's groups; {}: the run has one
    task. Arguments as for `group_measures`."""
    measures: dict[str, float] = {}
    for name in sorted({group.prompt.task for group in groups} - {""}):
        of_task = [group for group in groups if group.prompt.task == name]
        measures[f"task/{name}/groups"] = float(len(of_task))
        for key, value in group_measures(of_task, version).items():
            if key.startswith("reward/"):
                measures[f"task/{name}/{key}"] = value
            elif key in OF_TASKS:
                measures[f"task/{name}/{OF_TASKS[key]}"] = value
    return measures


def _length_counts(lengths: IntArray) -> dict[str, float]:
    """Count lengths by the next power of two; empty answers are counted under 0."""
    reached = np.where(lengths > 0, 2 ** np.ceil(np.log2(np.maximum(lengths, 1))), 0)
    bins, counts = np.unique(reached.astype(np.int64), return_counts=True)
    pairs = zip(bins.tolist(), counts.tolist(), strict=True)
    return {f"rollout/lengths_to_{n}": float(count) for n, count in pairs}


def _part_measures(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Report the mean of each named part of the reward, and of the values that functions logged.

    A missing part counts as 0, unless a function declared that it does not apply to the answer, or
    only other seats of the game have it.
    """
    scores = [s for g in groups for s in g.scores]
    seats = [e.seat for g in groups for e in g.episodes]
    names = sorted({name for s in scores for name in s.parts})
    logged = sorted({name for s in scores for name in s.logged})
    left_out = sum(s.left_out for s in scores)
    return {
        **{f"reward/{n}": _mean_of_part(scores, seats, n) for n in names},
        **{
            f"logged/{n}": float(np.mean([s.logged[n] for s in scores if n in s.logged]))
            for n in logged
        },
        **({"reward/left_out_share": left_out / len(scores)} if left_out else {}),
    }


def _mean_of_part(scores: Sequence[Score], seats: Sequence[str], name: str) -> float:
    pairs = list(zip(scores, seats, strict=True))
    have = {seat for score, seat in pairs if name in score.parts}
    counted = [s for s, seat in pairs if name in s.parts or (seat in have and not s.left_out)]
    return float(np.mean([s.parts.get(name, 0.0) for s in counted]))


def _seat_measures(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Report the mean reward of each seat of a game that the policy filled."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        for episode, score in zip(group.episodes, group.scores, strict=True):
            if episode.seat:
                rewards.setdefault(episode.seat, []).append(score.total)
    return {f"reward/seat_{seat}": float(np.mean(r)) for seat, r in sorted(rewards.items())}


def _mask_measures(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Report the mean number of tokens in a sampling mask; {} without masks."""
    masks = [e.kept for g in groups for e in g.episodes if e.kept is not None]
    sizes = [m.sizes for m in masks]
    sampled = sum(int(np.count_nonzero(of_tokens)) for of_tokens in sizes)
    kept = sum(int(of_tokens.sum(dtype=np.int64)) for of_tokens in sizes)
    return {"rollout/kept_mean": kept / sampled} if sampled else {}


def _lags_of(groups: Sequence[EpisodeGroup], version: int) -> IntArray:
    """Return the trainer's version minus the token's, for all sampled tokens in order."""
    episodes = [e for g in groups for e in g.episodes]
    sampled = np.concatenate([e.drawn for e in episodes])
    return version - np.concatenate([e.versions for e in episodes])[sampled]


def _lag_measures(groups: Sequence[EpisodeGroup], version: int, lags: IntArray) -> dict[str, float]:
    """Report the lags of sampled tokens (_lags_of): mean, max and counts."""
    if not len(lags):
        return {"staleness/mean": 0.0, "staleness/max": 0.0}
    counts = {
        f"staleness/tokens_lag_{lag}": float(n)
        for lag, n in zip(*np.unique(lags, return_counts=True), strict=True)
    }
    oldest = max(version - g.oldest_version for g in groups)
    return {"staleness/mean": float(lags.mean()), "staleness/max": float(oldest), **counts}


def _by_lag(
    groups: Sequence[EpisodeGroup], lags: IntArray, kl: Sequence[Sequence[FloatArray]] | None
) -> dict[str, float]:
    """Report for each lag the mean reward and length of the tokens' episodes, and the mean KL."""
    pairs = [(e, s.total) for g in groups for e, s in zip(g.episodes, g.scores, strict=True)]
    episodes, counts = [e for e, _ in pairs], [e.num_drawn for e, _ in pairs]
    columns = {
        "reward": np.repeat([r for _, r in pairs], counts),
        "length": np.repeat(np.array(counts, np.float64), counts),
    }
    if kl is not None:
        flat = [values for of_group in kl for values in of_group]
        columns["kl"] = np.concatenate([v[e.drawn] for v, e in zip(flat, episodes, strict=True)])
    return {
        f"staleness/lag_{lag}_{name}": float(column[lags == lag].mean(dtype=np.float64))
        for lag in np.unique(lags)
        for name, column in columns.items()
    }


def drop_measures(
    dropped: Iterable[tuple[EpisodeGroup, Drop]],
    cancelled: Sequence[CancelledGroup] = (),
    *,
    trained: int,
) -> dict[str, float]:
    """Report the groups that were dropped in this step.

    Reports counts by reason, the share of all groups (`trained` ones included), and the wasted
    tokens. The mean length of the finished groups' answers shows a bias.

    Args:
        dropped: finished groups.
        cancelled: groups that became too old during their generation.
        trained: number of groups trained on.
    """
    dropped = list(dropped)
    reasons = [*(reason for _, reason in dropped), *(Drop.STALE for _ in cancelled)]
    lengths = [e.num_drawn for g, _ in dropped for e in g.episodes]
    wasted = sum(lengths) + sum(sum(group.lengths) for group in cancelled)
    return {
        **{f"staleness/dropped_{r}": float(n) for r, n in Counter(reasons).items()},
        **({"staleness/cancelled": float(len(cancelled))} if cancelled else {}),
        "staleness/dropped_share": len(reasons) / max(len(reasons) + trained, 1),
        "staleness/wasted_tokens": float(wasted),
        **({"staleness/dropped_length_mean": float(np.mean(lengths))} if lengths else {}),
    }
