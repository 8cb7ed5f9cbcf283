"""Random inputs of the losses."""

import jax.numpy as jnp
import numpy as np

from jaxrl_async.algorithms.losses import TokenInputs


def token_inputs(
    rng: np.random.Generator, shape: tuple[int, int], *, from_reference: float = 0.7
) -> TokenInputs:
    """Inputs of all tokens of some rows, about 0.7 of them trained, with versions and entropies of
    0. from_reference: how far the reference is from the policy, nats."""
    policy = -rng.exponential(1.0, shape)
    return TokenInputs(
        policy_logprobs=jnp.asarray(policy, jnp.float32),
        behavior_logprobs=jnp.asarray(policy + rng.normal(0, 0.7, shape), jnp.float32),
        advantages=jnp.asarray(rng.normal(0, 1, shape), jnp.float32),
        mask=jnp.asarray(rng.random(shape) < 0.7),
        versions=jnp.zeros(shape, jnp.int32),
        entropy=jnp.zeros(shape),
        reference_logprobs=jnp.asarray(policy + rng.normal(0, from_reference, shape), jnp.float32),
    )
