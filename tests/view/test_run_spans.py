"""Who was busy when: what the page is told of the files of spans."""

import json
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.metrics.spans import recorded_spans
from jaxrl_async.metrics.trace_file import RecordedSpan, SpanRecorder, ThreadSpans, TraceFile
from jaxrl_async.trainer.evaluation import EvaluationThread
from jaxrl_async.trainer.step_clock import EVALUATION, GROUPS, LEARN, PUBLISH, TURN, StepClock
from jaxrl_async.view.lanes import IDLE, RunSpans, read_spans, thinned
from jaxrl_async.view.queries import ANSWERS
from jaxrl_async.view.report import as_json, embedded_spans
from jaxrl_async.view.watched import WatchedRun

Given = list[tuple[str, float, float, str]]  # name, start, end, lanes


def written(path: Path, process: str, spans: Given, *, ahead_s: float = 0.0, thread: str = "t"):
    """Write spans of one thread; the wall's clock is ahead_s ahead of the spans' own."""
    recorder = SpanRecorder()
    for name, start, end, lanes in spans:
        args = {"version": int(start)} if name == "step" else {}
        recorder.add(RecordedSpan(name, start, end, lanes, args))
    for one in recorder._threads:
        one.name = thread
    path.parent.mkdir(parents=True, exist_ok=True)
    TraceFile(path, process).add(recorder.take())
    head, *rest = path.read_text().splitlines()
    facts = json.loads(head.rstrip(",") + "}")
    facts["otherData"]["written_at"] = {"wall_clock_s": 500.0 + ahead_s, "trace_clock_s": 500.0}
    path.write_text("\n".join([json.dumps(facts)[:-1] + ",", *rest]))


def lane_of(spans: RunSpans, name: str):
    (found,) = [lane for lane in spans.lanes if lane.name == name]
    return found


def test_a_thread_is_a_lane_of_nested_spans_and_a_wait_within_one_is_not_busy(tmp_path):
    steps = [("step", 0.0, 10.0, ""), ("wait for groups", 0.0, 4.0, ""), ("learn", 4.0, 9.0, "")]
    written(tmp_path / "trace.json", "trainer 0", [*steps, ("step", 10.0, 20.0, "")])
    spans = read_spans(tmp_path)
    shown = spans.shown(0.0, 20.0, 100)
    (lane,) = shown["lanes"]
    assert (lane["process"], lane["name"]) == ("trainer 0", "t")
    names = [[shown["kinds"][kind] for _, _, kind, _ in row] for row in lane["rows"]]
    assert names == [["step", "step"], ["wait for groups", "learn"]]
    assert lane["busy"] == pytest.approx(16 / 20)
    assert spans.shown(0.0, 5.0, 100)["lanes"][0]["busy"] == pytest.approx(1 / 5)
    assert spans.window_of(10, 99) == (10.0, 20.0) and spans.window_of(7, 9) == (0.0, 20.0)
    assert spans.steps_between(0.0, 5.0) == [0, 0] and spans.steps_between(5.0, 15.0) == [0, 10]


def test_evaluations_beside_the_trainer_are_one_lane_and_its_wait_for_one_is_not_busy(tmp_path):
    """Each has a thread of its own; a step without a wait has no span of it."""
    moments = iter((0.0, 0.0, 4.0, 4.0, 6.0, 9.0, 10.0))
    clock = StepClock([EVALUATION], clock=lambda: next(moments))
    with recorded_spans(tmp_path / "trace.json", "trainer 0"):
        for version in (1, 2, 3):
            EvaluationThread(dict, lambda values: None, version).complete()
        for phase in (GROUPS, TURN, LEARN, EVALUATION, PUBLISH):
            clock.now("", phase)
        measured = clock.end_step(1, waited_s=1.0)
    assert measured["time/wait_eval_s"] == 3.0 and measured["time/train_s"] == 5.0
    assert "time/wait_turn_s" not in measured and measured["time/step_s"] == 10.0
    spans = read_spans(tmp_path)
    assert len(lane_of(spans, "evaluation").starts) == 3 and len(spans.lanes) == 2
    (lane,) = [lane for lane in spans.lanes if lane.name != "evaluation"]
    shown_spans = [spans.kinds[kind] for kind in lane.kinds]
    assert shown_spans == ["step", "wait for groups", "learn", "wait for the evaluation", "publish"]
    idle = [i for i, name in enumerate(spans.kinds) if name in IDLE]
    begin_s = lane.starts[0]
    assert lane.busy_s(begin_s, begin_s + 10.0, idle) == pytest.approx(3.0)


def test_what_overlaps_is_one_lane_and_counts_each_second_once(tmp_path):
    scores = [("score", 0.0, 4.0, "scorer"), ("score", 1.0, 2.0, "scorer")]
    written(tmp_path / "trace.json", "trainer 0", [*scores, ("score", 6.0, 8.0, "scorer")])
    spans = read_spans(tmp_path)
    lane = lane_of(spans, "scorer")
    assert lane.busy_s(0.0, 8.0, []) == 6.0 and lane.busy_s(1.5, 7.0, []) == 3.5
    (row,) = lane.rows(0.0, 8.0, 1000)
    assert [(start, end, count) for start, end, _, count in row] == [(0.0, 4.0, 2), (6.0, 8.0, 1)]


def test_spans_that_were_written_in_parts_nest_whichever_came_first(tmp_path):
    """A step is recorded when it ends, after what it holds, which may be in an older file."""
    recorder, file = SpanRecorder(), TraceFile(tmp_path / "trace.json", "p", most_spans=1)
    for name, start, end in (("learn", 1, 2), ("publish", 2, 3), ("step", 0, 4), ("step", 4, 5)):
        recorder.add(RecordedSpan(name, start, end, "", {"version": start}))
        if name != "learn":
            file.add(recorder.take(), not_taken=2)
    spans = read_spans(tmp_path)
    assert spans.files == ("older.trace.json", "trace.json") and spans.dropped == 2 + 2
    (lane,) = spans.lanes
    assert [spans.kinds[kind] for kind in lane.kinds] == ["step", "step"]
    file = TraceFile(tmp_path / "trace.json", "p", most_spans=2)
    for name, start, end in (("learn", 1, 2), ("publish", 2, 3), ("step", 0, 4)):
        recorder.add(RecordedSpan(name, start, end, "", {"version": start}))
        file.add(recorder.take())
    spans = read_spans(tmp_path)
    (lane,) = spans.lanes
    assert [spans.kinds[kind] for kind in lane.kinds] == ["step", "learn", "publish"]
    assert lane.depths.tolist() == [0, 1, 1] and spans.dropped == 0
    assert lane.busy_s(0.0, 4.0, [spans.kinds.index("learn")]) == 3.0


def test_processes_are_set_against_each_other_by_their_clocks(tmp_path):
    written(tmp_path / "trace.json", "trainer 0", [("learn", 100.0, 101.0, "")], ahead_s=1000.0)
    written(
        tmp_path / "samplers" / "0.trace.json", "sampler 0", [("block", 3.0, 4.0, "")],
        ahead_s=1098.0, thread="sampler",
    )  # fmt: skip
    spans = read_spans(tmp_path)
    assert [(lane.process, lane.starts[0]) for lane in spans.lanes] == [
        ("sampler 0", 1.0),
        ("trainer 0", 0.0),
    ]
    assert spans.end_s == 2.0 and spans.files == ("samplers/0.trace.json", "trace.json")


def test_one_of_several_adapters_has_the_spans_of_all_and_steps_of_its_own(tmp_path):
    recorder = SpanRecorder()
    for name, late in (("few", 0.0), ("many", 0.5)):

        def steps(late=late):
            for step in (1, 2):
                args = {"version": step}
                recorder.add(RecordedSpan("step", step + late, step + late + 0.4, "", args))

        thread = threading.Thread(target=steps, name=f"trainer of {name}")
        thread.start()
        thread.join()
    TraceFile(tmp_path / "trace.json", "trainer 0").add(recorder.take())
    (tmp_path / "config.yaml").write_text("")
    for name, window in (("few", (0.0, 0.4)), ("many", (0.5, 0.9))):
        (tmp_path / name).mkdir()
        spans = WatchedRun(tmp_path / name, name).spans()
        assert spans.files == ("../trace.json",) and len(spans.lanes) == 2
        assert spans.window_of(1, 1) == pytest.approx(window)


@pytest.mark.full
def test_the_spans_of_many_samplers_take_a_bounded_part_of_a_report(tmp_path):
    blocks = [("block", n, n + 0.9, "") for n in range(600)]
    blocks += [("prefill", n, n + 0.4, "") for n in range(600)]
    written(tmp_path / "trace.json", "trainer 0", [("step", n, n + 1.0, "") for n in range(600)])
    for number in range(40):
        path = tmp_path / "samplers" / f"{number}.trace.json"
        written(path, f"sampler {number}", blocks, thread="sampler")
    kept = embedded_spans(WatchedRun(tmp_path, "run"))
    assert len(as_json(kept)) < 150_000, "a report stays below 1 MB"
    assert len(kept["whole"]["lanes"]) == 41 and all(x["rows"][0] for x in kept["whole"]["lanes"])


def test_what_is_cut_off_or_no_span_is_left_out_and_counted(tmp_path):
    written(tmp_path / "trace.json", "trainer 0", [("learn", 0.0, 1.0, ""), ("x", 2.0, 3.0, "")])
    whole = (tmp_path / "trace.json").read_text().splitlines()
    spoilt = [*whole[:-2], '{"ph": "X", "name": 1}', whole[-2][:30], "\x00\xff", "[]"]
    (tmp_path / "trace.json").write_text("\n".join(spoilt))
    spans = read_spans(tmp_path)
    assert [len(lane.starts) for lane in spans.lanes] == [1]
    assert spans.unread == 4
    (tmp_path / "trace.json").write_text("no JSON")
    assert read_spans(tmp_path).lanes == () and read_spans(tmp_path / "none").files == ()


SPAN = '{"name": "a", "ph": "X", "pid": 1, "tid": %s, "ts": %s, "dur": %s, "args": {}},\n'
HEAD = '{"displayTimeUnit": "ms", "otherData": {"dropped": %s, "written_at": %s}},\n'


@pytest.mark.parametrize(
    "line",
    [
        SPAN % ("Infinity", 1, 1),
        SPAN % (1, "-Infinity", 1),
        SPAN % (1, "NaN", 1),
        SPAN % (1, "1" + 400 * "0", 1),
        SPAN % (1, 5, -1),
        "[" * 100_000 + "\n",
        HEAD % ("Infinity", '{"wall_clock_s": 1, "trace_clock_s": 0}'),
        HEAD % (0, '{"wall_clock_s": 1}'),
    ],
)
def test_numbers_that_are_no_times_are_counted_and_the_rest_is_shown(tmp_path, line):
    (tmp_path / "trace.json").write_text(line + SPAN % (2, 0, 3e6) + SPAN % (2, 1e6, 0))
    spans = read_spans(tmp_path)
    assert spans.unread == 1 and [len(lane.starts) for lane in spans.lanes] == [2]
    for window in ((0.0, 3.0), (1.0, 1.0), (1.0, float("inf"))):
        json.dumps(spans.shown(*window, 10), allow_nan=False)


def test_a_window_of_no_length_is_drawn_and_one_without_a_number_is_refused(tmp_path):
    written(tmp_path / "trace.json", "t", [("x", 0.0, 9.0, ""), ("y", 1.0, 2.0, "a")] * 2)
    run = WatchedRun(tmp_path, "run")
    window = {"run": ["run"], "from": ["1.5"], "to": ["1.5"]}
    assert ANSWERS["/api/spans"]({"run": run}, window)["window"] == [1.5, 1.5]
    with pytest.raises(ValueError, match="from is no number"):
        ANSWERS["/api/spans"]({"run": run}, window | {"from": ["nan"]})


def test_a_run_reads_its_spans_again_when_they_change(tmp_path):
    run = WatchedRun(tmp_path, "run")
    assert run.spans().lanes == ()
    before = run.stamp()
    written(tmp_path / "trace.json", "trainer 0", [("learn", 0.0, 1.0, "")])
    assert run.stamp() != before and len(run.spans().lanes) == 1
    assert run.spans() is run.spans()


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.integers(0, 3)), max_size=10),
    st.sampled_from([0.5, 1.0, 4.0, 25.0]),
)
def test_thinning_covers_the_same_time_and_loses_no_span(given_spans, column_s):
    spans = sorted(given_spans)
    starts = np.array([s for s, _, _ in spans], np.float64)
    ends = np.array([s + length for s, length, _ in spans], np.float64)
    shown_spans = thinned(starts, ends, np.array([k for *_, k in spans], np.int64), column_s)
    assert sum(count for *_, count in shown_spans) == len(spans)
    assert all(a[1] <= b[0] for a, b in pairwise(shown_spans)), "in order, apart"
    for second in np.arange(0.25, 70.0, 0.5):
        covered = bool(((starts < second) & (ends > second)).any())
        shown = [d for d in shown_spans if d[0] < second < d[1]]
        assert not covered or shown, "nothing that was busy is drawn as idle"
        gap = shown and not covered
        assert not gap or shown[0][1] - shown[0][0] < 2 * column_s + max(ends - starts)
    for start, end, kind, _ in shown_spans:
        held = [(length, k) for s, length, k in spans if s >= start and s + length <= end]
        assert (max(held)[0], kind) in held, "it has the kind of the longest"


def test_a_thread_is_one_lane_whichever_thread_a_second_file_names_first(tmp_path):
    numbers = iter(range(2))
    first, second = (ThreadSpans(threading.Thread(name=n), next(numbers), 9) for n in "ab")
    file = TraceFile(tmp_path / "trace.json", "p", most_spans=1)
    file.add([(first, [RecordedSpan("x", 0.0, 1.0, "", {})])])
    file.add([(second, [RecordedSpan("x", 0.0, 1.0, "", {})])])
    file.add([(second, [RecordedSpan("x", 1.0, 2.0, "", {})])])
    found = read_spans(tmp_path)
    assert [(lane.name, len(lane.starts)) for lane in found.lanes] == [("b", 2)]
    assert found.dropped == 1
