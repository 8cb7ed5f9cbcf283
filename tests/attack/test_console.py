"""A log that cannot be written, a terminal that closes, foreign lines in a run's files: a run ends
for none of them."""

import faulthandler
import io
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from jaxrl_async import audit
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.guarded_stream import GuardedStream, guarded_output
from jaxrl_async.metrics.json_logs import logs_as
from jaxrl_async.metrics.recorder import Recorder, read_lines, set_aside
from jaxrl_async.run.shown_answers import before_and_after
from jaxrl_async.run.signals import EXIT_CODE, PREEMPTED_CODE, Stop, preempted

ROOT = Path(__file__).parents[2]


class Broken(io.TextIOBase):
    """A stream whose disk is full, whose reader has gone, or that somebody has closed."""

    def __init__(self, error, *, after=0, tty=False):
        self.error, self.left, self.tty, self.tried = error, after, tty, 0

    def write(self, text):
        self.tried += 1
        if self.left <= 0:
            raise self.error
        self.left -= 1
        return len(text)

    def flush(self):
        if self.left <= 0:
            raise self.error

    def isatty(self):
        return self.tty


ERRORS = [
    BrokenPipeError(32, "Broken pipe"),
    OSError(28, "No space left on device"),
    OSError(5, "Input/output error"),
    ValueError("I/O operation on closed file."),
]


@pytest.mark.parametrize("error", ERRORS, ids=str)
@pytest.mark.parametrize("live", [False, True])
def test_the_console_says_once_that_it_cannot_be_written(error, live, caplog):
    stream, seen = Broken(error, after=1, tty=live), []
    clock = iter(range(0, 10_000, 100)).__next__
    console = Console(
        9, stream=stream, live=live, clock=clock, on_step=lambda step, _: seen.append(step)
    )
    with caplog.at_level(logging.WARNING), console:
        console.phase("training")
        for step in range(1, 10):
            console.step(step, {"reward/mean": 0.5})
        tried = stream.tried
        console.summary(["the end", "really"])
    assert seen == list(range(1, 10))  # whoever follows the run still does
    assert caplog.text.count("the console can no longer be written") == 1
    assert "the run continues" in caplog.text and stream.tried <= tried


def test_what_the_encoding_does_not_hold_is_written_as_escapes():
    below = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream = GuardedStream(below, "stdout")
    print("reward \u2581\u2582 and \ud83d", file=stream, flush=True)
    assert below.buffer.getvalue() == b"reward \\u2581\\u2582 and \\ud83d\n"
    assert not stream.broken


def test_a_guarded_stream_has_what_its_stream_has(monkeypatch, tmp_path):
    """A user's file may ask for what any stdout has; the right values are the stream's own."""
    with (tmp_path / "out").open("w", encoding="ascii", errors="replace") as below:
        monkeypatch.setattr(sys, "stdout", below)
        with guarded_output():
            for name in ("name", "mode", "encoding", "errors", "newlines", "line_buffering"):
                assert getattr(sys.stdout, name) == getattr(below, name), name
            for name in ("fileno", "isatty", "writable", "readable"):
                assert getattr(sys.stdout, name)() == getattr(below, name)(), name
            assert sys.stdout.buffer is below.buffer and not sys.stdout.closed
            sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)
            assert (below.encoding, below.line_buffering) == ("utf-8", True)
            print("reward \u2581")
            subprocess.run([sys.executable, "-c", "print('child')"], stdout=sys.stdout, check=True)
            detached = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-16-le")
            detached.write("x")
            detached.flush()
            print("still the run's")
            assert not hasattr(sys.stdout, "no_such_thing")
    text = "reward \u2581\nchild\n".encode() + b"x\0still the run's\n"
    assert (tmp_path / "out").read_bytes() == text


@pytest.mark.parametrize("kind", ["none", "notebook"])
def test_a_stream_without_more_than_text_is_guarded(kind, monkeypatch):
    """A process without stdout takes any question; a notebook's stream has no bytes below."""
    monkeypatch.setattr(sys, "stdout", None if kind == "none" else io.StringIO())
    with guarded_output():
        print("words", flush=True)
        with pytest.raises(io.UnsupportedOperation):
            sys.stdout.fileno()
        assert not sys.stdout.isatty() and hasattr(sys.stdout, "buffer") == (kind == "none")
        if kind == "none":
            sys.stdout.reconfigure(line_buffering=True)
            sys.stdout.buffer.write(b"bytes")


def test_libraries_that_write_to_a_terminal_write_to_a_guarded_stream(tmp_path):
    rich, tqdm = pytest.importorskip("rich.console"), pytest.importorskip("tqdm")
    with (tmp_path / "out").open("w", encoding="utf-8") as below:
        stream = GuardedStream(below, "stdout")
        rich.Console(file=stream).print("[bold]words")
        list(tqdm.tqdm(range(2), file=stream))
        stream.flush()
        with (tmp_path / "stacks").open("w") as file:
            faulthandler.dump_traceback(file=GuardedStream(file, "stacks"))
    assert "words" in (tmp_path / "out").read_text() and "2/2" in (tmp_path / "out").read_text()
    assert "test_libraries_that_write" in (tmp_path / "stacks").read_text()


def test_a_process_without_stdout_has_a_console(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with guarded_output(), Console(3) as console:
        console.step(1, {"reward/mean": 0.5})
        print("nothing")
    assert sys.stdout is None


def test_a_log_in_json_that_cannot_be_written_is_no_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Broken(OSError(28, "No space left on device")))
    with logs_as("json"):
        print("a line", flush=True)
        logging.getLogger("jaxrl_async").warning("another")
    assert "Logging error" not in capsys.readouterr().err


# --- real processes ------------------------------------------------------------------------------

LOOPS = """
    import logging, os, sys, time
    from jaxrl_async.metrics.console import Console
    from jaxrl_async.metrics.guarded_stream import guarded_output
    from jaxrl_async.run.signals import PREEMPTED_CODE, Stop

    def main(steps):
        with guarded_output():
            logging.basicConfig(level=logging.INFO)
            clock = iter(range(0, 10**9, 100)).__next__
            with Stop(grace_s=30) as stop, Console(steps, clock=clock) as console:
                for step in range(1, steps + 1):
                    console.step(step, {"reward/mean": 0.5})
                    logging.info("made %d", step)
                    if steps > 1000:
                        time.sleep(0.02)
                    if stop:
                        break
                with open(sys.argv[1], "w") as file:
                    file.write(f"{step} {stop.reason}")
                print("the report")
            return PREEMPTED_CODE if stop.preempted else 0

    sys.exit(main(int(sys.argv[2])))
"""


def started(tmp_path, steps, **streams):
    script = tmp_path / "loops.py"
    script.write_text(textwrap.dedent(LOOPS))
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "made"), str(steps)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **streams,
    )


def test_a_reader_that_leaves_ends_no_run(tmp_path):
    process = started(tmp_path, 1000, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("step")
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 0
    process.stderr.close()
    assert (tmp_path / "made").read_text() == "1000 "
    assert errors.count("stdout can no longer be written") == 1
    assert "Traceback" not in errors and "Exception ignored" not in errors
    assert "INFO:root:made 1000" in errors


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk_for_the_log_ends_no_run(tmp_path, both):
    with open("/dev/full", "w") as full, open(tmp_path / "errors", "w+") as errors:
        process = started(tmp_path, 300, stdout=full, stderr=full if both else errors)
        assert process.wait(60) == 0
        errors.seek(0)
        told = errors.read()
    assert (tmp_path / "made").read_text() == "300 "
    assert told.count("stdout can no longer be written") == (not both)
    assert "Logging error" not in told and "Exception ignored" not in told


@pytest.mark.full
def test_a_terminal_that_closes_stops_a_run_as_sigterm_does(tmp_path):
    ours, theirs = os.openpty()
    process = started(tmp_path, 10**6, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"step" not in seen:
        seen += os.read(ours, 1000)
    os.close(ours)  # writes to the terminal fail from now on
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)  # the shell's, and the kernel's
    assert process.wait(60) == PREEMPTED_CODE == 75
    assert (tmp_path / "made").read_text().endswith(" SIGHUP")


@pytest.mark.full
def test_under_nohup_the_end_of_the_terminal_is_not_heard(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which the process inherits
    try:
        process = started(tmp_path, 10**6, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout.readline().startswith(b"step")
    process.send_signal(signal.SIGHUP)
    for _ in range(20):
        assert process.stdout.readline().startswith(b"step")
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    process.stdout.close()
    assert process.wait(60) == PREEMPTED_CODE
    assert (tmp_path / "made").read_text().endswith(" SIGTERM")


# --- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "ended", "reason"),
    [
        ("HUP HUP HUP", 0, "SIGHUP"),
        ("TERM HUP HUP", 0, "SIGTERM"),
        ("HUP TERM", 0, "SIGHUP"),
        ("HUP TERM INT", 1, "SIGHUP"),
        ("INT HUP TERM", 1, "SIGINT"),
        ("INT INT", 1, "SIGINT"),
    ],
)
def test_sighup_is_never_the_second_signal(numbers, ended, reason):
    codes = []
    with Stop(end_process=codes.append) as stop:
        for name in numbers.split():
            signal.raise_signal(signal.Signals[f"SIG{name}"])
    assert (codes, stop.reason) == ([EXIT_CODE] * ended, reason)
    assert stop.preempted == (reason != "SIGINT")


def test_what_was_saved_after_sighup_is_said_so():
    with Stop() as stop:
        signal.raise_signal(signal.SIGHUP)
    assert str(preempted(stop, "version 3")).startswith("SIGHUP: version 3 was saved")


def test_a_signal_is_heard_where_stderr_cannot_be_written(monkeypatch):
    def fails(descriptor, data):
        raise BrokenPipeError(32, "Broken pipe")

    with Stop() as stop:
        monkeypatch.setattr(os, "write", fails)
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.undo()
    assert stop.reason == "SIGTERM"


def test_signals_of_before_come_back():
    before = signal.getsignal(signal.SIGHUP)
    with Stop():
        assert signal.getsignal(signal.SIGHUP) != before
    assert signal.getsignal(signal.SIGHUP) == before
    assert threading.current_thread() is threading.main_thread()


# --- foreign lines -------------------------------------------------------------------------------

FOREIGN = [
    b'{"step": "x"}',
    b'{"step": null}',
    b'{"step": true}',
    b'{"step": -1}',
    b'{"step": 1.5}',
    b'{"step": [1]}',
    b"[]",
    b"null",
    b'"step"',
    b"{}",
    b"not JSON",
    b"\xff\xfe",
    b"[" * 100_000,
    b"\0" * 50,
]


def test_a_resumed_run_moves_foreign_lines_aside_and_names_them(tmp_path, caplog):
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = [b'{"step": 1, "train/loss": 0.5}', *FOREIGN, b'{"step": 2, "train/loss": 0.25}']
        (tmp_path / name).write_bytes(b"\n".join([*lines, b'{"step": 3}']) + b"\n" + b'{"st')
    with caplog.at_level(logging.WARNING):
        recorder = Recorder(tmp_path, tensorboard=False, resume_step=2)
    recorder.log(3, {"train/loss": 0.125})
    recorder.close()
    metrics = read_lines(tmp_path / "metrics.jsonl")
    assert metrics == [{"step": n, "train/loss": 2.0**-n} for n in (1, 2, 3)]
    aside = (tmp_path / "metrics.superseded.jsonl").read_bytes()
    assert all(line in aside for line in FOREIGN) and b'{"step": 3}' in aside
    assert f"{len(FOREIGN)} lines were not written by a run (line 2, 3, 4, 5, 6 and" in caplog.text


def test_foreign_lines_of_a_ledger_count_for_none_of_its_own(tmp_path, caplog):
    path = tmp_path / "ledger.jsonl"
    own = [json.dumps({"fate": "admitted", "group": n, "version": 0}).encode() for n in range(4)]
    path.write_bytes(b"\n".join([own[0], b'{"group": 1}', own[1], b"x", own[2], own[3]]) + b"\n")
    set_aside(path, lambda number, _: number < 3)
    assert path.read_bytes() == b"\n".join(own[:3]) + b"\n"
    assert "line 2, 4" in caplog.text


def test_an_audit_skips_foreign_lines_and_names_them(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(
        "staleness: {max_staleness: 1}\nalgorithm: {groups_per_step: 1}\nbuffer: {reuse: 1}\n"
    )
    facts = [
        {"fate": "admitted", "group": 0, "version": 0},
        {"fate": "trained", "group": 0, "version": 0, "oldest": 0},
    ]
    ledger = b"".join(json.dumps(line).encode() + b"\n" for line in facts)
    (tmp_path / "ledger.jsonl").write_bytes(b"\n".join(FOREIGN) + b"\n" + ledger)
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 0}\n' + b"\n".join(FOREIGN) + b'\n{"step": 1}\n'
    )
    assert audit.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "metrics.jsonl: line 2, 3, 4, 5, 6 and 9 more is torn, or not written by a run" in told
    assert "ledger.jsonl: line 1, 2, 3, 4, 5 and 9 more" in told
    assert "clean: every group has one fate" in told
    # what looks like the ledger's, and has no facts, is a problem with its line
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"fate": "trained", "group": {}}\n{"fate": "resumed"}\n{"fate": "flies"}\n')
    assert audit.main([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "line 3: trained has no facts that are read here" in told
    assert "line 4: resumed has no facts" in told and "Traceback" not in told


def test_answers_of_evaluations_are_shown_without_foreign_lines(tmp_path, caplog):
    answer = {"index": 0, "seat": "", "prompt": "1+1", "reference": "2", "reward": 0.0}
    lines = [
        json.dumps({**answer, "completion": "3", "version": 0}).encode(),
        *FOREIGN,
        b'{"version": 9}',
        json.dumps({**answer, "completion": "2", "version": 4}).encode(),
    ]
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n")
    shown = "\n".join(before_and_after(file))
    assert "step 0     reward 0.0   3" in shown and "step 4     reward 0.0   2" in shown
    assert "line 2 is not an answer of an evaluation" in caplog.text
