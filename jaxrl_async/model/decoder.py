"""The decoder, shared by trainer and sampler: embedding, layers, head. Pure functions.

Parameters are a dict of arrays, with layers stacked on axis 0. The trainer scans over the layers,
one period of their pattern per iteration (`ModelSpec.runs`). The decode step unrolls them over
statically indexed weights, which is the fastest form for small batches.
"""

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_async.algorithms.expert_load import ExpertLoad
from jaxrl_async.cpu.gradients import MULTIPLIED
from jaxrl_async.cpu.kernel_calls import packed, packed_product
from jaxrl_async.cpu.kernel_library import multiplies_in_parts
from jaxrl_async.errors import ConfigError
from jaxrl_async.later import Later
from jaxrl_async.model.attention import (
    has_cpu_kernels,
    image_attention,
    reference,
    sequence_attention,
    visible_until,
)
from jaxrl_async.model.delta import DeltaInputs
from jaxrl_async.model.delta_layer import DeltaLayer, GatedLayer, read_states
from jaxrl_async.model.families.parts import LINEAR_STACK, LayerKind, LayerRun, Scales
from jaxrl_async.model.kernels import ATTENDED, Scoring, SequenceAttention
from jaxrl_async.model.layers import Layer, all_angles, initial, normed, product
from jaxrl_async.model.layout import ONE_DEVICE, Layout
from jaxrl_async.model.lora import adapted_names, with_adapter
from jaxrl_async.model.moe import (
    Choose,
    Experts,
    counting,
    experts_on,
    load_by_layer,
    replaying,
    route,
    run_experts,
)
from jaxrl_async.model.own_code import class_of
from jaxrl_async.model.quantize import computed_in, scales_among, table_of
from jaxrl_async.model.spec import LORA_OWN, ROWS_USED, ModelSpec, Params, Weight, weight_table

if TYPE_CHECKING:
    from jaxrl_async.model import latent, own_layer
else:
    latent = Later("jaxrl_async.model.latent")
    own_layer = Later("jaxrl_async.model.own_layer")

UNROLL = 4
"""Small layers per iteration of the trainer's scan: more run faster and compile longer."""
SMALL_LAYER = 2**20
"""Maximum number of weights of a small layer, whose products take so little time that the loop's
overhead matters. For larger layers, several per iteration only cost compile time and memory: with
135 million weights in 30 layers, 4 per iteration took 7.6 s to compile and 4.7 GB of temporaries
for 1,536 tokens on a CPU; 1 takes 2.2 s and 2.7 GB, and runs equally fast."""


PACKED_HEAD = "packed_head"
"""Name of the parameter that next_logits uses in place of the head, see packed_head."""

Attend = Callable[[int, Array, Array, Array], Array]
ReadStates = Callable[[int, DeltaInputs, Sequence[Array]], Array]


class TokenRows(NamedTuple):
    """The input of a decoder: packed sequences in B rows of T tokens."""

    token_ids: Array  # [B, T] int32
    positions: Array  # [B, T] int32, from 0 in each segment, or from the end of its shared prefix
    segment_ids: Array  # [B, T] int32, from 1 in each row; 0 is padding
    kept: Array | None = None
    """[B, T, ceil(vocab / 8)] uint8, little-endian: the tokens among which token t was sampled.
    None: the whole vocabulary."""
    expert_ids: Array | None = None
    """[B, T, layers, k] integers, the experts of each token as in moe.route; -1: the router's
    choice. None: the router chooses for every token."""
    image_begins: Array | None = None
    """[B, T] int32, position in its sequence where a token's image begins; -1: not an image token.
    Tokens of an image see each other in both directions. None: no images."""
    embeddings: Array | None = None
    """[B, T, D] float32, embeddings of image tokens, which replace the looked up ones."""
    wanted: Array | None = None
    """[B, T] bool, the tokens whose log-probs are needed. None: all."""
    task_ids: Array | None = None
    """[B, T] int32, index of each token's task (DecoderSettings.temperatures). None: one."""

    @classmethod
    def of(cls, columns: Mapping[str, Array], wanted: Array | None = None) -> "TokenRows":
        """Return the rows from a batch's columns."""
        kept, expert_ids = columns.get("kept"), columns.get("expert_ids")
        tokens = (columns["token_ids"], columns["positions"], columns["segment_ids"])
        images = (columns.get("image_begins"), columns.get("embeddings"))
        return cls(*tokens, kept, expert_ids, *images, wanted, columns.get("task_ids"))

    @classmethod
    def copies(cls, ids: Array, count: int) -> "TokenRows":
        """Return one sequence [T] in each of `count` rows."""
        rows = jnp.tile(ids, (count, 1))
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
        return cls(rows, positions, jnp.ones_like(rows))


class Routed(NamedTuple):
    """The routing of some layers, one entry per layer with a router."""

    changed: list[Array]  # [n] int32 or bool, whether the router prefers other experts
    loads: list[ExpertLoad]


class TokenStates(NamedTuple):
    """A decoder's output for packed sequences."""

    hidden: Array  # [B * T, D] after the final norm, in the order of the layout
    changed: Array | None  # [B, T] int32, number of layers whose router prefers other experts
    load: ExpertLoad | None = None  # load of its experts; None: no experts


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    """Settings of a program that runs a decoder and computes log-probs from its logits."""

    dtype: DTypeLike = jnp.float32  # type of activations
    remat: str = "none"  # parts that the backward pass recomputes, see _remat
    attention: SequenceAttention = reference
    shares_prefixes: bool = False  # segments may continue a prefix; the attention must support it
    layout: Layout = ONE_DEVICE  # order of the tokens; the attention must use the same
    chunk: int = 1024  # tokens of a device whose logits are computed at a time
    temperature: float = 1.0  # divides the logits
    temperatures: tuple[float, ...] = ()  # of each task by TokenRows.task_ids, in addition; (): 1
    cpu_kernels: bool = False  # whether log-probs are computed by this package's CPU kernels
    in_parts: bool = False  # products by the CPU's matrix unit, see layers.product
    learns_load: bool = False  # whether ExpertLoad.odds carries a gradient


ON_ONE_DEVICE = DecoderSettings()
"""float32 with the reference attention."""


def settings_on(
    mesh: Mesh,
    spec: ModelSpec,
    *,
    dtype: DTypeLike,
    attention: str,
    shares_prefixes: bool = False,
    cpu_kernels: bool = False,
    **more: Any,
) -> DecoderSettings:
    """Return the settings of a program of this decoder on a mesh, with the named attention.

    cpu_kernels: on a CPU in float32, use this package's kernels; on a mesh of several devices only
    for attention, since XLA cannot partition the others.

    Raises ConfigError if the attention cannot run on the mesh, or if a gated delta net would have
    to continue from a shared prefix.
    """
    if shares_prefixes and spec.delta:
        raise ConfigError(
            f"trainer.share_prefixes: the gated delta nets of this {spec.family} model do not keep "
            "their state at the end of a prefix, so segments cannot continue it. Set it to false."
        )
    chosen = sequence_attention(
        attention,
        mesh=mesh,
        dtype=dtype,
        head_dim=spec.head_dim,
        cap=spec.scales.attention_cap,
        sinks=spec.sinks,
        shares_prefixes=shares_prefixes,
        cpu_kernels=cpu_kernels,
    )
    alone = cpu_kernels and _computes_alone(mesh, dtype)
    return DecoderSettings(
        dtype=dtype,
        attention=chosen,
        shares_prefixes=shares_prefixes,
        layout=Layout(mesh),
        cpu_kernels=alone,
        in_parts=alone and multiplies_in_parts(),
        **more,
    )


def _computes_alone(mesh: Mesh, dtype: DTypeLike) -> bool:
    """Return whether this package's CPU kernels compute log-probs and products on a mesh."""
    if not has_cpu_kernels(mesh.devices.flat[0], dtype):
        return False
    if mesh.size > 1:
        _log_once("trainer.cpu_kernels: on several CPU devices log-probs are computed by XLA")
    return mesh.size == 1


@cache
def _log_once(words: str) -> None:
    logging.getLogger(__name__).info(words)


def init_params(spec: ModelSpec, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Return random parameters; each weight's key depends only on its name."""
    return init_table(weight_table(spec), key, dtype)


def init_table(table: Mapping[str, object], key: Array, dtype: DTypeLike) -> Params:
    """Return random parameters for a table of weights, as `init_params` does."""

    def make(path: Any, weight: Weight) -> Array:
        name = jax.tree_util.keystr(path)
        return initial(weight, jax.random.fold_in(key, zlib.crc32(name.encode())), dtype)

    return jax.tree_util.tree_map_with_path(make, table, is_leaf=lambda w: isinstance(w, Weight))


def output_head(spec: ModelSpec, params: Params, layout: Layout = ONE_DEVICE) -> Array:
    """Return the output head [D, V], gathered over fsdp: the transposed embedding if the weights
    are tied."""
    head = params["embed"].T if spec.tied else params["lm_head"]
    return layout.gathered(head, ("embed", "vocab"))


def hidden_states(
    spec: ModelSpec,
    params: Params,
    token_ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    dtype: DTypeLike = jnp.float32,
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
    """Return each token's hidden state; tokens with expert ids are routed to these experts."""
    layout, B = settings.layout, tokens.token_ids.shape[0]
    extent = _extent(spec, tokens, settings)
    attention = settings.attention
    if tokens.image_begins is not None:
        attention = image_attention(layout.mesh)
    angles = all_angles(spec, layout.flat(tokens.positions))
    experts, real = experts_on(layout.mesh), layout.flat(tokens.segment_ids) > 0
    graphs, axes = _graphs(spec, params), _axes(spec, params)

    def one_layer(kind: LayerKind, x: Array, given: Any) -> tuple[Array, Routed]:
        weights, forced = given
        choose, changed = replaying(forced)
        choose, loads = counting(choose, real, learns=settings.learns_load)
        weights = computed_in(settings.dtype, weights)
        of_stack = axes[kind.stack]
        weights = {
            n: layout.gathered(w, of_stack[n]) if n in of_stack else w for n, w in weights.items()
        }
        layer = nnx.merge(graphs[kind.stack], weights)
        layer.in_parts = settings.in_parts

        def attend(*qkv: Array) -> Array:
            q, k, v = (layout.unfold(a, B) for a in qkv)
            sinks = layer.sinks_of()
            return layout.fold(attention(q, k, v, extent, scoring_of(spec, kind), sinks))

        mix = partial(read_states, layout, tokens.segment_ids) if kind.is_linear else attend
        x = layer.through(x, angles[kind.rope], mix, experts, choose)
        return layout.place(x, "tokens", None), Routed(changed, loads)

    steps = {kind: _remat(partial(one_layer, kind), settings.remat) for kind in spec.pattern}
    x = _looked_up(spec, params, tokens, settings.dtype, layout)
    ids = tokens.expert_ids
    forced = None if ids is None else jnp.moveaxis(layout.flat(ids), 1, 0)
    changes, loads = list[Array](), list[list[ExpertLoad]]()
    for run in spec.runs:
        x, routed = _scan(spec, params, run, steps, x, forced)
        changes += routed.changed
        loads.append(routed.loads)
    layers = None
    if ids is not None:
        layers = layout.rows(reduce(add, (c.sum(0, dtype=jnp.int32) for c in changes)), B)
    return TokenStates(_final_norm(spec, params, x), layers, load_by_layer(loads))


def _extent(spec: ModelSpec, tokens: TokenRows, settings: DecoderSettings) -> Array:
    """Return the last argument of the attention: the segment ids; with shared prefixes, the end of
    each token's visibility, and its position if a layer has a window; with images, the segment ids
    and the images' begins."""
    layout, B = settings.layout, tokens.token_ids.shape[0]
    extent = tokens.segment_ids
    if tokens.image_begins is not None:
        extent = jnp.stack([extent, tokens.image_begins], axis=-1)
    elif settings.shares_prefixes:
        extent = visible_until(tokens.positions, tokens.segment_ids)
        if any(kind.window for kind in spec.pattern):
            extent = jnp.stack([extent, tokens.positions], axis=-1)
    return layout.unfold(layout.flat(extent), B)


def scoring_of(spec: ModelSpec, kind: LayerKind) -> Scoring:
    """Return the attention options of a kind of layer."""
    return Scoring(window=kind.window, cap=spec.scales.attention_cap)


def sinks_in(spec: ModelSpec, layers: Sequence[Params]) -> list[Array | None]:
    """Return each layer's sink logits [H] from its weights; None: no sinks."""
    return [layer["sinks"] if spec.sinks else None for layer in layers]


def _graphs(spec: ModelSpec, params: Params) -> dict[str, Any]:
    """Return the graph of a layer of each stack."""
    return {
        stack: layer_graph(
            spec,
            stack=stack,
            scales=scales_among(params[stack]),
            adapted=adapted_names(params[stack]),
        )
        for stack in spec.stacks
    }


def _axes(spec: ModelSpec, params: Params) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the logical axes of each weight of a layer, by stack."""
    table = with_adapter(spec, table_of(weight_table(spec), params), params)
    return {
        stack: {name: weight.axes[1:] for name, weight in table[stack].items()}
        for stack in spec.stacks
    }


def _scan(
    spec: ModelSpec,
    params: Params,
    run: LayerRun,
    steps: Mapping[LayerKind, Any],
    x: Array,
    forced: Array | None,
) -> tuple[Array, Routed]:
    """Compute the layers of a run, one period per iteration of a loop.

    Args:
        spec: the decoder.
        params: its parameters.
        run: the layers.
        steps: function per kind of layer: (x, (weights, tokens' experts)) -> x, Routed.
        x: hidden states.
        forced: [layers, n, k] experts of all layers, or None.

    Returns x and the routing, with one entry per layer of a period: [iterations, ...].
    """
    period = len(run.kinds)
    names = [kind.stack for kind in run.kinds]
    stacks = {stack: _of_run(spec, params, run, stack) for stack in dict.fromkeys(names)}
    forced = None if forced is None else _by_iteration(forced, run.first, period, run.times)

    def iteration(x: Array, inputs: Any) -> tuple[Array, Routed]:
        weights, forced = inputs
        routed = Routed([], [])
        for i, kind in enumerate(run.kinds):
            nth = names[:i].count(kind.stack)
            one = _nth(weights[kind.stack], nth, names.count(kind.stack))
            x, more = steps[kind](x, (one, None if forced is None else _nth(forced, i, period)))
            routed = Routed(routed.changed + more.changed, routed.loads + more.loads)
        return x, routed

    unroll = max(1, min(run.times, UNROLL // period)) if _is_small(spec) else 1
    return jax.lax.scan(iteration, x, (stacks, forced), length=run.times, unroll=unroll)


def _of_run(spec: ModelSpec, params: Params, run: LayerRun, stack: str) -> Params:
    """Return a stack's weights of a run, [iterations, ...] or [iterations, layers in each, ...]."""
    before = sum(kind.stack == stack for kind in spec.kinds[: run.first])
    count = sum(kind.stack == stack for kind in run.kinds)
    return jax.tree.map(lambda w: _by_iteration(w, before, count, run.times), params[stack])


def _by_iteration(w: Array, first: int, count: int, times: int) -> Array:
    """Return entries from `first` on as [times, count, ...]; without the second dimension if
    count is 1."""
    if count * times < w.shape[0]:
        w = w[first : first + count * times]
    return w if count == 1 else w.reshape(times, count, *w.shape[1:])


def _nth(weights: Params, nth: int, of: int) -> Any:
    """Return the weights of the nth layer in an iteration."""
    return weights if of == 1 else jax.tree.map(lambda w: w[nth], weights)


def _is_small(spec: ModelSpec) -> bool:
    """Return whether layers are small enough for several per iteration."""
    table = weight_table(spec)
    sizes = (sum(math.prod(w.shape[1:]) for w in table[stack].values()) for stack in spec.stacks)
    return max(sizes) <= SMALL_LAYER


def split_layers(spec: ModelSpec, params: Params) -> list[Any]:
    """Return each layer's weights separately; done once, before a loop of steps. An adapter may
    lack some stacks."""
    return [jax.tree.map(lambda w, n=n: w[n], params.get(stack, {})) for stack, n in spec.in_stacks]


def packed_head(spec: ModelSpec, params: Params, *, halved: bool = False) -> Params:
    """Return parameters with the head packed for the CPU kernel (halved: in bfloat16). The
    embedding of tied weights is kept for lookups."""
    rest = {name: w for name, w in params.items() if name != "lm_head"}
    head = output_head(spec, params).T
    return {**rest, PACKED_HEAD: packed(head.astype(jnp.bfloat16) if halved else head)}


def flat_forward(
    spec: ModelSpec,
    params: Params,
    layers: Sequence[Any],
    token_ids: Array,
    positions: Array,
    attend: Attend,
    *,
    dtype: DTypeLike = jnp.float32,
    mixed: bool = False,
    eight_bits: bool = False,
    experts: Experts = run_experts,
    choose: Choose = route,
    images: tuple[Array, Array] | None = None,
    read: ReadStates | None = None,
    last: tuple[Array, Array] | None = None,
) -> Array:
    """Run tokens [n] at positions [n] through all layers: [n, D], before the final norm.

    Args:
        spec: the decoder.
        params: its parameters; the layers' are not read.
        layers: the layers' weights from split_layers.
        token_ids: [n] int32.
        positions: [n] int32.
        attend: (layer, q [n, H, K], k [n, N, K], v [n, N, K]) -> [n, H, K]; defines what each token
            sees. With latent attention N is 1, and v has width 0: the keys are the values.
        dtype: type of the hidden states.
        mixed: matrix products in bfloat16, see layers.product.
        eight_bits: round tokens for packed 8-bit weights, see layers.Layer.
        experts: computes a layer's experts, see moe.experts_on.
        choose: routes each token.
        images: position where each token's image begins [n], and its embedding [n, D], as in
            TokenRows; None: no images.
        read: (layer, inputs of a gated delta net [n, ...], the convolution's weights) -> the
            tokens' reads [n, H, V]. None: no such layer.
        last: [m] indices of the tokens whose result is returned, [m, D], and a mask of the valid
            ones [m] bool. The last layer skips the part after attention for other tokens. None: all
            tokens.
    """
    angles = all_angles(spec, positions)
    x = _embed(spec, params, token_ids, positions, dtype)
    x = x if images is None else with_images(x, *images)
    for i, (kind, weights) in enumerate(zip(spec.kinds, layers, strict=True)):
        graph = layer_graph(
            spec,
            stack=kind.stack,
            fused="qkv_proj" in weights,
            mixed=mixed,
            eight_bits=eight_bits,
            scales=scales_among(weights),
            adapted=adapted_names(weights),
            chosen=LORA_OWN in weights,
            masked=ROWS_USED in weights,
            cached=True,
        )
        layer: Layer = nnx.merge(graph, weights)
        mix = read if kind.is_linear else attend
        assert mix is not None, "a model with gated delta nets needs what reads their states"
        mix = _cast(partial(mix, i), x.dtype)
        attended = layer.attended(x, angles[kind.rope], mix)
        if last is not None and i == spec.layers - 1:
            layer = nnx.merge(graph, _of_rows(weights, *last))
            x, attended = x[last[0]], attended[last[0]]
        x = layer.finish(x, attended, experts, choose)
    return x


def _of_rows(weights: Params, rows: Array, used: Array) -> Params:
    """Return a layer's weights for a subset of their tokens; used: mask of the valid tokens."""
    own = {LORA_OWN: weights[LORA_OWN][rows]} if LORA_OWN in weights else {}
    own |= {ROWS_USED: used} if ROWS_USED in weights else {}
    return {**weights, **own}


def _cast(function: Callable[..., Array], dtype: DTypeLike) -> Callable[..., Array]:
    return lambda *given: function(*given).astype(dtype)


def next_logits(spec: ModelSpec, params: Params, x: Array, *, mixed: bool = False) -> Array:
    """Apply the final norm and the head: [n, D] -> [n, V] float32."""
    if PACKED_HEAD in params:
        y, used = _final_norm(spec, params, x), params.get(ROWS_USED)
        logits = packed_product(y, params[PACKED_HEAD], spec.vocab, used, rounds=mixed)
        return bounded(logits, spec.scales)
    if mixed:
        y = _final_norm(spec, params, x).astype(jnp.float32)  # for logits in float32
        return bounded(product(y, output_head(spec, params), mixed=True), spec.scales)
    head = output_head(spec, params).astype(x.dtype)
    y = _final_norm(spec, params, x)
    return bounded(jnp.matmul(y, head, preferred_element_type=jnp.float32), spec.scales)


def bounded(logits: Array, scales: Scales) -> Array:
    """Return the logits from the head's products: scaled, and bounded to c tanh(logits / c)."""
    if scales.logits != 1:
        logits = logits * scales.logits
    cap = scales.logit_cap
    return cap * jnp.tanh(logits / cap) if cap else logits


def _looked_up(
    spec: ModelSpec, params: Params, tokens: TokenRows, dtype: DTypeLike, layout: Layout
) -> Array:
    """Embed the layout's tokens: [n] -> [n, D].

    Each device looks up its columns for all tokens of its fsdp group, and the group exchanges them:
    this moves less data than gathering the table.
    """
    ids, positions = (
        layout.place(layout.flat(a), "looked_up") for a in (tokens.token_ids, tokens.positions)
    )
    x = _embed(spec, params, ids, positions, dtype, layout)
    x = layout.place(layout.place(x, "looked_up", "embed"), "tokens", None)
    if tokens.image_begins is None or tokens.embeddings is None:
        return x
    return with_images(x, layout.flat(tokens.image_begins), layout.flat(tokens.embeddings))


def with_images(x: Array, begins: Array, embeddings: Array) -> Array:
    """Replace the embeddings [n, D] of image tokens (begins [n] >= 0) by the given ones: unscaled,
    as in Gemma 3."""
    return jnp.where((begins >= 0)[:, None], embeddings.astype(x.dtype), x)


def _embed(
    spec: ModelSpec,
    params: Params,
    token_ids: Array,
    positions: Array,
    dtype: DTypeLike,
    layout: Layout = ONE_DEVICE,
) -> Array:
    if spec.own is not None:
        return own_layer.first_states(spec, params, token_ids, positions).astype(dtype)
    x = layout.rows_of(params["embed"], token_ids).astype(dtype)
    scale = spec.scales.embedding
    return x if scale == 1 else x * jnp.asarray(scale, dtype)


def _final_norm(spec: ModelSpec, params: Params, x: Array) -> Array:
    if spec.own is not None:
        return own_layer.last_states(spec, params, x)
    return normed(spec, x, params["final_norm"])


def _remat(function: Any, policy: str) -> Any:
    """Wrap a layer to recompute part of it in the backward pass.

    none: nothing; layer: everything; attention: everything except splash attention; dots:
    everything except matrix products (by XLA or in parts) and splash attention.
    """
    if policy == "none":
        return function
    policies = jax.checkpoint_policies
    attended = policies.save_only_these_names(ATTENDED)
    dots = policies.dots_with_no_batch_dims_saveable
    saved = {
        "layer": None,
        "attention": attended,
        "dots": policies.save_from_both_policies(
            dots, policies.save_only_these_names(ATTENDED, MULTIPLIED)
        ),
    }
    return jax.checkpoint(function, policy=saved[policy], prevent_cse=False)


# ---- the layer class of a stack, split once into a graph definition and a dict of arrays


@lru_cache(maxsize=16)
def layer_graph(
    spec: ModelSpec,
    *,
    stack: str = "layers",
    fused: bool = False,
    mixed: bool = False,
    eight_bits: bool = False,
    scales: str = "",
    adapted: tuple[str, ...] = (),
    chosen: bool = False,
    masked: bool = False,
    cached: bool = False,
) -> Any:
    """Return the layer's graph definition, made once; `nnx.merge(layer_graph(spec), weights)` is a
    Layer. cached: its keys and values have the form of the cache. For the rest, see Layer."""
    layer = partial(
        _layer_of(spec, stack, cached=cached), spec, stack=stack, fused=fused, mixed=mixed,
        eight_bits=eight_bits, scales=scales, adapted=adapted, chosen=chosen, masked=masked,
    )  # fmt: skip
    graph, _ = nnx.split(nnx.eval_shape(layer))
    return graph


def _layer_of(spec: ModelSpec, stack: str, *, cached: bool) -> Any:
    """Return the class of the layers in a decoder's stack."""
    if spec.own is not None:
        return class_of(spec.own)
    if stack == LINEAR_STACK:
        return DeltaLayer
    if spec.latent is None:
        return GatedLayer if spec.attention_gated else Layer
    return latent.AbsorbedLayer if cached else latent.LatentLayer
