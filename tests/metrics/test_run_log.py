"""run.log and starts.jsonl: what a run says, and how it was started."""

import io
import json
import logging
import os
import socket
import sys

import pytest

from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics import recorder
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.json_logs import logs_as
from jaxrl_async.metrics.recorder import LOG_FILE, RunLog, record_start


def lines_of(folder):
    """Return level and text of each line of the log, after its time."""
    found = []
    for line in (folder / LOG_FILE).read_text("utf-8").splitlines():
        day, time, level, text = line.split(maxsplit=3)
        assert len(day) == 10 and time.endswith("Z")
        found.append((level, text))
    return found


def test_lines_from_before_the_folder_are_kept_and_follow_in_order(tmp_path):
    with logs_as("text"), RunLog() as kept:
        kept.line("[0:00] preparing")
        logging.getLogger("jaxrl_async.data").warning("3 records skipped")
        assert list(tmp_path.iterdir()) == []
        kept.open(tmp_path)
        kept.line("step 1/3")
        logging.getLogger("elsewhere").warning("of another package")
        logging.getLogger("jaxrl_async.data").info("a note")
    logging.getLogger("jaxrl_async.data").warning("after the run")
    assert lines_of(tmp_path) == [
        ("INFO", "[0:00] preparing"),
        ("WARNING", "3 records skipped"),
        ("INFO", "step 1/3"),
        ("INFO", "a note"),
    ]


class Listed(logging.Handler):
    """Lists what a program's own handler gets."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO, logging.ERROR])
def test_notes_are_kept_and_the_programs_handlers_get_what_they_got_before(
    tmp_path, monkeypatch, level
):
    root, own = logging.getLogger(), logging.getLogger("jaxrl_async")
    handler, part = Listed(), logging.getLogger("jaxrl_async.run.builders")
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.setattr(root, "level", level)
    own.manager._clear_cache()
    with RunLog() as kept:
        kept.open(tmp_path)
        part.debug("of the programmers")
        part.info("answers are rewarded by exact")
        part.warning("3 records skipped")
        with RunLog():  # of another run in this process
            part.error("no room")
    part.warning("after the run")
    part.info("after the run")
    assert [text for _, text in lines_of(tmp_path)] == [
        "answers are rewarded by exact",
        "3 records skipped",
        "no room",
    ]
    at = {logging.INFO: 0, logging.WARNING: 1, logging.ERROR: 2}[level]
    after = ["after the run"] * (2 - at)
    sent = ["answers are rewarded by exact", "3 records skipped", "no room"]
    assert handler.texts == [*sent[at:], *after]
    assert own.level == logging.NOTSET and own.propagate


def test_a_resumed_run_appends(tmp_path):
    for part in ("first", "second"):
        with RunLog() as kept:
            kept.open(tmp_path)
            kept.line(part)
    assert [text for _, text in lines_of(tmp_path)] == ["first", "second"]


def test_an_error_that_ends_a_run_is_its_last_line(tmp_path):
    with pytest.raises(ConfigError), RunLog() as kept:
        kept.open(tmp_path)
        raise ConfigError("no such file")
    assert lines_of(tmp_path) == [("ERROR", "ended by ConfigError: no such file")]
    with pytest.raises(ZeroDivisionError), RunLog() as kept:
        kept.open(tmp_path)
        1 / 0  # noqa: B018
    text = (tmp_path / LOG_FILE).read_text()
    assert "ended by ZeroDivisionError: division by zero\n    Traceback" in text
    assert "1 / 0" in text


def test_a_text_of_a_policy_imitates_no_line(tmp_path):
    with RunLog() as kept:
        kept.open(tmp_path)
        kept.line("reply:\n2026-01-01 00:00:00Z ERROR   all is lost\x1b[2J")
    first, second = (tmp_path / LOG_FILE).read_text().splitlines()
    assert first.endswith("reply:") and second.startswith("    2026") and "\x1b" not in second


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO])
def test_warnings_are_shown_as_without_the_file(tmp_path, capsys, monkeypatch, level):
    """With no other handler they go to logging's last resort once, and else to that handler."""
    root, own = logging.getLogger(), logging.getLogger("jaxrl_async.x")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("jaxrl_async"), "level", level)  # of the program
    own.manager._clear_cache()
    with RunLog() as kept:
        kept.open(tmp_path)
        own.warning("plain")
        own.info("shown nowhere")
        stream = io.StringIO()
        root.addHandler(logging.StreamHandler(stream))
        own.warning("handled")
    assert capsys.readouterr().err == "plain\n" and stream.getvalue() == "handled\n"
    assert lines_of(tmp_path) == [
        ("WARNING", "plain"),
        ("INFO", "shown nowhere"),
        ("WARNING", "handled"),
    ]


def test_a_programs_handler_of_this_package_alone_is_enough(tmp_path, capsys, monkeypatch):
    """Where the root has no handler, logging's last resort does not repeat what another showed."""
    handler = Listed()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("jaxrl_async"), "handlers", [handler])
    with RunLog() as kept:
        kept.open(tmp_path)
        logging.getLogger("jaxrl_async.x").warning("once")
    assert handler.texts == ["once"] and capsys.readouterr().err == ""
    assert lines_of(tmp_path) == [("WARNING", "once")]


def test_a_file_that_cannot_be_written_is_reported_once_and_ends_nothing(tmp_path, caplog):
    with RunLog() as kept:
        kept.line("early")
        kept.open(tmp_path / "gone")
        kept.line("later")
    assert [r.message for r in caplog.records if "run.log" in r.message] and len(
        caplog.records
    ) == 1


def test_the_first_of_too_many_early_lines_are_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_HELD", 2)
    with RunLog() as kept:
        for number in range(5):
            kept.line(f"line {number}")
        kept.open(tmp_path)
    first, *rest = (tmp_path / LOG_FILE).read_text().splitlines()
    assert first == "(3 earlier lines were dropped)"
    assert [line.split()[-1] for line in rest] == ["3", "4"]


@pytest.mark.parametrize("live", [False, True])
def test_the_console_keeps_the_same_lines_on_a_live_display(live):
    now, kept, stream = [0.0], [], io.StringIO()
    with Console(
        4, stream=stream, live=live, clock=lambda: now[0], keep=kept.append, name="few"
    ) as console:
        console.phase("preparing")
        console.counted("warm start", 2, 8, "loss 1.5")
        for step in range(1, 5):
            now[0] += 10.0
            console.step(step, {"reward/mean": step / 4})
        console.summary(["done", ""])
    assert [line.split("  ")[1] for line in kept if "step" in line] == [
        f"step {step}/4" for step in range(1, 5)
    ]
    assert kept[:2] == ["few  [0:00] preparing", "few  [0:00] warm start: 2/8, loss 1.5"]
    assert kept[-1] == "few  done"
    if not live:
        assert stream.getvalue().splitlines() == kept


def test_a_start_says_when_where_and_how(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-m", "jaxrl_async.train", "a b"])
    record_start(tmp_path)
    record_start(tmp_path)
    first, second = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert first["command"] == "python3 -m jaxrl_async.train 'a b'"
    assert first["host"] == socket.gethostname() and first["process"] == os.getpid()
    assert first["folder"] == os.getcwd() and first["started"] <= second["started"]
