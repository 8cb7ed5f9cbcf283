"""Build the CPU kernels for this machine, once, and make them known to XLA: a library for samplers,
one for the trainer, each when it is first asked for.

A library is kept in $XDG_CACHE_HOME/jaxrl_async/kernels (~/.cache by default), under a name that
stands for the source, the compiler, its options, the processor and jaxlib.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import jax

from jaxrl_async.errors import in_a_line
from jaxrl_async.model.cpu.compiler import NotBuiltError, compiler_here, is_written_for_this

OPTIONS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-ffp-contract=fast",  # a * b + c is one instruction
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
)
LIMIT_S = 120.0
"""Longest time that the compiler may take."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What is built together."""

    files: tuple[str, ...]  # the first is compiled, and includes the others
    names: tuple[str, ...]


SAMPLING = Kernels(
    files=("kernels.cc", "attention.h", "product.h", "tiles.h", "tasks.h"),
    names=("product", "rotate", "attend", "attend_new"),
)
TRAINING = Kernels(
    files=("training.cc", "parts.h", "tiles.h", "tasks.h"),
    names=("multiply", "flash", "flash_back", "choose", "choose_back"),
)

_locks = {SAMPLING: threading.Lock(), TRAINING: threading.Lock()}
_log = logging.getLogger(__name__)


def kernels_are_there(kernels: Kernels) -> bool:
    """Build and register the kernels, once in a process: return whether XLA can call them.

    Where they cannot be built, the log says why, and what to do.
    """
    with _locks[kernels]:  # samplers may be built side by side
        return _are_there(kernels)


@functools.cache
def multiplies_in_parts() -> bool:
    """Return whether TRAINING multiplies float32 matrices on the processor's matrix unit (AMX): it
    is there, the kernels are built for it, and Linux lets this process use it."""
    return kernels_are_there(TRAINING) and bool(_loaded(TRAINING).jaxrl_async_multiplies_in_parts())


@functools.cache
def _are_there(kernels: Kernels) -> bool:
    if not is_written_for_this():
        return False  # nothing that a user could do about it
    try:
        library = _loaded(kernels)
    except NotBuiltError as error:
        _warn(in_a_line(error), "Install g++ (Debian: apt-get install g++)")
        return False
    except (OSError, RuntimeError) as error:  # the last: there is no home
        _warn(in_a_line(error), "Set XDG_CACHE_HOME to a folder that can be written to")
        return False
    for name in kernels.names:
        call = jax.ffi.pycapsule(getattr(library, f"jaxrl_async_{name}"))
        jax.ffi.register_ffi_target(target_of(name), call, platform="cpu")
    return True


@functools.cache
def _loaded(kernels: Kernels) -> ctypes.CDLL:
    """Build and load a library. Raises NotBuiltError, OSError, RuntimeError."""
    return ctypes.cdll.LoadLibrary(str(_built(kernels)))


@functools.cache
def _warn(why: str, advice: str) -> None:
    """Say once why there are none: most likely neither can be built."""
    _log.warning(
        "CPU kernels of our own cannot be built, XLA's programs are used: %s. %s, or set "
        "sampler.cpu_kernels and trainer.cpu_kernels to false to say no more of it.",
        why,
        advice,
    )


def target_of(name: str) -> str:
    """Return the name by which XLA knows a kernel."""
    return f"jaxrl_async.{name}"


def _built(kernels: Kernels) -> Path:
    """Return the library's file, compiled unless it is there. Raises NotBuiltError, OSError."""
    compiler = compiler_here()
    sources = [Path(__file__).with_name(name) for name in kernels.files]
    texts, age = [x.read_text("utf-8") for x in sources], str(os.stat(compiler).st_mtime_ns)
    parts = (*texts, *OPTIONS, compiler, age, _processor(), version("jaxlib"))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = _folder() / f"{key}.so"
    if not path.exists():
        _compile(compiler, sources[0], path)
    return path


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_async/kernels"


def _processor() -> str:
    """Return what tells apart processors that need code of their own."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "model name", "cpu family", "model\t")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Write the library to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        words = [
            compiler,
            *OPTIONS,
            f"-isystem{jax.ffi.include_dir()}",
            str(source),
            "-o",
            str(made),
        ]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise NotBuiltError(f"{compiler} took more than {LIMIT_S:.0f} s") from error
        if done.returncode:
            raise NotBuiltError(f"{compiler} failed: {' '.join(done.stderr.split())[:200]}")
        os.replace(made, path)
