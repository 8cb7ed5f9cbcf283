"""The timeline: spans by thread, bounded, readable by Perfetto."""

import json
import threading

import pytest

from jaxrl_async.metrics.trace import NO_TRACE, Trace


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 0.5
        return self.now


def events(path, phase):
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == phase]


def test_a_span_has_its_start_length_and_arguments_in_microseconds(tmp_path):
    trace = Trace(tmp_path / "trace.json", clock=Clock())
    with trace.span("decode block", tokens=64, mode=None):
        pass
    trace.close()
    (span,) = events(tmp_path / "trace.json", "X")
    assert (span["name"], span["ts"], span["dur"]) == ("decode block", 5e5, 5e5)
    assert span["args"] == {"tokens": 64, "mode": "None"}


def test_each_thread_has_its_own_named_row(tmp_path):
    trace = Trace(tmp_path / "trace.json")

    def work():
        with trace.span("work"):
            pass

    thread = threading.Thread(target=work, name="sampler")
    thread.start()
    thread.join()
    with trace.span("work"):
        pass
    trace.close()
    names = {e["tid"]: e["args"]["name"] for e in events(tmp_path / "trace.json", "M")}
    rows = [names[e["tid"]] for e in events(tmp_path / "trace.json", "X")]
    assert rows == ["sampler", threading.current_thread().name]


def test_a_span_that_raises_is_still_there(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    with pytest.raises(ValueError, match="inside"), trace.span("step"):
        raise ValueError("inside")
    trace.close()
    assert [e["name"] for e in events(tmp_path / "trace.json", "X")] == ["step"]


def test_memory_is_bounded_and_the_file_says_what_was_forgotten(tmp_path):
    trace = Trace(tmp_path / "trace.json", max_events=10)
    for i in range(25):
        trace.instant(f"e{i}")
    trace.close()
    assert [e["name"] for e in events(tmp_path / "trace.json", "i")] == [f"e{i}" for i in range(15, 25)]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"forgotten_events": 15}


def test_counters_keep_their_value(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    trace.counter("groups ready", 3)
    trace.close()
    assert [e["args"] for e in events(tmp_path / "trace.json", "C")] == [{"value": 3}]


def test_after_close_nothing_is_collected_or_written_again(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    trace.close()
    (tmp_path / "trace.json").unlink()
    with trace.span("late"):
        pass
    trace.close()
    assert not (tmp_path / "trace.json").exists()


def test_without_a_path_it_does_nothing():
    with NO_TRACE.span("x"):
        NO_TRACE.instant("y")
    NO_TRACE.close()
