"""What an NVIDIA card can do, by its compute capability."""

from typing import Any

from jaxrl_async.config.model_section import AMPERE

Capability = tuple[int, int]
"""Major and minor: (9, 0) of an H100."""


def capability_of(device: Any) -> Capability | None:
    """Return a device's compute capability; None if it is no NVIDIA GPU."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() else None


def has_triton(device: Any) -> bool:
    """Return whether our own kernels run on a device: an NVIDIA GPU since Ampere."""
    return (capability_of(device) or (0, 0)) >= (AMPERE, 0)
