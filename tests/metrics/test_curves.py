"""Curves of text: as high as what they show."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.metrics.console import BLOCKS, curve


def test_a_curve_rises_and_falls_with_its_values():
    assert curve([0, 7, 3.5, 0], 4) == "▁█▅▁"
    assert curve([0, 0, 8, 8], 2) == "▁█", "means of two"
    assert curve([5, 5, 5], 9) == "▁▁▁"
    assert curve([], 9) == curve([1], 0) == curve([float("nan")], 4) == ""


@pytest.mark.full
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 60))
def test_blocks_are_ordered_as_the_means_of_their_columns(values, width):
    curve_text = curve(values, width)
    columns = min(width, len(values))
    assert len(curve_text) == columns
    size, larger = divmod(len(values), columns)
    means, at = [], 0
    for column in range(columns):  # the first columns take one more
        count = size + (column < larger)
        means.append(sum(values[at : at + count]) / count)
        at += count
    extent = max(means) - min(means)
    for mean, block in zip(means, curve_text, strict=True):
        share = (mean - min(means)) / extent if extent > 0 else 0.0
        assert abs(BLOCKS.index(block) / 7 - share) <= 0.5 / 7 + 1e-6
