"""Formulas against NumPy float64, written from the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.errors import ConfigError
from jaxrl_async.trainer.corrections import none, truncate_token
from jaxrl_async.trainer.kl import k1, k2, k3
from jaxrl_async.trainer.losses import TokenInputs, cross_entropy, ppo_clip, reinforce

SHAPE = (4, 33)


@pytest.fixture
def x() -> TokenInputs:
    rng = np.random.default_rng(0)
    policy = -rng.exponential(1.0, SHAPE)
    return TokenInputs(
        policy_logprobs=jnp.asarray(policy, jnp.float32),
        behavior_logprobs=jnp.asarray(policy + rng.normal(0, 0.7, SHAPE), jnp.float32),
        advantages=jnp.asarray(rng.normal(0, 1, SHAPE), jnp.float32),
        mask=jnp.asarray(rng.random(SHAPE) < 0.7),
        versions=jnp.zeros(SHAPE, jnp.int32),
        entropy=jnp.zeros(SHAPE),
        reference_logprobs=jnp.asarray(policy + rng.normal(0, 0.7, SHAPE), jnp.float32),
    )


def float64(x: TokenInputs) -> TokenInputs:
    return TokenInputs(
        *(np.asarray(a, np.float64) if a.dtype == jnp.float32 else np.asarray(a) for a in x)
    )


def gradient(function, x):
    return jax.grad(lambda p: function(x._replace(policy_logprobs=p)).sum())(x.policy_logprobs)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.28)])
def test_ppo_clip_is_the_papers_equation_7(x, low, high):
    n = float64(x)
    r = np.exp(n.policy_logprobs - n.behavior_logprobs)
    unclipped, clipped = r * n.advantages, np.clip(r, 1 - low, 1 + high) * n.advantages
    result = ppo_clip(x, clip_low=low, clip_high=high)
    np.testing.assert_allclose(
        result.loss, np.where(n.mask, -np.minimum(unclipped, clipped), 0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(result.clipped, n.mask & (clipped < unclipped))
    active = n.mask & ~(clipped < unclipped)
    np.testing.assert_allclose(
        gradient(lambda y: ppo_clip(y, clip_low=low, clip_high=high).loss, x),
        np.where(active, -r * n.advantages, 0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_ppo_clip_cuts_only_the_side_that_the_advantage_pushes_to():
    logs = jnp.log(jnp.array([[2.0, 2.0, 0.5, 0.5]]))
    x = TokenInputs(
        policy_logprobs=logs,
        behavior_logprobs=jnp.zeros((1, 4)),
        advantages=jnp.array([[1.0, -1.0, 1.0, -1.0]]),
        mask=jnp.ones((1, 4), bool),
        versions=jnp.zeros((1, 4), jnp.int32),
        entropy=jnp.zeros((1, 4)),
    )
    assert ppo_clip(x).clipped.tolist() == [[True, False, False, True]]


def test_reinforce_is_the_importance_weighted_score_function(x):
    n = float64(x)
    r = np.exp(n.policy_logprobs - n.behavior_logprobs)
    np.testing.assert_allclose(
        reinforce(x).loss,
        np.where(n.mask, -r * n.advantages * n.policy_logprobs, 0),
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        gradient(lambda y: reinforce(y).loss, x),
        np.where(n.mask, -r * n.advantages, 0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_cross_entropy_is_the_negative_log_likelihood(x):
    np.testing.assert_array_equal(cross_entropy(x).loss, np.where(x.mask, -x.policy_logprobs, 0))


@pytest.mark.parametrize("cap", [1.0, 2.0, 5.0])
def test_truncation_makes_the_effective_ratio_the_smaller_of_ratio_and_cap(x, cap):
    n = float64(x)
    r = np.exp(n.policy_logprobs - n.behavior_logprobs)
    result = truncate_token(x, cap=cap)
    np.testing.assert_allclose(
        np.where(n.mask, result.weights * r, 0), np.where(n.mask, np.minimum(r, cap), 0), rtol=1e-5
    )
    np.testing.assert_array_equal(result.truncated, n.mask & (r > cap))
    grads = gradient(lambda y: truncate_token(y, cap=cap).weights * reinforce(y).loss, x)
    np.testing.assert_allclose(
        grads, np.where(n.mask, -np.minimum(r, cap) * n.advantages, 0), rtol=1e-5, atol=1e-6
    )


def test_a_huge_ratio_is_truncated_to_exactly_the_cap(x):
    x = x._replace(behavior_logprobs=x.policy_logprobs - 39.0)
    grads = gradient(lambda y: truncate_token(y).weights * reinforce(y).loss, x)
    np.testing.assert_allclose(grads, np.where(x.mask, -2.0 * x.advantages, 0), rtol=1e-5)


def test_a_cap_below_one_would_correct_on_policy_tokens_and_is_refused(x):
    with pytest.raises(ConfigError, match="cap must be at least 1"):
        truncate_token(x, cap=0.5)


def test_no_correction_weighs_everything_one(x):
    assert (np.asarray(none(x).weights) == 1).all()


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        (k1, lambda d: d),
        (k2, lambda d: d**2 / 2),
        (k3, lambda d: np.exp(-d) - 1 + d),
    ],
)
def test_kl_estimators_are_schulmans(x, estimator, formula):
    n = float64(x)
    d = n.policy_logprobs - n.reference_logprobs
    np.testing.assert_allclose(estimator(x), np.where(n.mask, formula(d), 0), rtol=1e-4, atol=1e-6)


def test_kl_estimators_average_to_the_true_divergence():
    """Over a whole vocabulary, weighted by the policy: k1 and k3 exactly, k2 nearly."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.35, 0.2])
    x = TokenInputs(
        policy_logprobs=jnp.log(jnp.asarray([p])),
        behavior_logprobs=jnp.zeros((1, 3)),
        advantages=jnp.zeros((1, 3)),
        mask=jnp.ones((1, 3), bool),
        versions=jnp.zeros((1, 3), jnp.int32),
        entropy=jnp.zeros((1, 3)),
        reference_logprobs=jnp.log(jnp.asarray([q])),
    )
    truth = float((p * np.log(p / q)).sum())
    for estimator, tolerance in ((k1, 1e-5), (k3, 1e-5), (k2, 0.1)):
        assert float((p * np.asarray(estimator(x))[0]).sum()) == pytest.approx(
            truth, rel=tolerance, abs=1e-7
        )
