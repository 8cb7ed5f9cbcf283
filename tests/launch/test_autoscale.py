"""How many samplers a run needs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.launch.autoscale import (
    CHANGES,
    NEEDED,
    WINDOW_S,
    Demand,
    demand_of,
    measured_steps,
    steps_in,
    wanted_samplers,
)
from jaxrl_async.metrics.metric import METRICS

shares = st.floats(0, 1)


def wanted(waits, idles, now, least=1, most=100):
    return wanted_samplers(Demand(trainer_waits=waits, sampler_idles=idles), now, least, most)


@pytest.mark.parametrize(
    ("waits", "idles", "now", "expected"),
    [
        (0.5, 0.0, 2, 4),  # the trainer works half the time: twice as many
        (0.9, 0.0, 2, 4),  # at most twice as many at once
        (0.25, 0.0, 3, 4),
        (0.1, 0.0, 3, 3),  # too little to tell
        (0.5, 0.5, 4, 4),  # by turns: max_staleness 0
        (0.0, 0.6, 4, 3),
        (0.0, 0.2, 4, 4),  # three would not suffice
        (0.0, 0.9, 1, 1),
    ],
)
def test_who_waits_decides(waits, idles, now, expected):
    assert wanted(waits, idles, now) == expected


@given(shares, shares, st.integers(1, 50), st.integers(1, 50), st.integers(0, 50))
def test_the_bounds_hold(waits, idles, now, least, more):
    assert least <= wanted(waits, idles, now, least, least + more) <= least + more


@given(shares, shares, st.integers(1, 50))
def test_more_waiting_never_means_fewer_samplers(waits, idles, now):
    assert wanted(min(waits + 0.1, 1), idles, now) >= wanted(waits, idles, now)


@given(st.integers(1, 20), st.floats(0.1, 10))
def test_a_steady_load_settles_and_no_longer_swings(first, load):
    """Samplers make 1 group/s each, the trainer takes `load` groups/s at most."""
    now, seen = first, []
    for _ in range(60):
        rate = min(float(now), load)
        now = wanted(1 - rate / load, 1 - rate / now, now)
        seen.append(now)
    assert len(set(seen[-10:])) == 1
    assert seen[-1] >= load * 0.85 - 1e-6, "the trainer waits little"
    assert seen[-1] <= max(load, 1) + 1 or seen[-1] <= first, "and no crowd idles"


def test_steps_count_by_their_time():
    lines = [
        {"time/step_s": 1.0, "time/wait_data_s": 1.0, "sampler/idle_share": 0.0},
        {"time/step_s": 3.0, "time/wait_data_s": 0.0, "sampler/idle_share": 0.4},
    ]
    demand = demand_of(lines)
    assert demand.trainer_waits == pytest.approx(0.25)
    assert demand.sampler_idles == pytest.approx(0.3)


def test_what_is_read_are_metrics_of_every_run():
    assert {*NEEDED, *CHANGES} <= {metric.key for metric in METRICS}


def step(number, living=1, step_s=WINDOW_S):
    values = {**dict.fromkeys(NEEDED, 0.5), "time/step_s": step_s, "sampler/living": living}
    return {"step": number, **values}


@given(st.integers(0, 2000))
def test_from_any_byte_of_a_file_on_whole_steps_are_read(start):
    text = "".join(json.dumps(step(n)) + "\n" for n in range(5)).encode()
    text = text.replace(b'{"step": 3', b'\x00torn\n[1]\n{}\n{"step": 9}\n{"step": 3')
    whole = [n for n in range(5) if text.find(b'{"step": %d' % n) >= min(start, len(text))]
    assert [line["step"] for line in steps_in(text[start:])] == whole
    assert [line["step"] for line in steps_in(text[start:] + b'{"step": 5, "ti')] == whole


@pytest.mark.parametrize(
    ("living", "samplers", "expected"),
    [
        ([], 1, []),
        ([1] * 4, 1, []),  # too few
        ([1] * 7, 1, [6, 5, 4, 3, 2]),
        ([1] * 7, 2, []),  # the second has not joined yet
        ([1, 1] + [2] * 6, 2, [7, 6, 5, 4, 3]),
        ([1, 1, 1] + [2] * 4, 2, []),
        ([2, 2, 1] + [2] * 6, 2, [8, 7, 6, 5, 4]),  # one was lost and came back
        ([2] * 7 + [1], 2, []),
    ],
)
def test_steps_count_that_had_all_samplers_from_start_to_end(living, samplers, expected):
    steps = [step(n, count) for n, count in enumerate(living)]
    assert [line["step"] for line in measured_steps(steps, samplers)] == expected


@pytest.mark.parametrize(("step_s", "count"), [(30.0, 5), (1.0, 10), (0.1, 100), (0.01, 0)])
def test_short_steps_are_measured_as_long_as_long_ones(step_s, count):
    steps = [step(n, step_s=step_s * 1.0001) for n in range(200)]
    assert len(measured_steps(steps, 1)) == count


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_had_other_samplers_for_a_while_says_nothing(change):
    """One that was cut off and came back within a step is there at its end."""
    steps = [step(n) for n in range(12)]
    steps[6][change] = 1.0
    assert [line["step"] for line in measured_steps(steps, 1)] == [11, 10, 9, 8, 7]
    assert not measured_steps(steps[:11], 1)
