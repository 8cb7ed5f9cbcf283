"""Symptoms of a run that learns nothing: said after ten updates in a row, again after a gap."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.metrics.symptoms import IN_A_ROW, SYMPTOMS, Symptoms

ROOT = Path(__file__).parents[2]
HEALTHY = {
    "train/grad_norm": 0.3,
    "policy/entropy": 0.008,
    "rollout/truncated_share": 0.9,
    "reward/mean": 0.5,
    "reward/std": 0.4,
}
ILL = {
    "no gradient": {"train/grad_norm": 0.0},
    "collapsed entropy": {"policy/entropy": 3e-35},
    "truncated answers": {"rollout/truncated_share": 1.0},
    "equal rewards": {"reward/std": 1e-17},
}


def warned_steps(updates: list[dict[str, float]]) -> list[int]:
    """Return the updates, from 1, after which something was said."""
    symptoms = Symptoms()
    return [n for n, values in enumerate(updates, 1) for _ in symptoms.warnings(values)]


def warned(updates: list[dict[str, float]]) -> list[str]:
    """Return what is said of updates."""
    symptoms = Symptoms()
    return [w for values in updates for w in symptoms.warnings(values)]


@pytest.mark.full
@pytest.mark.parametrize("name", SYMPTOMS)
@given(shown=st.lists(st.booleans(), max_size=60))
def test_one_warning_at_the_end_of_each_tenth_in_a_row(name, shown):
    """The reference: runs of the symptom in the text of all updates, as a regular expression."""
    updates = [HEALTHY | (ILL[name] if ill else {}) for ill in shown]
    text = "".join("x" if ill else "." for ill in shown)
    expected = [m.start() + IN_A_ROW for m in re.finditer("x+", text) if len(m[0]) >= IN_A_ROW]
    assert warned_steps(updates) == expected


@pytest.mark.full
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "train/grad_norm": st.floats(1e-9, 1e9),
                "policy/entropy": st.floats(2e-4, 12),
                "rollout/truncated_share": st.floats(0, 0.99),
                "reward/mean": st.floats(-1, 1),
                "reward/std": st.floats(1e-6, 10),
            }
        ),
        max_size=40,
    )
)
def test_a_healthy_run_hears_nothing(updates):
    assert warned_steps(updates) == []


@pytest.mark.full
@given(st.lists(st.dictionaries(st.sampled_from([*HEALTHY, "eval/reward"]), st.floats())))
def test_no_metrics_break_it(updates):
    warned_steps(updates)


def test_what_is_no_update_counts_for_nothing():
    ill = HEALTHY | ILL["no gradient"]
    evaluation = {"eval/reward": 0.5}
    assert warned_steps([*[ill] * 5, evaluation, *[ill] * 5]) == [11]


def test_supervised_updates_may_become_certain():
    certain = {"train/grad_norm": 1e-5, "policy/entropy": 1e-9}
    assert warned_steps([certain] * 30) == []


def test_equal_rewards_are_reported_whatever_their_size_and_small_ones_are_not_equal():
    huge = HEALTHY | {"reward/mean": 1e30, "reward/std": 1e13}
    small = HEALTHY | {"reward/mean": 1e-10, "reward/std": 1e-11}
    assert warned_steps([huge] * 10) == [10] and warned_steps([small] * 10) == []


@pytest.mark.parametrize("later", [0, 4])
def test_equal_rewards_that_leave_no_gradient_are_one_warning(later):
    """The gradient says more of the same cause; once there is one again, equal rewards are said."""
    equal = HEALTHY | ILL["equal rewards"]
    both = equal | ILL["no gradient"]
    (only,) = warned([HEALTHY | ILL["no gradient"]] * later + [both] * 15)
    assert "had no gradient" in only
    assert warned_steps([*[both] * 9, *[equal] * 5]) == [10]


def test_each_warning_names_a_section_of_the_docs_that_exists():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = {
        line.strip("# ").lower().replace(" ", "-")
        for line in page.splitlines()
        if line.startswith("#")
    }
    warnings = [w for ill in ILL.values() for w in warned([HEALTHY | ill] * IN_A_ROW)]
    assert len(warnings) == len(SYMPTOMS)
    for warning in warnings:
        (anchor,) = re.findall(r"docs/troubleshooting\.md#([a-z-]+)", warning)
        assert anchor in headings
