"""Credit: a step's rewards and the results of its forward passes become advantages.

rewards ──minus the KL──> estimator ──> advantages ──plus the teacher's──> rows
values of a critic ────────^   └────> returns, for the critic
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.advantages import AdvantageFn, StepData
from jaxrl_async.algorithms.columns import COLUMNS, Columns, Source, names_of
from jaxrl_async.algorithms.kl import KLFn
from jaxrl_async.algorithms.losses import token_inputs
from jaxrl_async.algorithms.peers import compared_with_peers, num_too_few
from jaxrl_async.config import schema
from jaxrl_async.later import Later
from jaxrl_async.trainer.step_data import ByGroup, PackedStep
from jaxrl_async.types import EpisodeGroup, FloatArray, PackedBatch

if TYPE_CHECKING:
    from jaxrl_async.trainer import distill
else:
    distill = Later("jaxrl_async.trainer.distill")


class PassResults(NamedTuple):
    """The results of forward passes over a step; [rows, length] float32. None: not run."""

    proximal: FloatArray | None = None  # log-probs of the weights at the start of the step
    reference: FloatArray | None = None  # log-probs of the reference
    teacher: FloatArray | None = None  # log-probs of the teacher
    values: FloatArray | None = None  # a critic's, of the state before each token
    last_values: FloatArray | None = None  # at a sequence's last token: of the state after it
    top_k: Columns | None = None  # teacher_ids, teacher_logprobs and, of several, teacher_weights
    teachers_gap: FloatArray | None = None  # of teachers by name, as named_teachers.Advice.gap

    @property
    def num_passes(self) -> int:
        """The passes in the report's FLOPs. One pass gives values and last values."""
        counted = (self.proximal, self.reference, self.teacher, self.values)
        return sum(result is not None for result in counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Turns a step's rewards into advantages of its tokens."""

    algorithm: schema.AlgorithmSection
    teacher: schema.TeacherSection | None
    advantage: AdvantageFn
    level: str | None  # as the advantage declares it
    kl: KLFn  # of algorithm.kl
    columns: frozenset[str]  # as pass_columns returns them
    teacher_vocab: int | None = None  # size of the teacher's vocabulary; None: the policy's
    kl_factors: Sequence[float] | None = None  # of each task, for the KL in the rewards; None: 1

    def __call__(
        self, step: PackedStep, results: PassResults, kl_coefficient: float
    ) -> tuple[PackedStep, dict[str, float]]:
        """Return the step with advantages and the columns of losses and critic; and a report.

        Args:
            step: packed and shaped, with advantages of 0.
            results: of the passes over it.
            kl_coefficient: weight of the KL that is subtracted from the rewards.
        """
        data, report = self.rewarded(step, results, kl_coefficient)
        least, pivots = self.algorithm.least_compared, self.algorithm.pivots
        trunk = "group" if pivots is None else pivots.trunk
        estimated = compared_with_peers(data, self.advantage, trunk=trunk, least=least)
        if data.compared is not None:
            report["shaping/too_few_compared"] = float(num_too_few(data, least))
        advantages = step.to_rows(estimated.advantages)
        if results.teacher is not None:
            advantages, gap = self.advised(step.batch, advantages, results.teacher)
            report["policy/teacher_gap"] = gap
        if results.teachers_gap is not None:
            advantages, gap = self.less_gap(step.batch, advantages, results.teachers_gap)
            report["policy/teacher_gap"] = gap
        columns: Columns = {} if results.top_k is None else dict(results.top_k)
        if results.proximal is not None:
            columns["proximal_logprobs"] = results.proximal
        if results.reference is not None:
            columns["reference_logprobs"] = results.reference
        if "covariance_rank" in self.columns:
            assert results.proximal is not None, "the rank is of the policy's own log-probs"
            rank = covariance_rank(results.proximal, advantages, step.batch.mask)
            columns["covariance_rank"] = rank
        if "rewards" in self.columns:
            columns["rewards"] = rewards_by_token(step)
        critic: Columns = {}
        if results.values is not None and estimated.returns is not None:
            critic = {"values": results.values, "returns": step.to_rows(estimated.returns)}
        return step.with_rows(advantages, columns, critic), report

    def rewarded(
        self, step: PackedStep, results: PassResults, kl_coefficient: float
    ) -> tuple[StepData, dict[str, float]]:
        """Return the data with the critic's values and the KL subtracted; and a report."""
        data = step.data
        if results.values is not None and results.last_values is not None:
            last = _last_of_each(step.to_groups(results.last_values))
            data = replace(data, values=step.to_groups(results.values), last_values=last)
        if results.reference is None or self.algorithm.kl_in != "reward":
            return data, {}
        assert results.proximal is not None, "a KL in the rewards needs the policy's log-probs"
        kl = self.divergence(step.batch, results.proximal, results.reference)
        if self.kl_factors is not None and step.batch.task_ids is not None:
            kl = kl * np.asarray(self.kl_factors, np.float32)[step.batch.task_ids]
        penalties = step.owned_to_groups(kl_coefficient * kl)
        return less_penalty(data, penalties, self.level)

    def divergence(
        self, batch: PackedBatch, proximal: FloatArray, reference: FloatArray
    ) -> FloatArray:
        """Return algorithm.kl's estimate at each token, for the weights before the step."""
        x = token_inputs(
            {
                "policy_logprobs": proximal,
                "reference_logprobs": reference,
                "entropy": np.zeros(batch.mask.shape),
                **{n: getattr(batch, n) for n in names_of(Source.PACK) if COLUMNS[n].in_loss},
            }
        )
        return np.asarray(self.kl(x), np.float32)

    def advised(
        self, batch: PackedBatch, advantages: FloatArray, teacher: FloatArray
    ) -> tuple[FloatArray, float]:
        """Add the teacher's advantages, as distill.teacher_advantages; [rows, length].

        Also return the mean of log behavior - log teacher over the trained tokens.
        """
        behavior = batch.behavior_logprobs
        known = batch.mask & np.isfinite(behavior - teacher)  # an external sampler may give none
        if self.teacher_vocab is not None:
            known &= batch.token_ids < self.teacher_vocab
        gap = -np.asarray(distill.teacher_advantages(behavior, teacher, known))
        return self.less_gap(batch, advantages, gap)

    def less_gap(
        self, batch: PackedBatch, advantages: FloatArray, gap: FloatArray
    ) -> tuple[FloatArray, float]:
        """Return teacher.rewards advantages - teacher.coefficient gap, [rows, length], and the mean
        gap of the trained tokens."""
        assert self.teacher is not None, "its gap is known"
        mixed = self.teacher.rewards * advantages - self.teacher.coefficient * gap
        mean = float(gap[batch.mask].mean(dtype=np.float64)) if batch.mask.any() else 0.0
        return mixed.astype(np.float32), mean


def rewards_by_token(step: PackedStep) -> FloatArray:
    """Return the reward of each token's answer, before shaping, [rows, length]; 0 outside the
    mask."""

    def of_group(group: EpisodeGroup) -> list[FloatArray]:
        both = zip(group.episodes, group.scores, strict=True)
        return [np.full(len(e.token_ids), s.total, np.float32) for e, s in both]

    return step.to_rows([of_group(group) for group in step.data.groups])


def less_penalty(
    data: StepData, penalties: ByGroup, level: str | None
) -> tuple[StepData, dict[str, float]]:
    """Subtract a penalty per token from the rewards; also report the mean of the sequences' sums.

    The tokens' rewards are reduced if the estimator declares its level. Another estimator may read
    only the sequences' rewards, so these are reduced.
    """
    sums = [np.array([p.sum(dtype=np.float64) for p in of_group]) for of_group in penalties]
    flat = np.concatenate(sums)
    report = {"reward/kl": float(flat.mean()) if len(flat) else 0.0}
    if level is None:
        rewards = tuple(r - s for r, s in zip(data.rewards, sums, strict=True))
        return replace(data, rewards=rewards), report
    before = data.token_rewards or tuple((None,) * len(g) for g in penalties)
    less = tuple(
        tuple(-p if old is None else old - p for old, p in zip(*both, strict=True))
        for both in zip(before, penalties, strict=True)
    )
    return replace(data, token_rewards=less), report


def covariance_rank(
    logprobs: FloatArray, advantages: FloatArray, mask: NDArray[np.bool_]
) -> FloatArray:
    """Rank the trained tokens by covariance, as losses.TokenInputs.covariance_rank; 0: largest.

    (log policy - mean) (A - mean) over the trained tokens of the step: Cui et al. 2025
    (arXiv:2505.22617), eq. 10. Ties keep the order of the tokens. 1 outside the mask.
    """
    rank = np.ones(mask.shape, np.float32)
    logs, values = logprobs[mask].astype(np.float64), advantages[mask].astype(np.float64)
    if len(logs):
        covariance = (logs - logs.mean()) * (values - values.mean())
        order = np.argsort(-covariance, kind="stable")
        ranks = np.empty(len(order))
        ranks[order] = np.arange(len(order))
        rank[mask] = ranks / len(order)
    return rank


def _last_of_each(values: ByGroup) -> tuple[NDArray[np.float64], ...]:
    """Return each episode's last value; per group [episodes], 0 for an episode without tokens."""
    return tuple(
        np.array([v[-1] if len(v) else 0.0 for v in of_group], np.float64) for of_group in values
    )
