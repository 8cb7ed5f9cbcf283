"""The programs that bring weights and prompts to the slots: prepare, prefill, insert. Pure.

Shapes: see sampler/device/arguments.py.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.mesh import SAMPLER_RULES
from jaxrl_async.model import cache, decoder
from jaxrl_async.model.cache import NewKV, PagedKV
from jaxrl_async.model.moe import Choose, experts_on, id_dtype, noting, route
from jaxrl_async.model.quantize import is_quantized
from jaxrl_async.model.spec import Params
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


def empty_state(spec: EngineSpec) -> DecodeState:
    """Return a decode state whose slots and pages are empty."""
    S, V = spec.total_slots, spec.model.vocab
    return DecodeState(
        cache.init_pages(spec.model, spec.pages, spec.page_tokens, spec.dtype, ragged=spec.ragged),
        jnp.zeros((S, V), jnp.float32),
        SlotParams(
            Controls(jnp.ones(S), jnp.zeros(S, jnp.int32), jnp.ones(S), jnp.zeros(S)),
            jnp.zeros((S, 2), jnp.uint32),
            jnp.full((S, MAX_STOP_TOKENS), -1, jnp.int32),
            jnp.ones(S, jnp.int32),
            jnp.zeros(S, bool),
        ),
    )


def prepare(spec: EngineSpec, params: Params) -> EngineWeights:
    """Split the parameters into layers, which the decode loop indexes statically."""
    rest = {name: w for name, w in params.items() if name != "layers"}
    quantized = is_quantized(params)
    layers = decoder.split_layers(spec.model, params, fused=spec.fused and not quantized)
    if spec.mixed and not quantized:  # cast once, not at each step; norms and biases stay
        layers = [
            {n: w if n.endswith(("norm", "bias")) else w.astype(jnp.bfloat16) for n, w in x.items()}
            for x in layers
        ]
    return EngineWeights(rest, layers)


def prefill(
    spec: EngineSpec, weights: EngineWeights, kv: PagedKV | None, chunk: PrefillArgs
) -> Prefix:
    """Compute KV and next logits of new tokens, which see the pages of `chunk.tables`.

    kv: None where the tables name no page.
    """
    B, T = chunk.token_indices.shape
    within = jnp.arange(T)
    visible = (within[:, None] >= within) & (within < chunk.lengths[:, None, None])
    before, seen = None, None
    if chunk.tables.shape[1]:
        assert kv is not None
        before = cache.gather(kv, chunk.tables, spec.model.head_dim)
        seen = jnp.arange(before.k[0].shape[-1]) < chunk.starts[:, None]
    keys: list[Array] = []
    values: list[Array] = []
    chosen: list[Array] = []

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        keys.append(k)
        values.append(v)
        attended = cache.attend_chunk(
            q[chunk.token_indices],
            k[chunk.token_indices],
            v[chunk.token_indices],
            visible,
            None if before is None else (before.k[i], before.v[i]),
            seen,
        )
        return attended.reshape(B * T, *attended.shape[2:])[chunk.cell_indices]

    x = decoder.flat_forward(
        spec.model,
        *weights,
        chunk.token_ids,
        chunk.positions,
        attend,
        dtype=spec.dtype,
        mixed=spec.mixed,
        experts=experts_on(spec.mesh, SAMPLER_RULES),
        choose=choose_experts(spec, chosen),
    )
    last = jnp.take_along_axis(chunk.token_indices, (chunk.lengths - 1)[:, None], axis=1)[:, 0]
    logits = decoder.next_logits(spec.model, weights.params, x[last], mixed=spec.mixed)
    return Prefix(NewKV(tuple(keys), tuple(values)), logits, stacked_routes(spec, chosen))


def choose_experts(spec: EngineSpec, chosen: list[Array]) -> Choose:
    """Return how a pass chooses experts; with keeps_routes it adds their ids to `chosen`."""
    return noting(chosen) if spec.keeps_routes else route


def stacked_routes(spec: EngineSpec, chosen: list[Array]) -> Array | None:
    """Stack layers of [n, k] to [n, layers, k] in the smallest integers; None without
    keeps_routes."""
    if not spec.keeps_routes:
        return None
    return jnp.stack(chosen, axis=1).astype(id_dtype(spec.model.experts))


def insert(prefix: Prefix, state: DecodeState, args: InsertArgs) -> DecodeState:
    """Write a chunk's KV into pages, copy pages for slots that share a prefix, ready the slots."""

    def put(into: AnyArray, values: AnyArray) -> Array:
        return into.at[args.slots].set(values, mode="drop")

    kv = cache.write_tokens(state.kv, prefix.kv, args.pages, args.offsets)
    if args.sources.shape[0]:
        kv = cache.copy_pages(kv, args.sources, args.targets)
    return DecodeState(
        kv,
        put(state.logits, prefix.logits[args.rows]),
        jax.tree.map(put, state.slot_params, args.slot_params),
    )
