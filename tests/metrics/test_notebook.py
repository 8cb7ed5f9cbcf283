"""A run's picture: what is in it, also while the run goes on."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from jaxrl_async.api.finished_run import Run
from jaxrl_async.metrics.notebook import (
    BUSY,
    LANE_HEIGHT,
    MAX_STEPS,
    TRAINER_PHASES,
    run_svg,
)
from jaxrl_async.metrics.recorder import METRICS_FILE

SVG = "{http://www.w3.org/2000/svg}"
LEARNS = {label: color for _, label, color in TRAINER_PHASES}["learns"]


def line(step: int, **more: float) -> dict[str, float]:
    """A step of 2 s: a second of waiting, one of learning."""
    return {
        "step": step,
        "reward/mean": 0.1 * step,
        "time/step_s": 2.0,
        "time/elapsed_s": 2.0 * step,
        "time/wait_data_s": 1.0,
        "time/train_s": 1.0,
        "sampler/busy_share": 0.5,
        **more,
    }


def lane(svg: str, color: str) -> list[tuple[float, float]]:
    """(left, width) of the timeline's bars of a colour."""
    bars = [r.attrib for r in ET.fromstring(svg).iter(f"{SVG}rect")]
    own = [b for b in bars if b["fill"] == color and b["height"] == str(LANE_HEIGHT)]
    return [(float(b["x"]), float(b["width"])) for b in own]


def test_the_timeline_has_each_second_where_it_was():
    svg = run_svg([line(1), line(2)])
    (first, width), (second, _) = lane(svg, LEARNS)
    assert width > 0 and second - first == pytest.approx(2 * width, abs=0.2)  # drawn to 0.1
    (_, busy), (_, busy_2) = lane(svg, BUSY)
    assert busy == pytest.approx(2 * width, abs=0.2) and busy_2 == pytest.approx(busy, abs=0.2)


def test_an_evaluation_beside_is_not_drawn_over_the_next_step_whose_wait_for_it_is():
    beside = line(1, **{"time/eval_s": 9.0})
    wait = {"time/wait_data_s": 0.5, "time/train_s": 0.5, "time/wait_eval_s": 1.0}
    svg = run_svg([beside, line(2) | wait])
    colors = {label: color for _, label, color in TRAINER_PHASES}
    (_, half), (left, quarter) = lane(svg, LEARNS)
    assert half == pytest.approx(2 * quarter, abs=0.2), "the second begins where it did"
    ((_, evaluates),) = lane(svg, colors["evaluates"])
    assert evaluates == 0.0
    *_, (waits_from, waits) = lane(svg, colors["waits for answers"])
    assert waits_from == pytest.approx(left + quarter, abs=0.2)
    assert waits == pytest.approx(half, abs=0.2)


def test_only_the_newest_steps_are_in_the_timeline():
    assert len(lane(run_svg([line(s) for s in range(1, 4 * MAX_STEPS)]), LEARNS)) == MAX_STEPS


def test_after_a_resumption_the_timeline_begins_anew():
    resumed = [
        line(1),
        line(2),
        line(3) | {"time/elapsed_s": 2.0},
        line(4) | {"time/elapsed_s": 4.0},
    ]
    assert lane(run_svg(resumed), LEARNS) == lane(run_svg([line(1), line(2)]), LEARNS)


def test_curves_are_drawn_for_what_was_measured():
    both = [line(1, **{"eval/accuracy": 0.1}), line(2, **{"eval/accuracy": 0.3})]
    for lines, curves in (([], 0), ([line(1), line(2)], 1), (both, 2)):
        svg = run_svg(lines)
        drawn = [p.get("points") for p in ET.fromstring(svg).iter(f"{SVG}polyline")]
        assert len([p for p in drawn if p]) == curves
        assert ("held-out accuracy" in svg) == (curves == 2)


def test_the_held_out_reward_stands_in_where_there_is_no_accuracy():
    lines = [line(s, **{"eval/reward": 0.1 * s}) for s in (1, 2)]
    assert "held-out reward" in run_svg(lines) and "held-out accuracy" not in run_svg(lines)
    svg = run_svg([*lines, line(3, **{"eval/accuracy": 0.3})])
    assert "held-out reward" not in svg and "held-out accuracy" in svg


@pytest.mark.parametrize("reward", [8e-6, 123_456_789.0, 1000.001, -1.23456e-7])
def test_no_label_of_an_axis_is_cut_or_shown_twice(reward):
    svg = run_svg([line(1, **{"reward/mean": reward}), line(2, **{"reward/mean": 2 * reward})])
    labels = re.findall(r'<text x="([0-9.]+)" y="[0-9.]+" text-anchor="end">([^<]*[0-9])<', svg)
    assert len(labels) > 2 and len({text for _, text in labels}) == len(labels)
    for right, text in labels:
        assert float(right) >= 7 * len(text)  # a digit of 12 pixels' font is 6.7 wide


def test_a_value_that_is_not_finite_is_left_out():
    assert "nan" not in run_svg([line(1, **{"eval/accuracy": float("nan")}), line(2)])


def test_a_run_that_continues_is_drawn_as_far_as_it_is(tmp_path):
    run = Run(tmp_path)
    assert "no step has finished yet" in run._repr_svg_()
    (tmp_path / METRICS_FILE).write_text(json.dumps(line(1)) + "\n")
    assert "no step has" not in run._repr_svg_() and "polyline" in run._repr_svg_()
