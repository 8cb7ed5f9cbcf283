"""The one decoder, used by trainer and sampler alike: embedding, layers, head. Pure functions.

Parameters are a pure dict of arrays, layers stacked on axis 0. The trainer scans over the layers;
the decode step unrolls them over statically indexed weights, which is the fastest form for small
batches.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxrl_async.model.attention import reference, sequence_attention
from jaxrl_async.model.kernels import ATTENDED, SequenceAttention
from jaxrl_async.model.layers import (
    Layer,
    fuse,
    initial,
    layer_graph,
    product,
    rms_norm,
    rope_angles,
)
from jaxrl_async.model.layout import ONE_DEVICE, Layout
from jaxrl_async.model.moe import Choose, Experts, experts_on, replaying, route, run_experts
from jaxrl_async.model.quantize import is_quantized
from jaxrl_async.model.spec import SCALE, ModelSpec, Params, Weight, weight_table

UNROLL = 4
"""Small layers in one turn of the trainer's scan: runs faster, compiles longer."""
SMALL_LAYER = 2**22
"""Weights up to which a layer is small: its products take so little time that turns of the loop
matter. Several larger layers in a turn only cost compile time and code (of 192 million weights: 4
take twice as long to compile as 1, and 170 MB on a TPU instead of 50)."""


Attend = Callable[[int, Array, Array, Array], Array]


class TokenRows(NamedTuple):
    """Packed sequences as a decoder reads them: B rows of T tokens."""

    token_ids: Array  # [B, T] int32
    positions: Array  # [B, T] int32, from 0 in each segment
    segment_ids: Array  # [B, T] int32, from 1 in each row; 0 is padding
    kept: Array | None = None
    """[B, T, ceil(vocab / 8)] uint8, little-endian: which tokens token t was drawn from. None: the
    whole vocabulary."""
    expert_ids: Array | None = None
    """[B, T, layers, k] integers, the experts of each token as in moe.route; -1: the router's
    choice. None: the router chooses for every token."""

    @classmethod
    def of(cls, columns: Mapping[str, Array]) -> "TokenRows":
        """Return the rows in a batch's columns, by their names."""
        kept, expert_ids = columns.get("kept"), columns.get("expert_ids")
        tokens = (columns["token_ids"], columns["positions"], columns["segment_ids"])
        return cls(*tokens, kept, expert_ids)


class TokenStates(NamedTuple):
    """A decoder's output for packed sequences."""

    hidden: Array  # [B * T, D] after the final norm, in the order of the layout
    changed: Array | None  # [B, T] int32, layers whose router would choose other experts


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    """How a program runs a decoder and computes log-probs from its logits."""

    dtype: Any = jnp.float32  # of activations
    remat: str = "none"  # what the backward pass recomputes, see _remat
    attention: SequenceAttention = reference
    layout: Layout = ONE_DEVICE  # the order of the tokens, which the attention must share
    chunk: int = 1024  # tokens of a device whose logits exist at once
    temperature: float = 1.0  # divides the logits


ON_ONE_DEVICE = DecoderSettings()
"""float32 with the reference attention."""


def settings_on(
    mesh: Mesh, head_dim: int, *, dtype: Any, attention: str, **more: Any
) -> DecoderSettings:
    """Return the settings of a program on a mesh, with the attention of that name.

    Raises ConfigError if that attention cannot run on the mesh.
    """
    chosen = sequence_attention(attention, mesh=mesh, dtype=dtype, head_dim=head_dim)
    return DecoderSettings(dtype=dtype, attention=chosen, layout=Layout(mesh), **more)


def init_params(spec: ModelSpec, key: Array, dtype: Any = jnp.float32) -> Params:
    """Return random parameters; each weight's key depends on its name only."""

    def make(path: Any, weight: Weight) -> Array:
        name = jax.tree_util.keystr(path)
        return initial(weight, jax.random.fold_in(key, zlib.crc32(name.encode())), dtype)

    return jax.tree_util.tree_map_with_path(
        make, weight_table(spec), is_leaf=lambda w: isinstance(w, Weight)
    )


def output_head(spec: ModelSpec, params: Params, layout: Layout = ONE_DEVICE) -> Array:
    """Return the output head [D, V], gathered over fsdp: for tied weights the embedding,
    transposed."""
    head = params["embed"].T if spec.tied else params["lm_head"]
    return layout.gathered(head, ("embed", "vocab"))


def hidden_states(
    spec: ModelSpec,
    params: Params,
    token_ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    attention: SequenceAttention = reference,
) -> Array:
    """Return the hidden states after the final norm, [B, T, D].

    [B, T] inputs; attention is causal within a segment, and segment 0 is padding.
    """
    settings = DecoderSettings(dtype=dtype, remat=remat, attention=attention)
    rows = TokenRows(token_ids, positions, segment_ids)
    return token_states(spec, params, rows, settings).hidden.reshape(*token_ids.shape, -1)


def token_states(
    spec: ModelSpec, params: Params, tokens: TokenRows, settings: DecoderSettings = ON_ONE_DEVICE
) -> TokenStates:
    """Return each token's hidden state; tokens with expert ids are routed to those experts."""
    dtype, attention, layout = settings.dtype, settings.attention, settings.layout
    token_ids, positions, segment_ids, _, expert_ids = tokens
    B = token_ids.shape[0]
    cos, sin = rope_angles(spec, layout.flat(positions))
    segments = layout.unfold(layout.flat(segment_ids), B)
    axes = {name: weight.axes[1:] for name, weight in weight_table(spec)["layers"].items()}
    graph, experts = layer_graph(spec, quantized=is_quantized(params)), experts_on(layout.mesh)

    def one_layer(x: Array, given: tuple[Params, Array | None]) -> tuple[Array, list[Array]]:
        weights, forced = given
        choose, changed = replaying(forced)
        if not is_quantized(params):
            weights = {n: layout.gathered(w.astype(dtype), axes[n]) for n, w in weights.items()}
        layer = nnx.merge(graph, weights)
        q, k, v = (layout.unfold(a, B) for a in layer.qkv(x, cos, sin))
        attended = attention(q, k, v, segments)
        x = layer.finish(x, layout.fold(attended), experts, choose)
        return layout.place(x, "tokens", None), changed

    x = _looked_up(params, layout.flat(token_ids), dtype, layout)
    forced = None if expert_ids is None else jnp.moveaxis(layout.flat(expert_ids), 1, 0)
    given = (params["layers"], forced)
    step = _remat(one_layer, settings.remat)
    x, changed = jax.lax.scan(step, x, given, unroll=_unroll(spec))
    layers = None if expert_ids is None else layout.rows(changed[0].sum(0, dtype=jnp.int32), B)
    return TokenStates(_final_norm(spec, params, x), layers)


def _unroll(spec: ModelSpec) -> int:
    """Return how many layers one turn of the scan computes."""
    sizes = (math.prod(w.shape[1:]) for w in weight_table(spec)["layers"].values())
    return min(spec.layers, UNROLL) if sum(sizes) <= SMALL_LAYER else 1


def split_layers(spec: ModelSpec, params: Params, *, fused: bool = False) -> list[Any]:
    """Return each layer's weights by themselves, optionally fuse()d; done once, before a loop of
    steps."""
    layers = [jax.tree.map(lambda w, i=i: w[i], params["layers"]) for i in range(spec.layers)]
    return [fuse(layer) for layer in layers] if fused else layers


def flat_forward(
    spec: ModelSpec,
    params: Params,
    layers: Sequence[Any],
    token_ids: Array,
    positions: Array,
    attend: Attend,
    *,
    dtype: Any = jnp.float32,
    mixed: bool = False,
    experts: Experts = run_experts,
    choose: Choose = route,
) -> Array:
    """Run tokens [n] at positions [n] through all layers: [n, D], before the final norm.

    Args:
        spec: the decoder.
        params: its parameters; those of the layers are not read.
        layers: of split_layers.
        token_ids: [n] int32.
        positions: [n] int32.
        attend: (layer, q [n, H, K], k [n, N, K], v [n, N, K]) -> [n, H, K]; decides what each token
            sees.
        dtype: of the hidden states.
        mixed: matrix products in bfloat16, see layers.product.
        experts: computes a layer's experts, see moe.experts_on.
        choose: routes each token.
    """
    cos, sin = rope_angles(spec, positions)
    x = _embed(params, token_ids, dtype)
    graph = layer_graph(
        spec, fused="qkv_proj" in layers[0], mixed=mixed, quantized="q" + SCALE in layers[0]
    )
    for i, weights in enumerate(layers):
        layer: Layer = nnx.merge(graph, weights)
        q, k, v = layer.qkv(x, cos, sin)
        x = layer.finish(x, attend(i, q, k, v).astype(x.dtype), experts, choose)
    return x


def next_logits(spec: ModelSpec, params: Params, x: Array, *, mixed: bool = False) -> Array:
    """Apply the final norm and the head: [n, D] -> [n, V] float32."""
    if mixed:
        return product(_final_norm(spec, params, x), output_head(spec, params), mixed=True)
    head = output_head(spec, params).astype(x.dtype)
    return jnp.matmul(_final_norm(spec, params, x), head, preferred_element_type=jnp.float32)


def _looked_up(params: Params, token_ids: Array, dtype: Any, layout: Layout) -> Array:
    """Embed the layout's tokens: [n] -> [n, D].

    Each device looks up its columns for all tokens of its fsdp group, which then exchange them:
    less data moves than the whole table.
    """
    x = _embed(params, layout.place(token_ids, "looked_up"), dtype)
    return layout.place(layout.place(x, "looked_up", "embed"), "tokens", None)


def _embed(params: Params, token_ids: Array, dtype: Any) -> Array:
    return params["embed"][token_ids].astype(dtype)


def _final_norm(spec: ModelSpec, params: Params, x: Array) -> Array:
    return rms_norm(x, params["final_norm"].astype(x.dtype), spec.norm_eps)


def _remat(function: Any, policy: str) -> Any:
    """Wrap a layer so that its backward pass recomputes part of it.

    none: nothing; layer: all of it; attention: all but splash attention; dots: all but matrix
    products and splash attention.
    """
    if policy == "none":
        return function
    policies = jax.checkpoint_policies
    attended = policies.save_only_these_names(ATTENDED)
    dots = policies.dots_with_no_batch_dims_saveable
    saved = {
        "layer": None,
        "attention": attended,
        "dots": policies.save_from_both_policies(dots, attended),
    }
    return jax.checkpoint(function, policy=saved[policy], prevent_cse=False)
