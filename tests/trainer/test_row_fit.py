"""Advice where much of what updates compute only fills micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.trainer.row_fit import UPDATES, RowFit, fitting_size


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9), st.integers(1, 12), st.integers(1, 4))
def test_no_size_of_half_or_of_a_whole_update_computes_fewer_rows(rows, times, multiple):
    most = times * multiple

    def computed(size: int) -> int:
        return sum(size * len(range(0, n, size)) for n in rows)

    size = fitting_size(rows, most, multiple)
    others = [
        s for s in range(1, most + 1) if s % multiple == 0 and (2 * s >= most or s >= max(rows))
    ]
    assert size in others
    assert computed(size) == min(map(computed, others))
    assert size == max(s for s in others if computed(s) == computed(size)), "the largest of equals"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([8] * UPDATES, True),
        ([1] * UPDATES, True),  # of a quarter of the size
        ([8] * (UPDATES - 1), False),  # a run that is over before
        ([9] * UPDATES, False),  # 25 % are empty, and no other size fits nine better by a tenth
        ([10] * UPDATES, False),  # a sixth is empty
        ([6, 12] * UPDATES, False),
    ],
)
def test_it_is_silent_where_nothing_would_be_gained(caplog, rows, told):
    fit = RowFit(6, 2, 100)
    for n in rows:
        fit.note(n)
    assert bool(caplog.records) == told
