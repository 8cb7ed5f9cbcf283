"""Commands without trust: processes in Linux namespaces, with limits. Standard library only.

    Sandbox.run ──request──> first_process.py, PID 1 of new user, mount, PID, IPC, UTS and network
         │                       │          namespaces (sandbox_layout.py: by bubblewrap or our own)
         └─ CommandOutcome <─────┘ one command in its own session

A command sees this machine's programs read-only and an empty folder /work, and nothing of the run:
no environment variables, files, processes or network. What it writes and starts ends with the
sandbox. A CommandOutcome says which limit ended the command. If the sandbox itself fails, that is
an error of the machine, not of the command: `Away`, which callers retry.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

from jaxrl_async.errors import Away, ConfigError
from jaxrl_async.keeper import kept
from jaxrl_async.sandbox import sandbox_layout as layouts
from jaxrl_async.sandbox.system_calls import seccomp_filter

START_S = 60.0
"""Maximum time for a sandbox to start, seconds."""
LONGER_S = 30.0
"""Time after a command's limit at which the whole sandbox is given up, seconds."""
ENDING_S = 10.0
"""Maximum wait for a sandbox's processes to end, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of a sandbox. Raises ConfigError."""

    memory_mb: int = 1024  # of all its processes together, without files, MiB
    disk_mb: int = 256  # of all files that it writes; they are in memory, MiB
    processes: int = 64  # at the same time
    timeout_s: float = 10.0  # of one command, and of the CPU time of each of its processes
    output_kb: int = 1024  # of one command, KiB
    network: bool = False  # True: this machine's network, unprotected
    readable: tuple[str, ...] = ()  # further files and folders of this machine, read-only

    def __post_init__(self) -> None:
        for name in ("memory_mb", "disk_mb", "processes", "timeout_s", "output_kb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"{name} ({value!r}) must be a number above 0.")
        if isinstance(self.readable, str) or not all(map(os.path.exists, self.readable)):
            raise ConfigError(
                f"readable ({self.readable!r}) must be a list of files and folders that exist."
            )


def limits_of(given: Mapping[str, object]) -> SandboxLimits:
    """Return limits by their names, as a configuration has them. Raises ConfigError."""
    known = [one.name for one in fields(SandboxLimits)]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(
            f"{', '.join(unknown)}: no limit of a sandbox. There are {', '.join(known)}."
        )
    plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
    return SandboxLimits(**plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """How a command ended."""

    code: int  # its exit code; negative: the signal that ended it
    # the limit that ended it: time, memory, processes, output, disk, or left_processes: it left
    # some behind; "": none
    reason: str
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it ended with exit code 0 and within its limits."""
        return self.code == 0 and not self.reason


class Sandbox:
    """One sandbox. `run` may be called by several threads at the same time."""

    def __init__(self, limits: SandboxLimits) -> None:
        """Start it; the first `run` waits until it is ready. Raises Away, ConfigError."""
        if sys.platform != "linux":
            raise ConfigError(
                "a sandbox needs Linux's namespaces. Run this task on Linux, or in a container "
                "engine: Harbor's environment docker."
            )
        self.limits = limits
        settings = {
            "memory_mb": limits.memory_mb,
            "disk_mb": limits.disk_mb,
            "processes": limits.processes,
            "path": layouts.search_path(),
            "seccomp": base64.b64encode(seccomp_filter()).decode(),
        }
        layout = layouts.layout_of(
            disk_mb=limits.disk_mb, network=limits.network, readable=limits.readable
        )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            kept(layouts.start_command(layout, json.dumps(settings))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={},
            start_new_session=True,
        )
        self._lock, self._number = threading.Lock(), 0
        self._waiting: dict[int, Future[CommandOutcome]] = {}
        self._ready: Future[None] = Future()
        self._over = False
        self.clean = True  # nothing is left of the commands that have ended
        self._reader = threading.Thread(target=self._read, name="sandbox", daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Wait until it has started. Raises Away, and ConfigError if the system does not allow
        it."""
        try:
            self._ready.result(START_S)
        except TimeoutError:
            self.close()
            raise Away(f"a sandbox did not start within {START_S:g} s") from None

    def run(
        self,
        words: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/work",
        environ: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        alone: bool = False,
    ) -> CommandOutcome:
        """Run a command to its end.

        Args:
            words: the command and its arguments.
            stdin: its input.
            cwd: its folder, in the sandbox.
            environ: variables in addition to PATH, HOME, LANG and TMPDIR.
            timeout_s: its limit; None: the sandbox's, seconds.
            output_bytes: limit of its output; None: the sandbox's.
            alone: nothing else runs in the sandbox, and nothing may be left behind.

        Raises Away if the sandbox does not answer, ConfigError if none can be started here.
        """
        self.wait_ready()
        limit_s = self.limits.timeout_s if timeout_s is None else timeout_s
        answer: Future[CommandOutcome] = Future()
        with self._lock:
            if self._over:
                raise Away("the sandbox has ended")
            self._number += 1
            self._waiting[self._number] = answer
            request = {
                "id": self._number,
                "words": list(words),
                "cwd": cwd,
                "env": dict(environ or {}),
                "timeout_s": limit_s,
                "output": self.limits.output_kb << 10 if output_bytes is None else output_bytes,
                "alone": alone,
                "bytes": len(stdin),
            }
            try:
                assert self._process.stdin is not None, "stdin=PIPE"
                self._process.stdin.write(json.dumps(request).encode() + b"\n" + stdin)
                self._process.stdin.flush()
            except OSError:
                raise Away(self._why()) from None
        try:
            return answer.result(limit_s + LONGER_S)
        except TimeoutError:
            self.close()
            raise Away(f"the sandbox did not answer within {limit_s + LONGER_S:g} s") from None

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files, by their path in the sandbox. Raises Away."""
        for path, data in files.items():
            done = self.run(["sh", "-c", 'mkdir -p "$(dirname "$1")" && cat > "$1"', "sh", path],
                            stdin=data)  # fmt: skip
            if not done.ok:
                raise Away(f"{path} could not be written: {done.stderr.decode(errors='replace')}")

    def close(self) -> None:
        """End it with all its processes. Idempotent."""
        with self._lock:
            self._over = True
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(ENDING_S)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        """Give each answer to its caller, until the sandbox ends."""
        stdout = self._process.stdout
        assert stdout is not None, "stdout=PIPE"
        with stdout:
            while line := stdout.readline():
                message = json.loads(line)
                out, err = stdout.read(message["out"]), stdout.read(message["err"])
                if "ready" in message:
                    self._ready.set_result(None)
                    continue
                with self._lock:
                    answer = self._waiting.pop(message["id"])
                    self.clean = message["clean"] and not self._waiting
                answer.set_result(
                    CommandOutcome(
                        code=message["code"],
                        reason=message["reason"],
                        stdout=out,
                        stderr=err,
                        seconds=message["seconds"],
                    )
                )
        with self._lock:
            self._over = True
            with suppress(OSError):
                assert self._process.stdin is not None, "stdin=PIPE"
                self._process.stdin.close()
            unanswered, self._waiting = list(self._waiting.values()), {}
        error = self._failed()
        self._errors.close()
        if not self._ready.done():
            self._ready.set_exception(error)
        for answer in unanswered:
            answer.set_exception(error)

    def _failed(self) -> Exception:
        """Return the error of a sandbox that has ended by itself."""
        self._process.wait()
        text = self._why()
        if not self._ready.done() and ("namespace" in text or "bwrap:" in text):
            return ConfigError(
                f"this system does not let this user make a sandbox: {text}. Allow user "
                "namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces, "
                "or an AppArmor profile; in a container --security-opt seccomp=unconfined), "
                "or use Harbor's environment docker."
            )
        return Away(text)

    def _why(self) -> str:
        with suppress(OSError, ValueError):
            self._errors.seek(0)
            text = self._errors.read()[-400:].decode(errors="replace").strip()
            if text:
                return text
        return "the sandbox has ended"


class SandboxPool:
    """Sandboxes that are started before they are needed, and used again if nothing is left of their
    commands: no process, and no file that was written. Any thread."""

    def __init__(self, limits: SandboxLimits, *, most: int, ready: int) -> None:
        """Start none yet.

        Args:
            limits: of each sandbox.
            most: maximum number of sandboxes in use.
            ready: number of unused ones that are kept ready once the first was asked for.
        """
        self._limits, self._ready = limits, ready
        self._free: deque[Sandbox] = deque()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(most)
        self._closed = 0  # number of times that it was closed

    @contextmanager
    def one(self) -> Iterator[Sandbox]:
        """Yield a sandbox as it is after its start. Raises Away, ConfigError."""
        with self._slots:
            with self._lock:
                closed = self._closed
                box = self._free.popleft() if self._free else None
            box = box or Sandbox(self._limits)
            is_clean = False
            try:
                self._refill()
                box.wait_ready()
                yield box
                is_clean = box.clean
            finally:
                self._take_back(box, is_clean, closed)

    def _take_back(self, box: Sandbox, is_clean: bool, closed: int) -> None:
        with self._lock:
            if is_clean and self._closed == closed:
                self._free.append(box)
                return
        box.close()

    def _refill(self) -> None:
        with self._lock:
            while len(self._free) < self._ready:
                self._free.append(Sandbox(self._limits))

    def close(self) -> None:
        """End the unused sandboxes now, and those in use once they are given back. Idempotent; new
        ones are started if they are needed again."""
        with self._lock:
            self._closed += 1
            boxes, self._free = list(self._free), deque()
        for box in boxes:
            box.close()
