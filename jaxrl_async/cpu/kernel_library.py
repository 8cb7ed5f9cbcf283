"""Build the CPU kernels for this machine, once, and register them with XLA: one library for
samplers, one for the trainer, each on first use.

A library is cached in $XDG_CACHE_HOME/jaxrl_async/kernels (~/.cache by default), a folder that only
this user can change; root's folder, in an image or for all users, is also read. The name is a hash
of the source, the compiler, its options, the processor and jaxlib. The sha256 is in a separate
file. A library is machine code that this process executes. It is built again if it belongs to
neither this user nor root, has another sha256, does not load or lacks a kernel.
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

from jaxrl_async.cpu.compiler import NotBuiltError, compiler_here, is_supported
from jaxrl_async.errors import in_a_line
from jaxrl_async.private_folder import (
    check_own_file,
    private_folder,
    readable_folders,
    write_whole,
)

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
"""Timeout of the compiler, seconds."""


FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening a library: no symbolic links, and no blocking on pipes."""


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The sources and kernels of one library."""

    files: tuple[str, ...]  # the first is compiled; it includes the others
    names: tuple[str, ...]


SAMPLING = CpuKernels(
    files=("kernels.cc", "attention.h", "product.h", "tiles.h", "tasks.h"),
    names=("product", "rotate", "attend", "attend_new"),
)
TRAINING = CpuKernels(
    files=("training.cc", "parts.h", "tiles.h", "tasks.h"),
    names=("multiply", "flash", "flash_back", "choose", "choose_back"),
)

_locks = {SAMPLING: threading.Lock(), TRAINING: threading.Lock()}
_log = logging.getLogger(__name__)


def kernels_are_there(kernels: CpuKernels) -> bool:
    """Build and register the kernels, once per process; return whether XLA can call them.

    If they cannot be built, the reason and the remedy are logged.
    """
    with _locks[kernels]:  # samplers may be built concurrently
        return _are_there(kernels)


@functools.cache
def multiplies_in_parts() -> bool:
    """Return whether TRAINING multiplies float32 matrices on the processor's matrix unit (AMX). The
    processor, the build and Linux must support it."""
    return kernels_are_there(TRAINING) and bool(_load(TRAINING).jaxrl_async_multiplies_in_parts())


@functools.cache
def _are_there(kernels: CpuKernels) -> bool:
    if not is_supported():
        return False  # without a warning: users cannot change it
    try:
        library = _load(kernels)
    except NotBuiltError as error:
        _warn(in_a_line(error), "Install g++ (Debian: apt-get install g++)")
        return False
    except OSError as error:
        _warn(in_a_line(error), "Set XDG_CACHE_HOME to a writable folder that you own")
        return False
    for name in kernels.names:
        call = jax.ffi.pycapsule(getattr(library, f"jaxrl_async_{name}"))
        jax.ffi.register_ffi_target(target_of(name), call, platform="cpu")
    return True


@functools.cache
def _load(kernels: CpuKernels) -> ctypes.CDLL:
    """Load a library; build it unless a valid one exists. Raises NotBuiltError, OSError."""
    compiler = compiler_here()
    name = f"{_key(kernels, compiler)}.so"
    for folder in readable_folders("kernels"):
        path = folder / name
        try:
            return _open(_valid_content(path), path, kernels)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("the CPU kernels in %s are rebuilt: %s", path, in_a_line(error))
    path = private_folder("kernels") / name
    for last in (False, True):  # another process may have replaced one of the two files meanwhile
        _compile(compiler, Path(__file__).with_name(kernels.files[0]), path)
        try:
            return _open(_valid_content(path), path, kernels)
        except OSError as error:
            if last:
                reason = f"the output of {compiler} cannot be used: {in_a_line(error)}"
                raise NotBuiltError(reason) from error
    raise AssertionError("the last try returns or raises")


def _valid_content(path: Path) -> bytes:
    """Return the content of a library that this user's processes wrote, unchanged since. Raises
    OSError; FileNotFoundError if it does not exist."""
    content = _own_content(path)
    try:
        expected = _own_content(_sum_of(path))
    except FileNotFoundError:
        raise OSError(f"{_sum_of(path).name} does not exist") from None
    if expected != _sum(content):
        raise OSError("it is damaged: its sha256 differs from the one in the .sha256 file")
    return content


def _own_content(path: Path) -> bytes:
    with open(os.open(path, FLAGS), "rb") as file:
        check_own_file(os.fstat(file.fileno()), path)
        return file.read()


def _open(content: bytes, path: Path, kernels: CpuKernels) -> ctypes.CDLL:
    """Load a library from memory, which later changes of its file do not affect; from the file if
    the system cannot load from memory. Raises OSError."""
    try:
        library = ctypes.CDLL(_in_memory(content))
    except (AttributeError, OSError):
        library = ctypes.CDLL(str(path))
    missing = [name for name in kernels.names if not hasattr(library, f"jaxrl_async_{name}")]
    if missing:
        raise OSError(f"it lacks {', '.join(missing)}")
    return library


def _in_memory(content: bytes) -> str:
    """Return a path to a file in memory, which is kept open: the loader identifies libraries by
    their paths. Raises AttributeError without support for it (macOS), and OSError."""
    handle = os.memfd_create("jaxrl_async_kernels")
    with open(handle, "wb", closefd=False) as file:
        file.write(content)
    return f"/proc/self/fd/{handle}"


def _sum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _sum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@functools.cache
def _warn(reason: str, advice: str) -> None:
    """Log once why the kernels are missing; usually neither library can be built."""
    _log.warning(
        "the CPU kernels cannot be built, XLA's programs are used instead: %s. %s, or set "
        "sampler.cpu_kernels and trainer.cpu_kernels to false to silence this warning.",
        reason,
        advice,
    )


def target_of(name: str) -> str:
    """Return the name under which a kernel is registered with XLA."""
    return f"jaxrl_async.{name}"


def _key(kernels: CpuKernels, compiler: str) -> str:
    """Return the name of a library. Raises OSError."""
    sources = [Path(__file__).with_name(name) for name in kernels.files]
    texts, age = [x.read_text("utf-8") for x in sources], str(os.stat(compiler).st_mtime_ns)
    parts = (*texts, *OPTIONS, compiler, age, _processor(), version("jaxlib"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return a text that identifies the processor, for which the code is compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    prefixes = ("flags", "model name", "cpu family", "model\t")
    return "\n".join(sorted({line for line in lines if line.startswith(prefixes)}))


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Write the library and its sum, each atomically; the sum first, so a new library always has
    one. Processes that build concurrently write the same files."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        words = [
            compiler,
            *OPTIONS,
            f"-isystem{jax.ffi.include_dir()}",
            str(source),
            "-o",
            str(built),
        ]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise NotBuiltError(f"{compiler} took more than {LIMIT_S:.0f} s") from error
        if done.returncode:
            raise NotBuiltError(f"{compiler} failed: {' '.join(done.stderr.split())[:200]}")
        content = built.read_bytes()
    write_whole(_sum_of(path), _sum(content))
    write_whole(path, content)
