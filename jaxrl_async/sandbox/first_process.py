"""The first process of a sandbox: runs commands and enforces limits. Standard library only.

    host ──request──> this process (PID 1) ──starts──> command ──> children
         <──reply───        │ looks at all processes of the sandbox every LOOK_S seconds
                            └─ over a limit: SIGKILL to all of them but itself

No signal of a process in the sandbox reaches the first process of a PID namespace, and since it is
not dumpable, none can read its memory or its descriptors. A message is a line of JSON and the bytes
that it announces. The sandbox ends when the host closes its end.
"""

import base64
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

LOOK_S, IDLE_S = 0.05, 0.5
"""Interval at which the sandbox's processes are counted, seconds: while a command runs, and while
only processes run that earlier ones left."""
DRAIN_S = 0.2
"""Time to read the rest of a command's output after it has ended, seconds."""
CLEAR_S = 5.0
"""Time within which killed processes of earlier commands disappear, seconds."""
SET_DUMPABLE, SET_SECCOMP, SET_NO_NEW_PRIVILEGES, FILTER = 4, 22, 38, 2
TOPS = ("/", "/dev/shm")
"""The file systems of the sandbox that can be written."""
USERS = "root:x:0:0:root:/work:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
LIBRARY = ctypes.CDLL(None, use_errno=True)


class Job:
    """A command that runs."""

    def __init__(self, request: dict[str, Any], process: "subprocess.Popen[bytes]") -> None:
        self.request, self.process, self.pid = request, process, process.pid
        self.begun = time.monotonic()
        self.output = {"out": bytearray(), "err": bytearray()}
        assert process.stdout is not None and process.stderr is not None, "both are pipes"
        self.open: dict[Any, str] = {process.stdout: "out", process.stderr: "err"}
        for pipe in self.open:
            os.set_blocking(pipe.fileno(), False)
        self.reason, self.ended = "", 0.0
        self.code: int | None = None

    def size(self) -> int:
        """Return the length of the output that was kept, bytes."""
        return sum(len(output) for output in self.output.values())


class FirstProcess:
    """Serves the host's requests until it closes the connection."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.limits = limits
        self.jobs: list[Job] = []
        self.received = bytearray()
        self.request: dict[str, Any] | None = None
        self.seccomp = base64.b64decode(limits["seccomp"])
        self.codes: dict[int, int] = {}
        self.initial_files = files_left()

    def serve(self) -> None:
        """Run until the host is gone."""
        self.reply({"ready": True})
        while True:
            wait_s = LOOK_S if self.jobs else IDLE_S if processes() else None
            files = [0, *(f for job in self.jobs for f in job.open)]
            readable = select.select(files, [], [], wait_s)[0]
            if 0 in readable:
                data = os.read(0, 1 << 20)
                if not data:
                    return
                self.received += data
                self.take_requests()
            self.reap()
            for job in list(self.jobs):
                self.update(job, readable)
            self.check_limits()

    def take_requests(self) -> None:
        """Start the commands of the requests that have arrived whole."""
        while True:
            if self.request is None:
                end = self.received.find(b"\n")
                if end < 0:
                    return
                self.request = json.loads(bytes(self.received[:end]))
                del self.received[: end + 1]
            if len(self.received) < self.request["bytes"]:
                return
            request, self.request = self.request, None
            data = bytes(self.received[: request["bytes"]])
            del self.received[: request["bytes"]]
            self.start(request, data)

    def start(self, request: dict[str, Any], data: bytes) -> None:
        """Start a command, or reply why it cannot be started. data: its input."""
        if request["alone"] and not self.jobs:
            self.clear()
        environ = {"PATH": self.limits["path"], "HOME": "/work", "LANG": "C.UTF-8",
                   "TMPDIR": "/tmp", "TERM": "dumb", **request["env"]}  # fmt: skip
        try:
            with os.fdopen(os.memfd_create("stdin"), "w+b") as stdin:
                stdin.write(data)
                stdin.seek(0)
                process = subprocess.Popen(
                    request["words"], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    env=environ, cwd=request["cwd"], start_new_session=True,
                    preexec_fn=lambda: self.confine(request),
                )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            reply = {"id": request["id"], "code": 127, "reason": "", "seconds": 0.0, "clean": False}
            self.reply(reply, b"", f"{request['words'][0]}: {error}\n".encode())
            return
        self.jobs.append(Job(request, process))

    def confine(self, request: dict[str, Any]) -> None:
        """Set the limits of a command, in the command's own process."""
        limits, megabytes = self.limits, 1 << 20
        each = {
            resource.RLIMIT_AS: 4 * limits["memory_mb"] * megabytes,
            resource.RLIMIT_FSIZE: limits["disk_mb"] * megabytes,
            resource.RLIMIT_CPU: max(int(request["timeout_s"]), 1) + 1,
            resource.RLIMIT_NPROC: limits["processes"] + 1,
            resource.RLIMIT_NOFILE: 1024,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: megabytes,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        for name, value in each.items():
            resource.setrlimit(name, (value, value))
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        except OSError:
            pass
        if LIBRARY.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError("no_new_privs is not available")
        if self.seccomp:
            lines = ctypes.create_string_buffer(self.seccomp, len(self.seccomp))

            class SeccompProgram(ctypes.Structure):
                _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_void_p)]

            program = SeccompProgram(len(self.seccomp) // 8, ctypes.addressof(lines))
            if LIBRARY.prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0):
                raise OSError("seccomp is not available")

    def clear(self) -> None:
        """Wait until what earlier commands left has died: it would count against the next."""
        end = time.monotonic() + CLEAR_S
        while processes() and time.monotonic() < end:
            kill_all()
            self.reap()
            time.sleep(0.001)

    def reap(self) -> None:
        """Collect ended processes: the commands' and those whose parents have gone."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return

    def update(self, job: Job, readable: list[Any]) -> None:
        """Read a job's output, look at its time, and reply if it is over."""
        for pipe in [f for f in job.open if f in readable]:
            data = pipe.read(1 << 16)
            if not data:
                del job.open[pipe]
                pipe.close()
                continue
            room = job.request["output"] - job.size()
            job.output[job.open[pipe]] += data[: max(room, 0)]
            if len(data) > room:
                self.end(job, "output")
        now = time.monotonic()
        if job.code is None and job.pid in self.codes:
            job.code, job.ended = self.codes.pop(job.pid), now
            job.process.returncode = job.code
        if job.code is None and now - job.begun > job.request["timeout_s"]:
            self.end(job, "time")
        if job.code is None:
            return
        is_left = job.request["alone"] and any(alive for _, alive, _ in processes())
        if not job.open and not is_left:
            self.finish(job)
        elif now - job.ended > DRAIN_S:
            if is_left:
                job.reason = job.reason or "left_processes"
                kill_all()
            self.finish(job)

    def end(self, job: Job, reason: str) -> None:
        """Kill a job's processes."""
        job.reason = job.reason or reason
        if job.request["alone"]:
            kill_all()
            return
        for pid in family(job.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def finish(self, job: Job) -> None:
        """Reply for a job that has ended."""
        for pipe in job.open:
            pipe.close()
        self.jobs.remove(job)
        if not job.reason and job.code == -signal.SIGXCPU:
            job.reason = "time"
        if not job.reason and job.code == -signal.SIGXFSZ:
            job.reason = "disk"
        message = {
            "id": job.request["id"],
            "code": job.code,
            "reason": job.reason,
            "seconds": time.monotonic() - job.begun,
            "clean": job.request["alone"] and self.is_clean(),
        }
        self.reply(message, bytes(job.output["out"]), bytes(job.output["err"]))

    def is_clean(self) -> bool:
        """Return whether nothing is left of what has run: no process and no change of a file."""
        return not self.jobs and not processes() and files_left() == self.initial_files

    def check_limits(self) -> None:
        """Kill everything if the sandbox has too many processes, or they have too much memory."""
        over = ""
        if sum(name.isdigit() for name in os.listdir("/proc")) > self.limits["processes"] + 1:
            over = "processes"
        elif sum(kilobytes for _, _, kilobytes in processes()) > self.limits["memory_mb"] << 10:
            over = "memory"
        if over:
            for job in self.jobs:
                if job.code is None:
                    job.reason = job.reason or over
            kill_all()

    def reply(self, message: dict[str, Any], out: bytes = b"", err: bytes = b"") -> None:
        """Send a message and a command's output to the host."""
        line = json.dumps({**message, "out": len(out), "err": len(err)}).encode() + b"\n"
        data = memoryview(line + out + err)
        while data:
            data = data[os.write(1, data) :]


def processes() -> list[tuple[int, bool, int]]:
    """Return id, whether it is alive (no zombie), and kilobytes of memory that is not a file's, of
    each process of the sandbox but this one."""
    listed = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        kilobytes, alive = 0, True
        try:
            with open(f"/proc/{name}/status", "rb") as file:
                for line in file:
                    if line.startswith((b"RssAnon:", b"RssShmem:")):
                        kilobytes += int(line.split()[1])
                    elif line.startswith(b"State:"):
                        alive = line.split()[1] not in (b"Z", b"X")
        except OSError:
            continue
        listed.append((int(name), alive, kilobytes))
    return listed


def files_left() -> list[tuple[str, int, int, int]]:
    """Return each writable file and folder with what shows whether it was changed."""
    entries: list[tuple[str, int, int, int]] = []
    devices = {os.lstat(top).st_dev for top in TOPS}
    for top in TOPS:
        for folder, folders, files in os.walk(top):
            here = [os.path.join(folder, name) for name in (*folders, *files)]
            about = {path: os.lstat(path) for path in (folder, *here)}
            folders[:] = [n for n in folders if about[os.path.join(folder, n)].st_dev in devices]
            entries += [(path, s.st_ino, s.st_mode, s.st_ctime_ns) for path, s in about.items()]
    return entries


def family(pid: int) -> set[int]:
    """Return a process and all that descend from it or are in its session."""
    parents = {}
    sessions = {}
    for other, _, _ in processes():
        try:
            with open(f"/proc/{other}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            parents[other], sessions[other] = int(fields[1]), int(fields[3])
        except (OSError, IndexError):
            continue
    members = {pid, *(p for p, s in sessions.items() if s == pid)}
    while more := {p for p, parent in parents.items() if parent in members} - members:
        members |= more
    return members


def kill_all() -> None:
    """Kill all processes of the sandbox but this one, also those that begin meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def main() -> None:
    """Serve. The first argument has the limits as JSON."""
    if os.getpid() != 1:
        sys.exit("the first process of a sandbox must be the first of a PID namespace")
    LIBRARY.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # signals with a handler do reach PID 1
    os.makedirs("/etc", exist_ok=True)
    for path, text in (("/etc/passwd", USERS), ("/etc/group", "root:x:0:\n"),
                       ("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")):  # fmt: skip
        with open(path, "w") as file:
            file.write(text)
    FirstProcess(json.loads(sys.argv[1])).serve()


if __name__ == "__main__":
    main()
