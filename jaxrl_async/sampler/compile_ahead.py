"""Compile programs before requests need them, where they are few and known beforehand: where
attention costs only a row's own tokens (EngineSpec.in_pages), widths of context share a program.

These are all programs except prefills of prompts with images, and on a TPU or GPU prefills of
models with gated delta nets, on a TPU also with windows: these are compiled when prompts arrive.
Nothing runs, and only shapes are needed: JAX finds the compiled program at the first call.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, product
from typing import Any

import jax

from jaxrl_async.sampler.batch.decoding import context_widths, empty_decode_args, padded_rows
from jaxrl_async.sampler.batch.prefill import (
    copied_sizes,
    insert_args,
    inserted_sizes,
    make_chunk,
    prefill_sizes,
)
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.program_arguments import DecodeState, EngineWeights
from jaxrl_async.sampler.device.sampling import Mix, union_of
from jaxrl_async.sampler.lifetime import close_at_exit
from jaxrl_async.sampler.setup import SamplerSetup

log = logging.getLogger(__name__)


def compile_all(
    engine: Engine,
    weights: EngineWeights,
    state: DecodeState,
    budget: int,
    mixes: Sequence[Mix],
    seed: int,
    *,
    possible: Sequence[Mix] = (),
    images: bool = False,
    stops: Callable[[], bool] = bool,
) -> int:
    """Compile the programs that requests can need and that are known beforehand, one after another;
    return their number.

    Args:
        engine: whose programs they are.
        weights: of Engine.prepare, or their shapes (shapes_of).
        state: of slots and pages, or its shapes.
        budget: tokens that are prefilled between two blocks (sampler.prefill_chunk).
        mixes: the kinds of sampling that requests will ask for, the most frequent one first.
        seed: of the sampler.
        possible: kinds of sampling that requests may ask for; their blocks come last.
        images: whether prompts may have images, whose prefills have many shapes.
        stops: returns True to skip the remaining programs.
    """
    weights, state, compiled = shapes_of(weights), shapes_of(state), 0
    blocks = _blocks(engine, weights, state, mixes)
    first = islice(blocks, 1 if engine.spec.ragged else len(mixes))  # of all slots
    prefills = iter(()) if images else _prefills(engine, weights, state, budget, seed)
    others = [_blocks(engine, weights, state, [mix]) for mix in possible if mix not in mixes]
    programs = chain(first, prefills, blocks, *others)
    while not stops() and next(programs, None):
        compiled += 1
    return compiled


def shapes_of(arrays: object) -> Any:
    """Return the shapes of arrays as a program's call sees them: with their shardings if they are
    bound to devices. Shapes are returned unchanged."""

    def shape_of(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        bound = isinstance(x, jax.Array) and x.committed
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if bound else None)

    return jax.tree.map(shape_of, arrays)


def _blocks(
    engine: Engine, weights: EngineWeights, state: DecodeState, mixes: Sequence[Mix]
) -> Iterator[str]:
    """Compile each block, blocks of all slots first, one kind of sampling after another; yield its
    name."""
    spec = engine.spec
    if not spec.in_pages:
        return
    sizes = sorted({padded_rows(spec, n) for n in range(1, spec.slots + 1)}, reverse=True)
    kinds = [union_of(mixes)] if spec.ragged else dict.fromkeys([*mixes, union_of(mixes)])
    for rows, pages, mix in product(sizes, context_widths(spec), kinds):
        args = empty_decode_args(spec, rows, pages, mix)
        engine.compile_generate(weights, state, args, context_pages=pages, mix=mix)
        yield "generate"


def _prefills(
    engine: Engine, weights: EngineWeights, state: DecodeState, budget: int, seed: int
) -> Iterator[str]:
    """Compile a prefill of each size, and each insert of it; yield each program's name."""
    spec = engine.spec
    for number, sizes in enumerate(prefill_sizes(spec, budget)):
        chunk = make_chunk([], sizes, spec)
        prefix = engine.compile_prefill(weights, state, chunk.args)._replace(routes=None)
        yield "prefill"
        if number and spec.prefills_in_pages:
            continue  # an insert has no tokens to write, for any size of the prefill
        for size in inserted_sizes(spec):
            for copies in copied_sizes(size, spec):
                args = insert_args(
                    chunk.unwritten, [], spec, seed, chunk.args.slots, size=size, num_copies=copies
                )
                engine.compile_insert(prefix, state, args)
                yield "insert"


def compile_for(
    setup: SamplerSetup, weights: EngineWeights, state: DecodeState, stops: Callable[[], bool]
) -> int:
    """Compile the programs that samplers of this setup can need (compile_all); return their
    number."""
    return compile_all(
        setup.engine,
        weights,
        state,
        setup.section.prefill_chunk,
        setup.settings.mixes,
        setup.seed,
        possible=setup.settings.possible,
        images=setup.settings.images is not None,
        stops=stops,
    )


class CompilingAhead:
    """A thread that compiles for a sampler (compile_for). An error is logged, and shows again when
    the program is needed."""

    def __init__(self, setup: SamplerSetup, weights: EngineWeights, state: DecodeState) -> None:
        """Start. Only the shapes of the weights (Engine.prepare) and the state are kept."""
        self._setup, self._name = setup, setup.settings.name
        self._weights, self._state = shapes_of(weights), shapes_of(state)
        self._stopped = threading.Event()
        name = f"{self._name} compiles"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        close_at_exit(self)
        self._thread.start()

    def leave(self) -> None:
        """End after the program that is being compiled; do not wait."""
        self._stopped.set()

    def close(self) -> None:
        """End after the program that is being compiled; wait for it."""
        self.leave()
        self._thread.join()

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            count = compile_for(self._setup, self._weights, self._state, self._stopped.is_set)
        except Exception as error:
            log.warning("%s: no more is compiled ahead: %s", self._name, error, exc_info=True)
            return
        if count:
            took = time.perf_counter() - begin
            log.info("%s: %d programs were ready in %.1f s", self._name, count, took)
