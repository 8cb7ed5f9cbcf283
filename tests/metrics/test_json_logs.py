"""Logs as JSON: each line of a process's output is one object with severity, message and time."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import datetime

import pytest

from jaxrl_async.metrics.json_logs import LABELS, add_labels, lines_for_people, logs_as

TINY = [
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16}",
    "data.addition.eval_size=4",
    "sampler={slots: 4, max_length: 32, max_new_tokens: 4}",
    "data.max_prompt_tokens=16",
    "algorithm={group_size: 4, groups_per_step: 2}",
    "trainer.micro_batch_tokens=128",
    "metrics={peak_flops: 1.0e+9, tensorboard: false}",
    "run.logs=json",
]


def entries(text: str) -> list[dict]:
    """Parse every line; fail on one that is not an entry."""
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        assert set(one) == {"severity", "message", "time", LABELS}
        assert datetime.fromisoformat(one["time"]).tzinfo is not None
    return found


def test_records_prints_and_tracebacks_are_entries_with_labels(capsys):
    with logs_as("json", run="r", role="trainer"):
        print("step 1/3  reward 0.5")
        print("half", end="")
        print(" and half")
        logging.getLogger("jaxrl_async.x").info("says %s", "größe\nand more")
        logging.getLogger("elsewhere").info("is not asked for")
        add_labels(process="0")
        try:
            raise ValueError("of a reward")
        except ValueError:
            logging.getLogger("elsewhere").exception("failed")
        print("the end", end="")
    print("text again")
    output = capsys.readouterr()
    *out, last = output.out.splitlines()
    assert last == "text again"
    out, err = entries("\n".join(out)), entries(output.err)
    assert [(e["severity"], e["message"]) for e in out] == [
        ("INFO", "step 1/3  reward 0.5"),
        ("INFO", "half and half"),
        ("INFO", "the end"),
    ]
    assert [(e["severity"], e["message"].splitlines()[0]) for e in err] == [
        ("INFO", "says größe"),
        ("ERROR", "failed"),
    ]
    assert err[1]["message"].endswith("ValueError: of a reward\n")
    assert out[0][LABELS] == {"run": "r", "role": "trainer"}
    assert err[1][LABELS] == {"run": "r", "role": "trainer", "process": "0"}
    age_s = time.time() - datetime.fromisoformat(err[0]["time"]).timestamp()
    assert 0 <= age_s < 3600, "in UTC"


def test_a_line_that_is_written_over_is_one_entry_and_bytes_go_through(capsysbinary):
    with logs_as("json", run="r"):
        for done in range(3):
            print(f"\r{done} of 2", end="", file=sys.stderr)
        print(file=sys.stderr)
        print("1 %\r", end="", file=sys.stderr)
        print("2 %\r\nthen", file=sys.stderr)
        print("1 %\r", end="", file=sys.stderr)
        print("failed", file=sys.stderr)
        sys.stdout.buffer.write(b"raw\n")
    output = capsysbinary.readouterr()
    messages = [e["message"] for e in entries(output.err.decode())]
    assert messages == ["2 of 2", "2 %", "then", "failed"]
    assert output.out == b"raw\n"


def test_text_stays_text_and_what_was_before_comes_back(capsys):
    handlers, out = logging.getLogger().handlers[:], sys.stdout
    with logs_as("text", run="r"):
        print("plain")
    with logs_as("json", run="r"), logs_as("json", run="s"):
        pass
    assert capsys.readouterr().out == "plain\n"
    assert logging.getLogger().handlers == handlers and sys.stdout is out


@contextmanager
def no_handlers():
    """Act as in a process in which nothing has set up logging, as of a command."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
        assert root.handlers == []
    finally:
        root.handlers = handlers


def people_lines(text: str) -> list[str]:
    """Return lines without their times, which must be of this moment."""
    for line in text.splitlines():
        if not line.startswith(("    ", "Traceback")):
            age = datetime.now() - datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S")
            assert -1 <= age.total_seconds() < 3600 and line[19] == " "
    return [line[20:] if line[:1] == "2" else line for line in text.splitlines()]


def test_lines_for_people_have_the_time_and_no_names_of_modules(capsys):
    with no_handlers(), lines_for_people():
        logging.getLogger("jaxrl_async.data.x").warning("%d records skipped", 3)
        logging.getLogger("jaxrl_async.data.x").info("is not shown")
        logging.getLogger("elsewhere").warning("received\n2026-01-01 00:00:00 a line\x1b[31m")
        try:
            raise ValueError("of a reward")
        except ValueError:
            logging.getLogger("jaxrl_async").exception("failed")
    lines = people_lines(capsys.readouterr().err)
    assert lines[:3] == [
        "warning: 3 records skipped",
        "warning: received",
        "    2026-01-01 00:00:00 a line [31m",
    ]
    assert lines[3] == "error: failed" and lines[-1].strip() == "ValueError: of a reward"


def test_reports_of_one_part_are_shown_where_they_are_asked_for(capsys):
    with no_handlers(), lines_for_people("jaxrl_async.evals"):
        for name in (
            "jaxrl_async.evals",
            "jaxrl_async.evals.x",
            "jaxrl_async.evalsy",
            "jaxrl_async",
        ):
            logging.getLogger(name).info("%s", name)
        with lines_for_people("jaxrl_async"):  # the outer one counts
            logging.getLogger("jaxrl_async").info("is not shown")
    assert people_lines(capsys.readouterr().err) == ["jaxrl_async.evals", "jaxrl_async.evals.x"]


def test_logging_that_was_set_up_before_is_left_alone(caplog, capsys):
    handlers = logging.getLogger().handlers[:]
    with lines_for_people("jaxrl_async"):
        logging.getLogger("jaxrl_async").warning("theirs")
        assert logging.getLogger().handlers == handlers
    assert caplog.messages == ["theirs"] and capsys.readouterr().err == ""


def test_messages_follow_a_stderr_that_is_replaced(monkeypatch, capsys):
    """As a live display does while it is shown; and JSON within them stays JSON."""
    with no_handlers(), lines_for_people():
        shown = io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", shown)
            logging.getLogger("jaxrl_async").warning("within")
        with logs_as("json"):
            logging.getLogger("jaxrl_async").warning("as JSON")
        logging.getLogger("jaxrl_async").warning("after")
    as_json, after = capsys.readouterr().err.splitlines()
    assert shown.getvalue().endswith(" warning: within\n")
    assert json.loads(as_json)["message"] == "as JSON" and after.endswith("warning: after")


@pytest.mark.exhaustive
@pytest.mark.full
def test_every_line_of_a_run_and_of_its_sampler_process_is_an_entry(tmp_path):
    """Also those about signals, which are written past Python's streams."""
    (tmp_path / "c.yaml").write_text("")
    words = [*TINY, f"run.dir={tmp_path / 'runs'}", "run.steps=2", "mesh.samplers_in=processes"]
    command = [sys.executable, "-m", "jaxrl_async.train", str(tmp_path / "c.yaml"), *words]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        ended = subprocess.run(command, stdout=out, stderr=err, timeout=500)
    output = (tmp_path / "err").read_text("utf-8")
    assert ended.returncode == 0, output
    found = entries((tmp_path / "out").read_text("utf-8")) + entries(output)
    assert any("report.html" in one["message"] for one in found)
    assert {one[LABELS]["run"] for one in found} == {"run"}
    (log,) = (tmp_path / "runs" / "run" / "samplers").glob("*.log")
    of_sampler = entries(log.read_text("utf-8"))
    assert {one[LABELS]["role"] for one in of_sampler} == {"sampler"}
    assert of_sampler[-1][LABELS] == {"role": "sampler", "sampler": "sampler-0", "run": "run"}


SIGNALLED = """
import os, signal, sys
from jaxrl_async.metrics.json_logs import logs_as
from jaxrl_async.run.signals import Stop
with logs_as("json", run="r"), Stop():
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_what_a_signal_says_is_an_entry():
    command = [sys.executable, "-c", SIGNALLED]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    (one,) = entries(output.stderr)
    assert one["message"].startswith(f"{signal.SIGTERM.name}: stopping after this step")
