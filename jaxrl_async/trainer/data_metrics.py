"""Metrics of one step's groups: about the policy and the data. Pure, host side.

Names as in metrics.metric.METRICS.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from jaxrl_async.types import Drop, EpisodeGroup, FloatArray, StopReason


def group_measures(
    groups: Sequence[EpisodeGroup],
    version: int,
    kl: Sequence[Sequence[FloatArray]] | None = None,
) -> dict[str, float]:
    """Report rewards, lengths and staleness of a step's groups.

    Args:
        groups: the groups trained on.
        version: the policy version that learns.
        kl: the divergence from the policy that drew each token, per group and episode [length].
            None: not known.
    """
    episodes = [e for g in groups for e in g.episodes]
    rewards = np.array([s.reward for g in groups for s in g.scores], np.float64)
    lengths = np.array([e.num_drawn for e in episodes])
    flat = [len({s.reward for s in g.scores}) == 1 for g in groups]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_variance_share": float(np.mean(flat)),
        **_part_measures(groups),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated_share": float(np.mean([e.stop is StopReason.LENGTH for e in episodes])),
        "rollout/turns_mean": float(np.mean([e.num_turns for e in episodes])),
        **_mask_measures(groups),
        **_lag_measures(groups, version),
        **_by_lag(groups, version, kl),
    }


def _part_measures(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Report the mean of each named part of the reward."""
    names = sorted({name for g in groups for s in g.scores for name in s.parts})
    scores = [s for g in groups for s in g.scores]
    return {f"reward/{n}": float(np.mean([s.parts.get(n, 0.0) for s in scores])) for n in names}


def _mask_measures(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Report how many tokens each token was drawn from; nothing without sampling masks."""
    masks = [e.kept for g in groups for e in g.episodes if e.kept is not None]
    drawn = sum(len(m.starts) - 1 for m in masks)
    return {"rollout/kept_mean": sum(len(m.ids) for m in masks) / drawn} if drawn else {}


def _lag_measures(groups: Sequence[EpisodeGroup], version: int) -> dict[str, float]:
    """Report drawn tokens by lag (trainer's version minus the token's): mean, max and counts."""
    drawn = np.concatenate([version - e.versions[e.drawn] for g in groups for e in g.episodes])
    if not len(drawn):
        return {"staleness/mean": 0.0, "staleness/max": 0.0}
    lags = {
        f"staleness/tokens_lag_{lag}": float(n)
        for lag, n in sorted(Counter(drawn.tolist()).items())
    }
    oldest = max(version - g.oldest_version for g in groups)
    return {"staleness/mean": float(drawn.mean()), "staleness/max": float(oldest), **lags}


def _by_lag(
    groups: Sequence[EpisodeGroup], version: int, kl: Sequence[Sequence[FloatArray]] | None
) -> dict[str, float]:
    """Report for each lag the mean reward and length of the tokens' episodes, and the mean KL."""
    pairs = [(e, s.reward) for g in groups for e, s in zip(g.episodes, g.scores, strict=True)]
    episodes, counts = [e for e, _ in pairs], [e.num_drawn for e, _ in pairs]
    columns = {
        "reward": np.repeat([r for _, r in pairs], counts),
        "length": np.repeat(np.array(counts, np.float64), counts),
    }
    if kl is not None:
        flat = [values for of_group in kl for values in of_group]
        columns["kl"] = np.concatenate([v[e.drawn] for v, e in zip(flat, episodes, strict=True)])
    lags = np.concatenate([version - e.versions[e.drawn] for e in episodes])
    return {
        f"staleness/lag_{lag}_{name}": float(column[lags == lag].mean(dtype=np.float64))
        for lag in sorted(set(lags.tolist()))
        for name, column in columns.items()
    }


def drop_measures(
    dropped: Iterable[tuple[EpisodeGroup, Drop]], *, trained: int
) -> dict[str, float]:
    """Report the finished groups that were dropped in this step.

    By reason, as a share of all finished groups (`trained` ones included), their tokens, and the
    mean length of their answers, which shows a bias.
    """
    dropped = list(dropped)
    counts = {f"staleness/dropped_{r}": float(n) for r, n in Counter(d for _, d in dropped).items()}
    lengths = [e.num_drawn for g, _ in dropped for e in g.episodes]
    return {
        **counts,
        "staleness/dropped_share": len(dropped) / max(len(dropped) + trained, 1),
        "staleness/wasted_tokens": float(sum(lengths)),
        **({"staleness/dropped_length_mean": float(np.mean(lengths))} if lengths else {}),
    }
