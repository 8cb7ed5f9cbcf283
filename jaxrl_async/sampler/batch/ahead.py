"""Compile ahead what requests can need, where that is a few programs known beforehand: where
attention costs a row's own tokens (EngineSpec.in_pages), no width of context is a shape of its own.

On a CPU these are all programs; on a TPU the blocks, and prefills are compiled as prompts come.
Nothing runs, and only shapes are needed: JAX finds what was compiled when it is first called.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import Any

import jax
import numpy as np

from jaxrl_async.sampler.batch import shapes
from jaxrl_async.sampler.batch.decoding import context_widths, padded_rows
from jaxrl_async.sampler.batch.prefill import (
    Sizes,
    copies_of,
    insert_args,
    inserted_sizes,
    make_chunk,
)
from jaxrl_async.sampler.device.arguments import DecodeArgs, DecodeState, EngineWeights
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.sampling import Mix, together


def compile_all(
    engine: Engine,
    weights: EngineWeights,
    state: DecodeState,
    budget: int,
    mixes: Sequence[Mix],
    seed: int,
    *,
    images: bool = False,
    stops: Callable[[], bool] = bool,
) -> int:
    """Compile the programs that requests can need and that are known beforehand, one after another;
    return how many.

    Args:
        engine: whose programs they are.
        weights: of Engine.prepare, or their shapes (shapes_of).
        state: of slots and pages, or its shapes.
        budget: tokens that are prefilled between two blocks (sampler.prefill_chunk).
        mixes: the samplings that requests will ask for, the most frequent one first.
        seed: of the sampler.
        images: whether prompts may have images: their prefills come in many shapes.
        stops: Returns whether to leave the rest out.
    """
    weights, state, compiled = shapes_of(weights), shapes_of(state), 0
    for compile_one in _all_programs(engine, weights, state, budget, mixes, seed, images):
        if stops():
            break
        compile_one()
        compiled += 1
    return compiled


def shapes_of(arrays: Any) -> Any:
    """Return the shapes of arrays as a call of a program sees them: with their shardings if they
    are bound to devices. Shapes stay what they are."""

    def of_one(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        bound = isinstance(x, jax.Array) and x.committed
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if bound else None)

    return jax.tree.map(of_one, arrays)


def _all_programs(
    engine: Engine,
    weights: EngineWeights,
    state: DecodeState,
    budget: int,
    mixes: Sequence[Mix],
    seed: int,
    images: bool,
) -> Iterator[Callable[[], Any]]:
    """Yield what compiles each program, those that are needed first before the others."""
    spec = engine.spec
    if not spec.in_pages:
        return
    blocks = _blocks(engine, weights, state, mixes)
    prefills = [] if images or not spec.cpu_attention else shapes.coarse_buckets(budget)
    yield from islice(blocks, 1 if spec.ragged else len(mixes))  # of all slots
    for tokens in prefills:
        yield from _prefilled(engine, weights, state, tokens, seed)
    yield from blocks


def _blocks(
    engine: Engine, weights: EngineWeights, state: DecodeState, mixes: Sequence[Mix]
) -> Iterator[Callable[[], Any]]:
    """Yield what compiles each block, first those of all slots, a sampling after the other."""
    spec = engine.spec
    sizes = sorted({padded_rows(spec, n) for n in range(1, spec.slots + 1)}, reverse=True)
    of_blocks = [together(mixes)] if spec.ragged else dict.fromkeys([*mixes, together(mixes)])
    for rows, pages, mix in product(sizes, context_widths(spec), of_blocks):
        args, static = _no_rows(spec, rows, pages), {"context_pages": pages, "mix": mix}
        yield partial(engine.compile_generate, weights, state, args, **static)


def _prefilled(
    engine: Engine, weights: EngineWeights, state: DecodeState, tokens: int, seed: int
) -> Iterator[Callable[[], Any]]:
    """Yield what compiles a prefill of so many tokens, and each way to insert it."""
    spec = engine.spec
    rows, width = min(shapes.TOGETHER, spec.total_slots), spec.num_pages(spec.max_length)
    chunk = make_chunk([], Sizes(rows, 1, tokens, width), spec)
    made: list[Any] = []
    yield lambda: made.append(engine.compile_prefill(weights, state, chunk.args))
    for size in inserted_sizes(spec):
        for copies in (0, copies_of(size, spec)):
            args = insert_args(
                chunk.cells, [], spec, seed, chunk.args.slots, size=size, num_copies=copies
            )
            yield partial(_compile_insert, engine, made, state, args)


def _compile_insert(engine: Engine, made: list[Any], state: DecodeState, args: Any) -> None:
    engine.compile_insert(made[0]._replace(routes=None), state, args)


def _no_rows(spec: EngineSpec, rows: int, pages: int) -> DecodeArgs:
    """Return the arguments of a block of so many rows, none of which decodes, with so many pages
    of context."""
    S, groups = spec.total_slots, len(spec.kv_layout.groups)
    width = pages + spec.num_pages(spec.block) + 1
    nothing = np.zeros(S, np.int32)
    return DecodeArgs(
        rows=np.full(rows, S, np.int32),
        reserve=np.zeros(spec.reserve, np.int32),
        num_reserve=np.int32(0),
        lengths=nothing,
        drawn=nothing,
        tables=np.full((S, groups, width), spec.pages, np.int32),
        steps=np.int32(spec.block),
        places=None if spec.room is None else nothing,
    )
