"""The diagnostics of `jaxrl-async doctor`."""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One line of the doctor's report."""

    level: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""  # what to do, unless it is ok

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}" + (
            f"\n{'':8} -> {self.remedy}" if self.remedy else ""
        )


def gib(num_bytes: float) -> str:
    """Return a number of bytes as text: 3.1 GiB, or 64 MiB."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:,.0f} MiB"
