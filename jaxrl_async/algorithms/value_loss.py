"""The critic's loss, and the explained variance of its values."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_async.types import BoolArray, FloatArray


class ValueLoss(NamedTuple):
    """The output of value_loss."""

    loss: Array  # [rows, length] float32, 0 outside the mask
    clipped: Array  # [rows, length] bool, tokens whose gradient was clipped


def value_loss(
    values: Array, old_values: Array, returns: Array, mask: Array, *, clip: float | None = 0.2
) -> ValueLoss:
    """max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2; [rows, length] each.

    Schulman et al. 2017 (arXiv:1707.06347), eq. 9, with the bound of OpenAI Baselines' ppo2
    (Engstrom et al. 2020, arXiv:2005.12729, sec. 3). clip None: the plain squared error.
    """
    values, returns = jnp.where(mask, values, 0.0), jnp.where(mask, returns, 0.0)
    plain = (values - returns) ** 2
    if clip is None:
        return ValueLoss(plain / 2, jnp.zeros_like(mask))
    old = jnp.where(mask, old_values, 0.0)
    bounded = (jnp.clip(values, old - clip, old + clip) - returns) ** 2
    return ValueLoss(jnp.maximum(plain, bounded) / 2, mask & (bounded > plain))


def explained_variance(values: FloatArray, returns: FloatArray, mask: BoolArray) -> float:
    """Return 1 - Var(R - v) / Var(R) over the mask: 1 is perfect, 0 no better than a constant.

    NaN if the returns do not vary or any value is not finite.
    """
    targets, predicted = returns[mask].astype(np.float64), values[mask].astype(np.float64)
    if not len(targets) or not np.isfinite([targets, predicted]).all() or not targets.var():
        return float("nan")
    return float(1 - (targets - predicted).var() / targets.var())
