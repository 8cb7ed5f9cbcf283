"""Ctrl-C once and twice, in this process and in a real one."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxrl_async.run.signals import EXIT_CODE, PREEMPTED_CODE, Stop

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_for_a_stop_and_is_the_reason(number, capfd):
    with Stop() as stop:
        assert not stop and stop.reason == ""
        os.kill(os.getpid(), number)
        assert stop.wait(5.0) and stop
        assert stop.reason == number.name
    assert "a second signal ends the process immediately" in capfd.readouterr().err


def test_the_second_signal_ends_the_process(capfd):
    codes = []
    with Stop(end_process=codes.append) as stop:
        signal.raise_signal(signal.SIGINT)
        assert codes == []
        signal.raise_signal(signal.SIGTERM)
        assert codes == [EXIT_CODE] == [130]
        assert stop.reason == "SIGINT"


def test_the_handlers_from_before_come_back_even_after_an_error():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="inside"), Stop():
        assert signal.getsignal(signal.SIGINT) != before[0]
        raise RuntimeError("inside")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_code_can_ask_too_and_the_first_reason_is_kept():
    stop = Stop()
    stop.request("enough")
    stop.request("more than enough")
    assert stop.is_set() and stop.reason == "enough"


def test_off_the_main_thread_it_says_that_it_gets_no_signal_and_can_still_be_requested(caplog):
    before, requested = signal.getsignal(signal.SIGINT), []

    def work():
        with Stop() as stop:
            stop.request("enough")
            requested.append(stop.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert requested == [True] and signal.getsignal(signal.SIGINT) == before
    assert "Ctrl-C, SIGTERM and SIGHUP do not stop the run" in caplog.text


KERNEL = """
import os, signal, sys, types
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: "a kernel")
from jaxrl_async.run.signals import Stop
try:
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        os.kill(os.getpid(), signal.SIGINT)
        stop.wait(5)
except KeyboardInterrupt:
    print("the cell ends, the kernel lives")
"""


def test_a_second_interrupt_in_a_notebook_ends_the_cell_and_not_the_kernel():
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "the cell ends, the kernel lives\n"), done.stderr


def test_a_process_signalled_twice_exits_with_130_even_while_busy():
    code = (
        "import os, signal, sys\n"
        "from jaxrl_async.run.signals import Stop\n"
        "with Stop() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while True: stop.wait(0.05)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert "stopping after this step" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_sigterm_is_a_preemption_and_ctrl_c_is_not():
    for number, preempted in ((signal.SIGTERM, True), (signal.SIGINT, False)):
        with Stop() as stop:
            os.kill(os.getpid(), number)
            assert stop.wait(10) and stop.preempted is preempted


def test_the_grace_period_ends_a_run_that_does_not(capfd):
    codes, late = [], threading.Event()

    def end(code):
        codes.append(code)
        late.set()

    with Stop(grace_s=0.01, end_process=end) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10) and late.wait(10)
    assert codes == [PREEMPTED_CODE]
    assert "checkpoint.grace_s" in capfd.readouterr().err


def test_a_run_that_ends_in_time_is_left_alone():
    codes = []
    with Stop(grace_s=1.0, end_process=codes.append) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)
    time.sleep(1.2)
    assert codes == []


def test_ctrl_c_before_a_run_has_begun_ends_in_one_line(tmp_path):
    """While JAX and others are imported, whose own answer would be a traceback or none at all."""
    file = tmp_path / "c.yaml"
    file.write_text(f"run: {{dir: '{tmp_path / 'runs'}'}}\n")
    program = (
        "import os, runpy, signal, sys\n"
        "import jaxrl_async.run.distributed as distributed\n"
        "distributed.join_processes = lambda c: os.kill(os.getpid(), signal.SIGINT) or c\n"
        f"sys.argv = ['train', {str(file)!r}]\n"
        "runpy.run_module('jaxrl_async.train', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 130 and not (tmp_path / "runs").exists()
    assert done.stderr == "\nSIGINT: nothing was started; ending\n"
