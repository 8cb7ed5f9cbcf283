"""Weights against the papers' sums, written as loops."""

import dataclasses

import numpy as np
import pytest

from jaxrl_async.algorithms.aggregate import (
    constant,
    per_group,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from jaxrl_async.trainer.learning_settings import MicroSizes
from jaxrl_async.trainer.pack import TrainSequence, micro_batches, pack, pack_pairs

MASKS = [
    [0, 1, 1, 0, 1],
    [0, 0, 1],
    [0, 0, 0, 0],
    [0, 1, 1, 1, 1, 1],
]  # the third has nothing to learn


@pytest.fixture
def batch():
    return pack_pairs([(np.arange(len(m), dtype=np.int32), np.array(m, bool)) for m in MASKS], 8)


@pytest.fixture
def losses(batch):
    return np.random.default_rng(0).normal(size=batch.mask.shape)


def by_sequence(batch, losses):
    sequences = [losses[(batch.sequence_ids == i) & batch.mask] for i in range(len(MASKS))]
    return [s for s in sequences if len(s)]


def test_token_mean_is_the_mean_over_all_tokens(batch, losses):
    expected = np.concatenate(by_sequence(batch, losses)).mean()
    assert (token_mean(batch) * losses).sum() == pytest.approx(expected, rel=1e-6)


def test_sequence_mean_is_the_mean_of_means(batch, losses):
    expected = np.mean([s.mean() for s in by_sequence(batch, losses)])
    assert (sequence_mean(batch) * losses).sum() == pytest.approx(expected, rel=1e-6)


def test_constant_divides_each_sum_by_the_same_number(batch, losses):
    expected = np.mean([s.sum() / 48 for s in by_sequence(batch, losses)])
    assert (constant(batch, divisor=48.0) * losses).sum() == pytest.approx(expected, rel=1e-6)


def test_sequence_sum_divides_by_sequences_only(batch, losses):
    expected = np.mean([s.sum() for s in by_sequence(batch, losses)])
    assert (sequence_sum(batch) * losses).sum() == pytest.approx(expected, rel=1e-6)


def test_per_group_is_the_mean_over_groups_of_their_token_means():
    """Groups of unequal size: indices 0 and 1, 2 and 3, and 4, which has nothing to learn."""
    masks = [*MASKS, [0, 0]]
    sequences = [
        TrainSequence(
            token_ids=np.arange(len(m), dtype=np.int32),
            mask=np.array(m, bool),
            behavior_logprobs=np.zeros(len(m), np.float32),
            versions=np.zeros(len(m), np.int32),
            advantages=np.zeros(len(m), np.float32),
            group=i // 2,
        )
        for i, m in enumerate(masks)
    ]
    batch = pack(sequences, 8)
    losses = np.random.default_rng(0).normal(size=batch.mask.shape)
    tokens = [losses[batch.mask & np.isin(batch.sequence_ids, [i, i + 1])] for i in (0, 2)]
    expected = np.mean([t.mean() for t in tokens])
    assert (per_group(batch) * losses).sum() == pytest.approx(expected, rel=1e-6)


def test_empty_rows_change_no_denominator(batch):
    (padded,) = micro_batches(batch, MicroSizes((9,)))
    for function in (token_mean, sequence_mean, per_group):
        np.testing.assert_array_equal(function(padded)[: len(batch.mask)], function(batch))


def test_a_batch_with_nothing_to_learn_gives_zero_weights(batch):
    empty = dataclasses.replace(batch, mask=np.zeros_like(batch.mask))
    for weights in (token_mean(empty), sequence_mean(empty), constant(empty, divisor=2.0)):
        assert (weights == 0).all()
