"""Dropout of an adapter's inputs, only in updates. It is a function of the numbers of update and
micro-batch, so a resumed run drops the same inputs as an uninterrupted one."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

DROPOUT_SEED = 0
"""Seed of all dropout; the numbers of update and micro-batch are folded in."""


class Noise(NamedTuple):
    """The keys of an update's dropout: the same numbers drop the same inputs."""

    update: Any  # [] int32, number of previous updates
    micro: Any  # [] int32, number of the micro-batch


def drops(share: float, noise: Noise, stack: str, layers: int) -> Array:
    """Return the inputs of `dropped` for each layer: two words of a key, and a threshold below
    which a random word drops an input. [layers, 3] uint32.

    Args:
        share: share of the inputs to drop.
        noise: numbers of the update and of the micro-batch.
        stack: name of the layers' stack.
        layers: number of layers in the stack.
    """
    key = jax.random.fold_in(jax.random.key(DROPOUT_SEED), zlib.crc32(stack.encode()))
    for number in noise:
        key = jax.random.fold_in(key, number)
    keys = jax.random.key_data(jax.random.split(key, layers))
    below = jnp.full((layers, 1), int(share * 2**32), jnp.uint32)
    return jnp.concatenate([keys, below], axis=1)


def dropped(x: Array, drop: Array, name: str) -> Array:
    """Return the inputs of a matrix's adapter with some set to 0 and the others scaled to keep the
    mean (Srivastava et al. 2014; at the same place as in PEFT).

    Args:
        x: inputs of any shape.
        drop: [3] uint32, see drops.
        name: name of the matrix; each matrix drops different inputs.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(drop[:2]), zlib.crc32(name.encode()))
    keep = jax.random.bits(key, x.shape, jnp.uint32) >= drop[2]
    grown = x / (1 - drop[2].astype(jnp.float32) / 2.0**32).astype(x.dtype)
    return jnp.where(keep, grown, jnp.zeros_like(x))


def per_device(drop: Array, axes: Sequence[str]) -> Array:
    """Return `drop` for this device's tokens, inside shard_map: devices along these axes of the
    mesh drop different inputs."""
    key = jax.random.wrap_key_data(drop[:2])
    for axis in axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return jnp.concatenate([jax.random.key_data(key), drop[2:]])
