"""What a machine has for a run: packages, devices, memory, cores, disk. Imports no JAX: devices are
asked for in a process of their own, which is given up after a while."""

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

from jaxrl_async.command.finding import GIB, Finding, gib
from jaxrl_async.cpu.compiler import NotBuiltError, compiler_here
from jaxrl_async.host import (
    TPU_FILES,
    card_out_of_reach,
    gpu_memory,
    has_nvidia,
    has_tpu,
    host_memory,
    jax_plugins,
    version_of,
)

OLDEST_PYTHON = (3, 11)
LITTLE_DISK = 2 * GIB
ENDING_S = 5.0
"""Longest wait for a process that was killed, seconds: one that waits for a driver may not end."""
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
"""Run by another Python to see the devices."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What JAX sees."""

    platform: str
    kind: str
    count: int
    memory: int | None  # bytes of one; None: not reported (a CPU)
    capability: str | None = None  # of an NVIDIA card, such as "9.0"; None: another device


# ---- packages


def package_findings() -> Iterator[Finding]:
    """Compare Python and the packages with what pyproject.toml asks for."""
    own = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        yield Finding("error", f"python {own}", "install Python 3.11 or newer")
    else:
        yield Finding("ok", f"python {own}, {platform.platform()}")
    try:
        asked = [Requirement(text) for text in requires("jaxrl_async") or []]
    except PackageNotFoundError:
        yield Finding(
            "warning",
            "jaxrl_async is used without being installed, so its packages cannot be compared",
            f"pip install -c {constraints_file()} -e .",
        )
        return
    needed = [one for one in asked if one.marker is None]
    yield from filter(None, (_wrong_version(one, "error") for one in needed))
    shown = [f"{name} {version_of(name)}" for name in SHOWN if version_of(name)]
    yield Finding("ok", ", ".join(shown))
    jax = version_of("jax")
    for plugin in CUDA_PLUGINS:
        if (own := version_of(plugin)) not in ("", jax):
            yield Finding(
                "error",
                f"{plugin} is {own}, and jax is {jax}: JAX uses no plugin of another version",
                f"pip install '{plugin}=={jax}'",
            )
    there, absent = set[str](), set[str]()
    for one in asked:
        if one.marker is not None and (extra := _extra_of(one)) not in ("dev", ""):
            (there if version_of(ACCELERATORS.get(extra, one.name)) else absent).add(extra)
            if version_of(one.name) and (wrong := _wrong_version(one, "warning")):
                yield wrong
    missing = f"; not installed: {', '.join(sorted(absent - there))}" if absent - there else ""
    yield Finding("ok", f"extras: {', '.join(sorted(there)) or 'none'}{missing}")


def constraints_file() -> str:
    """Return the name of the file with the versions that are tested on this Python."""
    minor = min(max(sys.version_info.minor, 11), 13)
    return "constraints.txt" if minor == 11 else f"constraints-3.{minor}.txt"


SHOWN = (
    "jaxrl_async",
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
)
"""Packages whose versions are shown, where they are installed."""


ACCELERATORS = {
    "tpu": "libtpu",
    "cuda": "jax-cuda13-plugin",
    "cuda12": "jax-cuda12-plugin",
    "cuda13": "jax-cuda13-plugin",
}
"""What the extras of jax bring."""
CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def _wrong_version(one: Requirement, level: Any) -> Finding | None:
    found = version_of(one.name)
    if found and one.specifier.contains(found, prereleases=True):
        return None
    state = f"{one.name} {found} is installed" if found else f"{one.name} is not installed"
    return Finding(
        level,
        f"{state}, and {one.specifier or 'any version'} is needed",
        f"pip install -U '{one.name}{one.specifier}'",
    )


def _extra_of(one: Requirement) -> str:
    """Return the extra of `ray>=2; extra == "ray"`."""
    text = str(one.marker)
    return text.rpartition("extra == ")[2].strip("\"' )") if "extra ==" in text else ""


# ---- devices


def look_at_devices(timeout_s: float) -> tuple[Devices | None, list[Finding]]:
    """Ask JAX for its devices in another process, for timeout_s at most; return them, and what to
    tell."""
    told, error = _asked(timeout_s)
    if told is None:
        return None, [_no_devices(error)]
    capability = None if told["capability"] is None else str(told["capability"])
    devices = Devices(told["platform"], told["kind"], told["count"], told["memory"], capability)
    each = f" with {gib(devices.memory)} each" if devices.memory else ""
    findings = [
        Finding("ok", f"devices: {devices.count} x {devices.kind}{each} (JAX: {devices.platform})")
    ]
    if devices.platform == "gpu":
        findings.append(_share_finding())
    if devices.platform != "cpu":
        return devices, findings
    if "cpu" in os.environ.get("JAX_PLATFORMS", ""):
        return devices, findings
    if has_tpu():
        findings.append(
            Finding(
                "warning",
                "this host has TPU chips, and JAX uses the CPU",
                "pip install 'jaxrl_async[tpu]'",
            )
        )
    elif has_nvidia():
        findings.append(
            Finding(
                "warning",
                "this host has an NVIDIA GPU, and JAX uses the CPU",
                "pip install 'jaxrl_async[cuda]'",
            )
        )
    elif problem := card_out_of_reach(jax_plugins()):
        findings.append(Finding("warning", *problem))
    return devices, findings


def _share_finding() -> Finding:
    """Say how much of each GPU JAX takes, and when."""
    memory = gpu_memory()
    if memory.problem:
        return Finding("warning", memory.problem)
    if not memory.pooled:
        return Finding("ok", "JAX takes memory of each GPU as it is needed, without a limit of its "
                       "own (XLA_PYTHON_CLIENT_ALLOCATOR=platform)")  # fmt: skip
    how = "at its start" if memory.preallocated else "as it is needed"
    return Finding(
        "ok",
        f"JAX takes {memory.share:.0%} of each GPU {how} ({memory.variable}, "
        "XLA_PYTHON_CLIENT_PREALLOCATE): processes that share one need shares below 1 together",
    )


def _asked(timeout_s: float) -> tuple[dict[str, Any] | None, str]:
    """Return what PROBE prints; or None, and why it did not."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-c", PROBE], stdout=out, stderr=err, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            # One that waits for a driver may not even end then; nothing more can be done from here.
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


def _no_devices(error: str) -> Finding:
    holders = list(holders_of_devices())
    if holders:
        return Finding(
            "error",
            f"JAX cannot use the devices: {error}. They are held by {'; '.join(holders)}",
            "wait for it, end it, or check with JAX_PLATFORMS=cpu",
        )
    return Finding(
        "error",
        f"JAX cannot use the devices: {error}",
        "see whether `python -c 'import jax; print(jax.devices())'` works; another process may "
        "hold them; a larger --timeout helps a slow start",
    )


def holders_of_devices() -> Iterator[str]:
    """Yield the other processes that have an accelerator's device open, as far as this user may
    see."""
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            opened = {os.readlink(fd) for fd in (process / "fd").iterdir()}
            name = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80].strip()
        except OSError:
            continue  # another user's, or it has ended
        if any(_is_device(path) for path in opened):
            yield f"process {process.name} ({name})"


def _is_device(path: str) -> bool:
    own = Path(path)
    if not own.is_relative_to("/dev"):
        return False
    return any(own.relative_to("/dev").match(pattern) for pattern in (*TPU_FILES, "nvidia[0-9]*"))


# ---- the host


def host_findings(runs: Path, cache: Path) -> Iterator[Finding]:
    """Look at memory, cores, shared memory, disk and the compile cache.

    Args:
        runs: the folder of runs, which need not exist.
        cache: the folder of compiled programs.
    """
    memory, free = host_memory()
    yield Finding("ok", f"host memory: {gib(memory)}, {gib(free)} of it free")
    yield Finding("ok", f"cores: {len(os.sched_getaffinity(0))} of {os.cpu_count()} may be used")
    try:
        shared = shutil.disk_usage("/dev/shm")
        yield Finding("ok", f"/dev/shm: {gib(shared.free)} free of {gib(shared.total)}")
    except OSError:
        yield Finding(
            "warning",
            "there is no /dev/shm",
            "use remote.transfer=tcp with mesh.samplers_in=processes",
        )
    yield compiler_finding()
    yield disk_finding(runs, LITTLE_DISK, "for checkpoints and policies")
    yield _cache_finding(cache)


def compiler_finding() -> Finding:
    """Say whether the CPU kernels of our own can be built here."""
    try:
        return Finding("ok", f"compiler of CPU kernels: {compiler_here()}")
    except NotBuiltError as error:
        return Finding(
            "ok",
            f"samplers and updates on this CPU compute by XLA's programs alone: {error}",
        )


def disk_finding(folder: Path, needed: float, what: str) -> Finding:
    """Say whether a folder, which need not exist yet, can be written to and has so many bytes."""
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding(
            "error", f"{folder} cannot be written to ({place})", "set run.dir to a folder that can"
        )
    free = shutil.disk_usage(place).free
    if free < needed:
        return Finding(
            "warning",
            f"disk at {folder}: {gib(free)} free, {gib(needed)} {what}",
            "free some, lower checkpoint.keep, or set run.dir",
        )
    return Finding("ok", f"disk at {folder}: {gib(free)} free")


def _cache_finding(cache: Path) -> Finding:
    if not cache.is_dir():
        return Finding(
            "ok", f"compile cache {cache}: none yet, the first start compiles everything"
        )
    files = [entry for entry in cache.iterdir() if entry.is_file()]
    size = sum(entry.stat().st_size for entry in files)
    return Finding("ok", f"compile cache {cache}: {len(files)} files, {gib(size)}")
