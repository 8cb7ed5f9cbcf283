"""What the host has, without asking JAX, and freed memory given back to it."""

import ctypes
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

TPU_FILES = ("accel[0-9]*", "vfio/[0-9]*")
"""Below /dev on a host with TPU chips."""


NVIDIA_FILES = ("nvidiactl", "nvidia0", "dxg")
"""One of them is below /dev on a host with NVIDIA's driver; the last under Windows' Linux."""


def version_of(package: str) -> str:
    """Return the version of an installed package; "": it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def host_memory() -> tuple[int, int]:
    """Return the bytes of memory that this process may have, and those that are free. Raises
    OSError where the system does not say (it is not Linux)."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, free = table["MemTotal"], table["MemAvailable"]
    try:  # a container's limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return total, free
    for of_files in ("inactive_file", "active_file"):  # given up when memory is asked for
        used -= int(stat.get(of_files, 0))
    return min(total, limit), max(0, min(free, limit - used))


def give_back_memory() -> None:
    """Return freed memory that malloc holds to the system.

    What several threads have made and freed leaves it scattered over their arenas, and a long run
    would seem to grow. Does nothing if malloc is not glibc's.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def has_tpu() -> bool:
    """Return whether TPU chips are attached, of a generation that this version of JAX knows or
    not."""
    return any(chain.from_iterable(Path("/dev").glob(pattern) for pattern in TPU_FILES))


def has_nvidia() -> bool:
    """Return whether NVIDIA's driver is there, so that JAX's CUDA plugin can be of use."""
    return any((Path("/dev") / name).exists() for name in NVIDIA_FILES)
