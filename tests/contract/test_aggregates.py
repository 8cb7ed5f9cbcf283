"""What every aggregate must do, whoever registers it."""

import inspect

import numpy as np
import pytest

from jaxrl_async.algorithms.aggregate import aggregate
from jaxrl_async.trainer.learning_settings import MicroSizes
from jaxrl_async.trainer.pack import micro_batches, pack_pairs


def with_examples(function):
    """Settings without a default get 8."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return lambda batch: function(batch, **dict.fromkeys(needed, 8.0))


each = pytest.mark.parametrize(
    "function", [aggregate[n] for n in sorted(aggregate)], ids=sorted(aggregate)
)


def pairs(seed: int = 0):
    rng = np.random.default_rng(seed)
    for length in rng.integers(2, 9, 12):
        mask = rng.random(length) < 0.6
        mask[0] = False
        yield rng.integers(0, 9, length).astype(np.int32), mask


def loss_of(batch, weights) -> float:
    """A loss that depends on token and position only, so that it can be packed differently."""
    token_loss = np.sin(batch.token_ids + 3.0 * batch.positions)
    return float((weights.astype(np.float64) * token_loss).sum())


@each
def test_weights_are_float32_and_zero_outside_the_mask(function):
    batch = pack_pairs(list(pairs()), 16)
    weights = with_examples(function)(batch)
    assert weights.dtype == np.float32 and weights.shape == batch.mask.shape
    assert (weights[~batch.mask] == 0).all() and (weights[batch.mask] > 0).all()


@each
def test_packing_and_order_of_sequences_do_not_matter(function):
    sequences = list(pairs())
    losses = []
    for row_length, order in ((8, 1), (16, 1), (16, -1), (96, 1)):
        batch = pack_pairs(sequences[::order], row_length)
        losses.append(loss_of(batch, with_examples(function)(batch)))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


@each
def test_twice_the_same_data_gives_the_same_loss(function):
    sequences = list(pairs())
    once, twice = pack_pairs(sequences, 16), pack_pairs(sequences * 2, 16)
    both = [loss_of(b, with_examples(function)(b)) for b in (once, twice)]
    np.testing.assert_allclose(both[1], both[0], rtol=1e-5)


@each
def test_empty_rows_change_nothing(function):
    batch = pack_pairs(list(pairs()), 16)
    (padded,) = micro_batches(batch, MicroSizes((40,)))
    np.testing.assert_array_equal(
        with_examples(function)(padded)[: len(batch.mask)], with_examples(function)(batch)
    )
