"""How the rows of an update are divided into micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.trainer.learning_settings import MAX_SIZES, MOST_EMPTY, MicroSizes

pytestmark = pytest.mark.full


@given(st.integers(1, 500), st.integers(1, 100), st.sampled_from([1, 2, 4, 8]))
def test_micro_batches_hold_all_rows_and_are_of_at_most_three_sizes(rows, times, multiple):
    sizes = MicroSizes.up_to(times * multiple, multiple)
    cover = sizes.cover(rows)
    assert sizes.most == times * multiple and len(sizes.sizes) <= MAX_SIZES
    assert all(size % multiple == 0 for size in sizes.sizes)
    assert set(cover) <= set(sizes.sizes) and list(cover) == sorted(cover, reverse=True)
    assert sum(cover) >= rows
    assert sum(cover[:-1]) < rows, "the last one holds rows"


@given(st.integers(1, 500), st.integers(1, 100))
def test_no_more_rows_are_empty_than_the_smallest_size_leaves_or_a_tenth(rows, most):
    sizes = MicroSizes.up_to(most)
    empty = sum(sizes.cover(rows)) - rows
    assert empty < sizes.sizes[-1] or empty <= MOST_EMPTY * (rows + empty)


@given(st.integers(1, 200), st.integers(1, 64))
def test_no_cover_of_as_few_empty_rows_has_fewer_micro_batches(rows, most):
    sizes = MicroSizes.up_to(most)
    cover = sizes.cover(rows)
    fewest = {0: 0}  # rows held: fewest micro-batches, over all ways
    for held in range(1, rows + most + 1):
        fewest[held] = min(1 + fewest.get(held - s, 10**9) for s in sizes.sizes)
    computed = sum(cover)
    allowed = [
        h for h in range(rows, rows + most + 1)
        if h - rows <= MOST_EMPTY * h and fewest[h] < 10**9
    ]  # fmt: skip
    if allowed:
        assert len(cover) == min(fewest[h] for h in allowed)
    else:
        assert computed == min(h for h in range(rows, rows + most + 1) if fewest[h] < 10**9)


@pytest.mark.parametrize(
    ("rows", "cover"),
    [(1, (2,)), (2, (2,)), (28, (8, 8, 8, 2, 2)), (30, (32,)), (64, (32, 32)), (70, (32, 32, 8))],
)
def test_examples(rows, cover):
    assert MicroSizes((32, 8, 2)).cover(rows) == cover


def test_many_of_the_smallest_size_may_replace_a_larger_one():
    assert MicroSizes((54, 14, 4)).cover(23) == (4, 4, 4, 4, 4, 4), "24 rows, not 26"
