"""The recorder of spans, and the file that it writes."""

import functools
import json
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.metrics import spans, trace_file
from jaxrl_async.metrics.spans import add_span, recorded_spans, span
from jaxrl_async.metrics.trace_file import Lanes, RecordedSpan, SpanRecorder, TraceFile


def at(start_s: float, end_s: float, lanes: str = "", name: str = "x") -> RecordedSpan:
    return RecordedSpan(name, start_s, end_s, lanes, {})


def events_of(path) -> list[dict]:
    return json.loads(path.read_text("utf-8"))["traceEvents"]


def dropped_in(path) -> int:
    return json.loads(path.read_text("utf-8"))["otherData"]["dropped"]


def test_what_overlaps_is_dealt_to_as_few_lanes_as_hold_it():
    one, two, three, four = at(0, 4), at(1, 2), at(2, 3), at(3.5, 5)
    lanes = Lanes("a")
    assert lanes.deal([four, three, two, one]) == [("a 001", [one]), ("a 002", [two, three, four])]
    assert lanes.deal([at(3.9, 6), at(4, 5)]) == [("a 001", [at(4, 5)]), ("a 003", [at(3.9, 6)])]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.booleans()), max_size=40))
def test_no_lane_has_two_spans_at_once_however_they_come_in_parts(given_spans):
    lanes, dealt, part = Lanes("a"), dict[str, list[RecordedSpan]](), list[RecordedSpan]()
    for start, length, last_of_part in given_spans:
        part.append(at(start, start + length))
        if last_of_part:
            for name, own in lanes.deal(part):
                dealt.setdefault(name, []).extend(own)
            part = []
    for own in dealt.values():
        assert all(a.end_s <= b.start_s for a, b in pairwise(own))


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
    assert sorted(named.values()) == ["lane 001", "same name", "same name", "test"]
    for tid, name in named.items():
        if name == "same name":
            outer, inner = (e for e in events if e["ph"] == "X" and e["tid"] == tid)
            assert (outer["name"], inner["name"]) == ("outer", "inner")
            assert outer["args"] == {"number": 1}
            assert outer["ts"] <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01


def test_nothing_is_kept_while_no_one_asked(tmp_path):
    with recorded_spans(None, "test"), span("x"):
        add_span("y", 0.0, 1.0)
    assert spans._recorder is None and not list(tmp_path.iterdir())
    with recorded_spans(tmp_path / "refused" / "trace.json", "test"), span("x"):
        pass
    assert not list(tmp_path.iterdir()), "the run's folder was never made"


def test_between_two_writes_the_newest_spans_are_kept_and_what_is_dropped_is_counted(
    tmp_path, caplog, monkeypatch
):
    recorder = SpanRecorder(capacity=3)
    for number in range(10):
        recorder.add(at(number, number + 1))
    ((_, kept),) = recorder.take()
    assert [s.start_s for s in kept] == [7, 8, 9] and recorder.dropped == 7
    assert recorder.take() == [] and recorder.dropped == 7
    recorder.add(at(10, 11))
    assert recorder.dropped == 7
    monkeypatch.setattr(spans.SpanRecorder.__init__, "__defaults__", (3,))
    with recorded_spans(tmp_path / "few.json", "test"):
        for _ in range(5):
            add_span("x", 0.0, 1.0)
    assert "few.json: no room for the oldest 2 spans" in caplog.text
    assert dropped_in(tmp_path / "few.json") == 2


def test_a_thread_that_has_ended_is_forgotten_and_its_spans_are_not():
    recorder = SpanRecorder(capacity=2)
    for number in range(3):
        thread = threading.Thread(
            target=lambda: [recorder.add(at(n, n + 1)) for n in range(3)], name=f"t{number}"
        )
        thread.start()
        thread.join()
    taken = recorder.take()
    assert [(thread.name, len(own)) for thread, own in taken] == [("t0", 2), ("t1", 2), ("t2", 2)]
    assert recorder.dropped == 3 and recorder._threads == []


def test_parts_are_added_behind_what_is_there_and_only_the_newest_files_are_kept(tmp_path):
    """Seven parts of three spans in files of six: the first two are gone."""
    path, older = tmp_path / "trace.json", tmp_path / "older.trace.json"
    older.write_text("of an earlier run")
    recorder, file = SpanRecorder(), TraceFile(path, "test", most_spans=6)
    for part in range(7):
        if part == 1:
            assert not older.exists()
        for number in range(3):
            recorder.add(at(part, part + 1, lanes="lane" if number else "", name=f"{part}"))
        file.add(recorder.take(), not_taken=part)
        names = [e["name"] for e in events_of(path) if e["ph"] == "X"]
        assert names == [str(p) for p in range(part - part % 2, part + 1) for _ in range(3)]
    assert [e["name"] for e in events_of(older) if e["ph"] == "X"] == ["4"] * 3 + ["5"] * 3
    for one in (path, older):
        named = {e["tid"]: e["args"]["name"] for e in events_of(one) if e["ph"] == "M"}
        assert sorted(named.values()) == ["MainThread", "lane 001", "lane 002", "test"]
        assert {e["tid"] for e in events_of(one)} == set(named)
    assert dropped_in(path) + dropped_in(older) == file.dropped(6) == 6 + 4 * 3


def test_tracks_of_threads_that_ended_are_forgotten_with_their_file(tmp_path):
    """Fifty threads of one span each, in files of four, and one thread that remains."""
    path, recorder = tmp_path / "trace.json", SpanRecorder()
    file = TraceFile(path, "test", most_spans=4)
    for part in range(50):
        work = functools.partial(recorder.add, at(part, part + 1))
        thread = threading.Thread(target=work, name=f"t{part}")
        thread.start()
        thread.join()
        recorder.add(at(part, part + 1, name="stays"))
        file.add(recorder.take())
    assert len(file._numbers) == 5  # two files of two such threads each, and this thread
    both = [e for name in ("older.trace.json", "trace.json") for e in events_of(tmp_path / name)]
    named = {(e["tid"], e["args"]["name"]) for e in both if e["name"] == "thread_name"}
    assert sorted(name for _, name in named) == ["MainThread", "t46", "t47", "t48", "t49"]
    assert len({number for number, _ in named}) == 5
    assert {e["tid"] for e in both if e["name"] == "stays"} == {
        number for number, name in named if name == "MainThread"
    }


def test_what_cannot_be_written_is_lost_and_counted_and_the_rest_stays(tmp_path):
    path, recorder = tmp_path / "trace.json", SpanRecorder()
    file = TraceFile(path, "test")
    recorder.add(at(0, 1, name="first"))
    file.add(recorder.take())
    there = path.read_bytes()
    path.unlink()
    path.mkdir()
    recorder.add(at(1, 2, name="lost"))
    with pytest.raises(OSError):
        file.add(recorder.take())
    path.rmdir()
    path.write_bytes(there + b"what was half written when the disk was full" * 9)
    recorder.add(at(2, 3, name="last"))
    file.add(recorder.take())
    assert [e["name"] for e in events_of(path) if e["ph"] == "X"] == ["first", "last"]
    assert dropped_in(path) == file.dropped(0) == 1


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
        assert all(not thread._kept for thread in spans._recorder._threads)
    assert [e["name"] for e in events_of(path) if e["ph"] == "X"] == ["early", "late"]


def test_times_are_microseconds_and_the_clocks_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "TRACE_CLOCK", lambda: 7.0)
    monkeypatch.setattr(trace_file.time, "time", lambda: 1_234_567_890.5)
    recorder = SpanRecorder()
    recorder.add(at(2.0, 2.5))
    TraceFile(tmp_path / "trace.json", "test").add(recorder.take())
    (one,) = (e for e in events_of(tmp_path / "trace.json") if e["ph"] == "X")
    assert (one["ts"], one["dur"]) == (2_000_000, 500_000)
    data = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert data["written_at"] == {"wall_clock_s": 1_234_567_890.5, "trace_clock_s": 7.0}


def test_a_file_that_is_removed_is_begun_again_and_its_spans_are_counted(tmp_path):
    path, recorder = tmp_path / "trace.json", SpanRecorder()
    file = TraceFile(path, "test", most_spans=2)
    for number in range(5):
        if number == 2:  # it is full: the next write would have renamed it
            path.unlink()
        recorder.add(at(number, number + 1, name=f"{number}"))
        file.add(recorder.take())
    older = tmp_path / "older.trace.json"
    assert [e["name"] for e in events_of(older) if e["ph"] == "X"] == ["2", "3"]
    assert [e["name"] for e in events_of(path) if e["ph"] == "X"] == ["4"]
    assert dropped_in(path) + dropped_in(older) == file.dropped(0) == 2


def test_attributes_of_a_span_may_be_anything(tmp_path):
    path, recorder = tmp_path / "trace.json", SpanRecorder()
    recorder.add(RecordedSpan("x", 0.0, 1.0, "", {"step": np.int64(3), "file": tmp_path}))
    TraceFile(path, "test").add(recorder.take())
    assert events_of(path)[-1]["args"] == {"step": "3", "file": str(tmp_path)}
