"""Dropout of what an adapter's change sees, in updates alone: equal numbers drop equal inputs, so
that a resumed run learns what an uninterrupted one does."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

DROPOUT_SEED = 0
"""Seed of all dropout; the numbers of update and micro-batch are folded in."""


class Noise(NamedTuple):
    """What an update's dropout depends on: the same numbers leave out the same inputs."""

    update: Any  # [] int32, updates made before
    micro: Any  # [] int32, number of the micro-batch


def drops(share: float, noise: Noise, stack: str, layers: int) -> Array:
    """Return what `dropped` needs, for each layer: two words of a key, and a third below which a
    random word means that an input is left out. [layers, 3] uint32.

    Args:
        share: of the inputs that are left out.
        noise: numbers of the update and of the micro-batch.
        stack: name of the layers' stack.
        layers: of the stack.
    """
    key = jax.random.fold_in(jax.random.key(DROPOUT_SEED), zlib.crc32(stack.encode()))
    for number in noise:
        key = jax.random.fold_in(key, number)
    keys = jax.random.key_data(jax.random.split(key, layers))
    below = jnp.full((layers, 1), int(share * 2**32), jnp.uint32)
    return jnp.concatenate([keys, below], axis=1)


def dropped(x: Array, drop: Array, name: str) -> Array:
    """Return the inputs of a matrix's adapter with some of them 0 and the others grown, such that
    the mean stays (Srivastava et al. 2014; where PEFT does it).

    Args:
        x: any shape.
        drop: [3] uint32, see drops.
        name: of the matrix: each drops others.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(drop[:2]), zlib.crc32(name.encode()))
    keep = jax.random.bits(key, x.shape, jnp.uint32) >= drop[2]
    grown = x / (1 - drop[2].astype(jnp.float32) / 2.0**32).astype(x.dtype)
    return jnp.where(keep, grown, jnp.zeros_like(x))


def apart(drop: Array, axes: Sequence[str]) -> Array:
    """Return `drop` for this part of the tokens, inside shard_map: along these axes of the mesh
    others are dropped."""
    key = jax.random.wrap_key_data(drop[:2])
    for axis in axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return jnp.concatenate([jax.random.key_data(key), drop[2:]])
