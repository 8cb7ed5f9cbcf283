"""Query the host's hardware and memory without JAX, and return freed memory to the system."""

import ctypes
import gc
import importlib.util
import os
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

TPU_FILES = ("accel[0-9]*", "vfio/[0-9]*")
"""Device files below /dev on a host with TPU chips."""


NVIDIA_FILES = ("nvidiactl", "nvidia0", "dxg")
"""Device files below /dev on a host with NVIDIA's driver, at least one; dxg is for WSL."""


PACKAGES = (
    *("jaxrl_async", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"),
    *("flax", "optax", "orbax-checkpoint", "grain", "transformers", "tokenizers", "safetensors"),
    "numpy",
)
"""Packages whose versions a run's numbers may depend on."""


def version_of(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def package_versions() -> dict[str, str]:
    """Return the versions of PACKAGES, of those that are installed."""
    return {name: number for name in PACKAGES if (number := version_of(name))}


def host_memory() -> tuple[int, int]:
    """Return the memory that this process may use, and the free part of it, in bytes. Raises
    OSError if the system does not report it (it is not Linux)."""
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
    for page_cache in ("inactive_file", "active_file"):  # the kernel frees them on demand
        used -= int(stat.get(page_cache, 0))
    return min(total, limit), max(0, min(free, limit - used))


GPU_SHARE_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
"""Variables with JAX's share of each GPU; the first is deprecated, and JAX refuses both
together."""
USUAL_GPU_SHARE = 0.75
"""JAX's share if neither variable is set."""
LARGE_GPU_SHARE = 0.95
"""The share for a run that has the GPU to itself: the rest is for CUDA, its libraries, and NCCL's
buffers. Plans assume it unless the environment sets another share."""
NEARLY_ALL = 0.9
"""From this share on, JAX cannot get much more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """The share of each GPU's memory that JAX gives to a process with this environment, and
    when."""

    variable: str  # which sets another share
    env_share: float | None = None  # by the environment; None: it sets none
    pooled: bool = True  # False: XLA_PYTHON_CLIENT_ALLOCATOR=platform, which ignores the share
    preallocated: bool = True  # False: memory is allocated on demand
    problem: str = ""  # what is wrong with the variables and what to do; then env_share is None

    @property
    def share(self) -> float:
        """The maximum share of JAX."""
        share = USUAL_GPU_SHARE if self.env_share is None else self.env_share
        return share if self.pooled else 1.0

    @property
    def planned_share(self) -> float:
        """The share of a run that is started with the environment that its plan recommends."""
        return LARGE_GPU_SHARE if self.env_share is None or not self.pooled else self.env_share


def gpu_memory() -> GpuMemory:
    """Read the environment's variables for the memory of GPUs, as JAX does."""
    values = {name: text for name in GPU_SHARE_VARIABLES if (text := os.environ.get(name))}
    pooled = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() != "platform"
    early = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")
    variable, text = next(iter(values.items()), (GPU_SHARE_VARIABLES[0], ""))
    memory = GpuMemory(variable=variable, pooled=pooled, preallocated=pooled and early)
    if len(values) > 1:
        both = " and ".join(values)
        return replace(memory, problem=f"{both} are both set, which JAX refuses: unset the first.")
    try:
        share = float(text) if text else None
    except ValueError:
        share = 0.0
    if share is None or 0 < share <= 1:
        return replace(memory, env_share=share)
    problem = f"{variable}={text} is not a share of a card's memory: give one such as 0.95."
    return replace(memory, problem=problem)


def more_of_a_gpu() -> str:
    """Return a sentence, with a space at its end, on how JAX gets more of a GPU; "" if it already
    has nearly all."""
    memory = gpu_memory()
    if memory.problem:
        return f"{memory.problem} "
    if memory.share >= NEARLY_ALL:
        return ""
    return (
        f"JAX takes {memory.share:.0%} of each GPU: start with {memory.variable}={LARGE_GPU_SHARE} "
        "in the environment if nothing else runs there. "
    )


M_ARENA_MAX = -8
"""The parameter of glibc's `mallopt` for the maximum number of arenas (malloc.h)."""
CORES_PER_ARENA = 4


def limit_arenas() -> None:
    """Limit malloc to one arena for each four cores, at least one.

    glibc allows eight per core. Threads that compile leave an arena of small holes; a page with a
    few live blocks in such holes cannot go back to the system, and over hours ever more pages have
    some. In one arena the holes are filled first. Call it before threads start: arenas that exist
    remain. Does nothing if $MALLOC_ARENA_MAX is set or malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, max(1, (os.cpu_count() or 1) // CORES_PER_ARENA))


def give_back_memory() -> None:
    """Return freed memory that malloc holds to the system.

    Memory that several threads allocated and freed is scattered over their arenas, which makes a
    long run appear to grow. Does nothing if malloc is not glibc's.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def has_tpu() -> bool:
    """Return whether TPU chips are attached, even if this version of JAX does not know their
    generation."""
    return any(chain.from_iterable(Path("/dev").glob(pattern) for pattern in TPU_FILES))


def has_nvidia() -> bool:
    """Return whether NVIDIA's driver is installed; JAX's CUDA plugin needs it."""
    return any((Path("/dev") / name).exists() for name in NVIDIA_FILES)


CUDA_PLUGIN = "xla_cuda"
"""Prefix of the module names of JAX's CUDA plugins: xla_cuda12, xla_cuda13."""


def jax_plugins() -> list[str]:
    """Return the module names of JAX's installed device plugins."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return [module.name for module in pkgutil.iter_modules(folders)]


def unusable_gpu(plugins: Sequence[str]) -> tuple[str, str] | None:
    """Return why JAX's CUDA plugin cannot use this host's GPUs, and what to do, as messages. None
    if NVIDIA's driver is present or `plugins` contains no CUDA plugin."""
    cuda_plugins = [f"jax-{name.removeprefix('xla_')}-plugin" for name in plugins
                    if name.startswith(CUDA_PLUGIN)]  # fmt: skip
    if not cuda_plugins or has_nvidia():
        return None
    files = ", ".join(f"/dev/{name}" for name in NVIDIA_FILES)
    return (
        f"{' and '.join(cuda_plugins)} is installed, and NVIDIA's driver is not here (none of "
        f"{files}), so JAX does not use the plugin and computes on the CPU",
        "install the driver, or start the container with its cards (docker run --gpus all); "
        "JAX_PLATFORMS=cpu chooses the CPU, JAX_PLATFORMS=cuda ends the run with an error",
    )


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Make the collector ignore all objects that exist before the `with`.

    About half a million objects (modules, traced programs, the parts of a run) exist by then and
    live on. A full collection scans all of them for 0.1 to 0.5 s. No thread runs Python during
    that time, so the results of updates and decode blocks are not processed. Unreferenced objects
    are still freed as before; only cycles that include earlier objects are kept until the end,
    with everything that they refer to. If objects are already frozen (`gc.freeze`), this does
    nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
