"""The recorder of spans, by itself."""

import json
import threading
import time

from jaxrl_async.metrics import spans
from jaxrl_async.metrics.spans import (
    RecordedSpan,
    SpanRecorder,
    add_span,
    in_lanes,
    recorded_spans,
    span,
    write_trace,
)


def at(start_s: float, end_s: float, lanes: str = "") -> RecordedSpan:
    return RecordedSpan("x", start_s, end_s, lanes, {})


def events_of(path) -> list[dict]:
    return json.loads(path.read_text("utf-8"))["traceEvents"]


def test_what_overlaps_is_dealt_to_as_few_lanes_as_hold_it():
    one, two, three, four = at(0, 4), at(1, 2), at(2, 3), at(3.5, 5)
    assert in_lanes([four, three, two, one]) == [[one], [two, three, four]]
    assert in_lanes([at(0, 1), at(1, 2)]) == [[at(0, 1), at(1, 2)]]


def test_spans_of_threads_are_tracks_of_their_own_and_nest(tmp_path):
    def work():
        with span("outer", number=1), span("inner"):
            pass

    with recorded_spans(tmp_path / "trace.json", "test"):
        threads = [threading.Thread(target=work, name="same name") for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with span("wait", "lane"):
            pass
    events = events_of(tmp_path / "trace.json")
    named = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert sorted(named.values()) == ["lane 1", "same name", "same name", "test"]
    for tid, name in named.items():
        if name == "same name":
            outer, inner = (e for e in events if e["ph"] == "X" and e["tid"] == tid)
            assert (outer["name"], inner["name"]) == ("outer", "inner")
            assert outer["args"] == {"number": 1}
            assert outer["ts"] <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01


def test_nothing_is_kept_while_nobody_asked(tmp_path):
    with recorded_spans(None, "test"), span("x"):
        add_span("y", 0.0, 1.0)
    assert spans._recorder is None and not list(tmp_path.iterdir())
    with recorded_spans(tmp_path / "refused" / "trace.json", "test"), span("x"):
        pass
    assert not list(tmp_path.iterdir()), "the run's folder was never made"


def test_the_newest_spans_are_kept_and_what_is_dropped_is_told(tmp_path, caplog, monkeypatch):
    recorder = SpanRecorder(capacity=3)
    for number in range(10):
        recorder.add(at(number, number + 1))
    ((_, kept),) = recorder.tracks()
    assert [s.start_s for s in kept] == [7, 8, 9] and recorder.dropped == 7
    write_trace(recorder, tmp_path / "trace.json", "test")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["dropped"] == 7
    monkeypatch.setattr(spans.SpanRecorder.__init__, "__defaults__", (3,))
    with recorded_spans(tmp_path / "few.json", "test"):
        for _ in range(5):
            add_span("x", 0.0, 1.0)
    assert "few.json: no room for the oldest 2 spans" in caplog.text


def test_what_is_recorded_so_far_is_written_now_and_then_and_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "WRITE_EVERY_S", 0.02)
    path = tmp_path / "trace.json"
    spans.write_spans()
    with recorded_spans(path, "test"):
        add_span("early", 0.0, 1.0)
        until = time.monotonic() + 60
        while not (path.exists() and "early" in path.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        assert "early" in path.read_text()
        monkeypatch.setattr(spans, "WRITE_EVERY_S", 1000.0)
        add_span("late", 1.0, 2.0)
        spans.write_spans()
        assert "late" in path.read_text()
    assert [e["name"] for e in events_of(path) if e["ph"] == "X"] == ["early", "late"]


def test_times_are_microseconds(tmp_path):
    recorder = SpanRecorder()
    recorder.add(at(2.0, 2.5))
    write_trace(recorder, tmp_path / "trace.json", "test")
    (one,) = (e for e in events_of(tmp_path / "trace.json") if e["ph"] == "X")
    assert (one["ts"], one["dur"]) == (2_000_000, 500_000)
