"""Formulas of evaluations against enumerations, bootstraps and other implementations."""

import itertools
import math

import numpy as np
import pytest

from jaxrl_async.evals.estimates import (
    Estimate,
    doubling,
    estimate,
    majority,
    paired_difference,
    pass_at_k,
)
from jaxrl_async.rollout.evaluate import clustered_stderr


def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_passing_sample():
    for n in range(1, 8):
        for c in range(n + 1):
            passes = [1] * c + [0] * (n - c)
            for k in range(1, n + 1):
                choices = list(itertools.combinations(passes, k))
                share = sum(map(any, choices)) / len(choices)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12), (n, c, k)


def test_pass_at_k_stays_exact_for_many_samples():
    """As the product of Chen et al.'s program, in float64."""
    for n, c, k in ((1024, 1, 512), (1024, 3, 64), (65_536, 5, 4096)):
        product = 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
        assert pass_at_k(n, c, k) == pytest.approx(product, rel=1e-9)
    assert pass_at_k(1024, 1, 512) == 0.5


def test_pass_at_k_is_unbiased_where_the_naive_formula_is_not():
    """The mean over the binomial number of passing samples is 1 - (1 - p)^k."""
    n, p = 6, 0.3
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in range(1, n + 1):
        mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_k_doubles_up_to_the_number_of_samples():
    assert [doubling(n) for n in (1, 2, 3, 4, 6, 16)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8, 16],
    ]  # fmt: skip


def test_the_most_frequent_answer_counts_and_equally_frequent_ones_in_equal_parts():
    assert majority(["7", "7", "9"], [1, 1, 0]) == 1
    assert majority(["9", "9", "7"], [0, 0, 1]) == 0
    assert majority(["9", "7", None, None, None], [0, 1, 0, 0, 0]) == 0.5
    assert majority(["1", "2", "3"], [1, 0, 0]) == pytest.approx(1 / 3)
    assert majority([None, None], [1, 1]) == 0
    assert majority(["1", "1", "2"], [1, 0, 1]) == 0.5, "the mean grade of an answer's samples"


def test_the_standard_error_of_one_value_a_prompt_is_the_usual_one():
    values = [0.0, 1.0, 1.0, 0.25, 3.0]
    usual = np.std(values, ddof=1) / math.sqrt(len(values))
    assert clustered_stderr([[v] for v in values]) == pytest.approx(usual, rel=1e-12)
    assert clustered_stderr([[1.0, 0.0, 1.0]]) is None, "one prompt"
    assert clustered_stderr([[], [1.0]]) is None and clustered_stderr([]) is None


def test_samples_of_a_prompt_are_no_independent_evidence():
    """Equal samples add nothing; the naive error would be smaller by the root of their number."""
    once = clustered_stderr([[0.0], [1.0], [1.0], [0.0]])
    assert clustered_stderr([[0.0] * 9, [1.0] * 9, [1.0] * 9, [0.0] * 9]) == pytest.approx(once)
    groups = [[0.0, 1.0], [1.0, 1.0], [0.5, 0.25], [0.0, 0.0]]
    means = [np.mean(g) for g in groups]
    assert clustered_stderr(groups) == pytest.approx(np.std(means, ddof=1) / 2)


@pytest.mark.parametrize("sizes", [(4, 4), (1, 8)], ids=["as many each", "different numbers"])
def test_the_standard_error_is_that_of_a_bootstrap_over_prompts(sizes):
    rng = np.random.default_rng(7)
    rates = rng.uniform(0, 1, 300)
    groups = [
        rng.binomial(1, rate, rng.integers(sizes[0], sizes[1] + 1)).astype(float) for rate in rates
    ]
    sums = np.array([g.sum() for g in groups])
    counts = np.array([len(g) for g in groups])
    chosen = rng.integers(0, len(groups), (4000, len(groups)))
    means = sums[chosen].sum(1) / counts[chosen].sum(1)
    found = estimate([g.tolist() for g in groups])
    assert found.mean == pytest.approx(sums.sum() / counts.sum())
    assert found.stderr == pytest.approx(means.std(), rel=0.06)
    low, high = found.interval
    assert (low, high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.006)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    rng, held = np.random.default_rng(3), 0
    for _ in range(1000):
        rates = rng.beta(2, 2, 120)
        samples = rng.binomial(1, rates[:, None], (120, 4)).astype(float)
        low, high = estimate(samples.tolist()).interval
        held += low <= 0.5 <= high
    assert 0.925 <= held / 1000 <= 0.975


def test_a_paired_difference_is_of_the_prompts_that_both_have():
    before = {"a": [0.0, 1.0], "b": [1.0], "c": [0.0], "only": [1.0], "none": []}
    after = {"a": [1.0, 1.0], "b": [1.0], "c": [0.25], "new": [1.0], "none": [1.0]}
    found, count = paired_difference(before, after)
    each = [0.5, 0.0, 0.25]
    assert count == 3 and found.mean == pytest.approx(np.mean(each))
    assert found.stderr == pytest.approx(np.std(each, ddof=1) / math.sqrt(3))
    assert paired_difference({"x": [1.0]}, {"y": [1.0]}) is None
    assert paired_difference({"x": [1.0]}, {"x": [0.0]})[0] == Estimate(-1.0, None)


def test_pairing_takes_out_what_makes_prompts_hard():
    rng = np.random.default_rng(5)
    hard = rng.uniform(0, 1, 400)
    before = {str(i): [x] for i, x in enumerate(hard)}
    after = {str(i): [x + 0.1 + rng.normal(0, 0.01)] for i, x in enumerate(hard)}
    found, _ = paired_difference(before, after)
    apart = clustered_stderr([*before.values()])
    assert found.mean == pytest.approx(0.1, abs=0.005) and found.stderr < apart / 20
