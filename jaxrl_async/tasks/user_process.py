"""A process that runs a user's functions, ended at their time limit. Needs no JAX.

a thread ──request (length, bytes)──> process: reply_to(request) ──reply──> the thread
                                         │ longer than its limit
                                         └─ ended by SIGKILL; the next request starts another
"""

import math
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from jaxrl_async.config.userfile import LOADING
from jaxrl_async.errors import RolloutError
from jaxrl_async.keeper import END_S, kept, kill_session
from jaxrl_async.shown_environment import hide_secrets, is_the_runs
from jaxrl_async.tasks.function_source import import_path
from jaxrl_async.tasks.usercode import TooLate

LENGTH = struct.Struct("<Q")


class UserProcess:
    """One process, started when first needed and restarted after it ended. One thread at a time."""

    def __init__(self, module: str) -> None:
        """module: run as a script; calls `serve_requests`."""
        self._module = module
        self._popen: subprocess.Popen[bytes] | None = None
        self._replies = -1

    def exchange(self, request: bytes, timeout_s: float) -> bytes:
        """Return the process's reply. Raises TooLate after timeout_s seconds, and RolloutError if
        the process ended; either ends it."""
        if self._popen is None:
            self._start()
        popen = self._popen
        assert popen is not None and popen.stdin is not None
        until = time.monotonic() + timeout_s
        try:
            popen.stdin.write(LENGTH.pack(len(request)) + request)
            popen.stdin.flush()
            (length,) = LENGTH.unpack(self._read(LENGTH.size, until))
            return self._read(length, until)
        except TooLate:
            self.close()
            raise
        except (BrokenPipeError, EOFError):
            code = _code_of(popen)
            self.close()
            raise RolloutError(
                f"ended its process, {code}. Correct the function; its output is on the screen."
            ) from None

    def close(self) -> None:
        """End the process and everything that it has started. Idempotent."""
        popen, self._popen = self._popen, None
        if popen is None:
            return
        popen.terminate()  # its keeper kills it
        with suppress(OSError):
            os.close(self._replies)
        assert popen.stdin is not None
        with suppress(OSError):
            popen.stdin.close()
        try:
            popen.wait(END_S + 1)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        kill_session(popen.pid)

    def _start(self) -> None:
        self._replies, to_run = os.pipe()
        try:
            self._popen = subprocess.Popen(
                kept([sys.executable, "-m", self._module, str(to_run)]),
                stdin=subprocess.PIPE,
                pass_fds=[to_run],
                env={
                    **{n: value for n, value in os.environ.items() if not is_the_runs(n)},
                    "PYTHONPATH": import_path(),
                    "JAX_PLATFORMS": "cpu",
                    LOADING: "1",
                },
                start_new_session=True,  # Ctrl-C is for the run
            )
        except BaseException:
            os.close(self._replies)
            raise
        finally:
            os.close(to_run)

    def _read(self, count: int, until: float) -> bytes:
        """Return the next bytes of the replies. Raises TooLate, EOFError."""
        data = bytearray()
        replies = select.poll()  # select() does not support descriptors above 1023
        replies.register(self._replies, select.POLLIN)
        while len(data) < count:
            left_s = until - time.monotonic()
            if left_s <= 0 or not replies.poll(math.ceil(1e3 * left_s)):
                raise TooLate
            more = os.read(self._replies, min(count - len(data), 1 << 20))
            if not more:
                raise EOFError
            data += more
        return bytes(data)


def _code_of(popen: "subprocess.Popen[bytes]") -> str:
    try:
        code = popen.wait(1.0)
    except subprocess.TimeoutExpired:
        return "or closed its output"
    return f"with code {code}" if code >= 0 else f"by signal {-code}"


# ---- in the process


def serve_requests(reply_to: Callable[[bytes], bytes]) -> None:
    """Answer the requests of the process that started this one, on the main thread, until there are
    no more; nothing else uses the pipes. Then end the process."""
    hide_secrets()  # from programs that a function runs
    requests, replies = os.dup(0), int(sys.argv[1])
    os.set_inheritable(replies, False)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        with os.fdopen(requests, "rb") as incoming, os.fdopen(replies, "wb") as outgoing:
            while len(head := incoming.read(LENGTH.size)) == LENGTH.size:
                (length,) = LENGTH.unpack(head)
                reply = reply_to(incoming.read(length))
                outgoing.write(LENGTH.pack(len(reply)) + reply)
                outgoing.flush()
    finally:
        sys.stdout.flush()
        os._exit(0)  # threads of the user's file must not keep the process alive
