"""How many samplers a run needs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.launch.demand import Demand, MetricLines, demand_of, wanted_samplers
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
    known = {metric.key for metric in METRICS}
    assert {"time/step_s", "time/wait_data_s", "sampler/idle_share"} <= known


@given(st.data())
def test_a_file_is_read_piecewise_and_each_step_counts_once(data):
    steps = [
        {"step": n, "time/step_s": 1.0, "time/wait_data_s": 0.5, "sampler/idle_share": 0.0}
        for n in range(5)
    ]
    text = "".join(json.dumps(s) + "\n" for s in steps).encode()
    text = text[:50] + text[50:].replace(b'{"step": 3', b"\x00torn\n[1]\n{}\n" + b'{"step": 3')
    lines, got = MetricLines(), []
    while lines.offset < len(text):
        size = data.draw(st.integers(1, 200))
        got += lines.add(text[lines.offset : lines.offset + size])
    assert [line["step"] for line in got] == [0, 1, 2, 3, 4]
