"""Sums over the sequences of packed rows, broadcast to each token of a sequence.

    segment_ids         1   1   1   2  2  0      (0 is padding)
    mask                0   1   1   1  1  0
    values              9   2   3   4  6  9
    sum_over_sequence   5   5   5  10 10  0
    mean_over_sequence  2.5 2.5 2.5 5  5  0
    first_tokens        0   1   0   1  0  0

A sequence lies in one row, so its sum does not depend on its neighbours in the row, on the order of
rows or on the split into micro-batches. `segment_ids=None`: each row is one sequence.

Each context of an episode (types.Episode.starts) is a separate sequence here: a sequence's ratios
and weights cover the tokens generated in one context, given what the policy saw there. The
advantage is still the episode's, and aggregates count episodes.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


def sum_over_sequence(values: Array, mask: Array, segment_ids: Array | None = None) -> Array:
    """Sum the values over the trained tokens of each token's sequence; [rows, length].

    0 for a sequence without trained tokens. Values outside the mask may be anything, even NaN.
    """
    return _over_sequences(jax.ops.segment_sum, jnp.where(mask, values, 0), segment_ids)


def mean_over_sequence(values: Array, mask: Array, segment_ids: Array | None = None) -> Array:
    """Average the values over the trained tokens of each token's sequence, as
    `sum_over_sequence`."""
    counts = sum_over_sequence(jnp.ones_like(mask, jnp.float32), mask, segment_ids)
    return sum_over_sequence(values, mask, segment_ids) / jnp.maximum(counts, 1)


def any_in_sequence(flags: Array, mask: Array, segment_ids: Array | None = None) -> Array:
    """Return whether any trained token of each token's sequence has the flag; [rows, length]."""
    return sum_over_sequence(flags.astype(jnp.int32), mask, segment_ids) > 0


def first_tokens(mask: Array, segment_ids: Array | None = None) -> Array:
    """Mark the first trained token of each sequence that has any; [rows, length] bool."""
    positions = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32), mask.shape)
    learnt = jnp.where(mask, positions, mask.shape[1])
    return mask & (positions == _over_sequences(jax.ops.segment_min, learnt, segment_ids))


def _over_sequences(
    reduction: Callable[..., Array], values: Array, segment_ids: Array | None
) -> Array:
    ids = jnp.ones(values.shape, jnp.int32) if segment_ids is None else segment_ids
    reduce = partial(reduction, num_segments=values.shape[1] + 1)
    return jnp.take_along_axis(jax.vmap(reduce)(values, ids), ids, axis=1)
