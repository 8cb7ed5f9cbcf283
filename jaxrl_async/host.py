"""What the host has, without asking JAX."""

from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

TPU_FILES = ("accel[0-9]*", "vfio/[0-9]*")
"""Below /dev on a host with TPU chips."""


def version_of(package: str) -> str:
    """Return the version of an installed package; "": it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def has_tpu() -> bool:
    """Return whether TPU chips are attached, of a generation that this version of JAX knows or
    not."""
    return any(chain.from_iterable(Path("/dev").glob(pattern) for pattern in TPU_FILES))
