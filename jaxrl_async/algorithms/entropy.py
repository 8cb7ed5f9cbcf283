"""The entropy bonus: which tokens get it, and how its coefficient follows a target."""

import jax.numpy as jnp
from jax import Array

from jaxrl_async.algorithms.losses import TokenInputs


def entropy_bonus(x: TokenInputs) -> Array:
    """The policy's entropy at each token, nats; 0 outside the mask. Subtract it from the loss."""
    return jnp.where(x.mask, x.entropy, 0.0)


def clipped_entropy_bonus(x: TokenInputs, *, bound: float) -> Array:
    """The same only where the entropy is below `bound`, nats: no push where there is enough."""
    return jnp.where(x.mask & (x.entropy < bound), x.entropy, 0.0)


def next_entropy_coefficient(
    coefficient: float, measured: float, *, target: float, step: float
) -> float:
    """coefficient + step where the measured entropy is below the target, - step above; >= 0.

    Skywork-OR1, He et al. 2025 (arXiv:2505.22312), adaptive entropy control: starts at 0.
    """
    if measured == target:
        return coefficient
    return max(coefficient + (step if measured < target else -step), 0.0)


def active_entropy_coefficient(coefficient: float, measured: float, *, target: float) -> float:
    """The coefficient to use in the step: 0 while the entropy is above the target.

    Skywork-OR1 (arXiv:2505.22312): alpha_k = c_k 1[e_k <= target].
    """
    return coefficient if measured <= target else 0.0
