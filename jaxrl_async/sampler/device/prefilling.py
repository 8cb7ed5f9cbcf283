"""The programs that compute prompts: prefill, and prefill in pages. Pure.

Shapes: see sampler/device/program_arguments.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.cpu.kernel_calls import NewTokens, attend_new_tokens
from jaxrl_async.later import Later
from jaxrl_async.model import cache, decoder
from jaxrl_async.model.attention import same_image
from jaxrl_async.model.cache import NewKV, PagedKV
from jaxrl_async.model.delta import DeltaInputs
from jaxrl_async.model.delta_layer import DeltaState, advanced
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.passes import (
    forward,
    ragged_kernel,
    stacked_routes,
    with_used_rows,
)
from jaxrl_async.sampler.device.program_arguments import (
    EngineWeights,
    PrefillArgs,
    Prefix,
    ScoreArgs,
    TokenScores,
)

if TYPE_CHECKING:
    from jaxrl_async.sampler.device import token_scores
else:
    token_scores = Later("jaxrl_async.sampler.device.token_scores")


def prefill(
    spec: EngineSpec,
    weights: EngineWeights,
    kv: PagedKV | None,
    chunk: PrefillArgs,
    states: tuple[DeltaState, ...] = (),
) -> Prefix:
    """Compute KV and next logits of new tokens, which see the pages of `chunk.tables`.

    kv: None where the tables name no page. states: of all slots, see DecodeState.
    """
    return _prefill(spec, weights, kv, chunk, states, None, 0)[0]


def score(
    spec: EngineSpec,
    weights: EngineWeights,
    kv: PagedKV | None,
    chunk: PrefillArgs,
    states: tuple[DeltaState, ...],
    scored: ScoreArgs,
    *,
    top: int,
) -> tuple[Prefix, TokenScores]:
    """Compute what `prefill` does, and the log-probs after the scored tokens.

    top: number of likeliest tokens whose log-probs are returned.
    """
    return _prefill(spec, weights, kv, chunk, states, scored, top)


def _prefill(
    spec: EngineSpec,
    weights: EngineWeights,
    kv: PagedKV | None,
    chunk: PrefillArgs,
    states: tuple[DeltaState, ...],
    scored: ScoreArgs | None,
    top: int,
) -> tuple[Prefix, Any]:
    """Compute `score`, or `prefill` with None instead of log-probs."""
    sinks = decoder.sinks_in(spec.model, weights.layers)
    if spec.cpu_attention and chunk.images is None:
        assert kv is not None
        attend_one = _attend_new(spec, kv, chunk, sinks)
    elif spec.gpu_pages and chunk.images is None:
        attend_one = _attend_by_kernel(spec, _pages_of(spec, kv), chunk, sinks)
    else:
        attend_one = _attend_padded(spec, kv, chunk, sinks)
    nothing = jnp.zeros((chunk.token_ids.shape[0], 0, spec.model.head_dim), spec.dtype)
    keys, values = [nothing] * spec.model.layers, [nothing] * spec.model.layers

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        keys[i], values[i] = k, v
        return attend_one(i, q, k, v)

    read, left = _read_padded(states, chunk)
    logits, routes, scores = _compute(spec, weights, chunk, attend, read, scored, top)
    return Prefix(NewKV(tuple(keys), tuple(values)), logits, routes, tuple(left)), scores


def prefill_in_pages(
    spec: EngineSpec, weights: EngineWeights, kv: PagedKV, chunk: PrefillArgs
) -> tuple[Prefix, PagedKV]:
    """Write the KV of new tokens to `chunk.cells`, and compute their next logits on the pages of
    `chunk.tables` by the decode kernel, which needs no program for each length."""
    return _prefill_in_pages(spec, weights, kv, chunk, None, 0)[:2]


def score_in_pages(
    spec: EngineSpec,
    weights: EngineWeights,
    kv: PagedKV,
    chunk: PrefillArgs,
    scored: ScoreArgs,
    *,
    top: int,
) -> tuple[Prefix, PagedKV, TokenScores]:
    """Compute what `prefill_in_pages` does, and the log-probs after the scored tokens. top: as of
    `score`."""
    return _prefill_in_pages(spec, weights, kv, chunk, scored, top)


def _prefill_in_pages(
    spec: EngineSpec,
    weights: EngineWeights,
    kv: PagedKV,
    chunk: PrefillArgs,
    scored: ScoreArgs | None,
    top: int,
) -> tuple[Prefix, PagedKV, Any]:
    """Compute `score_in_pages`, or `prefill_in_pages` with None instead of log-probs."""
    pages = list(kv.k)
    sinks = decoder.sinks_in(spec.model, weights.layers)
    attend = _attend_by_kernel(spec, pages, chunk, sinks)
    logits, routes, scores = _compute(spec, weights, chunk, attend, None, scored, top)
    return Prefix(None, logits, routes), kv._replace(k=tuple(pages)), scores


def _compute(
    spec: EngineSpec,
    weights: EngineWeights,
    chunk: PrefillArgs,
    attend: decoder.Attend,
    read: decoder.ReadStates | None,
    scored: ScoreArgs | None,
    top: int,
) -> tuple[Array, Array | None, TokenScores | None]:
    """Run the new tokens through the decoder; return the next logits of each sequence [B, V], with
    keeps_routes the tokens' experts, and the log-probs after scored tokens."""
    lengths, chosen = _without_padding(chunk), list[Array]()
    counted = jnp.arange(chunk.token_ids.shape[0]) < jnp.sum(lengths)
    last = chunk.token_indices[:, 0] + chunk.lengths - 1  # a sequence's tokens are contiguous
    all_tokens = spec.keeps_routes or scored is not None
    x = forward(
        spec,
        with_used_rows(spec, weights, counted),
        chunk.token_ids,
        chunk.positions,
        attend,
        chosen,
        adapter_slots=chunk.adapter_slots,
        images=chunk.images,
        read=read,
        last=None if all_tokens else (last, lengths > 0),
    )
    scores = None if scored is None else token_scores.token_scores(spec, weights, x, scored, top)
    x = x[last] if all_tokens else x
    params = with_used_rows(spec, weights, lengths > 0).params
    logits = decoder.next_logits(spec.model, params, x, mixed=spec.mixed)
    return logits, stacked_routes(spec, chosen), scores


def _read_padded(
    states: tuple[DeltaState, ...], chunk: PrefillArgs
) -> tuple[decoder.ReadStates, list[DeltaState]]:
    """Return a function that reads the states of gated delta nets, and the list to which it appends
    the chunk's new states. A new sequence starts with an empty state."""
    B, T = chunk.token_indices.shape
    lengths, left = _without_padding(chunk), list[DeltaState]()

    def read(_: int, inputs: DeltaInputs, kernels: Sequence[Array]) -> Array:
        assert chunk.slots is not None
        slots = jnp.asarray(chunk.slots)

        def before(x: Array) -> Array:
            own = x[jnp.minimum(slots, x.shape[0] - 1)]
            begins = (jnp.asarray(chunk.starts) == 0).reshape(-1, *[1] * (own.ndim - 1))
            return jnp.where(begins, 0, own)

        state = jax.tree.map(before, states[len(left)])
        tokens = DeltaInputs(*(x[chunk.token_indices] for x in inputs))
        out, after = advanced(state, tokens, kernels, lengths)
        left.append(after)
        return out.reshape(B * T, *out.shape[2:])[chunk.cell_indices]

    return read, left


def _without_padding(chunk: PrefillArgs) -> Array:
    """Return the number of new tokens of each sequence [B], 0 for padding, which has the start of
    the first sequence."""
    begins = jnp.asarray(chunk.token_indices)[:, 0]
    is_padding = (begins == 0) & (jnp.arange(begins.shape[0]) > 0)
    return jnp.where(is_padding, 0, chunk.lengths)


def _attend_padded(
    spec: EngineSpec, kv: PagedKV | None, chunk: PrefillArgs, sinks: list[Array | None]
) -> decoder.Attend:
    """Return attention over sequences padded to one length, with copies of their pages."""
    B, T = chunk.token_indices.shape
    before, kinds = None, spec.model.kinds
    tables, starts = jnp.asarray(chunk.tables), jnp.asarray(chunk.starts)
    if tables.shape[2]:
        assert kv is not None
        near = [
            cache.recent_pages(tables[:, g], starts, window, spec.page_tokens)[0]
            for g, window in enumerate(spec.windows)
        ]
        before = cache.gather(kv, spec.kv_layout, near, spec.model.cached_shape[2])
    visible = {window: _seen(spec, chunk, window) for window in dict.fromkeys(spec.windows)}

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        attended = cache.attend_chunk(
            q[chunk.token_indices],
            k[chunk.token_indices],
            v[chunk.token_indices],
            visible[kinds[i].window][0],
            None if before is None else (before.k[i], before.v[i]),
            visible[kinds[i].window][1],
            spec.model.scales.attention_cap,
            sinks[i],
        )
        return attended.reshape(B * T, *attended.shape[2:])[chunk.cell_indices]

    return attend


def _pages_of(spec: EngineSpec, kv: PagedKV | None) -> list[Array]:
    """Return the pages, or a placeholder that nothing reads."""
    if kv is not None:
        return list(kv.k)
    layout = spec.kv_layout
    empty = cache.init_pages(
        spec.model, layout, 1, spec.page_tokens, spec.dtype, ragged=True, padded=spec.pads_pages
    )
    return list(empty.k)


def _attend_by_kernel(
    spec: EngineSpec, pages: list[Array], chunk: PrefillArgs, sinks: list[Array | None]
) -> decoder.Attend:
    """Return attention by the decode kernel. With cells, a layer's new tokens are written to its
    pages and read there, after the earlier tokens. Without cells, and in layers with a window,
    whose pages hold only a part of the tokens, they are read from the chunk."""
    lengths, cells = _without_padding(chunk), chunk.cells
    tables = jnp.minimum(jnp.asarray(chunk.tables), spec.pages - 1)
    if not tables.shape[2]:
        tables = jnp.zeros((*tables.shape[:2], 1), jnp.int32)
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    begins_and_end = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    count = jnp.sum(lengths > 0, dtype=jnp.int32)[None]
    kernel, places = ragged_kernel(spec), spec.kv_layout.by_layer

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        g, a = places[i]
        before, scoring = pages[a], decoder.scoring_of(spec.model, spec.model.kinds[i])
        if cells is not None:
            pages[a] = cache.written(before, k, v, jnp.asarray(cells.pages)[g], cells.offsets)
        new = (cache.cells_of(before, k, v),) if scoring.window or cells is None else ()
        return kernel(
            q,
            pages[a],
            chunk.starts + lengths,
            tables[:, g],
            begins_and_end,
            count,
            scoring,
            sinks[i],
            *new,
        )

    return attend


def _attend_new(
    spec: EngineSpec, kv: PagedKV, chunk: PrefillArgs, sinks: list[Array | None]
) -> decoder.Attend:
    """Return attention by our CPU kernel, without padding and on the pages."""
    begins = jnp.asarray(chunk.token_indices)[:, 0]
    lengths, tables = _without_padding(chunk), jnp.asarray(chunk.tables)
    tokens = [
        NewTokens(begins, chunk.starts, lengths, tables[:, g]) for g in range(tables.shape[1])
    ]
    places = spec.kv_layout.by_layer

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        g, a = places[i]
        scoring = decoder.scoring_of(spec.model, spec.model.kinds[i])
        return attend_new_tokens(q, (k, v), (kv.k[a], kv.v[a]), tokens[g], scoring, sinks[i])

    return attend


def _seen(spec: EngineSpec, chunk: PrefillArgs, window: int) -> tuple[Array, Array | None]:
    """Return the new tokens [B, T, T], and the columns copied from earlier pages [B, 1 or T, C],
    that each query sees in a layer with this window; None: no such columns."""
    within = jnp.arange(chunk.token_indices.shape[1])
    visible = (within[:, None] >= within)[None]
    if chunk.images is not None:  # later tokens of an image are in the chunk, too
        begins = chunk.images[0][chunk.token_indices]
        visible = visible | same_image(begins, begins)
    visible = visible & (within < chunk.lengths[:, None, None])
    visible = visible & (within > within[:, None] - window if window else True)
    if not chunk.tables.shape[2]:
        return visible, None
    starts = jnp.asarray(chunk.starts)[:, None]
    table, G = jnp.asarray(chunk.tables)[:, 0], spec.page_tokens
    near, first = cache.recent_pages(table, starts[:, 0], window, G)
    positions = first[:, None] + jnp.arange(near.shape[1] * G)
    seen = (positions < starts)[:, None]
    if window:
        seen = seen & (positions[:, None] > (starts + within)[..., None] - window)
    return visible, seen
