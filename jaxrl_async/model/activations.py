"""The gated activations of an MLP and of experts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.model.families.parts import CLAMP_LIMIT, CLAMP_SLOPE, Activation

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def gated(kind: Activation, gate: Array, up: Array) -> Array:
    """Return activation(gate) * up. clamped_silu (gpt-oss) clamps both and uses up + 1."""
    if kind == "clamped_silu":
        gate = jnp.minimum(gate, CLAMP_LIMIT)
        up = jnp.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT)
        return gate * jax.nn.sigmoid(CLAMP_SLOPE * gate) * (up + 1)
    return ACTIVATIONS[kind](gate) * up
