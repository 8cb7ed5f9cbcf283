"""Commands on an event loop. All their processes are killed when they or this process exit.

start ──> reaper (reaper.py) ──> the command and all processes that it starts
 │ wait: for the reaper's exit, not for its pipes, which a stray process may hold open
 └ end:  SIGTERM to the reaper, which kills all processes below it
"""

import asyncio
import os
import subprocess
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping, Sequence
from contextlib import suppress

from jaxrl_async.reaper import END_S, kill_session, under_reaper

LOOK_S = 0.1
"""Polling interval for a command's exit if the system has no pidfd, seconds."""
REAP_S = END_S + 1.0
"""Maximum time for a reaper to end after SIGTERM, seconds; then it is killed."""


class RunningCommand:
    """A started command. Used on one event loop."""

    def __init__(
        self,
        reaper: "subprocess.Popen[bytes]",
        stdout: asyncio.StreamReader,
        transport: asyncio.ReadTransport,
    ) -> None:
        self._reaper, self.stdout, self._transport = reaper, stdout, transport
        self.pid = reaper.pid  # also the id of its session

    async def wait(self) -> int:
        """Wait until the command and all its processes have exited. Return its exit code;
        negative: the signal that ended it."""
        reaper = self._reaper
        if reaper.poll() is None:
            try:
                watched = os.pidfd_open(reaper.pid)
            except (AttributeError, OSError):
                watched = None
            if watched is None:
                while reaper.poll() is None:
                    await asyncio.sleep(LOOK_S)
            else:
                await _readable(watched)
        code = reaper.wait()
        if code < 0:  # the signal may have killed the reaper instead of the command
            kill_session(self.pid)
        return code

    async def end(self) -> None:
        """Kill its remaining processes, if any, and wait for them. Idempotent."""
        if self._reaper.poll() is None:
            self._reaper.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(REAP_S):
                    await self.wait()
        if self._reaper.poll() is None:
            self._reaper.kill()
            await self.wait()

    def close(self) -> None:
        """Stop reading its output. Idempotent."""
        self._transport.close()


async def _readable(descriptor: int) -> None:
    """Wait until a descriptor can be read, and close it."""
    loop = asyncio.get_running_loop()
    seen: asyncio.Future[None] = loop.create_future()

    def see() -> None:
        if not seen.done():
            seen.set_result(None)

    loop.add_reader(descriptor, see)
    try:
        await seen
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


class CommandGroups:
    """The commands of this process, each with all processes it has started. On any event loop."""

    def __init__(self) -> None:
        self.running: set[RunningCommand] = set()  # started, not ended

    async def start(self, words: Sequence[str], environ: Mapping[str, str]) -> RunningCommand:
        """Start a command, its output and errors in one pipe. The caller must `end` it. Raises
        OSError."""
        reaper = subprocess.Popen(
            under_reaper(words),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=environ,
            start_new_session=True,  # Ctrl-C should reach only the run
        )
        reader = asyncio.StreamReader()
        assert reaper.stdout is not None, "stdout=PIPE"
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), reaper.stdout
            )
        except BaseException:  # cancelled: no caller has a command to end
            reaper.terminate()
            reaper.stdout.close()
            raise
        command = RunningCommand(reaper, reader, transport)
        self.running.add(command)
        return command

    async def end(self, command: RunningCommand) -> None:
        """Kill a command's remaining processes, and stop reading its output."""
        try:
            await command.end()
        finally:
            command.close()
            self.running.discard(command)


COMMANDS = CommandGroups()
"""The commands of this process."""
