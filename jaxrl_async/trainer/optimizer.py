"""The optimizer, from configuration: global-norm clipping, AdamW, and a schedule."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxrl_async.config import schema


def make_schedule(
    section: schema.Trainer, *, learning_rate: float, total_steps: int
) -> optax.Schedule:
    """Learning rate at step 0, 1, ...: a linear warm-up to the peak, then the chosen course.

    Update n of the warm-up (from 1) has n / warmup_steps of the peak, so that none is wasted on 0;
    linear and cosine would reach 0 one step after the last.
    """
    warmup, decay_steps = section.warmup_steps, max(total_steps - section.warmup_steps, 1)

    def schedule(step: Any) -> Array:
        rise = jnp.minimum((step + 1) / max(warmup, 1), 1.0)
        progress = jnp.clip((step - warmup) / decay_steps, 0.0, 1.0)
        return jnp.asarray(learning_rate * rise * _course(section.schedule, progress))

    return schedule


def _course(name: str, progress: Array) -> Array:
    if name == "linear":
        return 1.0 - progress
    if name == "cosine":
        return (1.0 + jnp.cos(jnp.pi * progress)) / 2
    return jnp.ones_like(progress)


def make_optimizer(
    section: schema.Trainer, *, schedule: optax.Schedule, decayed: Any
) -> optax.GradientTransformation:
    """clip_by_global_norm, then AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).

    decayed: tree of bool like the parameters, True where weight decay applies.
    """
    return optax.chain(
        optax.clip_by_global_norm(section.max_grad_norm),
        optax.adamw(
            schedule,
            b1=section.beta1,
            b2=section.beta2,
            eps=section.epsilon,
            weight_decay=section.weight_decay,
            mask=decayed,
        ),
    )


def state_shardings(
    optimizer: optax.GradientTransformation, params: Any, param_shardings: Any, replicated: Any
) -> Any:
    """Where the optimizer's state lives: moments like their parameters, counters everywhere."""
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state,
        param_shardings,
        transform_non_params=lambda _: replicated,
    )
