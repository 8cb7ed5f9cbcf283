"""Compile ahead what any traffic can need, where that is a few programs known beforehand: where
attention costs a row's own tokens (EngineSpec.cpu_attention), no prompt's length, width of context
or number of rows is a shape of its own."""

from collections.abc import Iterable

import numpy as np

from jaxrl_async.sampler.batch import shapes
from jaxrl_async.sampler.batch.decoding import context_pages_of
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
from jaxrl_async.sampler.device.sampling import Mix


def compile_all(
    engine: Engine, weights: EngineWeights, budget: int, mixes: Iterable[Mix], seed: int
) -> None:
    """Run every program that requests without images can need, once, on empty slots of their own;
    return at once where they are not known beforehand.

    Args:
        engine: whose programs they are.
        weights: of Engine.prepare.
        budget: tokens that are prefilled between two blocks (sampler.prefill_chunk).
        mixes: the samplings that requests will ask for together.
        seed: of the sampler.
    """
    if not engine.spec.cpu_attention:
        return
    state = engine.init_decode_state()
    for tokens in shapes.coarse_buckets(budget):
        state = _prefilled(engine, weights, state, tokens, seed)
    slots = engine.spec.slots
    for rows in sorted({shapes.coarse_rows(1, slots), slots}):
        args, pages = _no_rows(engine.spec, rows)
        for mix in mixes:
            state, _ = engine.generate(weights, state, args, context_pages=pages, mix=mix)


def _prefilled(
    engine: Engine, weights: EngineWeights, state: DecodeState, tokens: int, seed: int
) -> DecodeState:
    """Prefill padding of so many tokens, and insert it into no slot in each way that there is."""
    spec = engine.spec
    rows, width = min(shapes.TOGETHER, spec.total_slots), spec.num_pages(spec.max_length)
    chunk = make_chunk([], Sizes(rows, 1, tokens, width), spec)
    prefix = engine.prefill(weights, state, chunk.args)._replace(routes=None)
    for size in inserted_sizes(spec):
        for copies in (0, copies_of(size, spec)):
            args = insert_args(
                chunk.cells, [], spec, seed, chunk.args.slots, size=size, num_copies=copies
            )
            state = engine.insert(prefix, state, args)
    return state


def _no_rows(spec: EngineSpec, rows: int) -> tuple[DecodeArgs, int]:
    """Return the arguments of a block of so many rows, none of which decodes, and its pages."""
    S, pages, groups = spec.total_slots, context_pages_of(spec, 1), len(spec.kv_layout.groups)
    width = pages + spec.num_pages(spec.block) + 1
    nothing = np.zeros(S, np.int32)
    args = DecodeArgs(
        rows=np.full(rows, S, np.int32),
        reserve=np.zeros(spec.reserve, np.int32),
        num_reserve=np.int32(0),
        lengths=nothing,
        drawn=nothing,
        tables=np.full((S, groups, width), spec.pages, np.int32),
        steps=np.int32(spec.block),
        places=None if spec.room is None else nothing,
    )
    return args, pages
