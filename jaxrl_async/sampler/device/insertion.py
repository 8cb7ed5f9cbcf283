"""The programs that bring weights and prompts to the slots: prepare, prefill, insert. Pure.

Shapes: see sampler/device/arguments.py.
"""

import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.mesh import SAMPLER_RULES
from jaxrl_async.model import cache, decoder
from jaxrl_async.model.adapter_stack import empty_stack, layers_with_stack, put_adapter
from jaxrl_async.model.attention import reference, same_image
from jaxrl_async.model.cache import NewKV, PagedKV
from jaxrl_async.model.cpu.calls import NewTokens, attend_new_tokens
from jaxrl_async.model.decoder import packed_head
from jaxrl_async.model.delta import DeltaInputs
from jaxrl_async.model.delta_layer import DeltaState, empty_states, go_on, read_states
from jaxrl_async.model.layout import ONE_DEVICE
from jaxrl_async.model.moe import Choose, experts_on, id_dtype, noting, route
from jaxrl_async.model.packed_layers import are_in_eight_bits, in_eight_bits, packed_layer
from jaxrl_async.model.quantize import is_quantized
from jaxrl_async.model.spec import ROWS_USED, Params, is_stack
from jaxrl_async.sampler.device.arguments import (
    DecodeState,
    EngineWeights,
    InsertArgs,
    PrefillArgs,
    Prefix,
    SlotParams,
)
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.sampling import AnyArray, Controls
from jaxrl_async.sampler.request_checks import MAX_STOP_TOKENS

log = logging.getLogger(__name__)

KEPT = ("norm", "bias", "sinks", "correction")
"""Ends of the names of weights that stay as they are where matrices are bfloat16."""


def empty_state(spec: EngineSpec) -> DecodeState:
    """Return a decode state whose slots and pages are empty."""
    S, V = spec.total_slots, spec.model.vocab
    return DecodeState(
        cache.init_pages(
            spec.model,
            spec.kv_layout,
            spec.pages,
            spec.page_tokens,
            spec.dtype,
            ragged=spec.ragged,
        ),
        jnp.zeros((S, V), jnp.float32),
        SlotParams(
            Controls(jnp.ones(S), jnp.zeros(S, jnp.int32), jnp.ones(S), jnp.zeros(S)),
            jnp.zeros((S, 2), jnp.uint32),
            jnp.full((S, MAX_STOP_TOKENS), -1, jnp.int32),
            jnp.ones(S, jnp.int32),
            jnp.zeros(S, bool),
        ),
        empty_states(spec.model, S),
    )


def prepare(spec: EngineSpec, params: Params) -> EngineWeights:
    """Split the parameters into layers, which the decode loop indexes statically."""
    if spec.eight_bits and not is_quantized(params):
        params = in_eight_bits(spec.model, params, spec.dtype)
    rest = {name: w for name, w in params.items() if not is_stack(name)}
    quantized = is_quantized(params)
    packs = spec.cpu_products and spec.fused and (not quantized or are_in_eight_bits(params))
    fused = spec.fused and not quantized and not packs
    layers = decoder.split_layers(spec.model, params, fused=fused)
    if spec.mixed and not quantized:  # cast once, not at each step; norms and biases stay
        layers = [
            {n: w if n.endswith(KEPT) else w.astype(jnp.bfloat16) for n, w in x.items()}
            for x in layers
        ]
    if packs:
        layers = [packed_layer(layer) for layer in layers]
    elif spec.cpu_products and quantized:
        log.info("XLA multiplies with the layers' quantised matrices: kernels take those in int8")
    if spec.cpu_products:
        rest = packed_head(spec.model, rest, halved=spec.mixed or spec.eight_bits)
    return EngineWeights(rest, layers)


def of_tokens(spec: EngineSpec, weights: EngineWeights, used: Array) -> EngineWeights:
    """Return weights for tokens of which these count [n] bool: the CPU's own products skip the
    others."""
    if not spec.cpu_products:
        return weights
    layers = [{**layer, ROWS_USED: used} for layer in weights.layers]
    return weights._replace(params={**weights.params, ROWS_USED: used}, layers=layers)


def prepare_adapter(spec: EngineSpec, adapter: Params) -> list[Params]:
    """Split an adapter's matrices (lora.as_sent) into layers."""
    layers = decoder.split_layers(spec.model, adapter)
    if spec.mixed:
        layers = [jax.tree.map(lambda w: w.astype(jnp.bfloat16), layer) for layer in layers]
    return layers


def empty_places(spec: EngineSpec) -> list[Params]:
    """Return each layer's places for adapters, all empty."""
    assert spec.room is not None, "there is room for adapters"
    return empty_stack(spec.model, spec.room, jnp.bfloat16 if spec.mixed else spec.dtype)


def load_place(
    spec: EngineSpec, stack: Sequence[Params], adapter: Params, place: Array
) -> list[Params]:
    """Write an adapter (adapter_stack.fitted_adapter) to a place, counted from 1."""
    assert spec.room is not None, "there is room for adapters"
    return put_adapter(spec.model, spec.room, stack, adapter, place)


def probe(spec: EngineSpec, weights: EngineWeights, token_ids: Array) -> Array:
    """Return the log-probs of token_ids[1:] of one sequence, [n - 1] float32, by prepared
    weights."""
    positions = jnp.arange(token_ids.shape[0])
    one = jnp.ones_like(token_ids)[None]

    kinds, sinks = spec.model.kinds, decoder.sinks_in(spec.model, weights.layers)

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        scoring = decoder.scoring_of(spec.model, kinds[i])
        return reference(q[None], k[None], v[None], one, scoring, sinks[i])[0]

    def read(_: int, inputs: DeltaInputs, kernels: Sequence[Array]) -> Array:
        return read_states(ONE_DEVICE, one, inputs, kernels)

    x = decoder.flat_forward(
        spec.model,
        weights.params,
        weights.layers,
        token_ids,
        positions,
        attend,
        dtype=spec.dtype,
        mixed=spec.mixed,
        eight_bits=spec.eight_bits,
        experts=experts_on(spec.mesh, SAMPLER_RULES),
        read=read,
    )
    logits = decoder.next_logits(spec.model, weights.params, x[:-1], mixed=spec.mixed)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logprobs, token_ids[1:, None], axis=-1)[:, 0]


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
    lengths = _without_padding(chunk)
    counted = jnp.arange(chunk.token_ids.shape[0]) < jnp.sum(lengths)
    layers = of_tokens(spec, weights, counted).layers
    sinks = decoder.sinks_in(spec.model, weights.layers)
    if spec.cpu_attention and chunk.images is None:
        assert kv is not None
        attend_one = _attend_new(spec, kv, chunk, sinks)
    else:
        attend_one = _attend_padded(spec, kv, chunk, sinks)
    nothing = jnp.zeros((chunk.token_ids.shape[0], 0, spec.model.head_dim), spec.dtype)
    keys, values = [nothing] * spec.model.layers, [nothing] * spec.model.layers
    chosen: list[Array] = []

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        keys[i], values[i] = k, v
        return attend_one(i, q, k, v)

    read, left = _read_padded(states, chunk, lengths)
    last = chunk.token_indices[:, 0] + chunk.lengths - 1  # a sequence's tokens lie together
    x = decoder.flat_forward(
        spec.model,
        weights.params,
        layers_with_stack(spec.room, layers, weights.stack, chunk.places),
        chunk.token_ids,
        chunk.positions,
        attend,
        dtype=spec.dtype,
        mixed=spec.mixed,
        eight_bits=spec.eight_bits,
        experts=experts_on(spec.mesh, SAMPLER_RULES),
        choose=choose_experts(spec, chosen),
        images=chunk.images,
        read=read,
        last=None if spec.keeps_routes else (last, lengths > 0),  # routes are of all tokens
    )
    x = x[last] if spec.keeps_routes else x
    params = of_tokens(spec, weights, lengths > 0).params
    logits = decoder.next_logits(spec.model, params, x, mixed=spec.mixed)
    routes = stacked_routes(spec, chosen)
    return Prefix(NewKV(tuple(keys), tuple(values)), logits, routes, tuple(left))


def _read_padded(
    states: tuple[DeltaState, ...], chunk: PrefillArgs, lengths: Array
) -> tuple[decoder.ReadStates, list[DeltaState]]:
    """Return what reads the states of gated delta nets, and the list to which it adds those that
    the chunk's sequences leave: of one that begins, the state before is empty."""
    B, T = chunk.token_indices.shape
    left: list[DeltaState] = []

    def read(_: int, inputs: DeltaInputs, kernels: Sequence[Array]) -> Array:
        assert chunk.slots is not None
        slots = jnp.asarray(chunk.slots)

        def before(x: Array) -> Array:
            own = x[jnp.minimum(slots, x.shape[0] - 1)]
            begins = (jnp.asarray(chunk.starts) == 0).reshape(-1, *[1] * (own.ndim - 1))
            return jnp.where(begins, 0, own)

        state = jax.tree.map(before, states[len(left)])
        tokens = DeltaInputs(*(x[chunk.token_indices] for x in inputs))
        out, after = go_on(state, tokens, kernels, lengths)
        left.append(after)
        return out.reshape(B * T, *out.shape[2:])[chunk.cell_indices]

    return read, left


def _without_padding(chunk: PrefillArgs) -> Array:
    """Return the new tokens of each sequence [B], 0 for padding: that begins where the first
    sequence does."""
    begins = jnp.asarray(chunk.token_indices)[:, 0]
    is_padding = (begins == 0) & (jnp.arange(begins.shape[0]) > 0)
    return jnp.where(is_padding, 0, chunk.lengths)


def _attend_padded(
    spec: EngineSpec, kv: PagedKV | None, chunk: PrefillArgs, sinks: list[Array | None]
) -> decoder.Attend:
    """Return attention over sequences padded to the same length, and copies of their pages."""
    B, T = chunk.token_indices.shape
    before, kinds = None, spec.model.kinds
    tables, starts = jnp.asarray(chunk.tables), jnp.asarray(chunk.starts)
    if tables.shape[2]:
        assert kv is not None
        near = [
            cache.recent_pages(tables[:, g], starts, window, spec.page_tokens)[0]
            for g, window in enumerate(spec.windows)
        ]
        before = cache.gather(kv, spec.kv_layout, near, spec.model.head_dim)
    sights = {window: _sight(spec, chunk, window) for window in dict.fromkeys(spec.windows)}

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        attended = cache.attend_chunk(
            q[chunk.token_indices],
            k[chunk.token_indices],
            v[chunk.token_indices],
            sights[kinds[i].window][0],
            None if before is None else (before.k[i], before.v[i]),
            sights[kinds[i].window][1],
            spec.model.scales.attention_cap,
            sinks[i],
        )
        return attended.reshape(B * T, *attended.shape[2:])[chunk.cell_indices]

    return attend


def _attend_new(
    spec: EngineSpec, kv: PagedKV, chunk: PrefillArgs, sinks: list[Array | None]
) -> decoder.Attend:
    """Return attention by the CPU's own kernel: no padding, and the pages as they are."""
    begins = jnp.asarray(chunk.token_indices)[:, 0]
    lengths, tables = _without_padding(chunk), jnp.asarray(chunk.tables)
    tokens = [
        NewTokens(begins, chunk.starts, lengths, tables[:, g]) for g in range(tables.shape[1])
    ]
    places = spec.kv_layout.places

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        g, a = places[i]
        scoring = decoder.scoring_of(spec.model, spec.model.kinds[i])
        return attend_new_tokens(q, (k, v), (kv.k[a], kv.v[a]), tokens[g], scoring, sinks[i])

    return attend


def _sight(spec: EngineSpec, chunk: PrefillArgs, window: int) -> tuple[Array, Array | None]:
    """Return which new tokens [B, T, T], and which of the columns copied from pages before them
    [B, 1 or T, C], each query sees in a layer of this window; None: there are no such columns."""
    within = jnp.arange(chunk.token_indices.shape[1])
    visible = (within[:, None] >= within)[None]
    if chunk.images is not None:  # what is behind a token of its image is in the chunk
        begins = chunk.images[0][chunk.token_indices]
        visible = visible | same_image(begins, begins)
    visible = visible & (within < chunk.lengths[:, None, None])
    visible = visible & (within > within[:, None] - window if window else True)
    if not chunk.tables.shape[2]:
        return visible, None
    starts = jnp.asarray(chunk.starts)[:, None]
    table, G = jnp.asarray(chunk.tables)[:, 0], spec.page_tokens
    near, first = cache.recent_pages(table, starts[:, 0], window, G)
    places = first[:, None] + jnp.arange(near.shape[1] * G)
    seen = (places < starts)[:, None]
    if window:
        seen = seen & (places[:, None] > (starts + within)[..., None] - window)
    return visible, seen


def choose_experts(spec: EngineSpec, chosen: list[Array]) -> Choose:
    """Return how a pass chooses experts; with keeps_routes it adds their ids to `chosen`."""
    return noting(chosen) if spec.keeps_routes else route


def stacked_routes(spec: EngineSpec, chosen: list[Array]) -> Array | None:
    """Stack layers of [n, k] to [n, layers, k] in the smallest integers, 0 for layers without
    experts; None without keeps_routes."""
    if not spec.keeps_routes:
        return None
    ids = dict(zip(spec.model.routed_layers, chosen, strict=True))
    none = jnp.zeros_like(chosen[0])
    whole = [ids.get(layer, none) for layer in range(spec.model.layers)]
    return jnp.stack(whole, axis=1).astype(id_dtype(spec.model.experts))


def insert(spec: EngineSpec, prefix: Prefix, state: DecodeState, args: InsertArgs) -> DecodeState:
    """Write a chunk's KV into pages, copy pages for slots that share a prefix, ready the slots."""

    def put(into: AnyArray, values: AnyArray) -> Array:
        return into.at[args.slots].set(values, mode="drop")

    kv = cache.write_tokens(state.kv, spec.kv_layout, prefix.kv, args.pages, args.offsets)
    if args.sources.shape[0]:
        kv = cache.copy_pages(kv, args.sources, args.targets)

    def put_state(into: AnyArray, values: AnyArray) -> Array:
        assert args.state_slots is not None
        into = into.at[args.state_slots].set(values, mode="drop")
        return put(into, values[args.rows])  # of a request's followers, too

    return DecodeState(
        kv,
        put(state.logits, prefix.logits[args.rows]),
        jax.tree.map(put, state.slot_params, args.slot_params),
        jax.tree.map(put_state, state.states, prefix.states),
    )
