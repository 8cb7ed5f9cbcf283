"""Commands end with the process that started them, with all that they started themselves."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_async.rollout.command_groups import COMMANDS

STARTS = """
import asyncio, sys
from jaxrl_async.rollout.command_groups import COMMANDS

async def work():
    words = ["sh", "-c", "trap '' TERM; sleep 60 & setsid sleep 60 & echo $$ $!; wait"]
    commands = [await COMMANDS.start(words, {"PATH": "/usr/bin:/bin"}) for _ in range(2)]
    pids = [(await p.stdout.readline()).decode().strip() for p in commands]
    print(*pids, *(p.pid for p in commands), flush=True)
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


@pytest.mark.full
def test_no_command_outlives_a_killed_process_and_its_children_neither():
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pids = [int(word) for word in run.stdout.readline().split()]
        assert len(pids) == 6 and all(map(is_alive, pids))
        run.kill()
    assert gone(pids), "the reapers leave, too"


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        (["sh", "-c", "echo out; echo err >&2; exit 3"], 3, "out\nerr\n"),
        (["sh", "-c", "kill -TERM $$"], -signal.SIGTERM, ""),
        (["sh", "-c", "kill -KILL $$"], -signal.SIGKILL, ""),
        (["no-such-command"], 127, "no-such-command: No such file or directory\n"),
        (["/etc/passwd"], 126, "/etc/passwd: Permission denied\n"),
        (["sh", "-c", "yes | head -n 1"], 0, "y\n"),
        (["sh", "-c", "cat; test $(ls /proc/self/fd | wc -l) = 4"], 0, ""),
    ],
)
def test_a_command_ends_as_it_would_by_itself(words, code, output):
    """Its code, its signal, its output; no input, SIGPIPE as usual, and no stray descriptor."""

    async def run():
        command = await COMMANDS.start(words, {"PATH": "/usr/bin:/bin"})
        try:
            return await command.wait(), (await command.stdout.read()).decode()
        finally:
            await COMMANDS.end(command)

    assert asyncio.run(run()) == (code, output)
    assert not COMMANDS.running


@pytest.mark.parametrize("moment", ["before the pipe", "in the pipe"])
def test_a_start_that_is_cancelled_leaves_no_command(moment, monkeypatch):
    """Either the loop has the pipe already, or not: the reaper ends, and the pipe is closed."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def noted(*words, **named):
        started.append(real(*words, **named))
        return started[-1]

    async def run():
        monkeypatch.setattr(subprocess, "Popen", noted)
        loop = asyncio.get_running_loop()
        if moment == "before the pipe":

            async def never(*_):
                await asyncio.sleep(3600)

            monkeypatch.setattr(loop, "connect_read_pipe", never)
        task = asyncio.ensure_future(COMMANDS.start(["sleep", "600"], {"PATH": "/usr/bin:/bin"}))
        await asyncio.sleep(0)
        assert started and not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(run())
    (reaper,) = started
    assert reaper.stdout is not None and reaper.stdout.closed
    assert reaper.wait(60) and not COMMANDS.running
