"""What the host has, without asking JAX, and freed memory given back to it."""

import ctypes
import importlib.util
import os
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


GPU_SHARE_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
"""Which share of each GPU JAX takes; JAX calls the first deprecated, and refuses both together."""
USUAL_GPU_SHARE = 0.75
"""What JAX takes if neither is set."""
LARGE_GPU_SHARE = 0.95
"""The share for a run that has the card to itself: the rest is for CUDA, its libraries, and the
buffers of NCCL. Plans count on it, unless the environment sets another share."""
NEARLY_ALL = 0.9
"""Share from which on there is little more to give to JAX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """How much of each GPU's memory JAX gives to a process with this environment, and when."""

    variable: str  # by which another share is asked for
    told: float | None = None  # the share that the environment sets; None: it sets none
    pooled: bool = True  # False: XLA_PYTHON_CLIENT_ALLOCATOR=platform, for which no share counts
    preallocated: bool = True  # False: the share is taken as it is needed
    problem: str = ""  # what is wrong with the variables, and what to do; told is None then

    @property
    def share(self) -> float:
        """The share that JAX has at most."""
        return 1.0 if not self.pooled else USUAL_GPU_SHARE if self.told is None else self.told

    @property
    def planned_share(self) -> float:
        """The share that a run has if it is started as its plan says."""
        return LARGE_GPU_SHARE if self.told is None or not self.pooled else self.told


def gpu_memory() -> GpuMemory:
    """Read the environment's variables for the memory of GPUs, as JAX does."""
    given = {name: text for name in GPU_SHARE_VARIABLES if (text := os.environ.get(name))}
    pooled = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() != "platform"
    early = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")
    variable, text = next(iter(given.items()), (GPU_SHARE_VARIABLES[0], ""))
    memory = GpuMemory(variable=variable, pooled=pooled, preallocated=pooled and early)
    if len(given) > 1:
        both = " and ".join(given)
        return replace(memory, problem=f"{both} are both set, which JAX refuses: unset the first.")
    try:
        told = float(text) if text else None
    except ValueError:
        told = 0.0
    if told is None or 0 < told <= 1:
        return replace(memory, told=told)
    problem = f"{variable}={text} is not a share of a card's memory: give one such as 0.95."
    return replace(memory, problem=problem)


def more_of_a_gpu() -> str:
    """Return a sentence, with a space behind it, on how JAX gets more of a GPU; "": it has nearly
    all."""
    memory = gpu_memory()
    if memory.problem:
        return f"{memory.problem} "
    if memory.share >= NEARLY_ALL:
        return ""
    return (
        f"JAX takes {memory.share:.0%} of each GPU: start with {memory.variable}={LARGE_GPU_SHARE} "
        "in the environment if nothing else runs there. "
    )


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
    """Return whether NVIDIA's driver is installed; without it JAX's CUDA plugin is of no use."""
    return any((Path("/dev") / name).exists() for name in NVIDIA_FILES)


CUDA_PLUGIN = "xla_cuda"
"""How the modules of JAX's CUDA plugins begin: xla_cuda12, xla_cuda13."""


def jax_plugins() -> list[str]:
    """Return the module names of JAX's plugins for devices that are installed."""
    found = importlib.util.find_spec("jax_plugins")
    places = [] if found is None else list(found.submodule_search_locations or ())
    return [module.name for module in pkgutil.iter_modules(places)]


def card_out_of_reach(plugins: Sequence[str]) -> tuple[str, str] | None:
    """Return, for people, what keeps JAX's CUDA plugin from the cards of this host, and what to do;
    None: there is NVIDIA's driver, or no CUDA plugin among `plugins`."""
    of_cuda = [f"jax-{name.removeprefix('xla_')}-plugin" for name in plugins
               if name.startswith(CUDA_PLUGIN)]  # fmt: skip
    if not of_cuda or has_nvidia():
        return None
    files = ", ".join(f"/dev/{name}" for name in NVIDIA_FILES)
    return (
        f"{' and '.join(of_cuda)} is installed, and NVIDIA's driver is not here (none of {files}), "
        "so JAX does not use the plugin and computes on the CPU",
        "install the driver, or start the container with its cards (docker run --gpus all); "
        "JAX_PLATFORMS=cpu chooses the CPU, JAX_PLATFORMS=cuda ends the run with an error",
    )
