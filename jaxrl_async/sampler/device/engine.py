"""The device side of the sampler, in JetStream's words: prefill, insert, generate, slots. Pure
programs.

    prefill   new tokens of some sequences, behind what their pages hold   -> Prefix
    insert    a Prefix into pages and slots                                -> DecodeState
    generate  up to `block` decode steps of up to `slots` rows             -> DecodeState, Block

Shapes: S slots and reserve places, R rows that decode, Q reserve places, B sequences of a prefill,
T their longest, n tokens, P pages, G tokens a page, C context columns, V vocabulary, E stop tokens
a request can have. What a slot holds (its length, its pages, whether it runs) is the host's to
know, see sampler/batch/slots.py, and comes with each call: a few bytes per slot.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.mesh import SAMPLER_RULES, shapes_on, spec_for
from jaxrl_async.model import cache, decoder
from jaxrl_async.model.attention import ragged_paged_reference
from jaxrl_async.model.cache import NewKV, PagedKV
from jaxrl_async.model.kernels import ragged_paged
from jaxrl_async.model.moe import Choose, experts_on, id_dtype, noting, route
from jaxrl_async.model.quantize import is_quantized
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.device.sampling import Controls, Mix, SampledTokens, sample
from jaxrl_async.sampler.request_checks import MAX_STOP_TOKENS

AnyArray = Any
"""An array on the device, or on its way there or back as NumPy."""


class EngineWeights(NamedTuple):
    """A policy's parameters as the programs want them: layers apart, made once per swap."""

    params: Any  # all but the layers
    layers: list[Any]


class PrefillArgs(NamedTuple):
    """New tokens of B sequences, packed: NumPy on its way to the device."""

    token_ids: AnyArray  # [n] int32
    positions: AnyArray  # [n] int32, place in the sequence
    places: AnyArray  # [B, T] int32, index into n; anything where there is no token
    back: AnyArray  # [n] int32, index into B * T
    starts: AnyArray  # [B] int32, tokens that the pages hold already
    lengths: AnyArray  # [B] int32, new tokens, >= 1
    tables: AnyArray  # [B, C / G] int32, pages of the tokens before


class Prefix(NamedTuple):
    """A prefilled chunk, ready to be inserted; opaque to callers."""

    kv: NewKV  # layers of [n, N, K]
    logits: Array  # [B, V] float32, after each sequence's last token
    routes: Array | None = None  # [n, layers, k] experts of each token, with keeps_routes


class SlotParams(NamedTuple):
    """What a request asks of its slot; arrays over slots or inserted requests."""

    controls: Controls
    keys: AnyArray  # [S, 2] uint32
    stop_ids: AnyArray  # [S, E] int32; -1 matches nothing
    max_new: AnyArray  # [S] int32
    ignores_stop: AnyArray  # [S] bool


class InsertArgs(NamedTuple):
    """Where an insert puts things: NumPy on its way to the device."""

    pages: AnyArray  # [n] int32, of each token of the chunk; P is padding
    places: AnyArray  # [n] int32, in its page
    sources: AnyArray  # [m] int32, pages that are copied after that
    targets: AnyArray  # [m] int32; P is padding
    rows: AnyArray  # [k] int32, the sequence of the chunk whose logits a slot takes
    slots: AnyArray  # [k] int32; S is padding
    ask: SlotParams  # [k]


class DecodeArgs(NamedTuple):
    """Who decodes in a block: NumPy on its way to the device."""

    rows: AnyArray  # [R] int32, slot of each row; S is an empty row
    reserve: AnyArray  # [Q] int32, slots that take over rows that end, in this order
    num_reserve: AnyArray  # [] int32
    lengths: AnyArray  # [S] int32, tokens in each slot's pages
    drawn: AnyArray  # [S] int32, tokens drawn so far
    tables: AnyArray  # [S, W] int32, each slot's pages, those that the block will fill included
    steps: AnyArray  # [] int32, at most the engine's block


class DecodeState(NamedTuple):
    """Everything on the device between two blocks. Donated to insert and generate; opaque."""

    kv: PagedKV
    logits: Array  # [S, V] float32: the next token's
    slot: SlotParams


class Block(NamedTuple):
    """What a block drew, for the host: 13 bytes a token, and what is asked beside it."""

    tokens: AnyArray  # [R, block] int32
    logprobs: AnyArray  # [R, block] float32
    owners: AnyArray  # [R, block] int32, slot that the token belongs to; S: none was drawn
    ends: AnyArray  # [R, block] bool, a stop token or the last one that its request may draw
    steps: AnyArray  # [] int32, decode steps made
    full_logprobs: AnyArray = None  # [R, block] float32, with extras
    kept: AnyArray = None  # [R, block, V / 32] uint32, with extras
    routes: AnyArray = None  # [R, block, layers, k] the token's own experts, with keeps_routes


class _Loop(NamedTuple):
    """What a decode step changes."""

    step: Array  # [] int32
    head: Array  # [] int32, reserve places taken
    kv: Any  # Context (gathered) or PagedKV (ragged)
    tables: Array  # [R, W]
    rows: Array  # [R] slot
    alive: Array  # [R] bool
    logits: Array  # [R, V]
    base: Array  # [R] tokens in the pages when the row's slot joined
    joined: Array  # [R] step at which it did
    drawn: Array  # [R]
    ask: SlotParams  # [R]
    positions: Array  # [R, block]
    out: Block


class _Programs(NamedTuple):
    """The compiled functions."""

    prepare: Any
    prefill: Any
    insert: Any
    generate: Any
    empty: Any


@lru_cache(maxsize=64)
def _programs(engine: "Engine") -> _Programs:
    """Compiled once for all equal engines."""
    options = {"xla_cpu_multi_thread_eigen": False} if engine.one_thread else None
    jit = partial(jax.jit, compiler_options=options)
    return _Programs(
        prepare=jit(engine._prepare_program),
        prefill=jit(engine._prefill_program),
        insert=jit(engine._insert_program, donate_argnums=(1,)),
        generate=jit(
            engine._generate_program,
            donate_argnums=(1,),
            static_argnames=("context_pages", "mix"),
        ),
        empty=jit(engine.empty_state, out_shardings=engine.state_shardings()),
    )


class Engine:
    """Compiled programs for one model, slot count and mesh. Holds no state but the programs."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        slots: int,
        max_length: int,
        pages: int,
        page_tokens: int = 32,
        reserve: int = 0,
        block: int = 16,
        mesh: Mesh | None = None,
        dtype: Any = jnp.float32,
        ragged: bool = False,
        one_thread: bool = False,
        on_tpu: bool | None = None,
        mixed: bool = False,
        keeps_routes: bool = False,
    ) -> None:
        """ragged: decode on the pages with the TPU kernel (elsewhere with its slow reference, for
        tests). one_thread: CPU programs without
        XLA's own threads, for several samplers side by side. on_tpu: null: as the devices are.
        mixed: matrix products in bfloat16, all else in dtype. keeps_routes: prefill and generate
        tell each token's experts."""
        self.spec, self.slots, self.reserve = spec, slots, reserve
        self.max_length, self.block = max_length, block
        self.pages, self.page_tokens = pages, page_tokens
        self.mesh, self.dtype, self.ragged = mesh, dtype, ragged
        self.fused = mesh is None or mesh.size == 1
        self.one_thread, self.mixed, self.keeps_routes = one_thread, mixed, keeps_routes
        device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        self.on_tpu = device.platform == "tpu" if on_tpu is None else on_tpu
        self._programs = _programs(self)

    def _identity(self) -> tuple[Any, ...]:
        """All that the programs depend on: equal engines share them."""
        return (
            self.spec, self.slots, self.reserve, self.max_length, self.block, self.pages,
            self.page_tokens, self.mesh, jnp.dtype(self.dtype), self.ragged, self.one_thread,
            self.on_tpu, self.mixed, self.keeps_routes,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self._identity())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Engine) and self._identity() == other._identity()

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots (JetStream's name)."""
        return self.slots

    @property
    def places(self) -> int:
        """Slots and reserve places together: the S of all shapes."""
        return self.slots + self.reserve

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far by equal engines; a weight swap must not change it."""
        return sum(p._cache_size() for p in self._programs)

    def prepare(self, params: Any) -> EngineWeights:
        """Parameters in the form that prefill and generate take; one copy on the device."""
        return self._programs.prepare(params)

    def init_decode_state(self) -> DecodeState:
        """All slots and pages empty, placed on the mesh."""
        state: DecodeState = self._programs.empty()
        return state

    def empty_state(self) -> DecodeState:
        """What init_decode_state places: also for jax.eval_shape, where nothing can be run."""
        S, V = self.places, self.spec.vocab
        return DecodeState(
            cache.init_pages(
                self.spec, self.pages, self.page_tokens, self.dtype, ragged=self.ragged
            ),
            jnp.zeros((S, V), jnp.float32),
            SlotParams(
                Controls(jnp.ones(S), jnp.zeros(S, jnp.int32), jnp.ones(S), jnp.zeros(S)),
                jnp.zeros((S, 2), jnp.uint32),
                jnp.full((S, MAX_STOP_TOKENS), -1, jnp.int32),
                jnp.ones(S, jnp.int32),
                jnp.zeros(S, bool),
            ),
        )

    def state_shapes(self) -> Any:
        """Shapes of a decode state, where it lies on the mesh."""
        return shapes_on(jax.eval_shape(self.empty_state), self.state_shardings())

    def state_shardings(self) -> Any:
        """Pages over kv heads as SAMPLER_RULES say, everything else on every device; None without a
        mesh."""
        if self.mesh is None:
            return None
        mesh, state = self.mesh, jax.eval_shape(self.empty_state)
        axes = cache.page_axes(ragged=self.ragged)
        rest = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state)

        def of_pages(x: Any) -> NamedSharding:
            return NamedSharding(mesh, spec_for(x.shape, axes, mesh, SAMPLER_RULES))

        return rest._replace(kv=jax.tree.map(of_pages, state.kv))

    def prefill(
        self, weights: EngineWeights, state: DecodeState | None, chunk: PrefillArgs
    ) -> Prefix:
        """New tokens of B sequences, which see what the pages of `chunk.tables` hold; changes no
        state, and needs none where they hold nothing. One compile per (n, B, T, C)."""
        return self._programs.prefill(weights, None if state is None else state.kv, chunk)

    def prefill_multisampling(
        self, weights: EngineWeights, state: DecodeState, chunk: PrefillArgs
    ) -> Prefix:
        """The same as prefill: one sequence may be inserted into any number of slots."""
        return self.prefill(weights, state, chunk)

    def insert(self, prefix: Prefix, state: DecodeState, into: InsertArgs) -> DecodeState:
        """Bulk insert under JetStream's name for one: `into` says how many."""
        return self.bulk_insert(prefix, state, into)

    def bulk_insert(self, prefix: Prefix, state: DecodeState, into: InsertArgs) -> DecodeState:
        """Put a chunk's KV into pages, copy pages for those who share a prefix, ready the slots."""
        return self._programs.insert(prefix, state, into)

    def generate(
        self,
        weights: EngineWeights,
        state: DecodeState,
        run: DecodeArgs,
        *,
        context_pages: int,
        mix: Mix,
    ) -> tuple[DecodeState, Block]:
        """Up to `run.steps` decode steps in one dispatch; ends early when no row is alive.

        context_pages: pages that hold every row's tokens so far. mix: what the rows ask for.
        """
        return self._programs.generate(weights, state, run, context_pages=context_pages, mix=mix)

    def lower(
        self, params: Any, chunk: PrefillArgs, run: DecodeArgs, *, context_pages: int, mix: Mix
    ) -> dict[str, Any]:
        """What a sampler compiles, for shapes alone (jax.ShapeDtypeStruct; params with shardings):
        prepare, prefill and decode. Nothing runs."""
        assert self.mesh is not None
        prepare = self._programs.prepare.lower(params)
        where = self._prepared_shardings(params, prepare.out_info)
        weights = shapes_on(prepare.out_info, where)
        state = self.state_shapes()
        return {
            "prepare": prepare,
            "prefill": self._programs.prefill.lower(weights, state.kv, chunk),
            "decode": self._programs.generate.lower(
                weights, state, run, context_pages=context_pages, mix=mix
            ),
        }

    def _prepared_shardings(self, params: Any, prepared: EngineWeights) -> EngineWeights:
        """Where `prepare` leaves the weights: on one device, or each as it lay, a layer's without
        the dimension that numbers the layers, which no rule divides."""
        mesh = self.mesh
        assert mesh is not None
        if mesh.size == 1:  # where layers are fused
            return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), prepared)
        where = jax.tree.map(lambda w: w.sharding, params)
        of_layer = {n: _of_one_layer(s) for n, s in where["layers"].items()}
        rest = {n: s for n, s in where.items() if n != "layers"}
        return EngineWeights(rest, [of_layer] * len(prepared.layers))

    # ---- programs

    def _prepare_program(self, params: Any) -> EngineWeights:
        rest = {name: w for name, w in params.items() if name != "layers"}
        quantized = is_quantized(params)
        layers = decoder.split_layers(self.spec, params, fused=self.fused and not quantized)
        if self.mixed and not quantized:  # once, not at each step; what is added or scaled stays
            layers = [
                {
                    n: w if n.endswith(("norm", "bias")) else w.astype(jnp.bfloat16)
                    for n, w in x.items()
                }
                for x in layers
            ]
        return EngineWeights(rest, layers)

    def _prefill_program(self, weights: EngineWeights, kv: PagedKV, chunk: PrefillArgs) -> Prefix:
        B, T = chunk.places.shape
        within = jnp.arange(T)
        visible = (within[:, None] >= within) & (within < chunk.lengths[:, None, None])
        before = (
            cache.gather(kv, chunk.tables, self.spec.head_dim) if chunk.tables.shape[1] else None
        )
        seen = None
        if before is not None:
            seen = jnp.arange(before.k[0].shape[-1]) < chunk.starts[:, None]
        keys: list[Array] = []
        values: list[Array] = []
        told: list[Array] = []

        def attend(i: int, q: Array, k: Array, v: Array) -> Array:
            keys.append(k)
            values.append(v)
            attended = cache.attend_chunk(
                q[chunk.places],
                k[chunk.places],
                v[chunk.places],
                visible,
                None if before is None else (before.k[i], before.v[i]),
                seen,
            )
            return attended.reshape(B * T, *attended.shape[2:])[chunk.back]

        x = decoder.flat_forward(
            self.spec,
            *weights,
            chunk.token_ids,
            chunk.positions,
            attend,
            dtype=self.dtype,
            mixed=self.mixed,
            experts=experts_on(self.mesh, SAMPLER_RULES),
            choose=self._choose(told),
        )
        last = jnp.take_along_axis(chunk.places, (chunk.lengths - 1)[:, None], axis=1)[:, 0]
        logits = decoder.next_logits(self.spec, weights.params, x[last], mixed=self.mixed)
        return Prefix(NewKV(tuple(keys), tuple(values)), logits, self._routes(told))

    def _choose(self, told: list[Array]) -> Choose:
        return noting(told) if self.keeps_routes else route

    def _routes(self, told: list[Array]) -> Array | None:
        """Layers of [n, k] -> [n, layers, k], as small as they can be; None: nobody asks."""
        if not self.keeps_routes:
            return None
        return jnp.stack(told, axis=1).astype(id_dtype(self.spec.experts))

    def _insert_program(self, prefix: Prefix, state: DecodeState, into: InsertArgs) -> DecodeState:
        def put(at: Array, values: Any) -> Array:
            return at.at[into.slots].set(values, mode="drop")

        kv = cache.write(state.kv, prefix.kv, into.pages, into.places)
        if into.sources.shape[0]:
            kv = cache.copy_pages(kv, into.sources, into.targets)
        return DecodeState(
            kv,
            put(state.logits, prefix.logits[into.rows]),
            jax.tree.map(put, state.slot, into.ask),
        )

    def _generate_program(
        self,
        weights: EngineWeights,
        state: DecodeState,
        run: DecodeArgs,
        *,
        context_pages: int,
        mix: Mix,
    ) -> tuple[DecodeState, Block]:
        def go_on(loop: _Loop) -> Array:
            more = jnp.any(loop.alive) | (loop.head < run.num_reserve)
            return (loop.step < run.steps) & more

        def one_step(loop: _Loop) -> _Loop:
            if run.reserve.shape[0]:
                loop = self._take_over(loop, state, run, context_pages)
            drawn = sample(
                loop.logits,
                loop.ask.controls,
                loop.ask.keys,
                loop.base + loop.step - loop.joined,
                mix,
            )
            loop = self._record(loop, drawn)
            return self._advance(weights, loop, drawn.tokens, context_pages)

        loop = jax.lax.while_loop(
            go_on, one_step, self._begin(state, run, context_pages, extras=mix.extras)
        )
        return self._finish(state, run, loop, context_pages)

    def _begin(
        self, state: DecodeState, run: DecodeArgs, context_pages: int, *, extras: bool
    ) -> _Loop:
        S, R, T, V = self.places, run.rows.shape[0], self.block, self.spec.vocab
        experts = (self.spec.layers, self.spec.experts_per_token)
        rows = jnp.asarray(run.rows)
        known = jnp.minimum(rows, S - 1)
        tables = jnp.asarray(run.tables)[known]
        kv: Any = state.kv
        if not self.ragged:
            kv = cache.gather(state.kv, tables[:, :context_pages], self.spec.head_dim, extra=T)

        def per_row(x: Any) -> Array:
            return jnp.asarray(x)[known]

        return _Loop(
            step=jnp.int32(0),
            head=jnp.int32(0),
            kv=kv,
            tables=tables,
            rows=rows,
            alive=rows < S,
            logits=per_row(state.logits),
            base=per_row(run.lengths),
            joined=jnp.zeros(R, jnp.int32),
            drawn=per_row(run.drawn),
            ask=jax.tree.map(per_row, state.slot),
            positions=jnp.zeros((R, T), jnp.int32),
            out=Block(
                tokens=jnp.zeros((R, T), jnp.int32),
                logprobs=jnp.zeros((R, T), jnp.float32),
                owners=jnp.full((R, T), S, jnp.int32),
                ends=jnp.zeros((R, T), bool),
                steps=jnp.int32(0),
                full_logprobs=jnp.zeros((R, T), jnp.float32) if extras else None,
                kept=jnp.zeros((R, T, -(-V // 32)), jnp.uint32) if extras else None,
                routes=jnp.zeros((R, T, *experts), id_dtype(self.spec.experts))
                if self.keeps_routes
                else None,
            ),
        )

    def _take_over(
        self, loop: _Loop, state: DecodeState, run: DecodeArgs, context_pages: int
    ) -> _Loop:
        """Rows that have ended go to the next slots of the reserve, one by one."""

        def possible(loop: _Loop) -> Array:
            return (loop.head < run.num_reserve) & ~jnp.all(loop.alive)

        def one(loop: _Loop) -> _Loop:
            row, slot = jnp.argmin(loop.alive), jnp.asarray(run.reserve)[loop.head]
            table = jnp.asarray(run.tables)[slot]

            def put(into: Array, value: Any) -> Array:
                return jax.lax.dynamic_update_index_in_dim(into, value, row, 0)

            def of_slot(into: Array, per_slot: Any) -> Array:
                return put(into, jnp.asarray(per_slot)[slot])

            kv = loop.kv
            if not self.ragged:
                context = cache.gather(state.kv, table[None, :context_pages], self.spec.head_dim)

                def over(into: Array, new: Array) -> Array:
                    return jax.lax.dynamic_update_slice(into, new, (row, 0, 0, 0))

                kv = jax.tree.map(over, kv, context)
            return loop._replace(
                head=loop.head + 1,
                kv=kv,
                tables=put(loop.tables, table),
                rows=put(loop.rows, slot),
                alive=put(loop.alive, True),
                logits=of_slot(loop.logits, state.logits),
                base=of_slot(loop.base, run.lengths),
                joined=put(loop.joined, loop.step),
                drawn=of_slot(loop.drawn, run.drawn),
                ask=jax.tree.map(of_slot, loop.ask, state.slot),
            )

        return jax.lax.while_loop(possible, one, loop)

    def _record(self, loop: _Loop, new: SampledTokens) -> _Loop:
        """Write down the drawn tokens; rows whose request is done stop."""
        out, ask, alive = loop.out, loop.ask, loop.alive

        def column(into: Array, values: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(into, values, loop.step, 1)

        drawn = loop.drawn + alive
        stopped = jnp.any(new.tokens[:, None] == ask.stop_ids, axis=-1) & ~ask.ignores_stop
        ends = alive & (stopped | (drawn >= ask.max_new))
        return loop._replace(
            drawn=drawn,
            alive=alive & ~ends,
            positions=column(loop.positions, loop.base + loop.step - loop.joined),
            out=out._replace(
                tokens=column(out.tokens, new.tokens),
                logprobs=column(out.logprobs, new.logprobs),
                owners=column(out.owners, jnp.where(alive, loop.rows, self.places)),
                ends=column(out.ends, ends),
                full_logprobs=None
                if new.full_logprobs is None
                else column(out.full_logprobs, new.full_logprobs),
                kept=None if new.kept is None else column(out.kept, new.kept),
            ),
        )

    def _advance(
        self, weights: EngineWeights, loop: _Loop, tokens: Array, context_pages: int
    ) -> _Loop:
        """The drawn tokens through the decoder: their KV, and the next logits."""
        where = loop.base + loop.step - loop.joined  # [R]
        keys, values = list(loop.kv.k), list(loop.kv.v)
        if self.ragged:
            attend = self._attend_pages(loop, where, keys)
        else:
            attend = self._attend_columns(loop, keys, values, context_pages)
        told: list[Array] = []
        x = decoder.flat_forward(
            self.spec,
            *weights,
            tokens,
            where,
            attend,
            dtype=self.dtype,
            mixed=self.mixed,
            experts=experts_on(self.mesh, SAMPLER_RULES),
            choose=self._choose(told),
        )
        out, routes = loop.out, self._routes(told)
        if routes is not None:
            noted = jax.lax.dynamic_update_index_in_dim(out.routes, routes, loop.step, 1)
            out = out._replace(routes=noted)
        return loop._replace(
            out=out,
            step=loop.step + 1,
            kv=loop.kv._replace(k=tuple(keys), v=tuple(values)),
            logits=decoder.next_logits(self.spec, weights.params, x, mixed=self.mixed),
        )

    def _attend_columns(
        self, loop: _Loop, keys: list[Array], values: list[Array], context_pages: int
    ) -> decoder.Attend:
        """Every row appends at the same column behind its context."""
        C = context_pages * self.page_tokens
        places = jnp.arange(C + self.block)
        mine = (places >= C + loop.joined[:, None]) & (places <= C + loop.step)
        visible = (places < loop.base[:, None]) & (places < C) | mine

        def attend(i: int, q: Array, k: Array, v: Array) -> Array:
            keys[i] = cache.append(keys[i], k, C + loop.step, keys=True)
            values[i] = cache.append(values[i], v, C + loop.step, keys=False)
            return cache.attend_columns(q, keys[i], values[i], visible)

        return attend

    def _attend_pages(self, loop: _Loop, where: Array, pages: list[Array]) -> decoder.Attend:
        """Every row writes into its own page, and the kernel reads the pages."""
        R, G = where.shape[0], self.page_tokens
        page = jnp.take_along_axis(loop.tables, (where // G)[:, None], axis=1)[:, 0]
        now = jax.lax.dynamic_index_in_dim(loop.out.owners, loop.step, 1, keepdims=False)
        running = now < self.places  # a row that has ended still computes, but touches no page
        page = jnp.where(running, page, self.pages)
        kernel = partial(ragged_paged, mesh=self.mesh) if self.on_tpu else ragged_paged_reference

        def attend(i: int, q: Array, k: Array, v: Array) -> Array:
            new = cache.interleaved(k, v, pages[i])
            pages[i] = pages[i].at[page, where % G].set(new, mode="drop")
            return kernel(
                q,
                pages[i],
                jnp.where(running, where + 1, 1),
                jnp.minimum(loop.tables, self.pages - 1),
                jnp.arange(R + 1, dtype=jnp.int32),
                jnp.full((1,), R, jnp.int32),
            )

        return attend

    def _finish(
        self, state: DecodeState, run: DecodeArgs, loop: _Loop, context_pages: int
    ) -> tuple[DecodeState, Block]:
        """New KV and logits from the rows back to where the slots keep them."""
        kv = loop.kv
        if not self.ragged:
            owners = loop.out.owners.reshape(-1)
            positions = loop.positions.reshape(-1)
            known = jnp.minimum(owners, self.places - 1)
            tables = jnp.asarray(run.tables)
            pages = tables[known, jnp.minimum(positions // self.page_tokens, tables.shape[1] - 1)]
            pages = jnp.where(owners < self.places, pages, self.pages)
            new = cache.columns(loop.kv, context_pages * self.page_tokens)
            kv = cache.write(state.kv, new, pages, positions % self.page_tokens)
        logits = state.logits.at[loop.rows].set(loop.logits, mode="drop")
        return DecodeState(kv, logits, state.slot), loop.out._replace(steps=loop.step)


def _of_one_layer(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


@partial(jax.jit, static_argnums=0)
def request_keys(seed: int, ids: Array) -> Array:
    """[n, 2] uint32 key data of requests with ids [n, 3] int32 (group, member, branch)."""

    def one(identity: Array) -> Array:
        key = jax.random.key(seed)
        for part in range(3):
            key = jax.random.fold_in(key, identity[part])
        return jax.random.key_data(key)

    return jax.vmap(one)(ids)


def pad_stop_ids(stop_ids: Sequence[int]) -> list[int]:
    """Exactly MAX_STOP_TOKENS ids, filled with -1."""
    return [*stop_ids, *[-1] * (MAX_STOP_TOKENS - len(stop_ids))]
