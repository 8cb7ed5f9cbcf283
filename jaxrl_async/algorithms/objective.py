"""The objective of one micro-batch: the chosen functions combined, and their metrics.

    loss = c_p * token loss * correction + c_kl * kl - c_h * entropy + c_t * divergence from teacher
           + c_1 * component 1 + c_2 * component 2 + ...        (loss_components)

Everything adds up over micro-batches: `aggregate` computes the weights of the loss's sum
beforehand, and each reported mean is kept as (total, count) until `summarize` divides on the host.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.algorithms.aggregate import (
    first_tokens,
    mean_of,
    mean_over_sequence,
    sum_over_sequence,
)
from jaxrl_async.algorithms.corrections import CorrectionFn, combined, correction_of
from jaxrl_async.algorithms.expert_load import ExpertLoad
from jaxrl_async.algorithms.kl import KLFn, k3_of, kl, sees_whole_distribution
from jaxrl_async.algorithms.losses import (
    MAX_LOG_RATIO,
    ON_REQUEST,
    TokenInputs,
    TokenLoss,
    TokenLossFn,
    cross_entropy,
    log_ratio,
    masked_loss,
    mismatch,
    negative_entropy,
    token_loss,
)
from jaxrl_async.config import schema
from jaxrl_async.config.userfile import is_own
from jaxrl_async.later import Later
from jaxrl_async.metrics.metric import Mean, merge, metric_of

if TYPE_CHECKING:
    from jaxrl_async.algorithms import loss_components
    from jaxrl_async.algorithms.loss_components import Component
else:
    loss_components = Later("jaxrl_async.algorithms.loss_components")


class Coefficients(NamedTuple):
    """Weights of terms that may change from step to step; numbers or scalars on the devices."""

    kl: Any = 0.0
    entropy: Any = 0.0
    losses: tuple[Any, ...] = ()  # of algorithm.losses, in order


class Recipe(NamedTuple):
    """The chosen functions with their settings bound, and the terms of the loss."""

    loss: TokenLossFn
    correction: CorrectionFn
    kl: KLFn
    coefficients: Coefficients  # at the start of the run
    anchor: str = "behavior"  # denominator of the loss's ratio: behavior or proximal
    kl_in_loss: bool = True
    whole_kl: bool = False  # over the whole vocabulary
    has_entropy: bool = False  # whether the bonus may be on
    sees_entropy: bool = False  # whether a term has a gradient through the entropy
    entropy_clip: float | None = None
    policy: float = 1.0  # weight of the policy loss
    teacher: float = 0.0  # weight of the divergence from the teacher
    components: "tuple[Component, ...]" = ()  # of algorithm.losses


class TaskFactors(NamedTuple):
    """Factors of terms of the loss that differ between tasks: a number for each task, or, inside a
    loss, for each token [rows, length]. None: 1 for all."""

    policy: Any = None
    kl: Any = None  # of the KL to the reference


SAME_FACTORS = TaskFactors()
"""All tasks train alike."""


class Totals(NamedTuple):
    """A micro-batch's share of the metrics; scalars by the names of metrics.metric.METRICS."""

    sums: dict[str, Array]
    means: dict[str, tuple[Array, Array]]  # total, count
    maxima: dict[str, Array]  # -inf over no tokens
    minima: dict[str, Array]  # inf over no tokens
    load: ExpertLoad | None = None  # the only part with a gradient; None: no experts


def pass_columns(
    algorithm: schema.AlgorithmSection, *, refers: bool, offloads: bool
) -> frozenset[str]:
    """Return the columns that are computed by passes before the updates of a step.

    The proximal log-probs are included if the weights change before their last use. The reference's
    are included if the rewards need them, if each epoch would compute them again, or if the
    reference is not on the devices.

    Args:
        algorithm: the algorithm's settings.
        refers: whether the run has a reference.
        offloads: whether the reference is kept in host memory.
    """
    in_reward = algorithm.kl_in == "reward" and refers
    needed = set(ON_REQUEST.intersection(token_loss.facts(algorithm.loss).needs))
    if algorithm.epochs * algorithm.minibatches > 1 or in_reward or "covariance_rank" in needed:
        needed.add("proximal_logprobs")
    several_passes = algorithm.epochs > 1 and not sees_whole_distribution(algorithm.kl)
    if in_reward or (refers and (several_passes or offloads)):
        needed.add("reference_logprobs")
    if algorithm.components:
        needed.add("rewards")
    return frozenset(needed)


def make_recipe(
    algorithm: schema.AlgorithmSection,
    teacher: schema.TeacherSection | None = None,
    tasks: Sequence[str] = (),
) -> Recipe:
    """Resolve the functions that the configuration names.

    Raise ConfigError, with the nearest known name. tasks: names of the run's several tasks.
    """
    loss = token_loss.resolve(algorithm.loss)
    distils = teacher is not None and teacher.form == "loss"
    sections = algorithm.components
    return Recipe(
        loss=masked_loss(loss) if is_own(schema.name_of(algorithm.loss)) else loss,
        correction=combined(correction_of(algorithm), algorithm.anchor),
        kl=kl.resolve(algorithm.kl),
        coefficients=coefficients_of(algorithm),
        anchor=algorithm.anchor,
        kl_in_loss=algorithm.kl_in == "loss",
        whole_kl=sees_whole_distribution(algorithm.kl),
        has_entropy=bool(algorithm.entropy_coefficient or algorithm.entropy_target),
        sees_entropy=algorithm.has_entropy_bonus
        or bool(sections and loss_components.need_entropy(sections)),
        entropy_clip=algorithm.entropy_clip,
        policy=teacher.rewards if teacher is not None and distils else 1.0,
        teacher=teacher.coefficient if teacher is not None and distils else 0.0,
        components=loss_components.components_of(sections, tasks) if sections else (),
    )


def coefficients_of(algorithm: schema.AlgorithmSection, step: int = 0) -> Coefficients:
    """Return the coefficients as they are configured for a step, from 0."""
    losses = tuple(one.coefficient_at(step) for one in algorithm.components.values())
    return Coefficients(algorithm.kl_coefficient, algorithm.entropy_coefficient, losses)


def policy_loss(
    recipe: Recipe,
    x: TokenInputs,
    weights: Array,
    version: Array,
    coefficients: Coefficients | None = None,
    *,
    component_weights: Array | None = None,
    num_lags: int = 0,
    factors: TaskFactors = SAME_FACTORS,
) -> tuple[Array, Totals]:
    """Return a micro-batch's share of the step's loss and of its metrics.

    If the sampler reported no log-prob (NaN), the proximal one is used: importance weight 1.

    Args:
        recipe: the chosen functions.
        x: the inputs of the losses.
        weights: [rows, length] float32 from `aggregate`.
        version: int32, of the weights being trained.
        coefficients: coefficients of this step. None: the recipe's.
        component_weights: [rows, length, components] float32; None: the recipe has no components.
        num_lags: number of lags that are reported separately.
        factors: of each token's terms, by its task.
    """
    coefficients = recipe.coefficients if coefficients is None else coefficients
    known = ~jnp.isnan(x.behavior_logprobs)
    x = completed(x, version)
    token, truncated, factor = _corrected_loss(recipe, x)
    policy_loss = _weighted(x, _times(weights, factors.policy), factor * token.loss)
    ratio, held = jnp.exp(log_ratio(x)), recipe.anchor == "behavior"
    means = {
        "policy/clip_share": _mean(x.mask, token.clipped),
        "policy/truncated_share": _mean(x.mask, truncated),
        "policy/weight_mean": _mean(x.mask, factor * ratio if held else factor),
    }
    terms, term_means = _other_terms(recipe, x, weights, coefficients, factors)
    loss = recipe.policy * policy_loss + terms
    sums, components = dict[str, Array](), recipe.components
    if components:
        added = loss_components.component_terms(
            components, x, component_weights, coefficients.losses
        )
        loss, sums = loss + added.loss, added.sums
        means |= added.means
    sums |= {
        "train/loss": loss,
        "train/policy_loss": policy_loss,
        "train/tokens": jnp.sum(x.mask),
        "train/sequences": jnp.sum(first_tokens(x.mask, x.segment_ids)),
    }
    minima = {"policy/ratio_min": jnp.min(jnp.where(x.mask, ratio, jnp.inf))}
    means |= term_means | _distances(x, known) | off_policy_measures(x, version)
    means |= divergence_by_lag(x, num_lags)
    report = Totals(sums, means, _largest_distances(x, known), minima)
    return loss, jax.lax.stop_gradient(report)


def completed(x: TokenInputs, version: Array) -> TokenInputs:
    """Return the inputs with the tokens' ages, and the proximal log-probs, or else the policy's,
    where the sampler reported none (NaN)."""
    own = jax.lax.stop_gradient(x.policy_logprobs)
    proximal = own if x.proximal_logprobs is None else x.proximal_logprobs
    known = ~jnp.isnan(x.behavior_logprobs)
    behavior = jnp.where(known, x.behavior_logprobs, proximal)
    return x._replace(behavior_logprobs=behavior, ages=version - x.versions)


def _other_terms(
    recipe: Recipe,
    x: TokenInputs,
    weights: Array,
    coefficients: Coefficients,
    factors: TaskFactors,
) -> tuple[Array, dict[str, tuple[Array, Array]]]:
    """Return c_kl * kl - c_h * entropy + c_t * divergence from the teacher, and their means.

    Terms that the recipe or the inputs lack are omitted.
    """
    total, means = jnp.float32(0), {}
    if x.reference_logprobs is not None or x.reference_divergence is not None:
        divergence = recipe.kl(x)
        means["policy/kl_reference"] = _mean(x.mask, divergence)
        if recipe.kl_in_loss:
            total += coefficients.kl * _weighted(x, _times(weights, factors.kl), divergence)
    if recipe.has_entropy:
        bonus = negative_entropy(x, recipe.entropy_clip)
        total += coefficients.entropy * _weighted(x, weights, bonus)
    if x.teacher_divergence is not None:
        means["policy/teacher_divergence"] = _mean(x.mask, x.teacher_divergence)
        total += recipe.teacher * _weighted(x, weights, x.teacher_divergence)
    return total, means


def _corrected_loss(recipe: Recipe, x: TokenInputs) -> tuple[TokenLoss, Array, Array]:
    """Return the token loss with the recipe's anchor, the truncated tokens and the loss's factor.

    anchor behavior: the loss's ratio contains the importance weight, and the factor bounds it.
    anchor proximal: the ratio is policy / proximal, and the factor is the corrected importance
    weight (decoupled PPO, arXiv:2505.24298, eq. 5).
    """
    corrected = recipe.correction(x)
    if recipe.anchor == "behavior":
        return recipe.loss(x), corrected.truncated, corrected.weights
    own = jax.lax.stop_gradient(x.policy_logprobs)
    proximal = own if x.proximal_logprobs is None else x.proximal_logprobs
    token = recipe.loss(x._replace(anchor_logprobs=proximal))
    return token, corrected.truncated, corrected.weights * jnp.exp(corrected.log_ratio)


# ---- the entropy bonus


def next_entropy_coefficient(
    coefficient: float, measured: float, *, target: float, step: float
) -> float:
    """Return coefficient + step where the measured entropy is below the target, - step above; >= 0.

    Skywork-OR1, He et al. 2025 (arXiv:2505.22312), adaptive entropy control: starts at 0.
    """
    if measured == target:
        return coefficient
    return max(coefficient + (step if measured < target else -step), 0.0)


def active_entropy_coefficient(coefficient: float, measured: float, *, target: float) -> float:
    """Return the coefficient used in the step: 0 while the entropy is above the target.

    Skywork-OR1 (arXiv:2505.22312): alpha_k = c_k 1[e_k <= target].
    """
    return coefficient if measured <= target else 0.0


# ---- supervised loss, metrics


def supervised_loss(x: TokenInputs, weights: Array) -> tuple[Array, Totals]:
    """Return the share of loss and metrics for maximum likelihood of given tokens."""
    loss = _weighted(x, weights, cross_entropy(x).loss)
    sums = {"train/loss": loss, "train/tokens": jnp.sum(x.mask)}
    report = Totals(sums, {"policy/entropy": _mean(x.mask, x.entropy)}, {}, {})
    return loss, jax.lax.stop_gradient(report)


def merged_parts(totals: Totals) -> Totals:
    """Combine the totals of parts of a micro-batch, [parts, ...] each, as `summarize` combines
    the totals of micro-batches; inside jit."""

    def over(combine: Any, tree: Any) -> Any:
        return jax.tree.map(lambda x: combine(x, axis=0), tree)

    return Totals(
        sums=over(jnp.sum, totals.sums),
        means=over(jnp.sum, totals.means),
        maxima=over(jnp.max, totals.maxima),
        minima=over(jnp.min, totals.minima),
        load=over(jnp.sum, totals.load),
    )


def summarize(totals: Sequence[Totals]) -> dict[str, float]:
    """Combine the totals of all micro-batches into one report, on the host.

    A mean or extreme over no tokens (such as none of the current version) is omitted.
    """
    first = totals[0]
    stats = {k: float(sum(float(t.sums[k]) for t in totals)) for k in first.sums}
    for key in first.means:
        total, count = (sum(float(t.means[key][i]) for t in totals) for i in (0, 1))
        if count:
            stats[key] = mean_of(total, count)
    stats |= {k: max(float(t.maxima[k]) for t in totals) for k in first.maxima}
    stats |= {k: min(float(t.minima[k]) for t in totals) for k in first.minima}
    stats |= derived_measures(stats)
    return {k: v for k, v in stats.items() if abs(v) != float("inf") or k in first.sums}


def mean_report(
    reports: Sequence[Mapping[str, float]], tokens: str = "train/tokens"
) -> dict[str, float]:
    """Merge the reports of updates on parts of one step, by the kind of each metric.

    A mean over tokens is weighted by the tokens of an update (its report's `tokens`), a mean over
    sequences by its sequences, and a mean over the tokens of a loss component or of demonstrations
    by these. The step's loss is the plain mean: a token's weight in a part's loss
    is its weight in the step's, times the number of parts. Metrics derived from means are derived
    again from the merged means.
    """
    if len(reports) == 1:
        return dict(reports[0])

    def reduction(key: str, value: float, report: Mapping[str, float]) -> Any:
        metric = metric_of(key)
        if metric.kind is not Mean:
            return metric.kind(value)
        counted = _counted_by(key) or tokens
        weight = 1.0 if metric.unit == "loss" else report.get(counted) or 1.0
        return Mean(value * weight, weight)

    merged = merge({k: reduction(k, v, r) for k, v in r.items()} for r in reports)
    return merged | derived_measures(merged)


def _counted_by(key: str) -> str | None:
    """Return the metric that counts what a mean is over; None: the trained tokens."""
    if key in OF_SEQUENCES:
        return "train/sequences"
    if key == "supervised/loss":
        return "supervised/tokens"
    first, *name, _ = key.split("/")
    return f"loss_tokens/{name[0]}" if first == "loss" and name else None


def _distances(x: TokenInputs, known: Array) -> dict[str, tuple[Array, Array]]:
    """Measure the policy's distance from the sampler. known: tokens with reported log-probs."""
    difference, distance = log_ratio(x), jnp.abs(mismatch(x))
    return {
        "policy/entropy": _mean(x.mask, x.entropy),
        "policy/ratio_mean": _mean(x.mask, jnp.exp(difference)),
        "policy/k1_behavior": _mean(x.mask, -difference),
        "policy/k3_behavior": _mean(x.mask, k3_of(-difference)),
        "policy/recomputed_logprob_share": _mean(x.mask, ~known),
        "mismatch/mean": _mean(_fresh(x) & known, distance),
        "mismatch/all_mean": _mean(x.mask & known, distance),
    }


def _largest_distances(x: TokenInputs, known: Array) -> dict[str, Array]:
    distance = jnp.abs(mismatch(x))
    return {
        "policy/ratio_max": _largest(x.mask, jnp.exp(log_ratio(x))),
        "mismatch/max": _largest(_fresh(x) & known, distance),
        "mismatch/all_max": _largest(x.mask & known, distance),
    }


def _fresh(x: TokenInputs) -> Array:
    """Mark tokens sampled by exactly the current weights: a mismatch there is not staleness."""
    return x.mask & (x.ages == 0)


def _times(weights: Array, factors: Array | None) -> Array:
    """Return the weights times the factors of the tokens' tasks, if these differ."""
    return weights if factors is None else weights * factors


def _weighted(x: TokenInputs, weights: Array, values: Array) -> Array:
    return jnp.sum(jnp.where(x.mask, weights * values, 0.0))


def _mean(mask: Array, values: Array) -> tuple[Array, Array]:
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask)


def _largest(mask: Array, values: Array) -> Array:
    return jnp.max(jnp.where(mask, values, -jnp.inf))


# ---- off-policy measures: how far the data is from the weights being trained

# They are measured with every algorithm. w = proximal / behavior, per token or multiplied over the
# token's sequence. Totals and counts add up over micro-batches (`off_policy_measures`); measures
# that are not means are derived from the means on the host.


OF_SEQUENCES = (
    "offpolicy/geometric_ratio_mean",
    "offpolicy/sequence_weight_mean",
    "offpolicy/sequence_weight_square_mean",
)
"""The measures that are means over sequences; all others are means over tokens."""


def off_policy_measures(x: TokenInputs, version: Array) -> dict[str, tuple[Array, Array]]:
    """Return (total, count) of each mean, over trained tokens or over sequences that have any.

    version: int32, of the weights being trained. k3 estimates KL(behavior || proximal). At lag 0
    both are the same weights, so k3 measures only numerical differences.
    """
    logs = mismatch(x)
    fresh = x.mask & (x.versions == version)
    heads = first_tokens(x.mask, x.segment_ids)
    geometric = mean_over_sequence(logs, x.mask, x.segment_ids)
    whole = jnp.clip(sum_over_sequence(logs, x.mask, x.segment_ids), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "offpolicy/weight_mean": _mean(x.mask, jnp.exp(logs)),
        "offpolicy/weight_square_mean": _mean(x.mask, jnp.exp(2 * logs)),
        "offpolicy/k3": _mean(x.mask, k3_of(-logs)),
        "offpolicy/k3_lag0": _mean(fresh, k3_of(-logs)),
        "offpolicy/geometric_ratio_mean": _mean(heads, jnp.exp(geometric)),
        "offpolicy/sequence_weight_mean": _mean(heads, jnp.exp(whole)),
        "offpolicy/sequence_weight_square_mean": _mean(heads, jnp.exp(2 * whole)),
    }


def divergence_by_lag(x: TokenInputs, num_lags: int) -> dict[str, tuple[Array, Array]]:
    """Return (total, count) of k3 of KL(behavior || proximal) over the tokens of each lag."""
    if not num_lags:
        return {}
    assert x.ages is not None
    values = k3_of(-mismatch(x))
    return {f"staleness/lag_{n}_kl": _mean(x.mask & (x.ages == n), values) for n in range(num_lags)}


def derived_measures(stats: Mapping[str, float]) -> dict[str, float]:
    """Derive effective sample sizes and chi-square from the means that `stats` has.

    Effective sample size as a share, (sum w)^2 / (n sum w^2): Kish 1965; Owen 2013, "Monte Carlo
    theory", eq. 9.13. Chi-square divergence of proximal from behaviour: mean w^2 - 1.
    """
    derived = {}
    for level in ("", "sequence_"):
        mean = stats.get(f"offpolicy/{level}weight_mean")
        square = stats.get(f"offpolicy/{level}weight_square_mean")
        if mean is not None and square:
            derived[f"offpolicy/{level}ess_share"] = mean**2 / square
    if (square := stats.get("offpolicy/weight_square_mean")) is not None:
        derived["offpolicy/chi_square"] = square - 1
    return derived
