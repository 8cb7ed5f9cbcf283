"""Measure how far a decode step is from what this machine allows.

Measured by this script: the matrix products of one decode step of 64 rows, with as many weights as
the model has (so that they are read from memory, as in a step), through XLA in float32, through
XLA in bfloat16 into float32, and through NumPy's BLAS; the peak product rate of both libraries on
square matrices; and the bandwidth of reading and of copying. The floor of a step is the faster of
the two float32 products plus the live keys and values at the reading bandwidth. Beside it: a step
of the engine, and the cost of a block beyond its steps (gathering pages, writing back).
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import MODELS, Row, make_params, options, parser, report

from jaxrl_async.sampler.device.arguments import DecodeArgs
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.sampling import Mix

ROWS, LIVE, BLOCK = 64, 64, 32
"""Rows that decode, tokens of each row before the block, steps of the block."""


def main() -> None:
    """Measure and print."""
    args = options(parser(__doc__ or ""))
    repeats = 3 if args.quick else 20
    rows: list[Row] = []
    read, copy = read_rate(repeats), copy_rate(repeats)
    xla_peak, numpy_peak = (peak_rate(library, repeats) for library in (jnp, np))
    for model in args.models:
        flops = step_flops(model)
        xla, bf16, other = (
            products_s(model, library, dtype, repeats)
            for library, dtype in (
                (jnp, jnp.float32),
                (jnp, jnp.bfloat16),
                (np, np.float32),
            )
        )
        step_s, fixed_s = decode_step(model, repeats)
        floor_s = min(xla, other) + live_bytes(model) / read
        rows.append(
            {
                "model": model,
                "xla_peak_gflops": xla_peak / 1e9,
                "numpy_peak_gflops": numpy_peak / 1e9,
                "read_gb_per_s": read / 1e9,
                "copy_gb_per_s": copy / 1e9,
                "step_mflop": flops / 1e6,
                "live_kv_mb": live_bytes(model) / 1e6,
                "xla_products_ms": xla * 1e3,
                "xla_bf16_products_ms": bf16 * 1e3,
                "numpy_products_ms": other * 1e3,
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


def products_s(model: str, library: Any, dtype: Any, repeats: int) -> float:
    """Time the matrix products of one step in sequence, with the engine's weights, seconds."""
    spec = MODELS[model]
    heads = spec.head_dim * (spec.heads + 2 * spec.kv_heads)
    shapes = [
        (heads, spec.width),
        (spec.width, spec.heads * spec.head_dim),
        (2 * spec.mlp, spec.width),
        (spec.width, spec.mlp),
    ] * spec.layers + [(spec.vocab, spec.width)]
    weights = [library.ones(shape, dtype) for shape in shapes]
    inputs = {width: library.ones((ROWS, width), dtype) for _, width in shapes}
    if library is np:
        return best_s(lambda: [inputs[w.shape[1]] @ w.T for w in weights], repeats, inner=4)

    def chain(weights: Any, inputs: Any, steps: Any) -> Any:
        def one(_: Any, x: Any) -> Any:
            for w in weights:
                y = jax.lax.dot_general(
                    inputs[w.shape[1]] + x.astype(dtype),
                    w,
                    (((1,), (1,)), ((), ())),
                    preferred_element_type=jnp.float32,
                )
                x = y[0, 0] * 1e-30  # the next product waits for this one
            return x

        return jax.lax.fori_loop(0, steps, one, jnp.float32(0))

    compiled, steps = jax.jit(chain), 4
    return best_s(lambda: compiled(weights, inputs, steps), repeats, inner=1) / steps


def peak_rate(library: Any, repeats: int, size: int = 1024) -> float:
    """Measure the FLOP/s of a product of square float32 matrices."""
    a, b = library.ones((size, size), np.float32), library.ones((size, size), np.float32)
    product: Callable[[], Any] = lambda: a @ b  # noqa: E731
    if library is jnp:
        compiled = jax.jit(jnp.matmul)
        product = lambda: compiled(a, b)  # noqa: E731
    return 2.0 * size**3 / best_s(product, repeats, inner=4)


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
    spec, width = MODELS[model], LIVE // 32 + 2
    engine = Engine(
        EngineSpec(model=spec, slots=ROWS, max_length=256, pages=ROWS * width, block=BLOCK)
    )
    weights, state = engine.prepare(make_params(spec)), engine.init_decode_state()
    state = state._replace(slot_params=state.slot_params._replace(max_new=jnp.full(ROWS, 10**6)))
    taken: dict[int, float] = {}
    for steps in (0, BLOCK):
        run = DecodeArgs(
            rows=np.arange(ROWS, dtype=np.int32),
            reserve=np.zeros(0, np.int32),
            num_reserve=np.int32(0),
            lengths=np.full(ROWS, LIVE, np.int32),
            drawn=np.zeros(ROWS, np.int32),
            tables=np.arange(ROWS * width, dtype=np.int32).reshape(ROWS, 1, width),
            steps=np.int32(steps),
        )
        seconds = []
        for _ in range(max(3, repeats // 2)):
            start = time.perf_counter()
            state, block = engine.generate(weights, state, run, context_pages=LIVE // 32, mix=Mix())
            jax.block_until_ready((state.logits, block.tokens))
            seconds.append(time.perf_counter() - start)
        taken[steps] = float(np.median(seconds[1:]))
    return (taken[BLOCK] - taken[0]) / BLOCK, taken[0]


if __name__ == "__main__":
    main()
