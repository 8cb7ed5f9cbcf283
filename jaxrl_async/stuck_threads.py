"""Handle threads that are stuck in native code that cannot be interrupted, such as a long update.

If a daemon thread returns from native code while the interpreter exits, Python unwinds it through
C++ that does not allow that. The process then aborts ("terminate called ...", SIGABRT), and its
exit code is lost. The interpreter therefore does not exit while such a thread exists:

    a command              the process ends immediately, with the exit code of the command
    a program that calls   it waits at its exit until the thread returns, for a limited time;
    train()                then, or at Ctrl-C, the process ends immediately, with STUCK_CODE or
                           INTERRUPTED_CODE
"""

import atexit
import logging
import os
import sys
import threading
import time

STUCK_CODE = 1
"""Exit code of a process that timed out waiting for a thread."""
INTERRUPTED_CODE = 130
"""Exit code if Ctrl-C ended the wait."""
LEAST_S = 60.0
"""Minimum of the timeout for a thread at exit, seconds."""
EXIT_S = 30.0
"""Time after which a command whose work is done exits even if user threads still run, seconds."""
WAITING = {
    "threading.py": ("wait", "_wait_for_tstate_lock"),
    "selectors.py": ("select",),
    "queue.py": ("get", "put"),
}
"""Functions of the standard library in which a thread is only waiting, which is harmless."""

log = logging.getLogger(__name__)

_registered: dict[threading.Thread, float] = {}  # timeout of each, seconds
_code: int | None = None  # the command's exit code; None: this process runs no command
os.register_at_fork(after_in_child=_registered.clear)


def register_stuck(thread: threading.Thread, longest_s: float = LEAST_S) -> None:
    """Register a daemon thread that may not end, although everything that it waits for was closed.
    Call this before joining the thread, since Ctrl-C may interrupt the join. Registered threads
    that have ended are removed.

    longest_s: maximum duration of what the thread does.
    """
    for ended in [other for other in list(_registered) if not other.is_alive()]:
        _registered.pop(ended, None)
    if not _registered:
        atexit.unregister(_end)
        atexit.register(_end)  # after jax's own: the last one registered is called first
    _registered[thread] = max(longest_s, LEAST_S)


def at_exit_end_with(code: int) -> int:
    """Make this process, which runs a command, end with the command's exit code: immediately at
    exit if a thread is stuck, and in any case EXIT_S seconds from now. Return the code."""
    global _code
    _code = code
    late = threading.Timer(EXIT_S, _end_late, (code,))
    late.daemon = True
    late.start()
    return code


def _end_late(code: int) -> None:
    """End a process whose interpreter waits for non-daemon threads, or for threads of a
    ThreadPoolExecutor."""
    names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    log.warning(
        "the process did not exit %g s after its work was done, and ends now; its threads were: %s",
        EXIT_S,
        ", ".join(sorted(names)[:16]),
    )
    _end_process(code)


def threads_in_native_code() -> list[threading.Thread]:
    """Return the registered threads that are still inside native code."""
    frames = sys._current_frames()

    def is_inside(thread: threading.Thread) -> bool:
        frame = frames.get(thread.ident or 0)
        if frame is None or not thread.is_alive():
            return False
        file = os.path.basename(frame.f_code.co_filename)
        return frame.f_code.co_name not in WAITING.get(file, ())

    return [thread for thread in list(_registered) if is_inside(thread)]


def _end() -> None:
    """Let the interpreter exit once no registered thread is inside native code."""
    try:
        _wait()
    except KeyboardInterrupt:  # if raised, the interpreter would exit and the process abort
        _end_process(INTERRUPTED_CODE)


def _wait() -> None:
    """Wait until no thread is inside native code; end the process after a timeout."""
    if _code is not None and threads_in_native_code():
        _end_process(_code)
        return
    began, warned = time.monotonic(), False
    while threads := threads_in_native_code():
        left_s = began + max(_registered[thread] for thread in threads) - time.monotonic()
        if left_s <= 0:
            log.error("%s did not end: the process ends without it", threads[0].name)
            _end_process(STUCK_CODE)
            return
        if not warned:
            warned = True
            log.warning(
                "waiting at most %.0f s for thread %s: it is inside native code that cannot be "
                "interrupted",
                left_s,
                threads[0].name,
            )
        threads[0].join(min(left_s, 0.5))


def _end_process(code: int) -> None:
    """Flush all output, then end immediately."""
    try:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:  # even after another Ctrl-C or a broken pipe
        os._exit(code)
