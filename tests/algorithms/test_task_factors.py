"""Factors of the loss's terms by task: against NumPy, and 1 changes nothing."""

import jax.numpy as jnp
import numpy as np
import pytest
from token_inputs import token_inputs

from jaxrl_async.algorithms.losses import TokenInputs
from jaxrl_async.algorithms.objective import TaskFactors, make_recipe, policy_loss
from jaxrl_async.config import schema

pytestmark = pytest.mark.full

SHAPE = (3, 5)
RECIPE = make_recipe(
    schema.AlgorithmSection(
        loss="gpg", correction="none", kl="k1", kl_coefficient=0.3, entropy_coefficient=0.1
    )
)


@pytest.fixture
def x() -> TokenInputs:
    rng = np.random.default_rng(0)
    inputs = token_inputs(rng, SHAPE, from_reference=0.3)
    return inputs._replace(
        behavior_logprobs=inputs.policy_logprobs,
        versions=jnp.full(SHAPE, 5, jnp.int32),
        entropy=jnp.asarray(rng.random(SHAPE), jnp.float32),
    )


def loss_of(x: TokenInputs, weights: np.ndarray, **factors: np.ndarray | None) -> float:
    given = TaskFactors(**{n: None if f is None else jnp.asarray(f) for n, f in factors.items()})
    return float(policy_loss(RECIPE, x, jnp.asarray(weights), jnp.int32(5), factors=given)[0])


def test_each_term_is_multiplied_by_the_factors_of_its_own(x: TokenInputs) -> None:
    rng = np.random.default_rng(1)
    weights = rng.random(SHAPE).astype(np.float32)
    policy, kl = (rng.uniform(0, 3, SHAPE).astype(np.float32) for _ in range(2))
    m = np.asarray(x.mask)
    logs, advantages, entropy, reference = (
        np.asarray(a, np.float64)[m]
        for a in (x.policy_logprobs, x.advantages, x.entropy, x.reference_logprobs)
    )
    of_policy = -advantages * logs
    terms = weights[m] * (policy[m] * of_policy + 0.3 * kl[m] * (logs - reference) - 0.1 * entropy)
    assert loss_of(x, weights, policy=policy, kl=kl) == pytest.approx(terms.sum(), rel=1e-5)
    plain = weights[m] * (of_policy + 0.3 * (logs - reference) - 0.1 * entropy)
    assert loss_of(x, weights) == pytest.approx(plain.sum(), rel=1e-5)
    ones = np.ones(SHAPE, np.float32)
    assert loss_of(x, weights, policy=ones, kl=ones) == loss_of(x, weights)
