"""How far a decode step is from what this machine allows.

Measured by this script: matrix products through XLA (float32, and bfloat16 into float32) and
through NumPy's BLAS at the shapes of a decode step of 64 rows, and the bandwidth of a copy. The
floor of a step is its FLOPs at the better product rate plus its bytes (weights, live KV) at the
copy's bandwidth, one after the other; a block of the engine is measured beside it, and what a block
costs apart from its steps (gathering pages, writing back).
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import MODELS, Row, make_params, options, parser, report

from jaxrl_async.sampler.engine import Engine, Run
from jaxrl_async.sampler.sampling import Mix

ROWS, LIVE, BLOCK = 64, 64, 32
"""Rows that decode, tokens that each holds before the block, steps of the block."""


def main() -> None:
    """Measure and print."""
    args = options(parser(__doc__ or ""))
    repeats = 3 if args.quick else 20
    rows: list[Row] = []
    for model in args.models:
        spec = MODELS[model]
        shapes = (ROWS, spec.width, 2 * spec.mlp)
        xla = product_rate(jnp, shapes, jnp.float32, repeats)
        bf16 = product_rate(jnp, shapes, jnp.bfloat16, repeats)
        other = product_rate(np, shapes, np.float32, repeats)
        copy = copy_rate(repeats)
        step_s, fixed_s = decode_step(model, repeats)
        flops, moved = step_flops(model), step_bytes(model)
        floor_s = flops / max(xla, other) + moved / copy
        rows.append(
            {
                "model": model,
                "xla_gflops": xla / 1e9,
                "xla_bf16_gflops": bf16 / 1e9,
                "numpy_gflops": other / 1e9,
                "copy_gb_per_s": copy / 1e9,
                "step_mflop": flops / 1e6,
                "step_mb": moved / 1e6,
                "floor_ms": floor_s * 1e3,
                "step_ms": step_s * 1e3,
                "share_of_floor": floor_s / step_s,
                "block_extra_ms": fixed_s * 1e3,
            }
        )
    report("limits", rows, args)


def step_flops(model: str) -> float:
    """FLOPs of one decode step of ROWS: two for each weight but the embedding's look-up, and
    attention over what is live."""
    spec = MODELS[model]
    layer = spec.width * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    layer += 3 * spec.width * spec.mlp
    attention = 2 * spec.heads * spec.head_dim * (LIVE + BLOCK / 2)
    each = spec.layers * (layer + attention) + spec.width * spec.vocab
    return 2.0 * ROWS * each


def step_bytes(model: str) -> float:
    """Bytes that a step must read: all weights and the live keys and values, float32."""
    spec = MODELS[model]
    layer = spec.width * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    layer += 3 * spec.width * spec.mlp
    kv = 2 * ROWS * (LIVE + BLOCK / 2) * spec.kv_heads * spec.head_dim
    return 4.0 * (spec.layers * (layer + kv) + spec.width * spec.vocab)


def product_rate(library: Any, shape: tuple[int, int, int], dtype: Any, repeats: int) -> float:
    """FLOP/s of [rows, width] @ [width, out], the best of `repeats` times twenty."""
    rows, width, out = shape
    a, b = library.ones((rows, width), dtype), library.ones((width, out), dtype)
    product: Callable[[], Any] = lambda: a @ b  # noqa: E731
    if library is jnp:
        compiled = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32))
        product = lambda: compiled(a, b)  # noqa: E731
    return 2.0 * rows * width * out / best_s(product, repeats)


def copy_rate(repeats: int) -> float:
    """Bytes read and written per second by a copy of 256 MiB through XLA."""
    x = jnp.ones(64 * 2**20, jnp.float32)
    copy = jax.jit(lambda a: a + 1)
    return 2.0 * x.nbytes / best_s(lambda: copy(x), min(repeats, 5), inner=1)


def best_s(work: Callable[[], Any], repeats: int, inner: int = 20) -> float:
    """Least seconds of one call."""
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
    """(seconds of a step, seconds that a block costs beside its steps): medians."""
    spec, width = MODELS[model], LIVE // 32 + 2
    engine = Engine(spec, slots=ROWS, max_length=256, pages=ROWS * width, block=BLOCK)
    weights, state = engine.prepare(make_params(spec)), engine.init_decode_state()
    state = state._replace(slot=state.slot._replace(max_new=jnp.full(ROWS, 10**6)))
    taken: dict[int, float] = {}
    for steps in (0, BLOCK):
        run = Run(
            rows=np.arange(ROWS, dtype=np.int32),
            reserve=np.zeros(0, np.int32),
            num_reserve=np.int32(0),
            lengths=np.full(ROWS, LIVE, np.int32),
            drawn=np.zeros(ROWS, np.int32),
            tables=np.arange(ROWS * width, dtype=np.int32).reshape(ROWS, width),
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
