"""Commands end with the process that started them, with all that they started themselves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxrl_async.rollout.command_groups import keep

STARTS = """
import asyncio, sys
from jaxrl_async.rollout.command_groups import COMMANDS

async def work():
    gone = await COMMANDS.start(["sh", "-c", "exit 3"], {})
    assert await gone.wait() == 3
    COMMANDS.end(gone)
    words = ["sh", "-c", "trap '' TERM; sleep 60 & echo $$ $!; wait"]
    one = await COMMANDS.start(words, {"PATH": "/usr/bin:/bin"})
    COMMANDS._keeper.kill()
    COMMANDS._keeper.wait()
    two = await COMMANDS.start(words, {"PATH": "/usr/bin:/bin"})
    pids = [(await p.stdout.readline()).decode().strip() for p in (one, two)]
    print(*pids, COMMANDS._keeper.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(work())
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def test_no_command_outlives_a_killed_process_and_its_children_neither():
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pids = [int(word) for word in run.stdout.readline().split()]
        assert len(pids) == 5 and all(map(is_alive, pids))
        run.kill()
    assert gone(pids), "the keeper leaves, too"


def test_groups_that_have_ended_are_left_alone():
    """Their number may be another process's by then."""
    groups = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2)]
    ended, left = (g.pid for g in groups)
    try:
        keep([f"+{ended}\n", f"+{left}\n", "nonsense\n", "+\n", f"-{ended}\n"])
        assert gone([left]) and is_alive(ended)
    finally:
        for group in groups:
            os.kill(group.pid, signal.SIGKILL)
            group.wait()
