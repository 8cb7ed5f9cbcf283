"""Features of NVIDIA GPUs by compute capability."""

from typing import Any

from jaxrl_async.config.model_section import AMPERE

Capability = tuple[int, int]
"""Major and minor version: (9, 0) for an H100."""


def capability_of(device: Any) -> Capability | None:
    """Return a device's compute capability; None if it is not an NVIDIA GPU."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() else None


def has_triton(device: Any) -> bool:
    """Return whether a device supports the Triton kernels: NVIDIA GPUs since Ampere."""
    return (capability_of(device) or (0, 0)) >= (AMPERE, 0)
