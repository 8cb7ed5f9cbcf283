"""Two real sessions, with codec and threads, connected through memory by a line that a test can
slow down and cut."""

import threading
from dataclasses import dataclass

from jaxrl_async.remote.wire.session import WireLimits, WireSession

TEST_LIMITS = WireLimits(silence_s=5.0)


@dataclass(frozen=True, slots=True)
class SessionPair:
    """Both ends of a line, and the line itself."""

    trainer: WireSession  # the trainer's end; its peer is the sampler
    sampler: WireSession
    line: "MemoryLine"

    def close(self) -> None:
        """Break the line, so no thread remains."""
        self.line.cut()


class MemoryLine:
    """The line that carries frames between two sessions."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        """Transfer time per frame, seconds; frames are sent one after another."""
        self._cut, self._silent = threading.Event(), threading.Event()
        self._ends: tuple[WireSession, ...] = ()

    def join(self, *ends: WireSession) -> None:
        """Carry frames between these two sessions."""
        self._ends = ends
        for a, b in (ends, ends[::-1]):
            threading.Thread(target=self._carry, args=(a, b), name="line", daemon=True).start()

    def cut(self) -> None:
        """Break the line; both ends notice immediately, as when a process dies."""
        self._cut.set()
        for end in self._ends:
            end.lost("the line was cut")

    def silence(self) -> None:
        """Drop all frames from now on; the ends notice after silence_s, as when a network fails or
        a process is stopped."""
        self._silent.set()

    def _carry(self, a: WireSession, b: WireSession) -> None:
        for frame in a.frames():
            self._cut.wait(self.delay_s)
            if self._cut.is_set():
                return
            if not self._silent.is_set():
                b.take(frame)
        if not self._silent.is_set():
            b.lost(f"{b.peer} has closed the connection")


def session_pair(*, sampler: str = "sampler-0", limits: WireLimits = TEST_LIMITS) -> SessionPair:
    """Return two connected sessions in memory; close() the pair at the end of a test.

    Args:
        sampler: name of the sampler, shown as `peer` on the trainer's side.
    """
    line = MemoryLine()
    at_trainer, at_sampler = WireSession(sampler, limits), WireSession("trainer", limits)
    line.join(at_trainer, at_sampler)
    at_trainer.start()
    at_sampler.start()
    return SessionPair(at_trainer, at_sampler, line)
