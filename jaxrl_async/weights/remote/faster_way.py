"""Which of two ways weights come by, where it is not known which is the faster: each is tried."""

import logging
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

DEVICE, TCP = "device", "tcp"


@dataclass(slots=True)
class FasterWay:
    """The first version comes from device to device, the second over TCP, and all others the way
    that was faster. Used by one thread."""

    _rates: dict[str, float] = field(default_factory=dict)  # bytes a second, by way; 0: it failed

    @property
    def next(self) -> str:
        """The way to try now."""
        untried = [way for way in (DEVICE, TCP) if way not in self._rates]
        return untried[0] if untried else max(self._rates, key=lambda way: self._rates[way])

    def took(self, way: str, num_bytes: int, seconds: float) -> None:
        """Take note that a version came this way; 0 bytes: it did not. The first of each way
        counts, but a failure always does."""
        known = way in self._rates
        if known and num_bytes:
            return
        self._rates[way] = num_bytes / max(seconds, 1e-9)
        if not known and len(self._rates) == 2:
            log.info(
                "weights come by remote.transfer=%s from now on (auto): GB/s were %s",
                self.next,
                ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in self._rates.items()),
            )
