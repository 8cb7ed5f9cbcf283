"""Check a machine for a run: packages, devices, memory, cores, disk. Imports no JAX: a separate
process queries the devices, with a timeout."""

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from jaxrl_async.command.diagnostic import GIB, Diagnostic, gib
from jaxrl_async.cpu.compiler import NotBuiltError, compiler_here
from jaxrl_async.host import (
    TPU_FILES,
    gpu_memory,
    has_nvidia,
    has_tpu,
    host_memory,
    jax_plugins,
    package_versions,
    unusable_gpu,
    version_of,
)

OLDEST_PYTHON = (3, 11)
LITTLE_DISK = 2 * GIB
ENDING_S = 5.0
"""Maximum wait for a killed process to exit, seconds: a process that waits for a driver may not."""
PROBE = """
import json, jax
devices = jax.local_devices()
stats = devices[0].memory_stats() or {}
print(json.dumps({
    "platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices),
    "memory": stats.get("bytes_limit"), "used": stats.get("bytes_in_use"),
    "capability": getattr(devices[0], "compute_capability", None),
}))
"""
"""Program for a separate process that lists the devices."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that JAX sees."""

    platform: str
    kind: str
    count: int
    memory: int | None  # bytes of one device; None: not reported (a CPU)
    capability: str | None = None  # of an NVIDIA card, such as "9.0"; None: another device


# ---- packages


def check_packages() -> Iterator[Diagnostic]:
    """Compare Python and the packages with the requirements in pyproject.toml."""
    own = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        yield Diagnostic("error", f"python {own}", "install Python 3.11 or newer")
    else:
        yield Diagnostic("ok", f"python {own}, {platform.platform()}")
    try:
        requirements = [Requirement(text) for text in requires("jaxrl_async") or []]
    except PackageNotFoundError:
        yield Diagnostic(
            "warning",
            "jaxrl_async is not installed, so its requirements cannot be checked",
            f"pip install -c {constraints_file()} -e .",
        )
        return
    needed = [one for one in requirements if one.marker is None]
    yield from filter(None, (_wrong_version(one, "error") for one in needed))
    shown = [f"{name} {number}" for name, number in package_versions().items()]
    yield Diagnostic("ok", ", ".join(shown))
    jax = version_of("jax")
    for plugin in CUDA_PLUGINS:
        if (own := version_of(plugin)) not in ("", jax):
            yield Diagnostic(
                "error",
                f"{plugin} is {own}, and jax is {jax}: JAX does not use plugins of other versions",
                f"pip install '{plugin}=={jax}'",
            )
    present, absent = set[str](), set[str]()
    for one in requirements:
        if one.marker is not None and (extra := _extra_of(one)) not in ("dev", ""):
            (present if version_of(ACCELERATORS.get(extra, one.name)) else absent).add(extra)
            if version_of(one.name) and (wrong := _wrong_version(one, "warning")):
                yield wrong
    missing = f"; not installed: {', '.join(sorted(absent - present))}" if absent - present else ""
    yield Diagnostic("ok", f"extras: {', '.join(sorted(present)) or 'none'}{missing}")


def constraints_file() -> str:
    """Return the name of the file with the versions that are tested with this Python."""
    minor = min(max(sys.version_info.minor, 11), 13)
    return "constraints.txt" if minor == 11 else f"constraints-3.{minor}.txt"


ACCELERATORS = {
    "tpu": "libtpu",
    "cuda": "jax-cuda13-plugin",
    "cuda12": "jax-cuda12-plugin",
    "cuda13": "jax-cuda13-plugin",
}
"""Packages that the extras of jax install."""
CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def _wrong_version(one: Requirement, level: Any) -> Diagnostic | None:
    number = version_of(one.name)
    if number and one.specifier.contains(number, prereleases=True):
        return None
    state = f"{one.name} {number} is installed" if number else f"{one.name} is not installed"
    return Diagnostic(
        level,
        f"{state}, and {one.specifier or 'any version'} is needed",
        f"pip install -U '{one.name}{one.specifier}'",
    )


def _extra_of(requirement: Requirement) -> str:
    """Return the extra of `ray>=2; extra == "ray"`."""
    text = str(requirement.marker)
    return text.rpartition("extra == ")[2].strip("\"' )") if "extra ==" in text else ""


# ---- devices


def find_devices(timeout_s: float) -> tuple[Devices | None, list[Diagnostic]]:
    """List JAX's devices in another process, within timeout_s; return them with the diagnostics."""
    answer, error = _query_devices(timeout_s)
    if answer is None:
        return None, [_no_devices(error)]
    capability = None if answer["capability"] is None else str(answer["capability"])
    platform, kind, count = answer["platform"], answer["kind"], answer["count"]
    devices = Devices(platform, kind, count, answer["memory"], capability)
    each = f" with {gib(devices.memory)} each" if devices.memory else ""
    diagnostics = [Diagnostic("ok", f"devices: {count} x {kind}{each} (JAX: {platform})")]
    if devices.platform == "gpu":
        diagnostics.append(_check_gpu_share())
    if devices.platform != "cpu" or "cpu" in os.environ.get("JAX_PLATFORMS", ""):
        return devices, diagnostics
    if has_tpu() or has_nvidia():
        what, extra = ("TPU chips", "tpu") if has_tpu() else ("an NVIDIA GPU", "cuda")
        text = f"this host has {what}, and JAX uses the CPU"
        diagnostics.append(Diagnostic("warning", text, f"pip install 'jaxrl_async[{extra}]'"))
    elif problem := unusable_gpu(jax_plugins()):
        diagnostics.append(Diagnostic("warning", *problem))
    return devices, diagnostics


def _check_gpu_share() -> Diagnostic:
    """Report JAX's share of each GPU's memory, and when it is allocated."""
    memory = gpu_memory()
    if memory.problem:
        return Diagnostic("warning", memory.problem)
    if not memory.pooled:
        return Diagnostic("ok", "JAX allocates memory of each GPU on demand, without its own limit "
                       "(XLA_PYTHON_CLIENT_ALLOCATOR=platform)")  # fmt: skip
    how = "at its start" if memory.preallocated else "on demand"
    return Diagnostic(
        "ok",
        f"JAX takes {memory.share:.0%} of each GPU {how} ({memory.variable}, "
        "XLA_PYTHON_CLIENT_PREALLOCATE): the shares of processes on the same GPU must sum to less "
        "than 1",
    )


def _query_devices(timeout_s: float) -> tuple[dict[str, Any] | None, str]:
    """Return PROBE's output; or None, and the reason."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-c", PROBE], stdout=out, stderr=err, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            # A process that waits for a driver may not end even then; nothing more can be done.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            return None, f"no answer within {timeout_s:g} s"
        out.seek(0)
        err.seek(0)
        text, problem = out.read().decode(), err.read().decode(errors="replace").strip()
    if process.returncode:
        return None, problem.splitlines()[-1][:300] if problem else f"exit {process.returncode}"
    answer: dict[str, Any] = json.loads(text.splitlines()[-1])
    return answer, ""


def _no_devices(error: str) -> Diagnostic:
    holders = list(holders_of_devices())
    if holders:
        return Diagnostic(
            "error",
            f"JAX cannot use the devices: {error}. They are held by {'; '.join(holders)}",
            "wait for it, end it, or check with JAX_PLATFORMS=cpu",
        )
    return Diagnostic(
        "error",
        f"JAX cannot use the devices: {error}",
        "check that `python -c 'import jax; print(jax.devices())'` works; another process may "
        "hold them; a larger --timeout helps a slow start",
    )


def holders_of_devices() -> Iterator[str]:
    """Yield the other processes that have an accelerator's device open, as far as this user can
    see."""
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            opened = {os.readlink(fd) for fd in (process / "fd").iterdir()}
            name = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80].strip()
        except OSError:
            continue  # another user's process, or it has ended
        if any(_is_device(path) for path in opened):
            yield f"process {process.name} ({name})"


def _is_device(path: str) -> bool:
    own = Path(path)
    if not own.is_relative_to("/dev"):
        return False
    return any(own.relative_to("/dev").match(pattern) for pattern in (*TPU_FILES, "nvidia[0-9]*"))


# ---- the host


def check_host(runs: Path, cache: Path) -> Iterator[Diagnostic]:
    """Look at memory, cores, shared memory, disk and the compile cache.

    Args:
        runs: the folder of runs, which need not exist.
        cache: the folder of compiled programs.
    """
    memory, free = host_memory()
    yield Diagnostic("ok", f"host memory: {gib(memory)}, {gib(free)} of it free")
    yield Diagnostic("ok", f"cores: {len(os.sched_getaffinity(0))} of {os.cpu_count()} may be used")
    try:
        shared = shutil.disk_usage("/dev/shm")
        yield Diagnostic("ok", f"/dev/shm: {gib(shared.free)} free of {gib(shared.total)}")
    except OSError:
        yield Diagnostic(
            "warning",
            "/dev/shm does not exist",
            "use remote.transfer=tcp with mesh.samplers_in=processes",
        )
    yield check_compiler()
    yield check_disk(runs, LITTLE_DISK, "for checkpoints and policies")
    yield _check_cache(cache)


def check_compiler() -> Diagnostic:
    """Report whether the package's CPU kernels can be built here."""
    try:
        return Diagnostic("ok", f"compiler of CPU kernels: {compiler_here()}")
    except NotBuiltError as error:
        text = f"samplers and updates on this CPU use only XLA's programs: {error}"
        return Diagnostic("ok", text)


def check_disk(folder: Path, needed: float, what: str) -> Diagnostic:
    """Report whether a folder, which need not exist yet, is writable and has enough space."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Diagnostic(
            "error",
            f"{folder} cannot be written to ({existing})",
            "set run.dir to a writable folder",
        )
    free = shutil.disk_usage(existing).free
    if free < needed:
        return Diagnostic(
            "warning",
            f"disk at {folder}: {gib(free)} free, {gib(needed)} {what}",
            "free some space, lower checkpoint.keep, or set run.dir",
        )
    return Diagnostic("ok", f"disk at {folder}: {gib(free)} free")


def _check_cache(cache: Path) -> Diagnostic:
    if not cache.is_dir():
        return Diagnostic(
            "ok", f"compile cache {cache}: empty, so the first start compiles everything"
        )
    files = [entry for entry in cache.iterdir() if entry.is_file()]
    size = sum(entry.stat().st_size for entry in files)
    return Diagnostic("ok", f"compile cache {cache}: {len(files)} files, {gib(size)}")
