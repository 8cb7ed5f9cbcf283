"""What the stages share: how findings are reported, the model, clocks, programs, memory."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import accelerator_proof

from jaxrl_async.config import schema

QWEN3 = {"layers": 28, "width": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 3072}
"""Qwen3-0.6B (its config.json on the Hugging Face hub): 0.60e9 weights, 0.16e9 of them embeddings,
which are the head, too."""
VOCAB, THETA = 151_936, 1e6
TINY = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "mlp": 128}
TINY_VOCAB = 512

DECODERS: Mapping[str, Mapping[str, Any]] = {
    "qwen3, heads of 128": {},
    "gemma3_text, windows, heads of 256": {"family": "gemma3_text", "head_dim": 256, "window": 24},
    "qwen3_moe, experts": {"family": "qwen3_moe", "experts": 16, "experts_per_token": 4},
    "gpt_oss, sinks, windows": {"family": "gpt_oss", "head_dim": 64, "window": 24, "experts": 8},
    "llama, heads of 64": {"family": "llama", "head_dim": 64},
}
"""Small decoders that are compared: how each differs from the model."""
WORSE = 2.0
"""How many times the error of the plain code in bfloat16 a kernel may have."""


@dataclass(frozen=True)
class Work:
    """What a stage is asked for."""

    stage: str
    argument: str  # what follows the colon in its name
    out: Path  # results
    scratch: Path  # removed at the end of all stages
    tiny: bool
    until: float  # time.monotonic() at which the stage is killed

    def report(self, finding: str, facts: Mapping[str, Any]) -> None:
        """Write a finding immediately; "ok": whether it is as it should be, where that is known."""
        accelerator_proof.write(self.out, self.stage, finding, facts)

    @property
    def left_s(self) -> float:
        """Seconds until the stage is killed."""
        return self.until - time.monotonic()

    @cached_property
    def shape(self) -> Mapping[str, int]:
        """Sizes of the model, as model.architecture names them."""
        return TINY if self.tiny else QWEN3

    @cached_property
    def vocab(self) -> int:
        """Number of tokens."""
        return TINY_VOCAB if self.tiny else VOCAB

    def ceiling(self, name: str) -> float:
        """Return what the stage env measured of the card: "flops" or "bytes_per_s"; where it was
        not run, measure now."""
        for finding in accelerator_proof.findings_in(self.out):
            if finding["finding"] == "ceilings":
                return float(finding[name])
        from proof.ceilings import measured

        return float(measured(self)[name])


def spec_of(work: Work, **changes: Any) -> Any:
    """Return the model's spec. changes: of its architecture, and its vocab."""
    from jaxrl_async.model.spec import ModelSpec

    sizes = {"family": "qwen3", "tied": True, "rope_theta": THETA, **work.shape, **changes}
    vocab = sizes.pop("vocab", work.vocab)
    return ModelSpec.from_architecture(schema.ArchitectureSection(**sizes), vocab)


def small_spec(work: Work, changes: Mapping[str, Any]) -> Any:
    """Return the spec of one of DECODERS."""
    sizes = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 128, "mlp": 96}
    if not work.tiny:
        sizes |= {"layers": 4, "width": 512, "heads": 8, "mlp": 768}
    return spec_of(work, **{**sizes, "vocab": 1024, **changes})


def params_of(spec: Any, dtype: Any) -> Any:
    """Return random weights on the default device."""
    import jax

    from jaxrl_async.model.decoder import init_params

    return jax.jit(lambda key: init_params(spec, key, dtype))(jax.random.key(0))


def fastest_s(work: Callable[[], object], repeats: int) -> float:
    """Return the minimum wall seconds of `repeats` runs of work, which waits for its results."""
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


class Compiled:
    """Counts what this process compiles, from its construction on."""

    def __init__(self) -> None:
        import jax

        self.programs, self.compile_s, self.cached = 0, 0.0, 0
        jax.monitoring.register_event_duration_secs_listener(self._note_duration)
        jax.monitoring.register_event_listener(self._note_event)

    def _note_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.programs += 1
            self.compile_s += duration_secs

    def _note_event(self, event: str, **_: Any) -> None:
        self.cached += event == "/jax/compilation_cache/cache_hits"

    @property
    def facts(self) -> dict[str, Any]:
        """Programs, how many of them an earlier stage has compiled, and the seconds for them."""
        return {
            "programs": self.programs,
            "of_the_cache": self.cached,
            "compile_s": round(self.compile_s, 1),
        }


def memory_of(device: Any) -> dict[str, float]:
    """Return the device's peak and limit, GiB; empty where it has no such counts (a CPU)."""
    stats = device.memory_stats() or {}
    names = {"peak_bytes_in_use": "peak_gib", "bytes_limit": "limit_gib"}
    return {short: gib(stats[name]) for name, short in names.items() if name in stats}


def gib(count: float) -> float:
    """Return bytes in GiB, to two decimals."""
    return round(count / 2**30, 3)


def without(package: str, work: Work) -> bool:
    """Return whether a package is not installed, and report it."""
    from importlib.util import find_spec

    if find_spec(package) is not None:
        return False
    work.report("not run", {"why": f"{package} is not installed"})
    return True
