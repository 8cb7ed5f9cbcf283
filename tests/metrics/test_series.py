"""Points of metrics, their numbers and ticks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.metrics.series import accuracy_points, number, thinned, tick_labels, ticks


def test_long_runs_are_thinned_with_both_ends_kept():
    points = [(i, float(i)) for i in range(10_000)]
    kept = thinned(points, 300)
    assert len(kept) == 300 and kept[0] == points[0] and kept[-1] == points[-1]
    assert thinned(points[:5], 300) == points[:5]


@given(
    st.floats(-1e6, 1e6).filter(lambda v: v == 0 or abs(v) > 1e-6),
    st.floats(1e-4, 1e6),
)
def test_ticks_enclose_the_range_evenly_and_are_few(low, size):
    found = ticks(low, low + size)
    assert found[0] <= low + 1e-6 * size + 1e-9 * abs(low)
    assert found[-1] >= low + size - 1e-6 * size - 1e-9 * abs(low)
    assert 2 <= len(found) <= 8


def test_labels_of_an_axis_have_as_many_digits_as_say_each_tick():
    quarters = [1170.0, 1172.5, 1175.0, 1177.5]  # rounded, they would still differ
    assert tick_labels(quarters) == ["1,170.0", "1,172.5", "1,175.0", "1,177.5"]
    assert tick_labels([999.5, 1000.0, 1000.5]) == ["999.5", "1,000.0", "1,000.5"]
    assert tick_labels([2000000.0, 2000002.5]) == ["2,000,000.0", "2,000,002.5"]
    assert tick_labels([1e-20, 1e-10, 0.3, 1000.0]) == ["1e-20", "1e-10", "0.3", "1,000"]
    assert tick_labels([1234.6]) == ["1,235"]
    assert tick_labels([0.0, 2e-6, 4e-6]) == ["0", "2e-06", "4e-06"]
    assert tick_labels([1000.0, 1000.5, 1001.0]) == ["1,000.0", "1,000.5", "1,001.0"]
    assert tick_labels([1.23456e-5, 1.23457e-5]) == ["1.23456e-05", "1.23457e-05"]
    assert tick_labels([]) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (12345.6, "12,346"),
        (1e-7, "1e-07"),
        (math.nan, "nan"),
        (999.96, "1000"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_an_evaluation_in_which_all_answers_were_cut_off_counts_in_the_curve_of_accuracy():
    lines = [{"step": 0, "eval/reward": 1.0}, {"step": 1}, {"step": 2, "eval/accuracy": 0.5}]
    assert accuracy_points(lines) == [(0, 0.0), (2, 0.5)]
    assert accuracy_points(lines[:2]) == []
