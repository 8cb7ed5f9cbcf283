"""What a person sees: steady lines in a log, a live display on a terminal."""

import io

import pytest
from rich.console import Console as RichConsole

from jaxrl_async.metrics.console import (
    Console,
    ConsoleProgress,
    duration,
    eta_s,
    plain_line,
    shown_part,
)

VALUES = {
    "reward/mean": 0.53149,
    "throughput/generated_tokens_per_s": 1234.4,
    "staleness/mean": 0.8,
    "sampler/idle_share": 0.12,
    "trainer/idle_share": 0.305,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain(total=10):
    clock, stream = Clock(), io.StringIO()
    return Console(total, stream=stream, live=False, clock=clock), clock, stream


def test_a_plain_line_says_step_reward_speed_staleness_and_idle_shares():
    line = plain_line(ConsoleProgress(total_steps=150, step=12, values=VALUES, eta_s=83))
    assert line == (
        "step  12/150  reward 0.531  tokens/s 1,234  staleness 0.80  sampler idle 12%  "
        "trainer idle 30%  eta 1:23"
    )


def test_the_last_step_has_no_eta():
    assert "eta" not in plain_line(
        ConsoleProgress(total_steps=12, step=12, values=VALUES, eta_s=0.0)
    )


def test_fast_steps_are_thinned_but_first_last_and_evaluations_are_not():
    console, clock, stream = plain(total=10)
    for step in range(11):
        values = {"eval/accuracy": 0.5} if step == 4 else {"reward/mean": 0.1}
        console.step(step, values)
        clock.now += 0.3
    steps = [
        int(line.split("/")[0].removeprefix("step")) for line in stream.getvalue().splitlines()
    ]
    assert steps == [0, 4, 10]


def test_slow_steps_get_a_line_each():
    console, clock, stream = plain(total=10)
    for step in range(1, 4):
        clock.now += 2.5
        console.step(step, VALUES)
    assert len(stream.getvalue().splitlines()) == 3


def test_the_last_known_evaluation_stays_in_sight():
    console, clock, stream = plain()
    console.step(0, {"eval/accuracy": 0.25})
    clock.now += 5
    console.step(1, {"reward/mean": 0.1})
    assert "eval accuracy 0.250" in stream.getvalue().splitlines()[-1]


def test_a_reward_without_an_accuracy_is_shown_itself_and_gets_its_line():
    console, _, stream = plain()
    console.step(0, {"eval/reward": -0.125})
    console.step(1, {"eval/reward": 0.5})  # at once, but an evaluation
    assert [line.count("eval reward") for line in stream.getvalue().splitlines()] == [1, 1]
    console.step(2, {"eval/reward": 0.5, "eval/accuracy": 0.25})
    last = stream.getvalue().splitlines()[-1]
    assert "eval accuracy 0.250" in last and "eval reward" not in last


def test_a_phase_is_announced_once_and_its_detail_now_and_then():
    console, clock, stream = plain()
    for i in range(10):
        console.phase("warm start", f"{i}/10")
        clock.now += 0.5
    assert stream.getvalue().splitlines() == [
        "[0:00] warm start: 0/10",
        "[0:02] warm start: 4/10",
        "[0:04] warm start: 8/10",
    ]


def test_a_phase_that_counts_says_how_long_it_takes():
    console, clock, stream = plain()
    console.phase("warm start", "compiling")
    for i in range(1, 11):
        clock.now += 3.0
        console.counted("warm start", i, 10, f"loss {10 - i}.0")
    lines = stream.getvalue().splitlines()
    assert lines[:4] == [
        "[0:00] warm start: compiling",
        "[0:03] warm start: 1/10, loss 9.0",
        "[0:06] warm start: 2/10, loss 8.0, eta 0:24",
        "[0:09] warm start: 3/10, loss 7.0, eta 0:21",
    ]
    assert lines[-1] == "[0:30] warm start: 10/10, loss 0.0"
    console.phase("training")
    console.step(1, VALUES)
    assert stream.getvalue().splitlines()[-1].startswith("step  1/10  reward")


def test_the_bar_is_that_of_the_phase_while_it_counts():
    stream = io.StringIO()
    console = Console(120, stream=stream, live=True, clock=Clock())
    console.counted("warm start", 72, 500, "loss 0.9")
    shown = RichConsole(file=io.StringIO(), width=100)
    with shown.capture() as capture:
        shown.print(console._draw())
    console.close()
    assert "warm start 72/500" in capture.get() and "loss 0.9" in capture.get()
    assert shown_part(ConsoleProgress(total_steps=120, step=3)) == ("step", 3, 120)


def test_the_eta_follows_the_recent_pace():
    assert eta_s([(10, 100.0), (20, 120.0)], 50) == 60.0


@pytest.mark.parametrize("times", [[], [(1, 1.0)], [(2, 1.0), (2, 3.0)]])
def test_there_is_no_eta_without_a_pace(times):
    assert eta_s(times, 50) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (65, "1:05"), (720, "12:00"), (3723, "1:02:03"), (-1, "0:00")],
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


def test_the_summary_leaves_out_empty_lines():
    console, _, stream = plain()
    console.summary(["accuracy 0.95", "", "report runs/x/report.html"])
    assert stream.getvalue().splitlines() == ["accuracy 0.95", "report runs/x/report.html"]


def test_the_live_display_draws_and_leaves_its_last_state_on_the_screen():
    stream = io.StringIO()
    with Console(10, stream=stream, live=True) as console:
        console.phase("training [not markup]", "x")
        console.step(7, {**VALUES, "eval/accuracy": 0.9})
        console.summary(["done"])
    text = stream.getvalue()
    assert "step 7/10" in text and "0.900" in text and text.rstrip().endswith("done")


def test_the_live_display_has_curves_of_what_was_measured_twice():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    with Console(10, stream=stream, live=True) as console:
        for step, reward in enumerate([0.0, 0.5, 1.0]):
            console.step(step, {"reward/mean": reward, "staleness/mean": reward})
        console.step(3, {"reward/mean": 0.5, "eval/accuracy": 0.25})
    stream.flush()
    text = stream.buffer.getvalue().decode()
    assert "reward 0.000 to 1.000" in text and "▁▅█▅" in text
    assert "staleness 0" not in text and "eval accuracy 0.250 to" not in text


def test_a_terminal_without_such_characters_gets_no_curves():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace", newline="")
    with Console(10, stream=stream, live=True) as console:
        for step, reward in enumerate([0.0, 1.0]):
            console.step(step, {"reward/mean": reward})
    stream.flush()
    assert b"0.000 to 1.000" not in stream.buffer.getvalue()


def test_a_stream_that_is_no_terminal_gets_no_control_characters():
    stream = io.StringIO()
    console = Console(3, stream=stream)
    console.phase("compiling")
    console.step(1, VALUES)
    console.summary(["done"])
    assert "\x1b" not in stream.getvalue()


def test_a_log_of_two_days_has_no_more_than_a_line_a_minute_after_the_first_hour():
    console, clock, stream = plain(total=100_000)
    for step in range(1, 48 * 360):
        clock.now += 10.0
        console.step(step, {"reward/mean": 0.1})
    assert 2 * 24 * 60 - 60 <= len(stream.getvalue().splitlines()) <= 2 * 24 * 60 + 250
