"""The optimizer, from configuration: global-norm clipping, AdamW, a schedule, and rounding."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.config import schema


def make_schedule(
    section: schema.TrainerSection, *, learning_rate: float, total_steps: int
) -> optax.Schedule:
    """Return the learning rate at update 0, 1, ...: a linear warm-up to the peak, then the decay.

    Update n of the warm-up (from 1) has n / warmup_steps of the peak: no update has rate 0. Linear
    and cosine decay would reach 0 one update after the last. total_steps: the configured number of
    updates; the index of an update is fractional if fewer are made.
    """
    warmup, decay_steps = section.warmup_steps, max(total_steps - section.warmup_steps, 1)

    def schedule(step: Any) -> Array:
        rise = jnp.minimum((step + 1) / max(warmup, 1), 1.0)
        progress = jnp.clip((step - warmup) / decay_steps, 0.0, 1.0)
        return jnp.asarray(learning_rate * rise * _decay(section.schedule, progress))

    return schedule


def _decay(name: str, progress: Array) -> Array:
    if name == "linear":
        return 1.0 - progress
    if name == "cosine":
        return (1.0 + jnp.cos(jnp.pi * progress)) / 2
    return jnp.ones_like(progress)


def make_optimizer(section: schema.TrainerSection, *, decayed: Any) -> optax.GradientTransformation:
    """Chain clip_by_global_norm and AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) of rate 1.

    The caller multiplies by the learning rate, which need not depend on the number of updates.
    decayed: tree of bool like the parameters, True where weight decay applies.
    """
    return optax.chain(
        optax.clip_by_global_norm(section.max_grad_norm),
        optax.adamw(
            optax.constant_schedule(1.0),  # not 1.0: its count is in every checkpoint
            b1=section.beta1,
            b2=section.beta2,
            eps=section.epsilon,
            weight_decay=section.weight_decay,
            mask=decayed,
        ),
    )


def needs_masters(section: schema.TrainerSection, param_dtype: Any) -> bool:
    """Return whether the optimizer moves float32 copies of the weights."""
    return jnp.dtype(param_dtype) != jnp.float32 and section.rounding == "masters"


def optimizer_bytes(section: schema.TrainerSection, param_dtype: Any) -> int:
    """Return the optimizer's bytes per weight: AdamW's two moments, and a master if kept."""
    return 12 if needs_masters(section, param_dtype) else 8


def stochastically_rounded(key: Array, values: Array, dtype: DTypeLike) -> Array:
    """Round float32 stochastically to a neighbour in bfloat16; the expected value is exact.

    Gupta et al. 2015 (arXiv:1502.02551), sec. 3. Random bits are added below bfloat16's last bit,
    and then cut off. Non-finite values are unchanged.
    """
    assert jnp.dtype(dtype) == jnp.bfloat16, "float32 has exactly 16 bits more"
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    moved = bits + jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type(moved & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(values), cut, values).astype(dtype)


def rounded_tree(key: Array, tree: Any, dtype: DTypeLike) -> Any:
    """Round all leaves by `stochastically_rounded`, each with different random bits."""
    leaves, structure = jax.tree.flatten(tree)
    keys = [jax.random.fold_in(key, index) for index in range(len(leaves))]
    rounded = [stochastically_rounded(k, x, dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, rounded)


def state_shardings(
    optimizer: optax.GradientTransformation, params: Any, param_shardings: Any, replicated: Any
) -> Any:
    """Return the shardings of an optimizer's state: moments as weights, counters replicated."""
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state,
        param_shardings,
        transform_non_params=lambda _: replicated,
    )
