"""The device side of the sampler, with JetStream's terms: prefill, insert, generate, slots.

    prepare   parameters                                                  -> EngineWeights
    prefill   new tokens of some sequences, after those in their pages    -> Prefix
              (in pages: and writes their KV there                        -> Prefix, DecodeState)
    insert    a Prefix into pages and slots                               -> DecodeState
    generate  up to `block` decode steps of up to `slots` rows            -> DecodeState, Block

The programs are pure functions of an EngineSpec (prefilling.py, insertion.py, decode.py). What a
slot holds (its length, its pages, whether it runs) is known only to the host
(sampler/batch/slots.py) and is passed with each call: a few bytes per slot.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.mesh import SAMPLER_RULES, shapes_on, shardings, spans_processes, spec_for
from jaxrl_async.model import cache
from jaxrl_async.model.adapter_stack import empty_adapter, stack_table
from jaxrl_async.model.lora import is_whole
from jaxrl_async.model.spec import ModelSpec, Params, is_stack
from jaxrl_async.sampler.device import decode, insertion, prefilling
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.program_arguments import (
    Block,
    DecodeArgs,
    DecodeState,
    EngineWeights,
    InsertArgs,
    PrefillArgs,
    Prefix,
    ScoreArgs,
    TokenScores,
)
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.types import MAX_STOP_TOKENS, IntArray

Program = Any
"""A jitted function."""
Shardings = Any
"""A tree of NamedSharding; None without a mesh."""


class Programs(NamedTuple):
    """The jitted functions of one EngineSpec."""

    prepare: Program
    prepare_rest: Program
    prepare_layer: Program
    prepare_adapter: Program
    empty_adapters: Program
    load_adapter: Program
    probe: Program
    prefill: Program
    prefill_in_pages: Program
    score: Program
    score_in_pages: Program
    insert: Program
    generate: Program
    empty: Program

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far, over all shapes."""
        return sum(program._cache_size() for program in self)


@lru_cache(maxsize=64)
def programs_of(spec: EngineSpec) -> Programs:
    """Return the programs that all engines of this spec share.

    They are bound to the spec here, not through `static_argnums`: each spec then counts its own
    compilations and has its own compiler options. The cache holds specs and compiled programs, but
    no engine and no array.
    """
    options = {"xla_cpu_multi_thread_eigen": False} if spec.one_thread else None
    jit = partial(jax.jit, compiler_options=options)
    state = decode_state_shardings(spec)
    results, stack = _result_shardings(spec, state), _adapter_shardings(spec)
    return Programs(
        prepare=jit(partial(insertion.prepare, spec)),
        prepare_rest=jit(partial(insertion.prepare_rest, spec)),
        prepare_layer=jit(partial(insertion.prepare_layer, spec), static_argnums=(0,)),
        prepare_adapter=jit(partial(insertion.prepare_adapter, spec)),
        empty_adapters=jit(partial(insertion.empty_adapters, spec), out_shardings=stack),
        load_adapter=jit(
            partial(insertion.load_adapter, spec), donate_argnums=(0,), out_shardings=stack
        ),
        probe=jit(partial(insertion.probe, spec)),
        prefill=jit(partial(prefilling.prefill, spec), out_shardings=results.prefill),
        prefill_in_pages=jit(
            partial(prefilling.prefill_in_pages, spec),
            donate_argnums=(1,),
            out_shardings=results.prefill_in_pages,
        ),
        score=jit(
            partial(prefilling.score, spec), static_argnames=("top",), out_shardings=results.score
        ),
        score_in_pages=jit(
            partial(prefilling.score_in_pages, spec),
            donate_argnums=(1,),
            static_argnames=("top",),
            out_shardings=results.score_in_pages,
        ),
        insert=jit(
            partial(insertion.insert, spec), donate_argnums=(1,), out_shardings=results.insert
        ),
        generate=jit(
            partial(decode.generate, spec),
            donate_argnums=(1,),
            static_argnames=("context_pages", "mix"),
            out_shardings=results.generate,
        ),
        empty=jit(partial(insertion.empty_state, spec), out_shardings=state),
    )


def decode_state_shardings(spec: EngineSpec) -> Shardings:
    """Return the shardings of a decode state: pages are divided over KV heads as SAMPLER_RULES
    say, everything else is replicated."""
    mesh = spec.mesh
    if mesh is None:
        return None
    state = jax.eval_shape(partial(insertion.empty_state, spec))
    axes = cache.page_axes(ragged=spec.ragged)
    replicated = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state)

    def of_pages(x: Any) -> NamedSharding:
        shape = x.shape
        if len(shape) == 3:  # latent attention on a TPU: one head
            return NamedSharding(mesh, PartitionSpec())
        if spec.ragged:  # key and value of a head stay together
            shape = (*shape[:2], max(1, shape[2] // 2), shape[3])
        return NamedSharding(mesh, spec_for(shape, axes, mesh, SAMPLER_RULES))

    return replicated._replace(kv=jax.tree.map(of_pages, state.kv))


class _Results(NamedTuple):
    """The shardings of the programs' results; None: the compiler chooses them."""

    prefill: Shardings = None
    prefill_in_pages: Shardings = None
    score: Shardings = None
    score_in_pages: Shardings = None
    insert: Shardings = None
    generate: Shardings = None


def _result_shardings(spec: EngineSpec, state: Shardings) -> _Results:
    """Return the shardings of results: the decode state keeps its own, and on a mesh of several
    processes each process gets the whole of the results that the host reads."""
    if spec.mesh is None:
        return _Results()
    whole, several = NamedSharding(spec.mesh, PartitionSpec()), spans_processes(spec.mesh)
    chosen: Any = None
    read = whole if several else chosen  # by the host
    prefix = Prefix(chosen, chosen, read if spec.keeps_routes else chosen, chosen)
    # logits as the state has them: one insert for all prefills
    in_pages = prefix._replace(logits=whole)
    return _Results(
        prefill=prefix if several else chosen,
        prefill_in_pages=(in_pages, state.kv),
        score=(prefix if several else chosen, read),
        score_in_pages=(in_pages, state.kv, read),
        insert=state,
        generate=(state, read),
    )


def _adapter_shardings(spec: EngineSpec) -> Shardings:
    """Return the shardings of the slots for adapters, one tree a layer; None: not divided."""
    if spec.mesh is None or spec.room is None:
        return None
    table = stack_table(spec.model, spec.room)
    stacked = shardings(table, spec.mesh, SAMPLER_RULES)
    return _by_layer(spec.model, stacked)


def weight_shardings(
    spec: ModelSpec, mesh: Mesh, params: Params, prepared: EngineWeights
) -> EngineWeights:
    """Return the shardings of prepared weights: one device, or the sharding of each parameter.

    A layer's weight is divided like the stacked one, without the layer dimension, which no rule
    divides.
    """
    if mesh.size == 1:  # where layers are fused
        return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), prepared)
    divided = jax.tree.map(lambda w: w.sharding, params)
    rest = {n: s for n, s in divided.items() if not is_stack(n)}
    return EngineWeights(rest, _by_layer(spec, divided))


def _by_layer(spec: ModelSpec, stacked: Shardings) -> list[Shardings]:
    """Return the shardings of each layer's weights, without empty stacks."""
    of_layer = {
        number: {
            n: NamedSharding(s.mesh, PartitionSpec(*s.spec[1:]))
            for n, s in stacked.get(stack, {}).items()
        }
        for stack, numbers in spec.stacks.items()
        for number in numbers
    }
    return [of_layer[i] for i in range(spec.layers)]


class Engine:
    """Compiled programs for one EngineSpec. Holds no other state."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.programs = programs_of(spec)

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far by engines of this spec; a weight swap must not change it."""
        return self.programs.num_compiled

    def prepare(self, params: Params, before: EngineWeights | None = None) -> EngineWeights:
        """Return the parameters in the form of prefill and generate; one copy on the device.

        before: weights in use. If `params` are an adapter, it replaces theirs and shares the rest.
        """
        if is_whole(params):
            weights = self._prepare_all(params)
            if self.spec.room is None:
                return weights
            weights = weights._replace(stack=self.programs.empty_adapters())
            nothing = empty_adapter(self.spec.model, self.spec.room)
            return self.load_adapter(weights, nothing, 1)  # compiled here, not at the first load
        assert before is not None, "an adapter needs the weights that it changes"
        layers = self.programs.prepare_adapter(params)
        pairs = zip(before.layers, layers, strict=True)
        return before._replace(layers=[{**old, **new} for old, new in pairs])

    def _prepare_all(self, params: Params) -> EngineWeights:
        if not insertion.prepares_by_layer(self.spec, params):
            weights: EngineWeights = self.programs.prepare(params)
            return weights
        form = insertion.layer_form(self.spec, params)
        layers = [
            self.programs.prepare_layer(form, params[stack], np.int32(number))
            for stack, number in self.spec.model.in_stacks
        ]
        rest = {name: w for name, w in params.items() if not is_stack(name)}
        return EngineWeights(self.programs.prepare_rest(rest), layers)

    def load_adapter(self, weights: EngineWeights, adapter: Params, slot: int) -> EngineWeights:
        """Write an adapter (adapter_stack.fitted_adapter) to a slot, counted from 1. The stack of
        `weights` is donated."""
        stack = self.programs.load_adapter(weights.stack, adapter, np.int32(slot))
        return weights._replace(stack=stack)

    def probe(self, weights: EngineWeights, token_ids: IntArray) -> Array:
        """Return untempered log-probs of token_ids[1:], [n - 1] float32."""
        logprobs: Array = self.programs.probe(weights, np.asarray(token_ids, np.int32))
        return logprobs

    def init_decode_state(self) -> DecodeState:
        """Return empty slots and pages, placed on the mesh."""
        state: DecodeState = self.programs.empty()
        return state

    def state_shapes(self) -> Any:
        """Return the shapes of a decode state with their shardings."""
        state = jax.eval_shape(partial(insertion.empty_state, self.spec))
        return shapes_on(state, decode_state_shardings(self.spec))

    def prefill(
        self, weights: EngineWeights, state: DecodeState | None, chunk: PrefillArgs
    ) -> Prefix:
        """Compute new tokens of B sequences, which see the pages of `chunk.tables`.

        Changes no state, and needs none if these pages are empty. The result may be inserted into
        any number of slots. One compilation per (n, B, T, C).
        """
        before = (None, ()) if state is None else (state.kv, state.states)
        prefix: Prefix = self.programs.prefill(weights, before[0], chunk, before[1])
        return prefix

    def prefill_in_pages(
        self, weights: EngineWeights, state: DecodeState, chunk: PrefillArgs
    ) -> tuple[Prefix, DecodeState]:
        """Compute new tokens of B sequences as `prefill` does, and write their KV to `chunk.cells`.

        For EngineSpec.prefills_in_pages. Donates the state's pages. One compilation per (n, B, C);
        few of these are used (prefill.prefill_sizes).
        """
        prefix, kv = self.programs.prefill_in_pages(weights, state.kv, chunk)
        return prefix, state._replace(kv=kv)

    def score(
        self,
        weights: EngineWeights,
        state: DecodeState,
        chunk: PrefillArgs,
        scored: ScoreArgs,
        *,
        top: int,
    ) -> tuple[Prefix, DecodeState, TokenScores]:
        """Compute what prefill() or prefill_in_pages() does, and the log-probs after the scored
        tokens.

        Args:
            weights: of `prepare`.
            state: donated if the chunk has cells.
            chunk: new tokens.
            scored: which of the new tokens are scored.
            top: number of likeliest tokens after each, one of sampling.NAMED_SIZES.
        """
        if chunk.cells is None:
            prefix, scores = self.programs.score(
                weights, state.kv, chunk, state.states, scored, top=top
            )
            return prefix, state, scores
        prefix, kv, scores = self.programs.score_in_pages(weights, state.kv, chunk, scored, top=top)
        return prefix, state._replace(kv=kv), scores

    def insert(self, prefix: Prefix, state: DecodeState, args: InsertArgs) -> DecodeState:
        """Write a chunk's KV into pages, copy pages for slots that share a prefix, and set up the
        slots."""
        new: DecodeState = self.programs.insert(prefix, state, args)
        return new

    def generate(
        self,
        weights: EngineWeights,
        state: DecodeState,
        args: DecodeArgs,
        *,
        context_pages: int,
        mix: Mix,
    ) -> tuple[DecodeState, Block]:
        """Decode up to `args.steps` steps in one dispatch; ends early when no row is alive.

        Args:
            weights: of `prepare`.
            state: donated.
            args: the slots that decode.
            context_pages: pages that hold every row's tokens so far.
            mix: the sampling that the rows' requests ask for together.
        """
        new: tuple[DecodeState, Block] = self.programs.generate(
            weights, state, args, context_pages=context_pages, mix=mix
        )
        return new

    def compile_prefill(
        self, weights: EngineWeights, state: DecodeState, chunk: PrefillArgs
    ) -> Prefix:
        """Compile the program of prefill() or prefill_in_pages() from shapes; return the shapes of
        its prefix."""
        lowered = self._lower_prefill(weights, state, chunk)
        compiled, result = lowered.compile(), lowered.out_info
        if self.spec.mesh is not None:
            result = shapes_on(result, compiled.output_shardings)
        prefix: Prefix = result if chunk.cells is None else result[0]
        return prefix

    def _lower_prefill(self, weights: EngineWeights, state: DecodeState, chunk: PrefillArgs) -> Any:
        if chunk.cells is None:
            return self.programs.prefill.lower(weights, state.kv, chunk, state.states)
        return self.programs.prefill_in_pages.lower(weights, state.kv, chunk)

    def compile_insert(self, prefix: Prefix, state: DecodeState, args: InsertArgs) -> None:
        """Compile the program of insert() from shapes."""
        self.programs.insert.lower(prefix, state, args).compile()

    def compile_generate(
        self,
        weights: EngineWeights,
        state: DecodeState,
        args: DecodeArgs,
        *,
        context_pages: int,
        mix: Mix,
    ) -> None:
        """Compile the program of generate() from shapes."""
        self.programs.generate.lower(
            weights, state, args, context_pages=context_pages, mix=mix
        ).compile()

    def lower(
        self, params: Params, chunk: PrefillArgs, args: DecodeArgs, *, context_pages: int, mix: Mix
    ) -> dict[str, Any]:
        """Lower the programs that a sampler compiles (prepare, prefill, decode); run nothing.

        Takes only shapes: jax.ShapeDtypeStruct, for params with shardings.
        """
        assert self.spec.mesh is not None
        prepare = self.programs.prepare.lower(params)
        shardings = weight_shardings(self.spec.model, self.spec.mesh, params, prepare.out_info)
        weights, state = shapes_on(prepare.out_info, shardings), self.state_shapes()
        return {
            "prepare": prepare,
            "prefill": self._lower_prefill(weights, state, chunk),
            "decode": self.programs.generate.lower(
                weights, state, args, context_pages=context_pages, mix=mix
            ),
        }


@partial(jax.jit, static_argnums=0)
def request_keys(seed: int, ids: Array) -> Array:
    """Return [n, 2] uint32 key data of requests with ids [n, 3] int32 (group, member, branch)."""

    def request_key(identity: Array) -> Array:
        key = jax.random.key(seed)
        for part in range(3):
            key = jax.random.fold_in(key, identity[part])
        return jax.random.key_data(key)

    return jax.vmap(request_key)(ids)


def pad_stop_ids(stop_ids: Sequence[int]) -> list[int]:
    """Return exactly MAX_STOP_TOKENS ids, filled with -1."""
    return [*stop_ids, *[-1] * (MAX_STOP_TOKENS - len(stop_ids))]
