"""Corrections for tokens that older weights drew: a weight per token, on the policy loss.

A policy loss already carries the importance ratio r = policy / behavior, whose variance grows with
staleness. A correction bounds it: the loss of each token is multiplied by a weight that has no
gradient, is at most 1, and is 1 on-policy.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.errors import ConfigError
from jaxrl_async.trainer.losses import TokenInputs, log_ratio
from jaxrl_async.trainer.registry import Registry


class Correction(NamedTuple):
    """What a correction gives."""

    weights: Array  # [rows, length] float32 in [0, 1], no gradient
    truncated: Array  # [rows, length] bool, tokens whose weight is below 1


CorrectionFn = Callable[..., Correction]  # (TokenInputs, **settings) -> Correction

correction: Registry[CorrectionFn] = Registry("correction")


@correction
def none(x: TokenInputs) -> Correction:
    """1 everywhere."""
    return Correction(jnp.ones(x.mask.shape, jnp.float32), jnp.zeros_like(x.mask))


@correction
def truncate_token(x: TokenInputs, *, cap: float = 2.0) -> Correction:
    """min(1, cap / r), r = exp(policy - behavior): the effective ratio is min(r, cap). cap >= 1.

    A gradient r A d log policy becomes min(r, cap) A d log policy: truncated importance sampling.
    With ppo_clip it matters where A < 0, since there r is not clipped from above.
    Ionides 2008; Espeholt et al. 2018 (IMPALA, arXiv:1802.01561), eq. 1 with rho-bar = cap; for
    language models Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training".
    """
    if not cap >= 1:
        raise ConfigError(f"correction 'truncate_token': cap must be at least 1, not {cap}.")
    excess = jax.lax.stop_gradient(log_ratio(x)) - math.log(cap)  # logs: exact also where r is huge
    return Correction(jnp.exp(-jnp.maximum(excess, 0.0)), x.mask & (excess > 0))
