"""python -m jaxrl_async.launch.die_with_parent PARENT_PID COMMAND...: COMMAND ends with its parent.

Replaces itself with COMMAND, with the signal handlers of a new process (a parent may have blocked
SIGINT). If the parent dies in any way, the command gets SIGTERM (on Linux).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: sets the signal that a process gets when its parent dies."""
USAGE = "usage: python -m jaxrl_async.launch.die_with_parent PARENT_PID COMMAND..."


def main(argv: Sequence[str] | None = None) -> int:
    """Become the command; return an exit code only if that is not possible."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) < 2 or not args[0].isdigit():
        print(USAGE, file=sys.stderr)
        return 2
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # survives the exec
    if os.getppid() != int(args[0]):
        print(f"the parent {args[0]} is gone; {args[1]} is not started", file=sys.stderr)
        return 1
    try:
        os.execvp(args[1], args[1:])
    except OSError as error:
        print(f"{args[1]} cannot be run: {error}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
