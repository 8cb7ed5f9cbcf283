"""Aggregation of token losses to one number: the only place that divides by a count.

Before the first micro-batch, an aggregate gets the whole step's batch on the host and gives each
token its weight. The loss is the sum of weight * token loss. Denominators are therefore global:
micro-batches, devices and packing only change the order of a sum. The tokens of a mini-batch keep
the weights from the whole step, times the number of mini-batches.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxrl_async.algorithms.registry import Above0, NoFacts, Registry
from jaxrl_async.types import FloatArray, IntArray, PackedBatch

AggregateFn = Callable[
    ..., FloatArray
]  # (PackedBatch, **settings) -> [rows, length], 0 outside the mask

aggregate: Registry[AggregateFn, NoFacts] = Registry("aggregate", "algorithm.aggregate", NoFacts)


@aggregate
def token_mean(batch: PackedBatch) -> FloatArray:
    """1 / number of trained tokens: every token counts the same.

    DAPO (arXiv:2503.14476), sec. 3.3.
    """
    return _weights(batch, np.full(batch.mask.shape, 1 / max(batch.num_tokens, 1)))


@aggregate
def sequence_mean(batch: PackedBatch) -> FloatArray:
    """Average the sequences' token means: every sequence counts the same.

    GRPO (arXiv:2402.03300), eq. 3. A sequence without trained tokens does not count.
    """
    counts = _tokens_of(batch.sequence_ids, batch)
    num_sequences = max(int(np.count_nonzero(counts)), 1)
    return _weights(batch, 1 / (np.maximum(counts[batch.sequence_ids], 1) * num_sequences))


@aggregate
def constant(batch: PackedBatch, *, divisor: Above0) -> FloatArray:
    """Average the sequences' token sums / divisor, the same for all: no length bias.

    Dr. GRPO (arXiv:2503.20783), sec. 3.2; its divisor is the longest answer allowed, in tokens.
    """
    num_sequences = max(int(np.count_nonzero(_tokens_of(batch.sequence_ids, batch))), 1)
    return _weights(batch, np.full(batch.mask.shape, 1 / (num_sequences * divisor)))


@aggregate
def sequence_sum(batch: PackedBatch) -> FloatArray:
    """Average the sequences' token sums: the plain policy gradient; long answers weigh more.

    Williams 1992 (REINFORCE); `constant` with a divisor of 1.
    """
    return constant(batch, divisor=1.0)


@aggregate
def per_group(batch: PackedBatch) -> FloatArray:
    """Average the groups' token means: every prompt counts the same.

    DAPO's token mean (arXiv:2503.14476, sec. 3.3) within a group, so a prompt with long or many
    answers does not weigh more than another. A group without trained tokens does not count.
    """
    counts = _tokens_of(batch.group_ids, batch)
    num_groups = max(int(np.count_nonzero(counts)), 1)
    return _weights(batch, 1 / (np.maximum(counts[batch.group_ids], 1) * num_groups))


def mean_of(total: float, count: float) -> float:
    """Return total / count; 0 if count is 0."""
    return total / count if count else 0.0


def _tokens_of(ids: IntArray, batch: PackedBatch) -> NDArray[np.int64]:
    """Count the trained tokens of each id; the last entry is for padding, whose id is -1."""
    return np.bincount(ids[batch.mask], minlength=int(ids.max(initial=-1)) + 2)


def _weights(batch: PackedBatch, weights: NDArray[np.float64]) -> FloatArray:
    """Return the weights as float32, 0 outside the mask."""
    return np.where(batch.mask, weights, 0.0).astype(np.float32)


# ---- sums over the sequences of packed rows, broadcast to each token of a sequence

#     segment_ids         1   1   1   2  2  0      (0 is padding)
#     mask                0   1   1   1  1  0
#     values              9   2   3   4  6  9
#     sum_over_sequence   5   5   5  10 10  0
#     mean_over_sequence  2.5 2.5 2.5 5  5  0
#     first_tokens        0   1   0   1  0  0
#
# A sequence lies in one row, so its sum does not depend on its neighbours in the row, on the order
# of rows or on the split into micro-batches. `segment_ids=None`: each row is one sequence.


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
    trained = jnp.where(mask, positions, mask.shape[1])
    return mask & (positions == _over_sequences(jax.ops.segment_min, trained, segment_ids))


def _over_sequences(
    reduction: Callable[..., Array], values: Array, segment_ids: Array | None
) -> Array:
    ids = jnp.ones(values.shape, jnp.int32) if segment_ids is None else segment_ids
    reduce = partial(reduction, num_segments=values.shape[1] + 1)
    return jnp.take_along_axis(jax.vmap(reduce)(values, ids), ids, axis=1)
