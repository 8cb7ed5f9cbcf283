"""Commands on an event loop, of which nothing is left when they exit, or when this process ends.

start ──> keeper (keeper.py) ──> the command and all that it starts
 │ wait: for the keeper's own exit, not for its pipes, which a stray process may hold
 └ end:  SIGTERM to the keeper, which kills all below it
"""

import asyncio
import os
import subprocess
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping, Sequence
from contextlib import suppress

from jaxrl_async.keeper import END_S, kept, kill_session

LOOK_S = 0.1
"""How often a command is looked at where no descriptor says that it has ended, seconds."""
REAP_S = END_S + 1.0
"""Longest wait for a keeper that was told to end, seconds; then it is killed itself."""


class RunningCommand:
    """A command that was started. On one event loop."""

    def __init__(
        self,
        keeper: "subprocess.Popen[bytes]",
        stdout: asyncio.StreamReader,
        transport: asyncio.ReadTransport,
    ) -> None:
        self._keeper, self.stdout, self._transport = keeper, stdout, transport
        self.pid = keeper.pid  # also names the session that it began in

    async def wait(self) -> int:
        """Wait until it has exited and nothing of it is left; return its exit code, negative: the
        signal that ended it."""
        keeper = self._keeper
        if keeper.poll() is None:
            try:
                watched = os.pidfd_open(keeper.pid)
            except (AttributeError, OSError):
                watched = None
            if watched is None:
                while keeper.poll() is None:
                    await asyncio.sleep(LOOK_S)
            else:
                await _readable(watched)
        code = keeper.wait()
        if code < 0:  # perhaps it was not the command that was killed, but its keeper
            kill_session(self.pid)
        return code

    async def end(self) -> None:
        """Kill what is left of it, if anything, and wait for that. Idempotent."""
        if self._keeper.poll() is None:
            self._keeper.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(REAP_S):
                    await self.wait()
        if self._keeper.poll() is None:
            self._keeper.kill()
            await self.wait()

    def close(self) -> None:
        """Read no more of its output. Idempotent."""
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
    """The commands of this process, each with all that it has started. On any event loop."""

    def __init__(self) -> None:
        self.running: set[RunningCommand] = set()  # begun, and not ended

    async def start(self, words: Sequence[str], environ: Mapping[str, str]) -> RunningCommand:
        """Start a command, its output and errors in one pipe. The caller must `end` it. Raises
        OSError."""
        keeper = subprocess.Popen(
            kept(words),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=environ,
            start_new_session=True,  # Ctrl-C is for the run
        )
        reader = asyncio.StreamReader()
        assert keeper.stdout is not None, "it was asked for"
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), keeper.stdout
            )
        except BaseException:  # cancelled: no caller has a command to end
            keeper.terminate()
            keeper.stdout.close()
            raise
        command = RunningCommand(keeper, reader, transport)
        self.running.add(command)
        return command

    async def end(self, command: RunningCommand) -> None:
        """Kill what is left of a command, and read no more of its output."""
        try:
            await command.end()
        finally:
            command.close()
            self.running.discard(command)


COMMANDS = CommandGroups()
"""Those of this process."""
