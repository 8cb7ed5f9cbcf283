"""A part fails, or a signal comes, while an update is inside a program that nothing interrupts: the
process ends with one message and its exit code, and is never aborted."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import CONFIGS, many_digits
from test_faults import TINY

from jaxrl_async import stuck_threads
from jaxrl_async.run import threads

ROOT = Path(__file__).parents[2]
LASTS_S = 150.0
"""How long the update lasts that the processes do not wait for."""
PROGRAM = """
import sys
from jaxrl_async.errors import WeightsError
from jaxrl_async.stuck_threads import at_exit_end_with
from jaxrl_async.run import threads
from jaxrl_async.testing import fault_injection as faults
from jaxrl_async.testing.fault_injection import Hits, injected

class During(Hits):
    def strikes(self):
        return bool(update.at) and super().strikes()

class Told(Hits):
    def strikes(self):
        hit = super().strikes()
        if hit:
            print("inside", flush=True)
        return hit

threads.JOIN_S = threads.SILENT_S = 0.5
threads.UPDATES = 0.0
update, wrong = Told(after=1), WeightsError("injected: the weights are wrong")
lasts = faults.update_lasts(update, {seconds})
with injected(lasts, *([faults.sampler_raises(During(times=99), wrong)] if {fails} else [])):
    {act}
"""
COMMAND = """
    from jaxrl_async.train_command import main
    sys.exit(at_exit_end_with(main(sys.argv[1:])))
"""
CAUGHT = """
    from jaxrl_async.config.load import load
    from jaxrl_async.run.loop import train
    try:
        train(load(sys.argv[1], sys.argv[2:]))
    except WeightsError as error:
        print("caught", error)
"""
RAISED = CAUGHT.replace("print(", "raise #")
ABORTS = ("terminate called", "Fatal Python error", "Aborted", "core dumped")


def started(
    folder: Path, act: str, *, seconds: float = LASTS_S, fails: bool = True
) -> "subprocess.Popen[str]":
    """Start a tiny run whose second update lasts; the sampler fails meanwhile."""
    overrides = (*TINY, f"run.dir={folder}", "checkpoint.grace_s=2", many_digits(folder))
    overrides += ("eval.every=0", "staleness.max_staleness=8")  # the sampler always has work
    program = PROGRAM.format(seconds=seconds, fails=fails, act=act.strip())
    return subprocess.Popen(
        [sys.executable, "-c", program, str(CONFIGS / "addition.yaml"), *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for a process, which ends while the long update lasts; return its exit code and what it
    has written."""
    try:
        out, err = process.communicate(timeout=LASTS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it did not end: {process.communicate()}") from None
    assert not any(word in out + err for word in ABORTS), err
    return process.returncode, out, err


@pytest.mark.full
def test_a_command_ends_at_once_with_one_message_while_an_update_continues(tmp_path: Path) -> None:
    code, _, err = ended(started(tmp_path, COMMAND))
    assert code == 1
    assert err.count("injected") == 1 and "Traceback" not in err, err
    assert err.rstrip().splitlines()[-1] == "WeightsError: injected: the weights are wrong"
    assert "waiting at most 0 s for the trainer (learning)" in err


@pytest.mark.full
def test_train_raises_and_the_program_exits_as_it_would_once_the_update_is_done(
    tmp_path: Path,
) -> None:
    code, out, err = ended(started(tmp_path, CAUGHT, seconds=8))
    assert code == 0 and "caught injected: the weights are wrong" in out
    assert err.count("injected") == 0 and "Traceback" not in err, err


@pytest.mark.full
@pytest.mark.exhaustive
def test_what_train_raises_is_shown_once(tmp_path: Path) -> None:
    code, _, err = ended(started(tmp_path, RAISED, seconds=8))
    assert (code, err.count("Traceback")) == (1, 1), err


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "times", "code"),
    [
        pytest.param(signal.SIGINT, 2, 130, marks=pytest.mark.exhaustive),
        (signal.SIGTERM, 2, 130),
        pytest.param(signal.SIGTERM, 1, 75, marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_during_a_long_update_ends_the_process_with_its_code(
    tmp_path: Path, number: signal.Signals, times: int, code: int
) -> None:
    process = started(tmp_path, COMMAND, fails=False)
    assert process.stdout is not None
    assert any(line == "inside\n" for line in process.stdout)
    time.sleep(1.0)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.5)
    found, _, err = ended(process)
    assert found == code and "Traceback" not in err, err


def test_only_a_thread_that_is_inside_something_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(stuck_threads, "_registered", {})
    over, spins = threading.Event(), list[bool]()

    def spin() -> None:
        while not spins:
            pass

    waiting = threading.Thread(target=over.wait, daemon=True)
    inside = threading.Thread(target=spin, daemon=True)
    for thread in (waiting, inside):
        thread.start()
        stuck_threads.register_stuck(thread)
    assert stuck_threads.threads_in_native_code() == [inside]
    threading.Timer(0.3, lambda: spins.append(True)).start()
    stuck_threads._end()
    assert not inside.is_alive() and waiting.is_alive()
    over.set()


@pytest.mark.parametrize(("code", "ends_with"), [(75, 75), (None, stuck_threads.STUCK_CODE)])
def test_a_thread_that_stays_inside_does_not_keep_the_process(monkeypatch, code, ends_with) -> None:
    over, ends = list[bool](), []

    def spin() -> None:
        while not over:
            pass

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    monkeypatch.setattr(stuck_threads, "_registered", {thread: 0.2})
    monkeypatch.setattr(stuck_threads, "_code", code)
    monkeypatch.setattr(stuck_threads, "_end_process", ends.append)
    stuck_threads._end()
    over.append(True)
    assert ends == [ends_with]


def test_a_thread_whose_join_is_interrupted_is_left_behind(monkeypatch) -> None:
    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(stuck_threads, "_registered", {})
    over = threading.Event()
    parts = SimpleNamespace(
        trainer=SimpleNamespace(longest_update_s=1.0, clock=SimpleNamespace(doing="learning"))
    )
    trainer, other = (Interrupted(target=over.wait, daemon=True) for _ in range(2))
    for thread, join in (
        (trainer, lambda t: threads._join_trainer(t, parts)),
        (other, threads._join),
    ):
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            join(thread)
    assert set(stuck_threads._registered) == {trainer, other}
    over.set()
    for thread in (trainer, other):
        threading.Thread.join(thread)
    third = threading.Thread()
    stuck_threads.register_stuck(third)
    assert set(stuck_threads._registered) == {third}, "those that have ended are forgotten"


def test_ctrl_c_while_a_program_waits_at_its_exit_ends_it_without_a_traceback() -> None:
    program = """
import signal, threading, time
from jaxrl_async.stuck_threads import register_stuck
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits none
thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
thread.start()
register_stuck(thread)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert any("waiting at most" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LASTS_S)
    assert (process.returncode, err) == (130, "")
