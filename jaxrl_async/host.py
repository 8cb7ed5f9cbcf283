"""What the host has, without asking JAX, and freed memory given back to it."""

import ctypes
import os
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


GPU_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Which share of each GPU JAX takes; newer versions also read it without the word PYTHON."""
USUAL_GPU_SHARE = 0.75
"""What JAX takes if the variable is not set."""
LARGE_GPU_SHARE = 0.9
"""Share from which on there is little more to give to JAX."""


def gpu_share() -> float:
    """Return which share of each GPU's memory JAX gives to a process that starts with this
    environment; what is no number JAX refuses itself."""
    told = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get(GPU_SHARE_VARIABLE)
    try:
        return float(told or USUAL_GPU_SHARE)
    except ValueError:
        return USUAL_GPU_SHARE


def more_of_a_gpu() -> str:
    """Return a sentence, with a space behind it, on how JAX gets more of a GPU; "": it has nearly
    all."""
    share = gpu_share()
    if share >= LARGE_GPU_SHARE:
        return ""
    return (
        f"JAX takes {share:.0%} of each GPU: start with {GPU_SHARE_VARIABLE}=0.95 in the "
        "environment if nothing else runs there. "
    )


def gpu_memory_is_taken_at_start() -> bool:
    """Return whether JAX takes that share at once, or as it needs it."""
    return os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")


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
