"""Chooses the faster of two weight transports by trying each."""

import logging
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

DEVICE, TCP = "device", "tcp"
TRIES = 2
"""Number of versions fetched by each transport before one is chosen; the first includes compilation
and memory allocation."""


@dataclass(slots=True)
class TransportTrial:
    """The first versions are transferred from device to device, the next ones over TCP, and all
    others by the faster of the two, measured from the request to arrays on devices. Used by one
    thread."""

    _rates: dict[str, list[float]] = field(default_factory=lambda: {DEVICE: [], TCP: []})
    _failed: set[str] = field(default_factory=set)
    _chosen: bool = False  # chosen, and logged

    @property
    def next(self) -> str:
        """The transport to try now."""
        usable = [t for t in self._rates if t not in self._failed] or [TCP]
        untried = [t for t in usable if len(self._rates[t]) < TRIES]
        return untried[0] if untried else max(usable, key=lambda t: max(self._rates[t]))

    def record(self, transport: str, num_bytes: int, seconds: float) -> None:
        """Record the transfer of a version by this transport."""
        if len(self._rates[transport]) == TRIES:
            return
        self._rates[transport].append(num_bytes / max(seconds, 1e-9))
        if not self._chosen and all(len(r) == TRIES for r in self._rates.values()):
            self._chosen = True
            log.info(
                "fetching weights with remote.transfer=%s from now on (auto); measured GB/s: %s",
                self.next,
                ", ".join(f"{name} {max(r) / 1e9:.2f}" for name, r in self._rates.items()),
            )

    def failed(self, transport: str) -> None:
        """Record a failed transfer by this transport: it is not tried again."""
        if transport not in self._failed:
            log.warning("remote.transfer=auto does not try %s again", transport)
        self._failed.add(transport)
