"""Estimators of KL(policy || other) from the log-probs of tokens sampled from the policy.

d = log policy - log other, one sample each (Schulman 2020, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html). Used as losses, their gradients differ. On-policy and in
expectation, k2's gradient equals the true divergence's, k1's is 0, and k3's equals the gradient of
KL(other || policy).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_async.algorithms.losses import MAX_LOG_RATIO, TokenInputs, bounded_difference
from jaxrl_async.algorithms.registry import Registry
from jaxrl_async.config import function_facts
from jaxrl_async.config.schema import Choice

KLFn = Callable[
    ..., Array
]  # (TokenInputs, **settings) -> [rows, length] float32, 0 outside the mask


class KLFacts(NamedTuple):
    """The facts that a KL estimator declares."""

    needs: tuple[str, ...] = ("reference_logprobs",)  # fields of TokenInputs
    has_gradient: bool = True  # False: its expected gradient is 0, so it cannot be a loss


kl: Registry[KLFn, KLFacts] = Registry("kl estimator", "algorithm.kl", KLFacts)


def sees_whole_distribution(choice: Choice) -> bool:
    """Return whether the chosen estimator compares distributions over the whole vocabulary."""
    return "reference_divergence" in kl.facts(choice).needs


@kl(has_gradient=False)
def k1(x: TokenInputs) -> Array:
    """d: unbiased, of either sign."""
    return _from_reference(x)


@kl
def k2(x: TokenInputs) -> Array:
    """d^2 / 2: biased, never negative, low variance."""
    return _from_reference(x) ** 2 / 2


@kl
def k3(x: TokenInputs) -> Array:
    """exp(-d) - 1 + d: unbiased and never negative; GRPO's (arXiv:2402.03300, eq. 4)."""
    return k3_of(_from_reference(x))


@kl
def unbiased(x: TokenInputs) -> Array:
    """r k3, r = policy / behavior with its gradient: unbiased also for off-policy tokens.

    Its gradient is r d d log policy: in expectation the true divergence's, unlike k3's.
    DeepSeek-V3.2 (arXiv:2512.02556), eq. 7.
    """
    ratio = jnp.exp(bounded_difference(x, x.policy_logprobs, x.behavior_logprobs))
    return ratio * k3_of(_from_reference(x))


@kl(needs=("reference_divergence",))
def full(x: TokenInputs) -> Array:
    """sum_v policy(v) log(policy(v) / reference(v)) over the vocabulary; the caller computes it."""
    assert x.reference_divergence is not None, "the full KL needs the reference's distribution"
    return jnp.where(x.mask, x.reference_divergence, 0.0)


kl.check_known(function_facts.WHOLE_VOCABULARY, lambda f: "reference_divergence" in f.needs)
kl.check_known(function_facts.WITHOUT_GRADIENT, lambda f: not f.has_gradient)


def next_coefficient(
    coefficient: float, measured: float, *, target: float, horizon: float
) -> float:
    """Return coefficient (1 + clip(measured / target - 1, -0.2, 0.2) / horizon).

    It steers the measured KL towards the target, once per step; horizon is in steps. Ziegler et al.
    2019 (arXiv:1909.08593), sec. 2.2, where K_beta = 1 / horizon = 0.1.
    """
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coefficient * (1 + error / horizon)


def k3_of(difference: Array) -> Array:
    """Return exp(-d) - 1 + d for d = log policy - log other; finite for every finite d."""
    return jnp.expm1(jnp.minimum(-difference, MAX_LOG_RATIO)) + difference


def _from_reference(x: TokenInputs) -> Array:
    """Return log policy - log reference; 0 outside the mask."""
    assert x.reference_logprobs is not None, "a KL to the reference needs the reference's log-probs"
    return jnp.where(x.mask, x.policy_logprobs - x.reference_logprobs, 0.0)
