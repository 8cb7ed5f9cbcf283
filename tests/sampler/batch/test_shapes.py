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


@given(
    st.lists(st.integers(1, 900), max_size=90),
    st.sampled_from([1, 4, 64]),
    st.sampled_from([7, 128, 300, 2048, 5000]),
)
def test_programs_where_padding_costs_are_more_than_half_full(counts, rows, most):
    buckets = shapes.filled_buckets(most)
    done = [0] * len(counts)
    for run, size in shapes.filled(counts, rows, buckets):
        assert size in buckets and 0 < len(run) <= rows
        tokens = sum(count for _, count in run)
        assert tokens <= size and (2 * tokens > size or size == buckets[0])
        for position, (index, count) in enumerate(run):
            assert count > 0 and sum(done[index + 1 :]) == 0, "in their order"
            done[index] += count
            assert done[index] == counts[index] or position == len(run) - 1
    assert done == counts


@given(
    st.lists(st.integers(1, 900), max_size=90),
    st.sampled_from([1, 4, 64]),
    st.sampled_from([900, 2048, 5000]),
)
def test_prompts_that_are_not_divided_fill_half_of_programs_of_more_sizes(counts, rows, most):
    buckets = shapes.filled_buckets(most, 2)
    runs = list(shapes.whole_runs(counts, rows, buckets))
    assert [pair for run, _ in runs for pair in run] == list(enumerate(counts)), "each in one"
    for run, size in runs:
        tokens = sum(count for _, count in run)
        assert size in buckets and 0 < len(run) <= rows
        assert tokens <= size and (2 * tokens > size or size == buckets[0])


def test_a_long_prompt_fills_programs_of_few_sizes():
    def sizes(*counts):
        return [size for _, size in shapes.filled(counts, 64, shapes.filled_buckets(2048))]

    assert shapes.filled_buckets(2048) == [128, 512, 2048]
    assert shapes.filled_buckets(2048, 2) == [128, 256, 512, 1024, 2048]
    assert shapes.filled_buckets(300) == [128, 300] and shapes.filled_buckets(100) == [100]
    assert sizes(600) == [512, 128] and sizes(200, 57) == [512] and sizes(256) == [128, 128]
    assert sizes(1025) == sizes(*[32] * 40) == [2048]
    assert sizes(*[2] * 70) == [128, 128], "of 64 prompts at most"


def test_steps_of_half_are_powers_of_two_and_what_lies_half_way():
    found = [shapes.steps_of_half(count) for count in range(-1, 14)]
    assert found == [0, 0, 1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
