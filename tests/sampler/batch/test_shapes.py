"""How prefills are divided among few programs."""

from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.sampler.batch import shapes


@given(st.lists(st.integers(1, 300), max_size=90), st.sampled_from([1, 4, 64]))
def test_sequences_are_divided_in_order_for_programs_that_hold_them(counts, rows):
    runs = shapes.divided(counts, rows, max(2048, sum(counts)))
    assert [n for run in runs for n in counts[run]] == counts
    assert all(0 < len(counts[run]) <= rows for run in runs)


def test_small_programs_are_taken_where_they_halve_the_padding():
    def sizes(*counts):
        runs = shapes.divided(counts, 64, 2048)
        return [shapes.coarse_bucket(sum(counts[run]), 2048) for run in runs]

    assert sizes(*[32] * 32) == [256] * 4
    assert sizes(*[32] * 8) == [256]
    assert sizes(*[32] * 48) == [2048], "six small ones are dearer than a third of padding"
    assert sizes(*[150] * 13) == [2048]
    assert sizes(300, 300, 20) == [2048], "each of the long ones would have 2,048 alone"
    assert sizes() == []
