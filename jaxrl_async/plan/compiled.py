"""Compile programs once: the compiler's output, with the program's text, is cached by its input;
the cost is computed again each time.

The key is a hash of the lowered program, the topology, the compiler's options, and the versions of
jax and libtpu (or the CUDA plugin, with its description of the card), so a result is never used for
another program.
"""

import gzip
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxrl_async.errors import ConfigError
from jaxrl_async.plan import cuda
from jaxrl_async.plan.cost import Cost, cost_of
from jaxrl_async.plan.hlo import Program, parse
from jaxrl_async.plan.pace import pace_of
from jaxrl_async.plan.programs import Lowered

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The compiler's numbers for a program, in bytes of HBM per device."""

    name: str
    side: str
    fits: bool  # False: out of memory at compile time; only needed_bytes is set
    argument_bytes: float = 0.0
    output_bytes: float = 0.0
    alias_bytes: float = 0.0  # part of the output that reuses arguments
    temp_bytes: float = 0.0
    code_bytes: float = 0.0
    needed_bytes: float = 0.0  # if it does not fit
    cost: Cost = field(default_factory=Cost)
    compile_s: float = 0.0
    cached: bool = False

    @property
    def total_bytes(self) -> float:
        """Memory of the program at its peak."""
        parts = (self.argument_bytes, self.output_bytes, self.temp_bytes, self.code_bytes)
        return self.needed_bytes or sum(parts) - self.alias_bytes


def cache_folder() -> Path:
    """Return $JAXRL_ASYNC_CACHE, or jaxrl_async/plans in the user's cache folder."""
    if folder := os.environ.get("JAXRL_ASYNC_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_async/plans"


def compiled(lowered: Lowered, folder: Path | None = None) -> Compiled:
    """Compile a program, or read the cached result.

    Raises ConfigError if the compiler does not know an option, or rejects the program for a reason
    other than its memory.
    """
    file = (folder or cache_folder()) / f"{key_of(lowered)}.json.gz"
    result, cached = _read(file), True
    if result is None:
        log.info("compiling %s for %s", lowered.name, lowered.slice.name)
        start = time.perf_counter()
        record = _compile(lowered)
        record["numbers"]["compile_s"] = time.perf_counter() - start
        _write(file, record)
        result, cached = _parsed(record), False
    numbers, program = result
    cost = Cost()
    if program is not None:
        pace = pace_of(lowered.slice.chip)
        where = lowered.slice
        cost = cost_of(
            program,
            lowered.mesh,
            pace,
            open_turns=lowered.open_turns,
            host=where.shape[-1] if where.chip.is_card else 0,
        )
    return Compiled(name=lowered.name, side=lowered.side, cached=cached, cost=cost, **numbers)


def key_of(lowered: Lowered) -> str:
    """Hash all inputs of the compiler.

    Only the order of the mesh's devices is left out. It always is the order of mesh.arranged() for
    the topology and the mesh, which is in the text.
    """
    seen = hashlib.sha256(lowered.program.as_text().encode())
    where = lowered.slice
    compiler = (
        [*cuda.compiler_versions(), cuda.target_config(where)]
        if where.chip.is_card
        else [version("libtpu")]
    )
    rest = [
        where.topology, sorted(lowered.options.items()), version("jax"), version("jaxlib"),
        *compiler,
    ]  # fmt: skip
    seen.update(json.dumps(rest).encode())
    return f"{lowered.name}-{seen.hexdigest()[:32]}"


def _write(file: Path, record: Mapping[str, object]) -> None:
    """Write a record atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}.tmp")
    draft.write_bytes(gzip.compress(json.dumps(record).encode()))
    draft.replace(file)


def _read(file: Path) -> tuple[dict[str, Any], Program | None] | None:
    """Read and parse a cached record; None if it is missing or invalid."""
    try:
        record = json.loads(gzip.decompress(file.read_bytes()))
        Compiled(name="", side="", **record["numbers"])
        return _parsed(record)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, EOFError) as error:
        log.warning("%s is not a result of the compiler (%s): compiling again", file, error)
        return None


def _parsed(record: dict[str, Any]) -> tuple[dict[str, Any], Program | None]:
    """Return numbers and program; the program is None if the compiler rejected it."""
    return record["numbers"], parse(record["text"]) if record["text"] else None


def _compile(lowered: Lowered) -> dict[str, Any]:
    """Compile to {"numbers": fields of Compiled, "text": the program's text}."""
    try:
        program = lowered.program.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            hint = PART_HINT if lowered.slice.part and not lowered.slice.chip.is_card else ""
            raise ConfigError(
                f"the compiler rejects the {lowered.side}'s program {lowered.name} for "
                f"{lowered.slice.topology}: {str(error).splitlines()[0][:400]}{hint}"
            ) from error
        return {"numbers": {"fits": False, "needed_bytes": needed}, "text": ""}
    memory = program.memory_analysis()
    numbers = {
        "fits": True,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }
    return {"numbers": numbers, "text": program.as_text()}


PART_HINT = (
    ". Programs must be able to run on this part of a TPU slice: give trainer and samplers "
    "separate, whole slices (mesh.samplers_in=external, mesh.trainer as large as its slice), or "
    "use one host."
)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def needed_bytes(message: str) -> float | None:
    """Read from the compiler's error how much memory a program needs; None for other errors.

    >>> needed_bytes("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 1.50G of ...")
    1610612736.0
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    match = re.search(r"(?:Used |temporaries \(|required[^(]{0,80}\()([\d.]+)([KMGT]?)", message)
    return float(match[1]) * UNITS[match[2]] if match else None
