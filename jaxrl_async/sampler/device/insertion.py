"""The programs that prepare weights and insert prefilled prompts into slots. Pure.

Shapes: see sampler/device/program_arguments.py.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.cpu.kernel_calls import PANEL, packed
from jaxrl_async.mesh import SAMPLER_RULES
from jaxrl_async.model import cache, decoder
from jaxrl_async.model.adapter_stack import empty_stack, put_adapter
from jaxrl_async.model.attention import reference
from jaxrl_async.model.decoder import packed_head
from jaxrl_async.model.delta import DeltaInputs
from jaxrl_async.model.delta_layer import empty_states, read_states
from jaxrl_async.model.layers import MATRICES, fuse
from jaxrl_async.model.layout import ONE_DEVICE
from jaxrl_async.model.moe import experts_on
from jaxrl_async.model.quantize import is_quantized, quantize, scales_among
from jaxrl_async.model.spec import SCALE, ModelSpec, Params, is_stack, stacks_in, weight_table
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.program_arguments import (
    DecodeState,
    EngineWeights,
    InsertArgs,
    Prefix,
    SlotParams,
)
from jaxrl_async.sampler.device.sampling import AnyArray, Controls
from jaxrl_async.types import MAX_STOP_TOKENS

log = logging.getLogger(__name__)

FEW_LAYERS = 8
"""Maximum layers that one program prepares, to limit its compile time."""
KEPT = ("norm", "bias", "sinks", "correction")
"""Suffixes of the names of weights that keep their type where matrices are bfloat16."""


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
            padded=spec.pads_pages,
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


class LayerForm(NamedTuple):
    """The form of each layer's prepared weights."""

    quantized: bool  # the parameters hold matrices in 8 or 4 bits
    packs: bool  # matrices are fused and packed for our CPU products
    fused: bool  # matrices are fused


def layer_form(spec: EngineSpec, params: Params) -> LayerForm:
    """Return the form of the layers of these parameters, from their names and types."""
    quantized = is_quantized(params)
    packs = spec.cpu_products and spec.fused and (not quantized or are_in_eight_bits(params))
    if spec.cpu_products and quantized and not packs:
        log.info("XLA multiplies with the layers' quantised matrices: kernels take those in int8")
    return LayerForm(quantized, packs, spec.fused and not quantized and not packs)


def prepares_by_layer(spec: EngineSpec, params: Params) -> bool:
    """Return whether one program prepares a layer at a time, instead of all layers in one program,
    which takes 5 s to compile for 30 layers on a CPU."""
    rounds = spec.eight_bits and not is_quantized(params)  # reads all layers
    return spec.cpu_products and spec.model.layers > FEW_LAYERS and not rounds


def prepare(spec: EngineSpec, params: Params) -> EngineWeights:
    """Split the parameters into layers, which the decode loop indexes statically."""
    if spec.eight_bits and not is_quantized(params):
        params = in_eight_bits(spec.model, params, spec.dtype)
    form = layer_form(spec, params)
    layers = decoder.split_layers(spec.model, params)
    return EngineWeights(
        prepare_rest(spec, params), [_prepared(spec, form, layer) for layer in layers]
    )


def prepare_rest(spec: EngineSpec, params: Params) -> Params:
    """Return the weights outside the layers in the form that the decode loop reads."""
    rest = {name: w for name, w in params.items() if not is_stack(name)}
    if spec.cpu_products:
        rest = packed_head(spec.model, rest, halved=spec.mixed or spec.eight_bits)
    return rest


def prepare_layer(spec: EngineSpec, form: LayerForm, stack: Params, number: Array) -> Params:
    """Return one layer's weights in the form that the decode loop reads.

    number: of the layer in its stack, int32.
    """
    take = partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
    return _prepared(spec, form, jax.tree.map(take, stack))


def _prepared(spec: EngineSpec, form: LayerForm, layer: Params) -> Params:
    if form.fused:
        layer = fuse(layer)
    if spec.mixed and not form.quantized:  # cast once, not at each step; norms and biases stay
        layer = {n: w if n.endswith(KEPT) else w.astype(jnp.bfloat16) for n, w in layer.items()}
    return packed_layer(layer) if form.packs else layer


def prepare_adapter(spec: EngineSpec, adapter: Params) -> list[Params]:
    """Split an adapter's matrices (lora.as_sent) into layers."""
    layers = decoder.split_layers(spec.model, adapter)
    if spec.mixed:
        layers = [jax.tree.map(lambda w: w.astype(jnp.bfloat16), layer) for layer in layers]
    return layers


def empty_adapters(spec: EngineSpec) -> list[Params]:
    """Return each layer's slots for adapters, all empty."""
    assert spec.room is not None, "there is room for adapters"
    return empty_stack(spec.model, spec.room, jnp.bfloat16 if spec.mixed else spec.dtype)


def load_adapter(
    spec: EngineSpec, stack: Sequence[Params], adapter: Params, slot: Array
) -> list[Params]:
    """Write an adapter (adapter_stack.fitted_adapter) to a slot, counted from 1."""
    assert spec.room is not None, "there is room for adapters"
    return put_adapter(spec.model, spec.room, stack, adapter, slot)


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


def insert(spec: EngineSpec, prefix: Prefix, state: DecodeState, args: InsertArgs) -> DecodeState:
    """Write a chunk's KV into pages if it is not there, copy pages for slots that share a prefix,
    and set up the slots."""

    def put(into: AnyArray, values: AnyArray) -> Array:
        return into.at[args.slots].set(values, mode="drop")

    kv = state.kv
    if prefix.kv is not None:
        kv = cache.write_tokens(kv, spec.kv_layout, prefix.kv, args.pages, args.offsets)
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


# ---- layers' matrices packed for the CPU kernels (cpu/kernel_calls.py)


def are_in_eight_bits(params: Params) -> bool:
    """Return whether the layers' matrices are int8, with one scale per output."""
    scaled = [
        array[name.removesuffix(SCALE)].dtype == jnp.int8
        for array in (params[stack] for stack in stacks_in(params))
        for name in array
        if scales_among(array) == SCALE and name.endswith(SCALE)
    ]
    return bool(scaled) and all(scaled)


def in_eight_bits(spec: ModelSpec, params: Params, dtype: DTypeLike) -> Params:
    """Return parameters with the layers' matrices in int8; adapters and all other weights in
    dtype."""
    table = weight_table(spec)
    stacks = stacks_in(params)
    base = {s: {n: w for n, w in params[s].items() if n in table[s]} for s in stacks}
    extra = {s: {n: w for n, w in params[s].items() if n not in table[s]} for s in stacks}
    rounded: Params = quantize(table, {**params, **base}, "int8", dtype)
    return {**rounded, **{s: {**rounded[s], **extra[s]} for s in stacks}}


def packed_layer(layer: Params) -> Params:
    """Fuse a layer's matrices (layers.fuse) and pack them.

    Matrices without scales whose outputs do not fill whole panels stay unpacked, for XLA.
    """
    fused = _fused(layer)

    def fits(name: str, weight: Array) -> bool:
        whole = weight.ndim == 2 and (weight.shape[0] % PANEL == 0 or name + SCALE in fused)
        return name in MATRICES and whole

    return {n: packed(w) if fits(n, w) else w for n, w in fused.items()}


def _fused(layer: Params) -> Params:
    """Fuse a layer's matrices and, if present, their scales."""
    if scales_among(layer) != SCALE:
        return fuse(layer)
    scales = {n.removesuffix(SCALE): w for n, w in layer.items() if n.endswith(SCALE)}
    fused = fuse({n: w for n, w in layer.items() if not n.endswith(SCALE)})
    first = [n for n in ("q_a", "q", "k", "v", "kv_a") if n in layer]
    parts = {"qkv_proj": first, "gate_up": ["gate", "up"]}
    joined = {
        name: jnp.concatenate([scales[part].reshape(-1) for part in parts.get(name, [name])])
        for name in MATRICES
        if name in fused and fused[name].ndim == 2
    }
    rest = {n: w for n, w in scales.items() if n in fused and n not in joined}
    return {**fused, **{n + SCALE: w for n, w in (joined | rest).items()}}
