"""Preference losses: a formula over named arrays, one number per pair. No averaging here.

Every array is `[pairs]`; a log-prob is the sum over an answer's tokens. An answer of length 0 is
missing: only kto can learn from the other answer alone. If both are missing, the loss may be any
finite number; `summed_pairs` leaves it out.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from jaxrl_async.algorithms.objective import Totals
from jaxrl_async.algorithms.registry import Above0, AtLeast0, Registry
from jaxrl_async.config import function_facts
from jaxrl_async.errors import ConfigError

MAX_MEAN_LOGPROB = -1e-6
"""Upper bound on mean log-probs in orpo, which keeps the odds p / (1 - p) finite."""


class PairInputs(NamedTuple):
    """The input of a preference loss. The gradient flows through chosen_logprobs and
    rejected_logprobs."""

    chosen_logprobs: Array  # [pairs] float32, nats
    rejected_logprobs: Array  # [pairs] float32, nats
    chosen_lengths: Array  # [pairs] trained tokens
    rejected_lengths: Array  # [pairs] trained tokens
    reference_chosen: Array | None = None  # [pairs] float32, of the frozen reference
    reference_rejected: Array | None = None  # [pairs] float32
    baseline: Array | None = None  # [] float32, kto's z0: see kl_baseline


class PairLoss(NamedTuple):
    """The output of a preference loss."""

    loss: Array  # [pairs] float32
    chosen_rewards: Array  # [pairs] float32, the loss's implicit reward
    rejected_rewards: Array  # [pairs] float32


PreferenceLossFn = Callable[..., PairLoss]  # (PairInputs, **settings) -> PairLoss


class PreferenceFacts(NamedTuple):
    """The facts that a preference loss declares."""

    needs: tuple[str, ...] = ("reference",)  # inputs made beforehand: reference, baseline


preference_loss: Registry[PreferenceLossFn, PreferenceFacts] = Registry(
    "preference loss", "preference.loss", PreferenceFacts
)


@preference_loss
def dpo(
    x: PairInputs,
    *,
    beta: Above0 = 0.1,
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0,
) -> PairLoss:
    """-(1 - e) log s(beta h) - e log s(-beta h), h = chosen - rejected log-ratio, s the sigmoid.

    Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; e: Mitchell 2023, "A note on DPO with noisy
    preferences" (conservative DPO), eq. 3.
    """
    chosen, rejected = log_ratios(x)
    logits = beta * (chosen - rejected)
    right, wrong = -jax.nn.log_sigmoid(logits), -jax.nn.log_sigmoid(-logits)
    loss = (1 - label_smoothing) * right + label_smoothing * wrong
    return PairLoss(loss, beta * chosen, beta * rejected)


@preference_loss
def ipo(x: PairInputs, *, beta: Above0 = 0.1) -> PairLoss:
    """(h - 1 / (2 beta))^2, h = chosen - rejected log-ratio.

    Azar et al. 2023 (arXiv:2310.12036), eq. 17, whose tau is beta.
    """
    return _ipo(*log_ratios(x), beta)


@preference_loss
def ipo_average(x: PairInputs, *, beta: Above0 = 0.1) -> PairLoss:
    """ipo with each log-ratio divided by its answer's length, as TRL's `ipo` does."""
    chosen, rejected = log_ratios(x)
    return _ipo(_mean(chosen, x.chosen_lengths), _mean(rejected, x.rejected_lengths), beta)


def _ipo(chosen: Array, rejected: Array, beta: float) -> PairLoss:
    loss = (chosen - rejected - 1 / (2 * beta)) ** 2
    return PairLoss(loss, beta * chosen, beta * rejected)


@preference_loss(needs=("reference", "baseline"))
def kto(
    x: PairInputs,
    *,
    beta: Above0 = 0.1,
    desirable_weight: AtLeast0 = 1.0,
    undesirable_weight: AtLeast0 = 1.0,
) -> PairLoss:
    """Half of l_D (1 - s(beta (r_chosen - z0))) + l_U (1 - s(beta (z0 - r_rejected))).

    r: log-ratio of an answer to the reference. Ethayarajh et al. 2024 (arXiv:2402.01306), eq. 8.
    Half, since the paper's mean is over answers and a pair has two. A missing answer adds nothing,
    so an unpaired answer is a pair with one answer missing.
    """
    if x.baseline is None:
        raise ConfigError("preference loss 'kto' needs a baseline: provide mismatched sequences.")
    chosen, rejected = log_ratios(x)
    z0 = jax.lax.stop_gradient(x.baseline)
    desirable = desirable_weight * jax.nn.sigmoid(-beta * (chosen - z0))
    undesirable = undesirable_weight * jax.nn.sigmoid(-beta * (z0 - rejected))
    loss = _present(desirable, x.chosen_lengths) + _present(undesirable, x.rejected_lengths)
    return PairLoss(loss / 2, beta * chosen, beta * rejected)


@preference_loss(needs=())
def simpo(x: PairInputs, *, beta: Above0 = 2.0, gamma: AtLeast0 = 1.0) -> PairLoss:
    """-log s(beta / |y_w| log p(y_w) - beta / |y_l| log p(y_l) - gamma); needs no reference.

    Meng et al. 2024 (arXiv:2405.14734), eq. 6.
    """
    chosen = beta * _mean(x.chosen_logprobs, x.chosen_lengths)
    rejected = beta * _mean(x.rejected_logprobs, x.rejected_lengths)
    return PairLoss(-jax.nn.log_sigmoid(chosen - rejected - gamma), chosen, rejected)


@preference_loss(needs=())
def orpo(x: PairInputs, *, beta: Above0 = 0.1) -> PairLoss:
    """-m_w - beta log s(log odds(m_w) - log odds(m_l)), m the mean log-prob of an answer's tokens
    and log odds(m) = m - log(1 - exp m); needs no reference.

    Hong et al. 2024 (arXiv:2403.07691), eq. 3, 6 and 7, whose lambda is beta.
    """
    chosen = _mean(x.chosen_logprobs, x.chosen_lengths)
    rejected = _mean(x.rejected_logprobs, x.rejected_lengths)
    ratio = -jax.nn.log_sigmoid(_log_odds(chosen) - _log_odds(rejected))
    return PairLoss(-chosen + beta * ratio, beta * chosen, beta * rejected)


def bradley_terry(
    chosen_rewards: Array, rejected_rewards: Array, margin: Array | float | None = None
) -> PairLoss:
    """-log s(r_chosen - r_rejected - margin): the loss of a reward model, [pairs] each.

    Bradley and Terry 1952 (Biometrika 39); Ouyang et al. 2022 (arXiv:2203.02155), eq. 1; margin:
    Touvron et al. 2023 (Llama 2, arXiv:2307.09288), eq. 2.
    """
    difference = chosen_rewards - rejected_rewards - (0.0 if margin is None else margin)
    return PairLoss(-jax.nn.log_sigmoid(difference), chosen_rewards, rejected_rewards)


preference_loss.check_known(
    function_facts.WITHOUT_REFERENCE, lambda facts: "reference" not in facts.needs
)
preference_loss.check_known(function_facts.SINGLE_ANSWERS, lambda facts: "baseline" in facts.needs)


def kl_baseline(log_ratio_total: Array, num_sequences: Array | int) -> Array:
    """Return kto's z0: max(0, mean log-ratio of answers paired with other answers' prompts).

    Ethayarajh et al. 2024 (arXiv:2402.01306), sec. 4.1: an estimate of the KL of policy and
    reference, biased but cheap; it carries no gradient.
    """
    return jax.lax.stop_gradient(jnp.maximum(log_ratio_total / num_sequences, 0.0))


def needs_reference(loss: PreferenceLossFn) -> bool:
    """Return whether a resolved loss needs a frozen reference."""
    return "reference" in preference_loss.facts_of(loss).needs


def needs_baseline(loss: PreferenceLossFn) -> bool:
    """Return whether a resolved loss needs kl_baseline; it then also accepts single answers."""
    return "baseline" in preference_loss.facts_of(loss).needs


def log_ratios(x: PairInputs) -> tuple[Array, Array]:
    """Return log(policy / reference) of the chosen and the rejected answer."""
    if x.reference_chosen is None or x.reference_rejected is None:
        raise ConfigError(
            "this preference loss needs a reference: set frozen.reference, or choose a loss that "
            "needs none (simpo, orpo)."
        )
    chosen = x.chosen_logprobs - jax.lax.stop_gradient(x.reference_chosen)
    return chosen, x.rejected_logprobs - jax.lax.stop_gradient(x.reference_rejected)


def summed_pairs(
    x: PairLoss, chosen_lengths: Array, rejected_lengths: Array, weight: Array
) -> tuple[Array, Totals]:
    """Return weight * sum of the losses of the pairs that exist, and the totals to report.

    weight: 2 / answers of the whole step, which is 1 / pairs if every answer is paired. Rewards are
    averaged over existing answers; accuracy and margin over complete pairs. A tie counts half.
    """
    has_chosen, has_rejected = chosen_lengths > 0, rejected_lengths > 0
    both = has_chosen & has_rejected
    loss = weight * jnp.sum(jnp.where(has_chosen | has_rejected, x.loss, 0.0))
    better = 0.5 + 0.5 * jnp.sign(x.chosen_rewards - x.rejected_rewards)
    means = {
        "preference/accuracy": _total(both, better),
        "preference/margin": _total(both, x.chosen_rewards - x.rejected_rewards),
        "preference/chosen_reward": _total(has_chosen, x.chosen_rewards),
        "preference/rejected_reward": _total(has_rejected, x.rejected_rewards),
        "preference/chosen_length": _total(has_chosen, chosen_lengths),
        "preference/rejected_length": _total(has_rejected, rejected_lengths),
    }
    sums = {"train/loss": loss, "train/tokens": jnp.sum(chosen_lengths + rejected_lengths)}
    return loss, jax.lax.stop_gradient(Totals(sums, means, {}, {}))


def _mean(total: Array, lengths: Array) -> Array:
    return total / jnp.maximum(lengths, 1)


def _present(values: Array, lengths: Array) -> Array:
    return jnp.where(lengths > 0, values, 0.0)


def _log_odds(mean: Array) -> Array:
    """log(p / (1 - p)) of p = exp(mean)."""
    mean = jnp.minimum(mean, MAX_MEAN_LOGPROB)
    return mean - jnp.log(-jnp.expm1(mean))


def _total(exists: Array, values: Array) -> tuple[Array, Array]:
    return jnp.sum(jnp.where(exists, values, 0.0)), jnp.sum(exists)
