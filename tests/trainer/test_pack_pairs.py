"""Pairs in rows: whole in each micro-batch, every token once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.data.preferences import PreferencePair
from jaxrl_async.errors import DataError
from jaxrl_async.trainer.pack_pairs import max_pairs, micro_batches_of, pack_preference

ROW = 12


def pair_of(prompt: int, chosen: int, rejected: int, start: int = 1) -> PreferencePair:
    ids = np.arange(start, start + prompt + chosen + rejected, dtype=np.int32)
    return PreferencePair(
        prompt_ids=ids[:prompt],
        chosen_ids=ids[prompt : prompt + chosen],
        rejected_ids=ids[prompt + chosen :],
    )


sizes = st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 6)).filter(
    lambda s: s[1] or s[2]
)


@pytest.mark.full
@given(st.lists(sizes, max_size=12), st.integers(2, 4))
def test_each_micro_batch_holds_whole_pairs_and_every_token_is_there_once(all_sizes, rows):
    pairs = [pair_of(*s, start=100 * i) for i, s in enumerate(all_sizes)]
    batch = pack_preference(pairs, ROW, rows)
    assert batch.num_pairs == len(pairs)
    assert batch.num_answers == sum(len(p.answers) for p in pairs)
    seen: set[int] = set()
    for micro in micro_batches_of(batch, rows):
        here = set(np.unique(micro["pair_ids"][micro["pair_ids"] >= 0]).tolist())
        assert not here & seen
        seen |= here
        for index in here:
            check_pair(micro, pairs[index], index)
        slots = np.unique(micro["slots"][micro["pair_ids"] >= 0])
        np.testing.assert_array_equal(slots, np.arange(len(here)))
        assert len(here) <= max_pairs(ROW, rows)
    assert seen == set(range(len(pairs)))


def check_pair(micro: dict, pair: PreferencePair, index: int) -> None:
    for is_chosen, answer in ((True, pair.chosen_ids), (False, pair.rejected_ids)):
        of_answer = (micro["pair_ids"] == index) & (micro["is_chosen"] == is_chosen)
        if not len(answer):
            assert not of_answer.any()
            continue
        wanted = np.concatenate([pair.prompt_ids, answer])
        np.testing.assert_array_equal(micro["token_ids"][of_answer], wanted)
        np.testing.assert_array_equal(micro["positions"][of_answer], np.arange(len(wanted)))
        np.testing.assert_array_equal(micro["token_ids"][of_answer & micro["mask"]], answer)
        assert len(np.unique(micro["segment_ids"][of_answer])) == 1
        assert len(np.unique(np.nonzero(of_answer)[0])) == 1, "a segment lies in one row"


@given(st.lists(sizes, min_size=1, max_size=8))
def test_padding_is_marked_as_such_and_segments_count_from_one(all_sizes):
    batch = pack_preference([pair_of(*s) for s in all_sizes], ROW, 2)
    padding = batch.segment_ids == 0
    assert (batch.pair_ids[padding] == -1).all() and (batch.slots[padding] == -1).all()
    assert not batch.mask[padding].any() and not batch.is_chosen[padding].any()
    for row in batch.segment_ids:
        kinds = np.unique(row[row > 0])
        np.testing.assert_array_equal(kinds, np.arange(1, len(kinds) + 1))


def test_answers_as_long_as_a_row_take_a_row_each():
    batch = pack_preference([pair_of(2, ROW - 2, ROW - 2)], ROW, 2)
    assert batch.token_ids.shape == (2, ROW) and (batch.segment_ids == 1).all()


def test_no_pairs_are_one_empty_micro_batch():
    batch = pack_preference([], ROW, 3)
    assert batch.token_ids.shape == (3, ROW) and batch.num_tokens == 0


@pytest.mark.parametrize(("lengths", "rows"), [((2, 11, 1), 2), ((4, 4, 4), 1)])
def test_a_pair_that_fits_nowhere_is_named(lengths, rows):
    with pytest.raises(DataError, match="preference pair 1 has segments of"):
        pack_preference([pair_of(1, 1, 1), pair_of(*lengths)], ROW, rows)
