"""Aggregation of token losses to one number: the only place that divides by a count.

Before the first micro-batch, an aggregate gets the whole step's batch on the host and gives each
token its weight. The loss is the sum of weight * token loss. Denominators are therefore global:
micro-batches, devices and packing only change the order of a sum. The tokens of a mini-batch keep
the weights from the whole step, times the number of mini-batches.
"""

from collections.abc import Callable

import numpy as np
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
