"""What the host has, without asking JAX."""

import os
from itertools import chain
from pathlib import Path

TPU_FILES = ("accel[0-9]*", "vfio/[0-9]*")
"""Below /dev on a host with TPU chips."""


def has_tpu() -> bool:
    """Return whether TPU chips are attached, of a generation that this version of JAX knows or
    not."""
    return any(chain.from_iterable(Path("/dev").glob(pattern) for pattern in TPU_FILES))


def accelerator() -> str:
    """Return what a process of this host computes on, unless JAX_PLATFORMS says otherwise: "tpu",
    "gpu" or "cpu"."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    if asked:
        first = asked.split(",")[0]
        return "gpu" if first in ("cuda", "rocm", "gpu") else first
    if has_tpu():
        return "tpu"
    return "gpu" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"
