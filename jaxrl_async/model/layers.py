"""The decoder layer as a Flax module, split once into a graph definition and a dict of arrays."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.cpu.gradients import multiplied
from jaxrl_async.cpu.kernel_calls import PANEL, packed_product, rotated
from jaxrl_async.model.dropout import dropped
from jaxrl_async.model.families.parts import Rope, RopeScaling
from jaxrl_async.model.moe import Choose, Experts, gated, route, run_experts
from jaxrl_async.model.quantize import is_matrix, quantized_product
from jaxrl_async.model.spec import (
    BIAS,
    LORA_A,
    LORA_B,
    LORA_DROP,
    LORA_OWN,
    ROWS_USED,
    SCALE,
    ModelSpec,
    Weight,
    weight_table,
)


def rms_norm(x: Array, scale: Array, eps: float, *, axes: int = 1) -> Array:
    """Return x / rms(x) * scale over the last axes, computed in float32. Zhang and Sennrich 2019
    (arXiv:1910.07467)."""
    y = x.astype(jnp.float32)
    over = tuple(range(-axes, 0))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=over, keepdims=True) + eps)
    return y.astype(x.dtype) * scale


class Angles(NamedTuple):
    """Rotary positions of some tokens: cos and sin [..., R / 2] float32, and an optional factor of
    queries [...]."""

    cos: Array
    sin: Array
    growth: Array | None = None


def rope_angles(rope: Rope, head_dim: int, positions: Array) -> Angles:
    """Return the angles at positions [...]. Su et al. 2021 (arXiv:2104.09864), eq. 34."""
    half = int(head_dim * rope.share) // 2
    frequencies = rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    scaling = rope.scaling
    if scaling:
        frequencies = _SCALED[scaling.kind](frequencies, scaling, rope.theta)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling is None:
        return Angles(cos, sin)
    if scaling.magnitude != 1:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    if not rope.query_growth:
        return Angles(cos, sin)
    periods = (positions // scaling.original_max_positions).astype(jnp.float32)
    return Angles(cos, sin, 1 + rope.query_growth * jnp.log1p(periods))


def all_angles(spec: ModelSpec, positions: Array) -> dict[Rope | None, Angles | None]:
    """Return the angles of each kind of rotary positions in a model."""
    ropes = dict.fromkeys(kind.rope for kind in spec.pattern)
    return {r: None if r is None else rope_angles(r, spec.rotary_dim, positions) for r in ropes}


def _linear(frequencies: Array, s: RopeScaling, _: float) -> Array:
    return frequencies / s.factor


def _llama3(frequencies: Array, s: RopeScaling, _: float) -> Array:
    """Divide the frequencies of long wavelengths by `factor`, keep the frequencies of short ones,
    interpolate linearly between."""
    wavelengths = 2 * jnp.pi / frequencies
    smooth = (s.original_max_positions / wavelengths - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return frequencies * ((1 - smooth) / s.factor + smooth)


def _yarn(frequencies: Array, s: RopeScaling, theta: float) -> Array:
    """Keep frequencies with more than beta_fast rotations in the original context, divide those
    with less than beta_slow by `factor`, interpolate linearly between."""
    half = frequencies.shape[0]

    def index_of(rotations: float) -> float:
        """Return the index of the frequency with this number of rotations."""
        rotated_by = math.log(s.original_max_positions / (rotations * 2 * math.pi))
        return half * rotated_by / math.log(theta)

    low, high = index_of(s.beta_fast), index_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001
    slow = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / width, 0.0, 1.0)
    return frequencies * (slow / s.factor + 1 - slow)


def _longrope(frequencies: Array, s: RopeScaling, _: float) -> Array:
    return frequencies / jnp.asarray(s.short_factors, jnp.float32)


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate pairs (i, i + R/2) of the first R components of x [..., heads, K]; cos, sin [..., R /
    2]."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    width = 2 * cos.shape[-1]
    x, rest = (x, None) if width == x.shape[-1] else jnp.split(x, [width], axis=-1)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return out if rest is None else jnp.concatenate([out, rest], axis=-1)


LEAST_IN_PARTS = 256
"""Minimum rows, inputs and outputs for which a product in parts is faster than XLA's."""


class Layer(nnx.Module):
    """One decoder layer: attention and gated MLP with residuals, and norms before, after or both.
    Its function depends only on the spec and the weights.

    stack: the stack of its weights. fused: fewer, larger matrices with outputs first, see fuse().
    mixed: products in bfloat16, see product(). eight_bits: tokens are rounded to 8 bits for packed
    8-bit weights, see insertion.py. scales: suffix of the names of the scales of quantised
    matrices, see quantize.py; with fused, the matrices are packed. adapted: names of the matrices
    with an adapter, and LORA_DROP in an update with dropout, see lora.py; adapters are not fused.
    chosen: each row uses its own columns of the adapter, see adapter_stack.py. masked: only the
    tokens of ROWS_USED need to be computed. in_parts: float32 products by the CPU's matrix unit,
    see product(); set by the caller of nnx.merge.
    """

    in_parts = False

    def __init__(
        self,
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
    ) -> None:
        self.spec, self.fused, self.mixed, self.eight_bits = spec, fused, mixed, eight_bits
        self.scales, self.adapted, self.chosen = scales, adapted, chosen
        table = weight_table(spec)
        shapes = {name: w.shape[1:] for name, w in table[stack].items()}
        if fused:
            shapes = jax.eval_shape(
                fuse, {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
            )
            shapes = {name: x.shape for name, x in shapes.items()}
        names = [n for n in adapted if n != LORA_DROP]
        extra = {n + end: () for n in names for end in (LORA_A, LORA_B)}
        extra |= {LORA_DROP: ()} if LORA_DROP in adapted else {}
        extra |= {LORA_OWN: ()} if chosen else {}
        extra |= {ROWS_USED: ()} if masked else {}
        if scales:
            weights = table[stack]
            quantised = [n for n, w in weights.items() if n in shapes and is_matrix(n, w)]
            joined = [n for n in shapes if fused and n in MATRICES]
            extra |= {n + scales: () for n in (*quantised, *joined)}
        for name, shape in (shapes | extra).items():
            setattr(self, name, nnx.Param(jnp.zeros(shape)))

    @property
    def packed(self) -> bool:
        """Whether the attention matrices are packed for the CPU's kernels (`packed_layer`)."""
        return self.fused and self.qkv_proj[...].ndim == 3

    def _weight(self, name: str, dtype: DTypeLike) -> Array:
        return getattr(self, name)[...].astype(dtype)

    def _times(self, x: Array, name: str) -> Array:
        """Multiply x [..., D] by a weight [D, ...], reshaped to two dimensions, inputs first; add
        its adapter's product."""
        parts = self._parts(name)
        if not any(part in self.adapted for part in parts):
            return self._times_base(x, name)
        whole = self._times_base(x, name)
        bounds = list(itertools.accumulate(parts.values()))[:-1]
        changed = [
            out + self._change(x, part) if part in self.adapted else out
            for part, out in zip(parts, jnp.split(whole, bounds, axis=-1), strict=True)
        ]
        return jnp.concatenate(changed, axis=-1)

    def _parts(self, name: str) -> dict[str, int]:
        """Return the matrices that a product combines, with their widths."""
        spec, widths = self.spec, dict[str, int]()
        if name == "qkv_proj":
            widths = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
        if name == "gate_up":
            weight = self.gate_up[...]
            outputs = weight.shape[0] * (PANEL if weight.ndim == 3 else 1)
            if weight.ndim == 3 and self.scales:  # packed with scales: maybe a partial last panel
                outputs = getattr(self, name + self.scales)[...].size
            return dict.fromkeys(("gate", "up"), outputs // 2)
        return {n: w * spec.head_dim for n, w in widths.items()} or {name: 0}

    def _change(self, x: Array, name: str) -> Array:
        """Return x A B of a matrix's adapter, whose B is already scaled."""
        a, b = (getattr(self, name + end)[...] for end in (LORA_A, LORA_B))
        if LORA_DROP in self.adapted:
            x = dropped(x, getattr(self, LORA_DROP)[...], name)
        low = product(x, a.reshape(x.shape[-1], -1), mixed=self.mixed)
        if self.chosen:
            low = jnp.where(self.lora_own[...], low, 0)
        return product(low, b.reshape(low.shape[-1], -1), mixed=self.mixed)

    def _times_base(self, x: Array, name: str) -> Array:
        weight = getattr(self, name)[...]
        if self.fused and weight.ndim == 3:
            return self._times_packed(x, name, weight)
        if self.fused:
            return product(x, weight, mixed=self.mixed, outputs_first=True)
        if not self.scales:
            flat = weight.reshape(x.shape[-1], -1)
            return product(x, flat, mixed=self.mixed, in_parts=self.in_parts)
        scales, rows = getattr(self, name + self.scales)[...], x.astype(jnp.bfloat16)
        width = weight.size // (x.shape[-1] if self.scales == SCALE else x.shape[-1] // 2)
        flat = scales.reshape(*(() if self.scales == SCALE else (-1,)), width)
        out = quantized_product(
            rows if self.mixed else x, weight.reshape(-1, width), flat, self.scales, summed
        )
        return out.astype(x.dtype)

    def _times_packed(self, x: Array, name: str, weight: Array) -> Array:
        used = getattr(self, ROWS_USED)[...] if hasattr(self, ROWS_USED) else None
        if not self.scales:
            return packed_product(x, weight, used=used, rounds=self.mixed)
        scales = getattr(self, name + self.scales)[...].astype(jnp.float32)
        x = x.astype(jnp.bfloat16).astype(x.dtype) if self.mixed else x
        return packed_product(x, weight, scales.size, used, scales=scales, rounds=self.eight_bits)

    def _norm(self, x: Array, name: str, *, axes: int = 1) -> Array:
        """Normalise over the last axes with the weights of a norm; return x without them."""
        if not hasattr(self, name):
            return x
        scale = self._weight(name, jnp.float32 if self.spec.norm_offset else x.dtype)
        return normed(self.spec, x, scale, axes=axes)

    def through(
        self,
        x: Array,
        angles: Angles | None,
        mix: Callable[..., Array],
        experts: Experts = run_experts,
        choose: Choose = route,
    ) -> Array:
        """Apply the whole layer to x [..., D]; see attended and finish for the other arguments."""
        return self.finish(x, self.attended(x, angles, mix), experts, choose)

    def attended(self, x: Array, angles: Angles | None, mix: Callable[..., Array]) -> Array:
        """Return attention's output for x [..., D]; mix: the attention, (q, k, v) of qkv -> [...,
        H, K]."""
        return mix(*self.qkv(x, angles))

    def qkv(self, x: Array, angles: Angles | None) -> tuple[Array, Array, Array]:
        """Return rotated queries and keys, and values, of x [..., D]: [..., H, K], [..., N, K],
        [..., N, K]. angles None: nothing is rotated.

        Queries are scaled for an attention that divides scores by the square root of K."""
        spec = self.spec
        y = self._norm(x, "attn_norm")
        if self.fused:
            parts = (spec.heads, spec.heads + spec.kv_heads)
            qkv = split_heads(self._times(y, "qkv_proj"), spec.head_dim)
            q, k, v = jnp.split(qkv, parts, axis=-2)
        else:
            q, k, v = (split_heads(self._times(y, n), spec.head_dim) for n in ("q", "k", "v"))
        return self._rotated_heads(q, k, v, angles)

    def _rotated_heads(
        self, q: Array, k: Array, v: Array, angles: Angles | None
    ) -> tuple[Array, Array, Array]:
        """Finish projected heads for qkv: add biases, apply norms, rotate, scale queries."""
        spec = self.spec
        if spec.attention_bias:
            q, k, v = (
                a + self._weight(name, a.dtype)
                for a, name in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias"))
            )
        axes = 2 if spec.qk_norm == "whole" else 1
        q, k = self._norm(q, "q_norm", axes=axes), self._norm(k, "k_norm", axes=axes)
        if angles is not None:
            rotation = rotated if self.packed else rotate
            q, k = (rotation(a, angles.cos, angles.sin) for a in (q, k))
        return self._scaled(q, angles), k, v

    def _scaled(self, q: Array, angles: Angles | None) -> Array:
        """Scale queries [..., H, K] for attention, which divides scores by the square root of K."""
        if angles is not None and angles.growth is not None:
            q = q * angles.growth[..., None, None].astype(q.dtype)
        scale = self.spec.scales.attention
        factor = scale * q.shape[-1] ** 0.5
        if scale and not math.isclose(factor, 1.0):
            q = q * jnp.asarray(factor, q.dtype)
        return q

    def sinks_of(self) -> Array | None:
        """Return the attention sinks' logits [H], float32; None: no sinks."""
        return self._weight("sinks", jnp.float32) if self.spec.sinks else None

    def finish(
        self,
        x: Array,
        attended: Array,
        experts: Experts = run_experts,
        choose: Choose = route,
    ) -> Array:
        """Apply the output projection and the MLP or the experts: x [..., D], attended [..., H, K]
        -> [..., D].

        experts: computes the experts; requires x of shape [n, D]. choose: routes each token.
        """
        flat = attended.reshape(*attended.shape[:-2], -1)
        out = self._times(flat, "o")
        if self.spec.output_bias:
            out = out + self._weight("o_bias", x.dtype)
        return self._added(x, out, experts, choose)

    def _added(self, x: Array, out: Array, experts: Experts, choose: Choose) -> Array:
        """Add the output of attention's projection to x [..., D], then the output of the MLP or the
        experts."""
        x = x + self._weighed(self._norm(out, "attn_out_norm"))
        y = self._norm(x, "mlp_norm")
        out = self._routed(y, experts, choose) if hasattr(self, "router") else self._mlp(y)
        return x + self._weighed(self._norm(out, "mlp_out_norm"))

    def _weighed(self, out: Array) -> Array:
        """Scale an output that is added to the residual stream."""
        share = self.spec.scales.residual
        return out if share == 1 else out * jnp.asarray(share, out.dtype)

    def _mlp(self, y: Array) -> Array:
        if self.fused:
            gate, up = jnp.split(self._times(y, "gate_up"), 2, axis=-1)
        else:
            gate, up = self._times(y, "gate"), self._times(y, "up")
        return self._times(gated(self.spec.activation, gate, up), "down")

    def _shared(self, y: Array) -> Array:
        """Compute the shared expert."""
        gate, up = self._times(y, "shared_gate"), self._times(y, "shared_up")
        out = self._times(gated(self.spec.activation, gate, up), "shared_down")
        if not self.spec.shared_gated:
            return out
        logit = product(y, self.shared_router[...].astype(y.dtype))
        return out * jax.nn.sigmoid(logit.astype(jnp.float32)).astype(out.dtype)

    def _routed(self, y: Array, experts: Experts, choose: Choose) -> Array:
        spec = self.spec
        logits = product(y, self.router[...], mixed=False)
        if spec.router.bias:
            logits = logits + self._weight("router_bias", logits.dtype)
        correction = self._weight("correction", jnp.float32) if spec.router.corrected else None
        ids, share = choose(
            logits, spec.experts_per_token, router=spec.router, correction=correction
        )
        ends = ("", self.scales, LORA_A, LORA_B, BIAS)
        names = [n + end for n in ("gate", "up", "down") for end in ends] + [LORA_DROP, LORA_OWN]
        matrices = {n: getattr(self, n)[...] for n in names if hasattr(self, n)}
        rows = y.astype(jnp.bfloat16) if self.mixed else y
        out = experts(rows, ids, share, matrices, spec.activation).astype(y.dtype)
        return out + self._shared(y) if spec.shared_mlp else out


def normed(spec: ModelSpec, x: Array, scale: Array, *, axes: int = 1) -> Array:
    """Normalise x over its last axes with the weights of one of the spec's norms."""
    if not spec.norm_offset:
        return rms_norm(x, scale.astype(x.dtype), spec.norm_eps, axes=axes)
    y = rms_norm(x.astype(jnp.float32), 1 + scale.astype(jnp.float32), spec.norm_eps, axes=axes)
    return y.astype(x.dtype)


def product(
    x: Array,
    weight: Array,
    *,
    mixed: bool = False,
    in_parts: bool = False,
    outputs_first: bool = False,
) -> Array:
    """Return x [..., D] @ weight [D, E] in x's dtype.

    Args:
        x: [..., D].
        weight: [D, E], or [E, D] with outputs_first.
        mixed: round both to bfloat16 and sum in float32, which is several times faster on matrix
            units, also in recent CPUs.
        in_parts: compute a float32 product, inputs first, as precisely by the CPU's matrix unit.
            Few rows and small matrices are computed by XLA, which is faster for them.
        outputs_first: the weight's first dimension is the output.
    """
    in_parts = in_parts and not (mixed or outputs_first) and x.dtype == jnp.float32
    if in_parts and min(*weight.shape, math.prod(x.shape[:-1])) >= LEAST_IN_PARTS:
        rows = multiplied(x.reshape(-1, x.shape[-1]), weight.astype(x.dtype))
        return rows.reshape(*x.shape[:-1], rows.shape[1])
    number = jnp.bfloat16 if mixed else x.dtype
    contract = (((x.ndim - 1,), (int(outputs_first),)), ((), ()))
    out = jax.lax.dot_general(
        x.astype(number),
        weight.astype(number),
        contract,
        preferred_element_type=jnp.float32 if mixed else None,
    )
    return out.astype(x.dtype)


def summed(x: Array, weight: Array) -> Array:
    """Return x [..., D] @ weight [D, E], summed in float32."""
    contract = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)


def split_heads(x: Array, head_dim: int) -> Array:
    """Reshape [..., H * K] to [..., H, K]."""
    return x.reshape(*x.shape[:-1], -1, head_dim)


def fuse(weights: dict[str, Array]) -> dict[str, Array]:
    """Join one layer's q, k, v (or their first projections of x) into one matrix and gate, up into
    another, and transpose every matrix to [E, D], outputs first.

    This makes fewer and larger products, whose weights a CPU reads in memory order (a third faster
    for few rows). It is worthwhile if a step is short and nothing is sharded.
    """
    first = [n for n in ("q_a", "q", "k", "v", "kv_a") if n in weights]
    qkv = [weights[n].reshape(weights[n].shape[0], -1) for n in first]
    fused = {
        **{n: w for n, w in weights.items() if n not in first},
        "qkv_proj": jnp.concatenate(qkv, axis=1).T,
        "o": weights["o"].reshape(-1, weights["o"].shape[-1]).T,
    }
    if "q_b" in weights:
        fused["q_b"] = weights["q_b"].reshape(weights["q_b"].shape[0], -1).T
    if "router" in weights:  # experts are unchanged
        shared = ("shared_gate", "shared_up", "shared_down")
        return {**fused, **{n: weights[n].T for n in shared if n in weights}}
    gate_up = jnp.concatenate([fused.pop("gate"), fused.pop("up")], axis=1).T
    return {**fused, "gate_up": gate_up, "down": weights["down"].T}


MATRICES = ("qkv_proj", "q_b", "o", "gate_up", "down", "shared_gate", "shared_up", "shared_down")
"""Names of the matrices that fuse() returns with outputs first."""


def initial(weight: Weight, key: Array, dtype: DTypeLike) -> Array:
    """Return initial weights as declared: normal (or narrow) with standard deviation fan_in **
    -0.5, uniform within fan_in ** -0.5, ones or zeros."""
    if weight.init == "ones":
        return jnp.ones(weight.shape, dtype)
    if weight.init in ("zeros", "off"):
        return jnp.zeros(weight.shape, dtype)
    if weight.init == "uniform":
        values = jax.random.uniform(key, weight.shape, jnp.float32, -1.0, 1.0)
        return (values * weight.fan_in**-0.5).astype(dtype)
    return (jax.random.normal(key, weight.shape, jnp.float32) * weight.fan_in**-0.5).astype(dtype)
