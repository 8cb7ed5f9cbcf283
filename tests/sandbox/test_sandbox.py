"""What code without trust may do in a sandbox, and what it may not."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxrl_async.errors import Away, ConfigError
from jaxrl_async.sandbox import sandbox_layout as layout
from jaxrl_async.sandbox.code_reward import PYTHON, Grade, grade
from jaxrl_async.sandbox.sandbox import Sandbox, SandboxLimits, SandboxPool
from jaxrl_async.sandbox.system_calls import ARCHITECTURES, NUMBERS, seccomp_filter

LIMITS = SandboxLimits(memory_mb=256, disk_mb=16, processes=20, timeout_s=30.0, output_kb=64)
QUICK = SandboxLimits(memory_mb=256, disk_mb=16, processes=20, timeout_s=1.0)
TEST = {"test": "def check(f):\n    assert f(2) == 4\n", "entry_point": "f"}
WORKS = "def f(x):\n    return x * x\n"


def run(box: Sandbox, code: str):
    """The outcome of a Python program."""
    return box.run([*PYTHON, code], alone=True)


def alive(word: str) -> list[int]:
    """The processes of this machine whose command line has a word."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def has_ended(word: str) -> bool:
    """Whether these processes end."""
    end = time.monotonic() + 60.0
    while alive(word) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(word)


FILLS = "f = open({!r}, 'wb')\nwhile True: f.write(b'x' * 10**6)"
ATTACKS = {
    "an endless loop": ("while True: pass", {"time"}),
    "waits for ever": ("import time; time.sleep(77701)", {"time"}),
    "deaf to signals": (
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(77702)",
        {"time"},
    ),
    "a fork bomb": ("import os\nwhile True: os.fork()", {"processes", "left_processes", "error"}),
    "a memory bomb": ("a = []\nwhile True: a.append(b'x' * 10**7)", {"memory", "error"}),
    "memory of many processes": (
        "import os, time\nfor _ in range(6):\n    if not os.fork(): break\n"
        "a = b'x' * (60 << 20)\ntime.sleep(77703)",
        {"memory"},
    ),
    "a shared memory bomb": (
        "import mmap, time\na = mmap.mmap(-1, 500 << 20)\na.write(b'x' * (500 << 20))\n"
        "time.sleep(77704)",
        {"memory", "error"},
    ),
    "a disk filler": (
        "i = 0\nwhile True:\n    open(f'/work/{(i := i + 1)}', 'w').write('x' * 10**6)",
        {"error"},
    ),
    "one large file": (FILLS.format("/tmp/a"), {"error", "disk"}),
    "a filler of /dev/shm": (FILLS.format("/dev/shm/a"), {"error", "disk"}),
    "a child that detaches": (
        f"import os\nif not os.fork():\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        f"    os.execv({sys.executable!r}, ['python', '-c', 'import time; time.sleep(77705)'])\n"
        + WORKS,
        {"left_processes"},
    ),
    "exits early": ("import os; os._exit(0)", {"error"}),
    "exits with 0": ("import sys; sys.exit(0)", {"error"}),
    "kills all": ("import os, signal; os.kill(-1, signal.SIGKILL)", {"error"}),
    "a syntax error": ("def f(x) return", {"error"}),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_a_failure_with_its_reason_and_leaves_nothing(kind: str, name: str) -> None:
    code, reasons = ATTACKS[name]
    limits = QUICK if "time" in reasons else LIMITS
    with Sandbox(limits) as box:
        result = grade(box, code, TEST)
        assert result.passed == 0.0 and result.reason in reasons, result
        # and the same sandbox works on, except for files that fill it
        if "filler" not in name and "large" not in name:
            assert grade(box, WORKS, TEST) == Grade(1.0, "")
    assert has_ended("7770")


def test_a_flood_of_output_is_cut_and_ended(kind: str) -> None:
    with Sandbox(LIMITS) as box:
        outcome = box.run(["yes"], alone=True)
        assert (outcome.reason, len(outcome.stdout)) == ("output", 64 << 10)
        outcome = box.run(["sh", "-c", "yes >&2"], output_bytes=1000)
        assert (outcome.reason, len(outcome.stderr)) == ("output", 1000)


def test_nothing_of_the_run_can_be_read(kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("JAXRL_ASYNC_SECRET", "sesame-1")
    (tmp_path / "secret").write_text("sesame-2")
    own = Path(__file__).resolve()
    code = f"""
import os
os.symlink({str(tmp_path)!r}, "/work/link")
paths = [{str(tmp_path / "secret")!r}, "/work/link/secret", {str(own)!r}, "/root/.ssh",
         "/etc/shadow",
         "/work/../..{tmp_path}/secret", "/proc/1/root{tmp_path}/secret", "/proc/1/environ",
         "/proc/1/mem", "/proc/1/fd/0", "/proc/{os.getpid()}/environ", "/sys/kernel", "/home",
         "/proc/self/cwd/..{tmp_path}/secret", "/run", "/proc/kcore"]
for path in paths:
    try:
        print("READ", path, os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(20))
    except OSError:
        pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        print("ENV", open(f"/proc/{{pid}}/environ").read())
    except OSError:
        pass
print(dict(os.environ))
"""
    with Sandbox(LIMITS) as box:
        outcome = run(box, code)
    output = (outcome.stdout + outcome.stderr).decode()
    assert outcome.code == 0 and "READ" not in output and "sesame" not in output, output
    assert "PATH" in output  # its own


def test_there_is_no_network(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(b"\0jaxrl-test-" + str(os.getpid()).encode())
        local.listen()
        code = f"""
import socket
for family, address in ((2, ("127.0.0.1", {server.getsockname()[1]})), (2, ("8.8.8.8", 53)),
                        (10, ("::1", {server.getsockname()[1]})),
                        (1, {b"jaxrl-test-" + str(os.getpid()).encode()!r}.join([bytes(1), b""]))):
    try:
        s = socket.socket(family)
        s.settimeout(5)
        s.connect(address)
        print("CONNECTED", address)
    except OSError as error:
        print(error)
with socket.create_server(("127.0.0.1", 0)) as own, socket.create_connection(own.getsockname()):
    print("its own works")
"""
        with Sandbox(LIMITS) as box:
            output = run(box, code).stdout.decode()
    assert "CONNECTED" not in output and "its own works" in output, output


def test_signals_reach_neither_the_run_nor_the_first_process(kind: str) -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        code = f"""
import os, signal
for pid in ({os.getpid()}, {other.pid}, {os.getppid()}):
    try:
        os.kill(pid, 9)
        print("KILLED", pid)
    except ProcessLookupError:
        pass
for number in range(1, 65):
    os.kill(1, number) if number not in (32, 33) else None
"""
        with Sandbox(LIMITS) as box:
            assert b"KILLED" not in run(box, code).stdout
            assert run(box, "print(5)").stdout == b"5\n"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


REFUSED = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def report(name, *arguments):
    done = getattr(libc, name)(*arguments)
    print(name, "DONE" if done >= 0 else errno.errorcode[ctypes.get_errno()])
report("unshare", 0x10000000)
report("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None)
report("ptrace", 0, 0, 0, 0)
report("memfd_create", b"a", 0)
report("shmget", 0, 4096, 0o1600)
report("chroot", b"/tmp")
report("setns", 0, 0)
report("keyctl", 0, 0) if hasattr(libc, "keyctl") else None
report("personality", 0x0040000)
try:
    socket.socket(40, socket.SOCK_STREAM)
    print("vsock DONE")
except OSError as error:
    print("vsock", errno.errorcode[error.errno])
try:
    os.mknod("/tmp/sda", 0o60600, 0x800)
    print("mknod DONE")
except OSError as error:
    print("mknod", errno.errorcode[error.errno])
status = open("/proc/self/status").read()
print(*[line for line in status.splitlines() if line.startswith(("Cap", "NoNewP", "Seccomp:"))])
"""


def test_system_calls_that_make_namespaces_or_hidden_memory_are_refused(kind: str) -> None:
    with Sandbox(LIMITS) as box:
        output = run(box, REFUSED).stdout.decode()
    lines = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert "DONE" not in output and {lines[name] for name in ("unshare", "mount", "vsock")} == {
        "EPERM"
    }
    zero = "0" * 16
    assert f"CapBnd:\t{zero}" in output and f"CapEff:\t{zero}" in output, output
    assert "NoNewPrivs:\t1" in output and "Seccomp:\t2" in output


def test_a_sandbox_of_root_cannot_change_the_kernels_settings(sandboxes) -> None:
    """Root without capabilities could: the files in /proc/sys are root's."""
    code = "for n in ('core_pattern', 'pid_max'):\n    open('/proc/sys/kernel/' + n, 'r+')\n"
    with Sandbox(LIMITS) as box:
        outcome = run(box, code)
        ids = box.run(["cat", "/proc/self/uid_map"]).stdout.split()
    assert outcome.code == 1 and b"Permission" in outcome.stderr, outcome
    assert ids[0] == b"0" and (ids[1] != b"0" or os.geteuid() != 0)


def test_programs_are_read_only_and_folders_are_not(kind: str) -> None:
    script = (
        "touch /usr/a /dev/a /etc/ssl/a 2>&1; mkdir /app && echo 5 > /app/a && cat /app/a; id -u"
    )
    with Sandbox(LIMITS) as box:
        output = box.run(["sh", "-c", script]).stdout.decode()
        assert output.count("Read-only") == 3 and output.endswith("5\n0\n"), output
        box.write({"/a/b/c": b"\0\1"})
        assert box.run(["cat", "/a/b/c"]).stdout == b"\0\1"


@pytest.mark.full
def test_commands_side_by_side_and_what_one_leaves(kind: str) -> None:
    with Sandbox(LIMITS) as box:
        box.run(["sh", "-c", "sleep 77710 > /dev/null 2>&1 &"])
        done: list[bytes] = []
        threads = [
            threading.Thread(
                target=lambda n=n: done.append(box.run(["cat"], stdin=str(n).encode()).stdout)
            )
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == [str(n).encode() for n in range(8)]
        assert box.run(["sh", "-c", "pgrep sleep | wc -l"]).stdout.strip() == b"1"
        assert box.run(["sleep", "77711"], timeout_s=0.3).reason == "time"
        assert box.run(["pgrep", "sleep"]).ok  # only the one that took too long has ended
    assert has_ended("77710")


@pytest.mark.full
def test_a_sandbox_ends_with_its_process(kind: str, tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom jaxrl_async.sandbox.sandbox import *\n"
        "box = Sandbox(SandboxLimits())\n"
        "box.run(['sh', '-c', 'setsid sleep 77720 > /dev/null 2>&1 &'])\n"
        "print('begun', flush=True)\ntime.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    assert alive("77720")
    process.kill()
    process.wait()
    process.stdout.close()
    assert has_ended("77720")


LEAVES = {
    "nothing": ("pass", True),
    "a file": ("open('/work/a', 'w')", False),
    "a file that was removed": ("import os; open('/tmp/a', 'w'); os.remove('/tmp/a')", False),
    "another mode": ("import os; os.chmod('/work', 0o500)", False),
    "other contents": ("open('/etc/hosts', 'r+').write('1')", False),
    "shared memory": ("open('/dev/shm/a', 'w')", False),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LEAVES)
def test_only_a_sandbox_as_new_is_used_again(kind: str, name: str) -> None:
    code, again = LEAVES[name]
    pool = SandboxPool(LIMITS, most=1, ready=0)
    with pool.one() as first:
        assert run(first, code).ok
        assert first.clean == again
    with pool.one() as second:
        assert (second is first) == again
        assert run(second, "import os; print(os.listdir('/tmp'))").stdout == b"[]\n"
    pool.close()


@pytest.mark.full
def test_a_pool_keeps_some_ready_and_lends_no_more_than_allowed(sandboxes) -> None:
    pool = SandboxPool(LIMITS, most=2, ready=1)
    inside, most = [0], [0]
    lock = threading.Lock()

    def use() -> None:
        with pool.one() as box:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            assert run(box, "pass").ok
            with lock:
                inside[0] -= 1

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 2
    pool.close()
    with pytest.raises(Away), pool.one() as box:
        box.close()
        box.run(["true"])


@pytest.mark.full
def test_a_sandbox_that_fails_is_an_error_of_the_machine(sandboxes, monkeypatch) -> None:
    box = Sandbox(LIMITS)
    box.wait_ready()
    thread = threading.Timer(0.3, box._process.terminate)
    thread.start()
    with pytest.raises(Away):
        box.run(["sleep", "60"], timeout_s=60.0)
    box.close()
    monkeypatch.setattr(layout, "start_command", lambda *_: ["sh", "-c", "echo oh >&2; exit 3"])
    with pytest.raises(Away, match="oh"):
        Sandbox(LIMITS).run(["true"])
    words = ["sh", "-c", "echo 'no namespaces: not permitted' >&2; exit 77"]
    monkeypatch.setattr(layout, "start_command", lambda *_: words)
    with pytest.raises(ConfigError, match="does not let this user make a sandbox"):
        Sandbox(LIMITS).run(["true"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_mb": 0}, "memory_mb"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"readable": "/x"}, "readable"),
        ({"readable": ("/nowhere",)}, "files and folders that exist"),
        ({"processes": True}, "processes"),
    ],
)
def test_limits_that_make_no_sense_are_refused(given, message) -> None:
    with pytest.raises(ConfigError, match=message):
        SandboxLimits(**given)


def test_further_files_are_shown_read_only(kind: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("7")
    tmp_path.chmod(0o755)
    with Sandbox(SandboxLimits(readable=(str(tmp_path),))) as box:
        output = box.run(["sh", "-c", f"cat {tmp_path}/data; echo 8 > {tmp_path}/data"])
        assert output.stdout == b"7" and output.code != 0
    assert (tmp_path / "data").read_text() == "7"


# ---- the filter of system calls


def verdict(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> str:
    """The filter's verdict on a call: an interpreter of the few instructions that it uses."""
    data = {
        0: number,
        4: ARCHITECTURES[machine] if architecture is None else architecture,
        16: argument,
    }
    code = seccomp_filter(machine)
    at, value = 0, 0
    while True:
        kind = int.from_bytes(code[8 * at : 8 * at + 2], "little")
        yes, no = code[8 * at + 2], code[8 * at + 3]
        k = int.from_bytes(code[8 * at + 4 : 8 * at + 8], "little")
        at += 1
        if kind == 0x06:
            return {0x7FFF0000: "allow", 0x80000000: "kill", 0x50001: "EPERM", 0x50026: "ENOSYS"}[k]
        if kind == 0x20:
            value = data[k]
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[kind]
            at += yes if holds else no


@pytest.mark.parametrize(
    ("machine", "read", "socket_call", "clone", "clone3"),
    [("x86_64", 0, 41, 56, 435), ("aarch64", 63, 198, 220, 435)],
)
def test_the_filter_refuses_what_it_lists_and_nothing_else(
    machine: str, read: int, socket_call: int, clone: int, clone3: int
) -> None:
    index = list(ARCHITECTURES).index(machine)
    for numbers in NUMBERS.values():
        assert verdict(machine, numbers[index]) == "EPERM"
    assert verdict(machine, read) == "allow"
    assert verdict(machine, clone3) == "ENOSYS"
    assert verdict(machine, read, architecture=0x40000003) == "kill"  # 32 bits
    assert verdict(machine, 0x40000000 + 59) == "ENOSYS"  # x32
    assert {f: verdict(machine, socket_call, f) for f in (1, 2, 10, 16, 17, 38, 40)} == {
        1: "allow", 2: "allow", 10: "allow", 16: "allow", 17: "EPERM", 38: "EPERM", 40: "EPERM",
    }  # fmt: skip
    assert verdict(machine, clone, 0x01200011) == "allow"  # as fork
    assert verdict(machine, clone, 0x003D0F00) == "allow"  # as a thread
    flags = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
    assert {verdict(machine, clone, flag) for flag in flags} == {"EPERM"}
    assert len({n[index] for n in NUMBERS.values()}) == len(NUMBERS)
    assert seccomp_filter("riscv64") == b""
