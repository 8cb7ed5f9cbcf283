"""Share what benchmarks need: workloads, a description of the machine, repeats, tables, `--json`.

    python benchmarks/generate.py [--quick] [--repeats 3] [--models 1M 25M] [--json [FILE]]

Times are wall seconds of whole, compiled runs (the first run is left out): median, least and most
of the repeats. `--quick` is a smoke test with smaller workloads and one repeat; its numbers mean
nothing.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.config import schema
from jaxrl_async.mesh import reserve_collective_threads
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.types import IntArray

MODELS = {
    "1M": ModelSpec.from_architecture(
        schema.ArchitectureSection(
            family="llama", layers=4, width=128, heads=4, kv_heads=2, head_dim=32, mlp=384
        ),
        vocab_size=512,
    ),
    "25M": ModelSpec.from_architecture(
        schema.ArchitectureSection(
            family="llama", layers=8, width=512, heads=8, kv_heads=4, head_dim=64, mlp=1536
        ),
        vocab_size=4096,
    ),
    "50M": ModelSpec.from_architecture(
        schema.ArchitectureSection(
            family="llama", layers=16, width=512, heads=8, kv_heads=4, head_dim=64, mlp=1536
        ),
        vocab_size=4096,
    ),
    "100M": ModelSpec.from_architecture(
        schema.ArchitectureSection(
            family="llama", layers=12, width=768, heads=12, kv_heads=4, head_dim=64, mlp=3072
        ),
        vocab_size=4096,
    ),
    "135M": ModelSpec.from_architecture(
        schema.ArchitectureSection(
            family="llama", layers=30, width=576, heads=9, kv_heads=3, head_dim=64, mlp=1536
        ),
        vocab_size=49_152,
    ),
    "360M": ModelSpec.from_architecture(
        schema.ArchitectureSection(
            family="llama", layers=32, width=960, heads=15, kv_heads=5, head_dim=64, mlp=2560
        ),
        vocab_size=49_152,
    ),
}
"""The decoders of the tables, float32, embeddings tied to the head. 135M and 360M have the shapes
and the vocabulary of SmolLM2; most tables have 135M and the first two."""

PROMPT_TOKENS = 32

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of repeated measurements, seconds."""

    median: float
    least: float
    most: float


def parser(description: str) -> argparse.ArgumentParser:
    """Make a parser of the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smoke test: small and once")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each row")
    parser.add_argument(
        "--models", nargs="+", choices=sorted(MODELS), default=["1M", "25M"], help="which decoders"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write JSON: to FILE beside the table, or to stdout instead of it",
    )
    return parser


def options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line and apply --quick."""
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.models = 1, ["1M"]
    return args


def force_cpu_devices(count: int, *, collectives: bool = False) -> None:
    """Ask the CPU backend for `count` devices; call before JAX's first computation.

    collectives: programs run on several of them.

    Has no effect if an accelerator is the default backend or XLA_FLAGS sets the number.
    """
    if collectives:
        reserve_collective_threads()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def make_params(spec: ModelSpec, seed: int = 0) -> Any:
    """Make random float32 weights on the default device."""
    return jax.jit(lambda key: init_params(spec, key, jnp.float32))(jax.random.key(seed))


def random_prompts(vocab: int, count: int, seed: int = 0) -> list[IntArray]:
    """Make `count` different prompts of PROMPT_TOKENS random tokens."""
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, vocab, (count, PROMPT_TOKENS), dtype=np.int32))


def long_tail(count: int, seed: int = 0, *, median: int = 24, most: int = 128) -> list[int]:
    """Draw answer lengths, tokens: log-normal (sigma 1) with this median, clipped to 1..most."""
    lengths = np.random.default_rng(seed).lognormal(np.log(median), 1.0, count)
    return [int(n) for n in np.clip(np.round(lengths), 1, most)]


def cpu_s() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(work: Callable[[], object], repeats: int) -> Spread:
    """Run `work` once to compile, then time it `repeats` times; it must wait for its results."""
    work()
    taken_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - start)
    return spread(taken_s)


def spread(taken_s: Sequence[float]) -> Spread:
    """Return median, least and most."""
    return Spread(statistics.median(taken_s), min(taken_s), max(taken_s))


def report(name: str, rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Print the table or write the JSON, as the options say."""
    result = {"benchmark": name, "quick": args.quick, "machine": machine(), "rows": list(rows)}
    if args.json == "-":
        json.dump(result, sys.stdout, indent=2)
        print()
        return
    print(f"# {name}" + (" (quick: compare no numbers)" if args.quick else ""))
    print("# " + ", ".join(f"{k} {v}" for k, v in result["machine"].items()))
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Describe the machine and the versions of the packages."""
    devices = jax.devices()
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def table(rows: Sequence[Row]) -> str:
    """Format rows of equal keys as aligned columns, numbers to the right."""
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    right = [isinstance(rows[0][name], int | float) for name in names]

    def line(texts: Sequence[str]) -> str:
        cells = (
            t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True)
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(names), line(["-" * w for w in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def columns(taken: Spread, unit: str = "s", scale: float = 1.0) -> Row:
    """Return the columns `median_UNIT`, `least_UNIT`, `most_UNIT`."""
    return {f"{k}_{unit}": v * scale for k, v in asdict(taken).items()}
