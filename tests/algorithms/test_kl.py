"""KL estimators against NumPy float64, values and slopes; the coefficient that follows a target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms.kl import k3_of, kl, next_coefficient
from jaxrl_async.algorithms.losses import TokenInputs

REFERENCES = {
    # (policy, reference, behavior log-probs, divergence) -> float64
    "k1": lambda p, r, b, full: p - r,
    "k2": lambda p, r, b, full: (p - r) ** 2 / 2,
    "k3": lambda p, r, b, full: np.exp(r - p) - 1 + p - r,
    "unbiased": lambda p, r, b, full: np.exp(p - b) * (np.exp(r - p) - 1 + p - r),
    "full": lambda p, r, b, full: full,
}


def test_every_estimator_has_a_reference():
    assert set(REFERENCES) == set(kl)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_an_estimate_and_its_slope_are_the_formulas(name):
    rng, shape = np.random.default_rng(3), (2, 5)
    policy = -rng.exponential(1.0, shape)
    reference, behavior = policy + rng.normal(0, 0.6, (2, *shape))
    divergence, mask = rng.exponential(0.3, shape), rng.random(shape) < 0.7
    x = TokenInputs(
        policy_logprobs=jnp.asarray(policy, jnp.float32),
        behavior_logprobs=jnp.asarray(behavior, jnp.float32),
        advantages=jnp.zeros(shape),
        mask=jnp.asarray(mask),
        versions=jnp.zeros(shape, jnp.int32),
        entropy=jnp.zeros(shape),
        reference_logprobs=jnp.asarray(reference, jnp.float32),
        reference_divergence=jnp.asarray(divergence, jnp.float32),
    )

    def total(p):
        found = REFERENCES[name](p, reference, behavior, divergence)
        return np.where(mask, found, 0)

    np.testing.assert_allclose(kl[name](x), total(policy), rtol=2e-5, atol=1e-6)
    slopes = (total(policy + 1e-6) - total(policy - 1e-6)) / 2e-6
    grads = jax.grad(lambda p: kl[name](x._replace(policy_logprobs=p)).sum())(x.policy_logprobs)
    np.testing.assert_allclose(grads, slopes, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("difference", [-5.0, 5.0, -15.0])
def test_k3_of_a_token_far_from_the_reference_is_the_formula(difference):
    wanted = np.expm1(-difference) + difference
    assert float(k3_of(jnp.float32(difference))) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("measured", "error"), [(0.1, 0.0), (0.11, 0.1), (0.09, -0.1), (0.5, 0.2), (0.0, -0.2)]
)
def test_the_coefficient_follows_its_target_by_a_fifth_over_the_horizon_at_most(measured, error):
    found = next_coefficient(0.5, measured, target=0.1, horizon=10.0)
    assert found == pytest.approx(0.5 * (1 + error / 10), rel=1e-12)
