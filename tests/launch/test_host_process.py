"""A command on one host: how it starts, ends, is signalled to end, and ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_async.errors import ConfigError
from jaxrl_async.launch.hardware import parse_hardware, parse_range
from jaxrl_async.launch.host_process import TAIL_BYTES, HostProcess
from jaxrl_async.launch.supervisor import HostTask

STUBBORN = "import signal, time; signal.signal(15, lambda *_: None);open('up', 'w'); time.sleep(60)"
POLITE = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75));"
    "open('up', 'w'); time.sleep(60)"
)


def task(code, *words, config="", **env):
    return HostTask(words=("-c", code, *words), env=env, config=config)


def until(condition, timeout_s=30):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def host(tmp_path):
    one = HostProcess(str(tmp_path))
    yield one
    one.end(0.0)


def test_a_command_gets_its_words_variables_and_configuration(host, tmp_path):
    code = "import os, sys; open('out', 'w').write(os.environ['A'] + open(sys.argv[1]).read())"
    host.start(task(code, "{config}", config=": text", A="a"))
    until(lambda: host.code() is not None)
    assert host.code() == 0 and (tmp_path / "out").read_text() == "a: text"
    assert host.tail("out") == b"a: text" and host.tail("nothing") == b""


def test_of_a_long_file_the_end_is_read(host, tmp_path):
    (tmp_path / "long").write_bytes(b"first\n" + b"x" * TAIL_BYTES + b"\nlast\n")
    assert len(host.tail("long")) == TAIL_BYTES and host.tail("long").endswith(b"x\nlast\n")


@pytest.mark.full
@pytest.mark.parametrize(("code", "expected"), [(POLITE, 75), (STUBBORN, 137)])
def test_an_end_is_asked_for_before_it_is_forced(host, tmp_path, code, expected):
    host.start(task(code))
    until((tmp_path / "up").exists)
    host.end(0.5 if code is STUBBORN else 30)
    assert host.code() == expected


def test_a_new_start_ends_what_still_runs(host, tmp_path):
    first = host.start(task(STUBBORN))
    until((tmp_path / "up").exists)
    host.start(task("import time; time.sleep(60)"))
    assert host.code() is None
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_command_ends_with_its_parent_even_if_that_is_killed_and_blocked_signals(tmp_path):
    child = f"{sys.executable} -m jaxrl_async.launch.die_with_parent"
    code = (
        "import os, signal, subprocess, sys, time;"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15]);"
        f"words = [*{child.split()!r}, str(os.getpid()), sys.executable, '-c', sys.argv[1]];"
        "p = subprocess.Popen(words);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    leaves = POLITE.replace("sys.exit(75)", "(open('left', 'w'), sys.exit(75))")
    parent = subprocess.Popen(
        [sys.executable, "-c", code, leaves], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    until((tmp_path / "up").exists)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until((tmp_path / "left").exists)
    status = Path(f"/proc/{pid}/status")
    until(lambda: not status.exists() or "zombie" in status.read_text())


def test_a_command_whose_parent_is_gone_is_not_started(tmp_path):
    words = [
        sys.executable,
        "-m",
        "jaxrl_async.launch.die_with_parent",
        "1",
        sys.executable,
        "-c",
        "1",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the parent 1 is gone" in done.stderr


def test_a_signal_reaches_the_command(host, tmp_path):
    host.send(signal.SIGTERM)  # nothing runs: nothing happens
    host.start(task(POLITE))
    until((tmp_path / "up").exists)
    host.send(signal.SIGTERM)
    until(lambda: host.code() == 75)


@pytest.mark.parametrize(
    ("text", "hosts", "per_host", "devices"),
    [
        ("cpu:2", 1, 2, None),
        ("gpu:8", 1, 8, 8),
        ("gpu:8x2", 2, 8, 16),
        ("tpu:v6e:4x4", 4, 4, 16),
        ("tpu:v5e:2x4", 1, 8, 8),
        ("tpu:tpu7x:2x2x2", 2, 4, 16),
    ],
)
def test_hardware_says_how_many_hosts_and_devices(text, hosts, per_host, devices):
    found = parse_hardware(text)
    assert (found.hosts, found.per_host, found.devices) == (hosts, per_host, devices)
    assert str(found) == text


@pytest.mark.parametrize(
    "text", ["", "cpu", "gpu:0", "gpu:8x", "gpu:8x2x2", "tpu:v6e:4x5", "tpu:v9:4x4", "npu:8", "tpu"]
)
def test_unknown_hardware_is_refused_with_what_is_known(text):
    with pytest.raises(ConfigError, match=r"gpu:8x2.*tpu:v6e:4x4"):
        parse_hardware(text)


def test_a_range_of_samplers():
    assert parse_range("2:8") == (2, 8) and parse_range("3") == (3, 3)
    for text in ("8:2", "0:2", "a", "1:2:3", "-1", ""):
        with pytest.raises(ConfigError, match="--samplers"):
            parse_range(text)
