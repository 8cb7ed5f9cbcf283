"""Threads that are left inside a program which nothing interrupts: an update of a minute, say.

Python ends a daemon thread that comes back from such a program while the interpreter exits, by
unwinding it through C++ that does not allow that: the process aborts ("terminate called ...",
SIGABRT), and its exit code is lost. So no interpreter exits while there is one:

    a command              the process ends immediately, with the exit code of the command
    a program that calls   it waits at its exit until the thread is out, for a limited time;
    train()                then, or at Ctrl-C, the process ends immediately, with LEFT_CODE or
                           INTERRUPTED_CODE
"""

import atexit
import logging
import os
import sys
import threading
import time

LEFT_CODE = 1
"""Exit code of a process that could not wait any longer for a thread."""
INTERRUPTED_CODE = 130
"""The same where Ctrl-C ended the wait."""
LEAST_S = 60.0
"""Least of the longest wait at exit for a thread, seconds."""
EXIT_S = 30.0
"""When a command's process ends that threads of a user's code keep, after its work, seconds."""
WAITING = {
    "threading.py": ("wait", "_wait_for_tstate_lock"),
    "selectors.py": ("select",),
    "queue.py": ("get", "put"),
}
"""Functions of the standard library in which a thread that only waits is: it is harmless."""

log = logging.getLogger(__name__)

_left: dict[threading.Thread, float] = {}  # how long to wait for each, seconds
_code: int | None = None  # of the command; None: this process runs no command
os.register_at_fork(after_in_child=_left.clear)


def leave_behind(thread: threading.Thread, longest_s: float = LEAST_S) -> None:
    """Take note of a daemon thread that may not end, although all that it waits for was closed.
    Called before it is joined, which Ctrl-C may interrupt; those that have ended are forgotten.

    longest_s: what it does may take at most that long.
    """
    for ended in [other for other in list(_left) if not other.is_alive()]:
        _left.pop(ended, None)
    if not _left:
        atexit.unregister(_end)
        atexit.register(_end)  # after jax's own: what was registered last is called first
    _left[thread] = max(longest_s, LEAST_S)


def at_exit_end_with(code: int) -> int:
    """Have this process, which runs a command, end immediately with its exit code if a thread is
    left, and in any case EXIT_S seconds from now; return the code."""
    global _code
    _code = code
    late = threading.Timer(EXIT_S, _end_late, (code,))
    late.daemon = True
    late.start()
    return code


def _end_late(code: int) -> None:
    """End a process whose interpreter waits for threads that are not daemons, or for those of a
    ThreadPoolExecutor."""
    kept = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    log.warning(
        "the process has not ended %g s after its work, and ends now; its threads were: %s",
        EXIT_S,
        ", ".join(sorted(kept)[:16]),
    )
    _end_process(code)


def inside_programs() -> list[threading.Thread]:
    """Return the threads left behind that are still inside something that is not Python."""
    frames = sys._current_frames()

    def is_inside(thread: threading.Thread) -> bool:
        frame = frames.get(thread.ident or 0)
        if frame is None or not thread.is_alive():
            return False
        file = os.path.basename(frame.f_code.co_filename)
        return frame.f_code.co_name not in WAITING.get(file, ())

    return [thread for thread in list(_left) if is_inside(thread)]


def _end() -> None:
    """Let the interpreter exit once no thread is left inside a program."""
    try:
        _wait()
    except KeyboardInterrupt:  # beyond this the interpreter would exit, and the process abort
        _end_process(INTERRUPTED_CODE)


def _wait() -> None:
    """Wait until no thread is inside a program; end the process if that takes too long."""
    if _code is not None and inside_programs():
        _end_process(_code)
        return
    began, said = time.monotonic(), False
    while threads := inside_programs():
        left_s = began + max(_left[thread] for thread in threads) - time.monotonic()
        if left_s <= 0:
            log.error("%s did not end: the process ends without it", threads[0].name)
            _end_process(LEFT_CODE)
            return
        if not said:
            said = True
            log.warning(
                "waiting at most %.0f s for thread %s: nothing interrupts the program that it is "
                "inside",
                left_s,
                threads[0].name,
            )
        threads[0].join(min(left_s, 0.5))


def _end_process(code: int) -> None:
    """End immediately, with all that was written flushed."""
    try:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:  # whatever happens: another Ctrl-C, a pipe that nobody reads
        os._exit(code)
