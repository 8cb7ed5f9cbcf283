"""The decode program: up to `block` tokens for each row in one dispatch. Pure.

    begin ──> [ take over ended rows ──> sample ──> record ──> forward ] x steps ──> finish

Rows decode for slots, which keep the KV and the logits between two blocks. When a row's request
ends, the row takes over the next reserve slot. Shapes: see
sampler/device/program_arguments.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.cpu.kernel_calls import attend_pages
from jaxrl_async.later import Later
from jaxrl_async.model import cache, decoder
from jaxrl_async.model.cache import CachedContext, PagedKV, recent_pages
from jaxrl_async.model.delta import DeltaInputs
from jaxrl_async.model.delta_layer import DeltaState, advanced
from jaxrl_async.model.kernels import sequences_in_a_call
from jaxrl_async.model.moe import id_dtype
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.logit_shaping import Counts, Shaping, counted, counts_of, shaped
from jaxrl_async.sampler.device.passes import (
    forward,
    ragged_kernel,
    stacked_routes,
    token_kernel,
    with_used_rows,
)
from jaxrl_async.sampler.device.program_arguments import (
    Block,
    DecodeArgs,
    DecodeState,
    EngineWeights,
    SlotParams,
)
from jaxrl_async.sampler.device.sampling import AnyArray, Mix, SampledTokens, no_extras, sample

if TYPE_CHECKING:
    from jaxrl_async.model import tpu_pages
else:
    tpu_pages = Later("jaxrl_async.model.tpu_pages")


class _Loop(NamedTuple):
    """The state that a decode step changes."""

    step: Array  # [] int32
    head: Array  # [] int32, reserve slots taken over so far
    kv: CachedContext | PagedKV  # copies of pages, or the pages
    tables: Array  # [R, L, W]
    rows: Array  # [R] slot
    alive: Array  # [R] bool
    logits: Array  # [R, V]
    base: Array  # [R] tokens in the pages when the row's slot started
    joined: Array  # [R] step at which it started
    num_sampled: Array  # [R]
    slot_params: SlotParams  # [R]
    states: tuple[DeltaState, ...]  # [R] of gated delta nets
    adapter_slots: Array | None  # [R]
    positions: Array  # [R, block]
    out: Block
    shaping: "_Shaping | None" = None

    @property
    def free(self) -> Array:
        """[R] bool: the row's request has ended."""
        return ~self.alive if self.shaping is None else ~(self.alive | self.shaping.waits)

    @property
    def next_positions(self) -> Array:
        """[R] position of the token that this step samples."""
        return self.base + self.step - self.joined


class _Shaping(NamedTuple):
    """What shapes the rows' logits; a row whose steps are over waits for the next block."""

    by_row: Shaping  # [R]
    counts: Counts | None
    waits: Array  # [R] bool


def generate(
    spec: EngineSpec,
    weights: EngineWeights,
    state: DecodeState,
    args: DecodeArgs,
    *,
    context_pages: int,
    mix: Mix,
) -> tuple[DecodeState, Block]:
    """Decode up to `args.steps` steps; end early when no row is alive and no reserve is left.

    context_pages: pages that hold every row's tokens so far.
    """

    def has_work(loop: _Loop) -> Array:
        more = jnp.any(loop.alive) | (loop.head < args.num_reserve)
        if loop.shaping is not None:  # a waiting row is not free for the reserve
            more &= jnp.any(loop.alive | loop.free)
        return (loop.step < args.steps) & more

    def ids(loop: _Loop) -> Array | None:
        slots = jnp.minimum(loop.rows, spec.total_slots - 1)
        return None if args.ids is None else jnp.asarray(args.ids)[slots]

    def one_step(loop: _Loop) -> _Loop:
        if args.reserve.shape[0]:
            loop = _take_over(spec, loop, state, args, context_pages)
        params, positions = loop.slot_params, loop.next_positions
        given = params.controls, params.keys, positions, mix, token_kernel(spec), ids(loop)
        new = sample(_shaped(loop), *given, full=loop.logits)
        loop = _record(spec, loop, new)
        return _forward(spec, weights, loop, new.tokens, context_pages)

    start = _begin(spec, state, args, context_pages, mix)
    return _finish(spec, state, args, jax.lax.while_loop(has_work, one_step, start))


def _begin(
    spec: EngineSpec, state: DecodeState, args: DecodeArgs, context_pages: int, mix: Mix
) -> _Loop:
    """Copy the slots' state to the rows that decode for them."""
    S, R, T, V = spec.total_slots, args.rows.shape[0], spec.block, spec.model.vocab
    experts = (spec.model.layers, spec.model.experts_per_token)
    rows = jnp.asarray(args.rows)
    slots = jnp.minimum(rows, S - 1)  # an empty row reads any slot
    tables = jnp.asarray(args.tables)[slots]

    def per_row(x: AnyArray) -> Array:
        return jnp.asarray(x)[slots]

    kv: CachedContext | PagedKV = state.kv
    if not spec.in_pages:
        kv = _context(spec, state.kv, tables, per_row(args.lengths), context_pages, extra=T)

    shaping = None
    if args.shaping is not None:
        by_row = jax.tree.map(per_row, args.shaping)
        counts = None if by_row.penalties is None else counts_of(by_row.penalties, V)
        shaping = _Shaping(by_row, counts, jnp.zeros(R, bool))
    return _Loop(
        step=jnp.int32(0),
        head=jnp.int32(0),
        kv=kv,
        tables=tables,
        rows=rows,
        alive=rows < S,
        logits=per_row(state.logits),
        base=per_row(args.lengths),
        joined=jnp.zeros(R, jnp.int32),
        num_sampled=per_row(args.num_sampled),
        slot_params=jax.tree.map(per_row, state.slot_params),
        states=jax.tree.map(per_row, state.states),
        adapter_slots=None if args.adapter_slots is None else per_row(args.adapter_slots),
        positions=jnp.zeros((R, T), jnp.int32),
        out=Block(
            tokens=jnp.zeros((R, T), jnp.int32),
            logprobs=jnp.zeros((R, T), jnp.float32),
            owners=jnp.full((R, T), S, jnp.int32),
            ends=jnp.zeros((R, T), bool),
            steps=jnp.int32(0),
            extras=no_extras((R, T), V, mix),
            routes=jnp.zeros((R, T, *experts), id_dtype(spec.model.experts))
            if spec.keeps_routes
            else None,
        ),
        shaping=shaping,
    )


def _shaped(loop: _Loop) -> Array:
    """Return the logits that the rows sample from, [R, V]."""
    if loop.shaping is None:
        return loop.logits
    step, stop_ids = loop.step - loop.joined, loop.slot_params.stop_ids
    shaping, counts = loop.shaping.by_row, loop.shaping.counts
    return shaped(loop.logits, shaping, step, loop.num_sampled, stop_ids, counts)


def _context(
    spec: EngineSpec,
    pages: PagedKV,
    tables: Array,
    lengths: Array,
    context_pages: int,
    *,
    extra: int = 0,
) -> CachedContext:
    """Copy the pages (tables [R, L, W]) that rows of these lengths [R] see; for layers with a
    window, only the window's pages."""
    near = [
        recent_pages(tables[:, g, :context_pages], lengths, window, spec.page_tokens)[0]
        for g, window in enumerate(spec.windows)
    ]
    return cache.gather(pages, spec.kv_layout, near, spec.model.cached_shape[2], extra)


def _take_over(
    spec: EngineSpec, loop: _Loop, state: DecodeState, args: DecodeArgs, context_pages: int
) -> _Loop:
    """Give ended rows to the next reserve slots, one by one."""

    def possible(loop: _Loop) -> Array:
        return (loop.head < args.num_reserve) & jnp.any(loop.free)

    def take_one(loop: _Loop) -> _Loop:
        row, slot = jnp.argmax(loop.free), jnp.asarray(args.reserve)[loop.head]
        table = jnp.asarray(args.tables)[slot]

        def put(into: Array, value: AnyArray) -> Array:
            return jax.lax.dynamic_update_index_in_dim(into, value, row, 0)

        def put_slot(into: Array, per_slot: AnyArray) -> Array:
            return put(into, jnp.asarray(per_slot)[slot])

        kv = loop.kv
        if not spec.in_pages:
            length = jnp.asarray(args.lengths)[slot]
            context = _context(spec, state.kv, table[None], length[None], context_pages)

            def overwrite(into: Array, new: Array) -> Array:
                return jax.lax.dynamic_update_slice(into, new, (row, 0, 0, 0))

            kv = jax.tree.map(overwrite, kv, context)
        shaping = loop.shaping
        if shaping is not None:
            by_row = jax.tree.map(put_slot, shaping.by_row, args.shaping)
            counts = shaping.counts
            if by_row.penalties is not None:
                own = jax.tree.map(lambda x: x[row][None], by_row.penalties)
                new = jax.tree.map(lambda x: x[0], counts_of(own, spec.model.vocab))
                counts = jax.tree.map(put, counts, new)
            shaping = shaping._replace(by_row=by_row, counts=counts)
        return loop._replace(
            head=loop.head + 1,
            kv=kv,
            tables=put(loop.tables, table),
            rows=put(loop.rows, slot),
            alive=put(loop.alive, True),
            logits=put_slot(loop.logits, state.logits),
            base=put_slot(loop.base, args.lengths),
            joined=put(loop.joined, loop.step),
            num_sampled=put_slot(loop.num_sampled, args.num_sampled),
            slot_params=jax.tree.map(put_slot, loop.slot_params, state.slot_params),
            states=jax.tree.map(put_slot, loop.states, state.states),
            adapter_slots=jax.tree.map(put_slot, loop.adapter_slots, args.adapter_slots),
            shaping=shaping,
        )

    return jax.lax.while_loop(possible, take_one, loop)


def _record(spec: EngineSpec, loop: _Loop, new: SampledTokens) -> _Loop:
    """Record the sampled tokens, and stop the rows whose request is done."""
    out, params, alive = loop.out, loop.slot_params, loop.alive

    def column(into: AnyArray, values: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(into, values, loop.step, 1)

    num_sampled = loop.num_sampled + alive
    stopped = jnp.any(new.tokens[:, None] == params.stop_ids, axis=-1) & ~params.ignores_stop
    ends = alive & (stopped | (num_sampled >= params.max_new))
    left, shaping = alive & ~ends, loop.shaping
    if shaping is not None:
        waits = left & (loop.step - loop.joined + 1 >= shaping.by_row.steps)
        counts = None if shaping.counts is None else counted(shaping.counts, new.tokens, alive)
        left &= ~waits
        shaping = shaping._replace(waits=shaping.waits | waits, counts=counts)
    return loop._replace(
        num_sampled=num_sampled,
        alive=left,
        shaping=shaping,
        positions=column(loop.positions, loop.next_positions),
        out=out._replace(
            tokens=column(out.tokens, new.tokens),
            logprobs=column(out.logprobs, new.logprobs),
            owners=column(out.owners, jnp.where(alive, loop.rows, spec.total_slots)),
            ends=column(out.ends, ends),
            extras=jax.tree.map(column, out.extras, new.extras),
        ),
    )


def _forward(
    spec: EngineSpec, weights: EngineWeights, loop: _Loop, tokens: Array, context_pages: int
) -> _Loop:
    """Run the sampled tokens through the decoder: store their KV, compute the next logits."""
    positions = loop.next_positions
    weights = with_used_rows(spec, weights, _running(spec, loop))
    keys, values = list(loop.kv.k), list(loop.kv.v)
    sinks = decoder.sinks_in(spec.model, weights.layers)
    if spec.gpu_pages:
        attend = _attend_on_gpu(spec, loop, positions, keys, sinks)
    elif spec.ragged:
        attend = _attend_pages(spec, loop, positions, keys, sinks)
    elif spec.cpu_attention:
        attend = _attend_on_cpu(spec, loop, (keys, values), sinks)
    else:
        attend = _attend_columns(spec, loop, (keys, values), context_pages, sinks)
    chosen: list[Array] = []
    states: list[DeltaState] = []

    def read(_: int, inputs: DeltaInputs, kernels: Sequence[Array]) -> Array:
        tokens = DeltaInputs(*(x[:, None] for x in inputs))
        out, after = advanced(loop.states[len(states)], tokens, kernels, jnp.ones_like(positions))
        states.append(after)
        return out[:, 0]

    slots = loop.adapter_slots
    x = forward(spec, weights, tokens, positions, attend, chosen, adapter_slots=slots, read=read)
    out, routes = loop.out, stacked_routes(spec, chosen)
    if routes is not None:
        routes = jax.lax.dynamic_update_index_in_dim(out.routes, routes, loop.step, 1)
        out = out._replace(routes=routes)
    logits = decoder.next_logits(spec.model, weights.params, x, mixed=spec.mixed)
    after = tuple(states)
    if loop.shaping is not None:  # a waiting row keeps the results of its last token
        sampled = _running(spec, loop)

        def keep(new: Array, old: Array) -> Array:
            return jnp.where(sampled.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        logits, after = jax.tree.map(keep, (logits, after), (loop.logits, loop.states))
    return loop._replace(
        out=out,
        step=loop.step + 1,
        kv=loop.kv._replace(k=tuple(keys), v=tuple(values)),
        states=after,
        logits=logits,
    )


def _running(spec: EngineSpec, loop: _Loop) -> Array:
    """Return the rows that sampled a token in this step, [R] bool."""
    owners = jax.lax.dynamic_index_in_dim(loop.out.owners, loop.step, 1, keepdims=False)
    return owners < spec.total_slots


def _attend_columns(
    spec: EngineSpec,
    loop: _Loop,
    copies: tuple[list[Array], list[Array]],
    context_pages: int,
    sinks: list[Array | None],
) -> decoder.Attend:
    """Return attention over the gathered context (`copies`: keys and values of each layer). All
    rows append at the same column after it."""
    keys, values = copies
    columns = {w: _seen(spec, loop, w, context_pages) for w in dict.fromkeys(spec.windows)}
    windows = [kind.window for kind in spec.model.kinds]

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        C, visible = columns[windows[i]]
        keys[i] = cache.append(keys[i], k, C + loop.step, keys=True)
        values[i] = cache.append(values[i], v, C + loop.step, keys=False)
        cap = spec.model.scales.attention_cap
        return cache.attend_columns(q, keys[i], values[i], visible, cap, sinks[i])

    return attend


def _seen(spec: EngineSpec, loop: _Loop, window: int, context_pages: int) -> tuple[int, Array]:
    """Return the number of columns of a layer with this window that are copies of pages (_context),
    and the columns that each row sees, [R, C + block] bool."""
    table = loop.tables[:, 0, :context_pages]
    near, begins = recent_pages(table, loop.base, window, spec.page_tokens)
    C = near.shape[1] * spec.page_tokens
    columns = jnp.arange(C + spec.block)
    in_block = (columns >= C + loop.joined[:, None]) & (columns <= C + loop.step)
    # positions of the columns: as in the pages, then one a step since the row started
    copied, since = begins[:, None] + columns, columns - C - loop.joined[:, None]
    visible = (columns < C) & (copied < loop.base[:, None]) | in_block
    positions = jnp.where(columns < C, copied, loop.base[:, None] + since)
    seen = visible & (positions > loop.next_positions[:, None] - window) if window else visible
    return C, seen


def _attend_pages(
    spec: EngineSpec,
    loop: _Loop,
    positions: Array,
    pages: list[Array],
    sinks: list[Array | None],
) -> decoder.Attend:
    """Return attention over the pages: each row writes into its own page, and a kernel reads the
    pages; in a layer with a window, only the window's. JAX's kernel (kernels.ragged_paged) is the
    first choice; ours (tpu_pages.py) supports wide heads, and sinks within a window."""
    G = spec.page_tokens
    running = _running(spec, loop)  # an ended row still computes, but writes nothing
    written = jnp.take_along_axis(loop.tables, (positions // G)[:, None, None], axis=2)[..., 0]
    written = jnp.where(running[:, None], written, pages[0].shape[0])
    seen = jnp.where(running, positions, 0)  # any token of an ended row
    kernel = ragged_kernel(spec)
    kinds, places = spec.model.kinds, spec.kv_layout.by_layer
    tables = jnp.minimum(loop.tables, spec.pages - 1)
    recent = [recent_pages(tables[:, g], seen, w, G) for g, w in enumerate(spec.windows)]
    last = jnp.max(jnp.where(running, jnp.arange(1, len(positions) + 1), 0))  # no row after it runs

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        g, a = places[i]
        pages[a] = cache.written(pages[a], k, v, written[:, g], positions % G)
        scoring = decoder.scoring_of(spec.model, kinds[i])
        table, begins = recent[g]
        own = spec.on_tpu and (spec.wide_heads or (scoring.window and sinks[i] is not None))
        outs = []
        for rows in _in_calls(len(table), table.shape[1] + (sinks[i] is not None)):
            if own:
                lengths = (seen - begins + 1)[rows]
                given = q[rows], pages[a], lengths, table[rows], scoring, sinks[i]
                outs.append(tpu_pages.attend_wide_pages(*given, mesh=spec.mesh))
                continue
            begin, count = rows.start, rows.stop - rows.start
            outs.append(
                kernel(
                    q[rows],
                    pages[a],
                    (seen - begins + 1)[rows],
                    table[rows],
                    jnp.arange(count + 1, dtype=jnp.int32),
                    jnp.clip(last - begin, 1, count)[None],
                    scoring,
                    sinks[i],
                )
            )
        return jnp.concatenate(outs)

    return attend


def _attend_on_gpu(
    spec: EngineSpec,
    loop: _Loop,
    positions: Array,
    pages: list[Array],
    sinks: list[Array | None],
) -> decoder.Attend:
    """Return attention over the pages: each row writes into its own page, and the kernel reads the
    pages that the row sees."""
    G, running = spec.page_tokens, _running(spec, loop)
    written = jnp.take_along_axis(loop.tables, (positions // G)[:, None, None], axis=2)[..., 0]
    written = jnp.where(running[:, None], written, spec.pages)
    tables = jnp.minimum(loop.tables, spec.pages - 1)
    kernel, places = ragged_kernel(spec), spec.kv_layout.by_layer
    rows = len(positions)
    tokens = jnp.where(running, positions, 0) + 1  # an ended row reads one
    each, count = jnp.arange(rows + 1, dtype=jnp.int32), jnp.full(1, rows, jnp.int32)

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        g, a = places[i]
        pages[a] = cache.written(pages[a], k, v, written[:, g], positions % G)
        scoring = decoder.scoring_of(spec.model, spec.model.kinds[i])
        return kernel(q, pages[a], tokens, tables[:, g], each, count, scoring, sinks[i])

    return attend


def _in_calls(rows: int, width: int) -> list[slice]:
    """Divide rows with tables of `width` pages among calls of the kernel."""
    most = sequences_in_a_call(width)
    return [slice(begin, min(begin + most, rows)) for begin in range(0, rows, most)]


def _attend_on_cpu(
    spec: EngineSpec,
    loop: _Loop,
    pages: tuple[list[Array], list[Array]],
    sinks: list[Array | None],
) -> decoder.Attend:
    """Return attention over the pages (`pages`: arrays of keys and of values) by our CPU kernel,
    which writes the new tokens, too."""
    keys, values = pages
    positions = jnp.where(_running(spec, loop), loop.next_positions, -1)
    tables = [loop.tables[:, g] for g in range(loop.tables.shape[1])]
    places = spec.kv_layout.by_layer

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        scoring = decoder.scoring_of(spec.model, spec.model.kinds[i])
        g, a = places[i]
        out, keys[a], values[a] = attend_pages(
            q, (k, v), (keys[a], values[a]), tables[g], positions, scoring, sinks[i]
        )
        return out

    return attend


def _finish(
    spec: EngineSpec, state: DecodeState, args: DecodeArgs, loop: _Loop
) -> tuple[DecodeState, Block]:
    """Copy new KV and logits from the rows back to the slots and their pages."""
    kv = loop.kv
    if isinstance(kv, CachedContext):
        owners = loop.out.owners.reshape(-1)
        positions = loop.positions.reshape(-1)
        slots = jnp.minimum(owners, spec.total_slots - 1)
        tables = jnp.asarray(args.tables)
        numbers = jnp.minimum(positions // spec.page_tokens, tables.shape[2] - 1)
        pages = tables[slots, :, numbers].T
        pages = jnp.where(owners < spec.total_slots, pages, spec.pages)
        new, offsets = cache.columns(kv, spec.block), positions % spec.page_tokens
        kv = cache.write_tokens(state.kv, spec.kv_layout, new, pages, offsets)

    def put(into: Array, values: Array) -> Array:
        return into.at[loop.rows].set(values, mode="drop")

    logits, states = put(state.logits, loop.logits), jax.tree.map(put, state.states, loop.states)
    return DecodeState(kv, logits, state.slot_params, states), loop.out._replace(steps=loop.step)
