"""Measure how far a decode step is from what this machine allows.

Measured by this script: the matrix products of one decode step of 64 rows, with as many weights as
the model has (so that they are read from memory, as in a step), by every library at hand: XLA,
NumPy's BLAS (in a process of its own without OPENBLAS_CORETYPE, which would hold it to an older
processor), oneDNN through torch (if benchmarks/peers/environments.py has made vLLM's environment)
and our own kernels; XLA's, torch's and ours in bfloat16, and ours in 8 bits; the peak product rate
on square matrices; and the bandwidth of reading and of copying. The floor of a step is the fastest
of the float32 products plus the live keys and values at the reading bandwidth. Beside it: a step
of the engine as a sampler sets it up, and the cost of a block beyond its steps.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import MODELS, Row, make_params, options, parser, report
from peers.environments import ENVIRONMENTS, FOLDER, preloaded

from jaxrl_async.config import schema
from jaxrl_async.cpu.kernel_calls import packed, packed_product
from jaxrl_async.cpu.kernel_library import SAMPLING, kernels_are_there
from jaxrl_async.sampler.device.program_arguments import DecodeArgs
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.sampler.setup import SamplerSettings, build_setup

ROWS, LIVE, BLOCK = 64, 64, 32
"""Rows that decode, tokens of each row before the block, steps of the block."""
SQUARE = 1024
"""Rows and columns of the matrices of the peak."""


def main() -> None:
    """Measure and print."""
    args = options(parser(__doc__ or ""))
    repeats = 3 if args.quick else 20
    rows: list[Row] = []
    read, copy = read_rate(repeats), copy_rate(repeats)
    for model in args.models:
        shapes = step_shapes(model)
        others = {name: elsewhere(name, shapes, repeats) for name in ("numpy", "torch")}
        took = {"xla": xla_products_s(shapes, jnp.float32, repeats)}
        took |= {name: got["products_s"] for name, got in others.items() if got}
        own = own_products_s(shapes, repeats) if kernels_are_there(SAMPLING) else {}
        took |= {"own": own["float32"]} if own else {}
        step_s, fixed_s = decode_step(model, repeats)
        floor_s = min(took.values()) + live_bytes(model) / read
        bf16 = {"xla": xla_products_s(shapes, jnp.bfloat16, repeats)}
        bf16 |= {"torch": others["torch"]["bf16_products_s"]} if others["torch"] else {}
        bf16 |= {"own": own["bfloat16"]} if own else {}
        peaks = {"xla": xla_peak(repeats)}
        peaks |= {name: got["flop_per_s"] for name, got in others.items() if got}
        rows.append(
            {
                "model": model,
                **{f"{name}_peak_gflops": rate / 1e9 for name, rate in peaks.items()},
                "read_gb_per_s": read / 1e9,
                "copy_gb_per_s": copy / 1e9,
                "step_mflop": step_flops(model) / 1e6,
                "live_kv_mb": live_bytes(model) / 1e6,
                **{f"{name}_products_ms": s * 1e3 for name, s in took.items()},
                **{f"{name}_bf16_products_ms": s * 1e3 for name, s in bf16.items()},
                **({"own_int8_products_ms": own["int8"] * 1e3} if own else {}),
                "floor_ms": floor_s * 1e3,
                "step_ms": step_s * 1e3,
                "share_of_floor": floor_s / step_s,
                "block_extra_ms": fixed_s * 1e3,
            }
        )
    report("limits", rows, args)


def step_flops(model: str) -> float:
    """Count the FLOPs of one decode step of ROWS: two per weight (without the embedding's look-up)
    plus attention over the live tokens."""
    spec = MODELS[model]
    layer = spec.width * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    layer += 3 * spec.width * spec.mlp
    attention = 2 * spec.heads * spec.head_dim * (LIVE + BLOCK / 2)
    each = spec.layers * (layer + attention) + spec.width * spec.vocab
    return 2.0 * ROWS * each


def live_bytes(model: str) -> float:
    """Count the bytes of live keys and values that a step must read, float32."""
    spec = MODELS[model]
    return 8.0 * spec.layers * ROWS * (LIVE + BLOCK / 2) * spec.kv_heads * spec.head_dim


def step_shapes(model: str) -> list[tuple[int, int]]:
    """Return outputs and inputs of each weight of a step, in turn."""
    spec = MODELS[model]
    heads = spec.head_dim * (spec.heads + 2 * spec.kv_heads)
    layer = [
        (heads, spec.width),
        (spec.width, spec.heads * spec.head_dim),
        (2 * spec.mlp, spec.width),
        (spec.width, spec.mlp),
    ]
    return [*layer * spec.layers, (spec.vocab, spec.width)]


def elsewhere(library: str, shapes: list[tuple[int, int]], repeats: int) -> Any:
    """Time the products by NumPy or torch in a process of its own (products_of.py); None: there is
    no torch, or it failed, which stderr says."""
    peer = ENVIRONMENTS["vllm"]
    python, preload = Path(sys.executable), ""
    if library == "torch":
        python, preload = FOLDER / peer.folder / "bin" / "python", preloaded(peer)
    request = {"rows": ROWS, "shapes": shapes, "size": SQUARE, "repeats": repeats}
    environment = {
        n: v for n, v in os.environ.items() if n not in ("OPENBLAS_CORETYPE", "PYTHONPATH")
    }
    if preload:
        environment["LD_PRELOAD"] = preload
    words = [str(python), str(Path(__file__).with_name("products_of.py")), library]
    try:
        done = subprocess.run(
            words,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"# {library} is left out: {error}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


Times = Callable[[Any, Any], Any]
"""(rows, weight) -> their product."""


def chained_s(weights: list[Any], inputs: dict[int, Any], times: Times, repeats: int) -> float:
    """Time products in sequence, each waiting for the one before, in one program, seconds."""

    def chain(weights: Any, inputs: Any, steps: Any) -> Any:
        def product(_: Any, x: Any) -> Any:
            for w, width in zip(weights, widths, strict=True):
                rows = inputs[width]
                x = times(rows + x.astype(rows.dtype), w)[0, 0] * 1e-30
            return x

        return jax.lax.fori_loop(0, steps, product, jnp.float32(0))

    widths, arrays = [width for width, _ in weights], [w for _, w in weights]
    compiled, steps = jax.jit(chain), 4
    return best_s(lambda: compiled(arrays, inputs, steps), repeats, inner=1) / steps


def xla_products_s(shapes: list[tuple[int, int]], dtype: Any, repeats: int) -> float:
    """Time XLA's products with weights of this type into float32, seconds."""
    contract = (((1,), (1,)), ((), ()))

    def times(x: Any, w: Any) -> Any:
        return jax.lax.dot_general(x, w, contract, preferred_element_type=jnp.float32)

    weights = [(width, jnp.ones((outputs, width), dtype)) for outputs, width in shapes]
    inputs = {width: jnp.ones((ROWS, width), dtype) for width, _ in weights}
    return chained_s(weights, inputs, times, repeats)


def own_products_s(shapes: list[tuple[int, int]], repeats: int) -> dict[str, float]:
    """Time the products of our own kernels, rows and weights alike in each type, seconds."""
    inputs = {width: jnp.ones((ROWS, width)) for _, width in shapes}
    taken = {}
    for kind in ("float32", "bfloat16", "int8"):
        pack = jax.jit(packed)
        weights = [(width, pack(jnp.ones((outputs, width), kind))) for outputs, width in shapes]

        def times(x: Any, w: Any, kind: str = kind) -> Any:
            outputs = w.shape[0] * 32
            scales = jnp.ones(outputs) if kind == "int8" else None
            return packed_product(x, w, outputs, scales=scales, rounds=kind != "float32")

        taken[kind] = chained_s(weights, inputs, times, repeats)
    return taken


def xla_peak(repeats: int) -> float:
    """Measure the FLOP/s of XLA's product of square float32 matrices."""
    a, compiled = jnp.ones((SQUARE, SQUARE)), jax.jit(jnp.matmul)
    return 2.0 * SQUARE**3 / best_s(lambda: compiled(a, a), repeats, inner=4)


def read_rate(repeats: int) -> float:
    """Measure bytes read per second by two threads that each reduce 256 MiB (NumPy's dot of an
    array with itself)."""
    halves = [np.ones(64 * 2**20, np.float32) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        seconds = best_s(
            lambda: list(pool.map(lambda x: np.dot(x, x), halves)), min(repeats, 5), inner=2
        )
    return sum(x.nbytes for x in halves) / seconds


def copy_rate(repeats: int) -> float:
    """Measure bytes read and written per second by XLA's copy of 256 MiB."""
    x = jnp.ones(64 * 2**20, jnp.float32)
    copy = jax.jit(lambda a: a + 1)
    return 2.0 * x.nbytes / best_s(lambda: copy(x), min(repeats, 5), inner=1)


def best_s(work: Callable[[], Any], repeats: int, inner: int = 20) -> float:
    """Return the least time of one call, seconds."""
    jax.block_until_ready(work())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            result = work()
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - start) / inner)
    return best


def decode_step(model: str, repeats: int) -> tuple[float, float]:
    """Return (seconds of a step, seconds of a block beyond its steps): medians."""
    spec, width = MODELS[model], 256 // 32 + 2
    section = schema.SamplerSection(
        slots=ROWS, reserve=0.0, max_length=256, max_new_tokens=128, block=BLOCK
    )
    engine = build_setup(spec, section, None, 0, SamplerSettings()).engine
    pages = engine.spec.num_pages(256) if engine.spec.cpu_attention else LIVE // 32
    weights, state = engine.prepare(make_params(spec)), engine.init_decode_state()
    state = state._replace(slot_params=state.slot_params._replace(max_new=jnp.full(ROWS, 10**6)))
    tables = np.full((ROWS, width), engine.spec.pages, np.int32)
    held = (LIVE + BLOCK) // 32
    tables[:, :held] = np.arange(ROWS * held).reshape(ROWS, held)
    taken: dict[int, float] = {}
    for steps in (0, BLOCK):
        run = DecodeArgs(
            rows=np.arange(ROWS, dtype=np.int32),
            reserve=np.zeros(0, np.int32),
            num_reserve=np.int32(0),
            lengths=np.full(ROWS, LIVE, np.int32),
            num_sampled=np.zeros(ROWS, np.int32),
            tables=tables[:, None],
            steps=np.int32(steps),
        )
        seconds = []
        for _ in range(max(3, repeats // 2)):
            start = time.perf_counter()
            state, block = engine.generate(weights, state, run, context_pages=pages, mix=Mix())
            jax.block_until_ready((state.logits, block.tokens))
            seconds.append(time.perf_counter() - start)
        taken[steps] = float(np.median(seconds[1:]))
    return (taken[BLOCK] - taken[0]) / BLOCK, taken[0]


if __name__ == "__main__":
    main()
