"""Token losses: a formula over named arrays. No averaging here (aggregate.py), no configuration.

Every array is `[rows, length]`. What lies outside the mask may be anything, NaN included, and gives
neither loss nor gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.trainer.registry import Registry

MAX_LOG_RATIO = 40.0
"""Bound on |log ratio|, nats, so that a ratio and its square are finite in float32.

Beyond it a drawn token has a probability below 1e-17 elsewhere: only broken data gets there.
"""


class TokenInputs(NamedTuple):
    """What a token loss may look at; position t is token t and its log-prob under each policy."""

    policy_logprobs: (
        Array  # [rows, length] float32, of the weights that learn; carries the gradient
    )
    behavior_logprobs: Array  # [rows, length] float32, of the distribution that drew the token
    advantages: Array  # [rows, length] float32
    mask: Array  # [rows, length] bool, tokens that are learnt
    versions: Array  # [rows, length] int32, policy version that drew the token
    entropy: Array  # [rows, length] float32, of the policy at the token, nats
    reference_logprobs: Array | None = None  # [rows, length] float32, of the frozen reference


class TokenLoss(NamedTuple):
    """What a token loss gives."""

    loss: Array  # [rows, length] float32, 0 outside the mask
    clipped: Array  # [rows, length] bool, tokens whose gradient the loss cut off


TokenLossFn = Callable[..., TokenLoss]  # (TokenInputs, **settings) -> TokenLoss

token_loss: Registry[TokenLossFn] = Registry("token loss")
supervised_loss: Registry[TokenLossFn] = Registry("supervised loss")


def log_ratio(x: TokenInputs) -> Array:
    """log(policy / behavior) per token, within MAX_LOG_RATIO; 0 outside the mask."""
    difference = jnp.where(x.mask, x.policy_logprobs - x.behavior_logprobs, 0.0)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


@token_loss
def ppo_clip(x: TokenInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(policy - behavior).

    Schulman et al. 2017 (arXiv:1707.06347), eq. 7; two bounds: DAPO (arXiv:2503.14476), sec. 3.1.
    """
    ratio = jnp.exp(log_ratio(x))
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    objective = jnp.minimum(ratio * x.advantages, bounded * x.advantages)
    clipped = bounded * x.advantages < ratio * x.advantages
    return TokenLoss(jnp.where(x.mask, -objective, 0.0), x.mask & clipped)


@token_loss
def reinforce(x: TokenInputs) -> TokenLoss:
    """-stop_gradient(r) A log policy, r = exp(policy - behavior): gradient -r A d log policy.

    The score function estimator of Williams 1992 (Machine Learning 8), with the importance ratio
    that makes it right for tokens of an older policy (1 on-policy). Bound r with a correction.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(x)))
    logprobs = jnp.where(x.mask, x.policy_logprobs, 0.0)
    return TokenLoss(
        jnp.where(x.mask, -ratio * x.advantages * logprobs, 0.0), jnp.zeros_like(x.mask)
    )


@supervised_loss
def cross_entropy(x: TokenInputs) -> TokenLoss:
    """-log policy: maximum likelihood of the given tokens."""
    return TokenLoss(jnp.where(x.mask, -x.policy_logprobs, 0.0), jnp.zeros_like(x.mask))
