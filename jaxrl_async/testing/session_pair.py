"""Two sessions that talk through memory: the real ones, codec and threads included, over a line
that a test can slow down and cut."""

import threading
from dataclasses import dataclass

from jaxrl_async.remote.wire.session import WireLimits, WireSession

TEST_LIMITS = WireLimits(silence_s=5.0)


@dataclass(frozen=True, slots=True)
class SessionPair:
    """Both ends of a line, and the line."""

    trainer: WireSession  # the trainer's end; its peer is the sampler
    sampler: WireSession
    line: "MemoryLine"

    def close(self) -> None:
        """Break the line, so that no thread stays."""
        self.line.cut()


class MemoryLine:
    """What happens to frames on their way."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        """Time that each frame takes, seconds; they go one after another."""
        self._cut, self._silent = threading.Event(), threading.Event()
        self._ends: tuple[WireSession, ...] = ()

    def join(self, *ends: WireSession) -> None:
        """Carry frames between these two."""
        self._ends = ends
        for a, b in (ends, ends[::-1]):
            threading.Thread(target=self._carry, args=(a, b), name="line", daemon=True).start()

    def cut(self) -> None:
        """Break the line; both ends notice at once, as when a process dies."""
        self._cut.set()
        for end in self._ends:
            end.stream_ended("the line was cut")

    def silence(self) -> None:
        """Lose all frames from now on; the ends notice after silence_s, as when a network is cut or
        a process stands still."""
        self._silent.set()

    def _carry(self, a: WireSession, b: WireSession) -> None:
        for frame in a.frames():
            self._cut.wait(self.delay_s)
            if self._cut.is_set():
                return
            if not self._silent.is_set():
                b.take(frame)
        if not self._silent.is_set():
            b.stream_ended(f"{b.peer} has closed the connection")


def session_pair(*, sampler: str = "sampler-0", limits: WireLimits = TEST_LIMITS) -> SessionPair:
    """Make two joined sessions in memory; close() the pair at the end of a test.

    Args:
        sampler: name of the sampler, which its trainer sees as `peer`.
    """
    line = MemoryLine()
    at_trainer, at_sampler = WireSession(sampler, limits), WireSession("trainer", limits)
    line.join(at_trainer, at_sampler)
    at_trainer.start()
    at_sampler.start()
    return SessionPair(at_trainer, at_sampler, line)
