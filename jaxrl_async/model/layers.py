"""The decoder layer as a Flax module, split once into a graph definition and a pure dict of
arrays."""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxrl_async.model.moe import Choose, Experts, route, run_experts
from jaxrl_async.model.quantize import quantized_table
from jaxrl_async.model.spec import SCALE, ModelSpec, RopeScaling, Weight, weight_table


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Return x / rms(x) * scale over the last axis, computed in float32. Zhang and Sennrich 2019
    (arXiv:1910.07467)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale


def rope_angles(spec: ModelSpec, positions: Array) -> tuple[Array, Array]:
    """Return cos, sin [..., head_dim / 2] float32. Su et al. 2021 (arXiv:2104.09864), eq. 34."""
    half = spec.head_dim // 2
    frequencies = spec.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if spec.rope_scaling:
        frequencies = _stretched(frequencies, spec.rope_scaling)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _stretched(frequencies: Array, s: RopeScaling) -> Array:
    """Scale as Llama 3 does: divide the frequencies of long wavelengths by `factor`, keep those of
    short ones, interpolate linearly between."""
    wavelengths = 2 * jnp.pi / frequencies
    smooth = (s.original_max_positions / wavelengths - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return frequencies * ((1 - smooth) / s.factor + smooth)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate pairs (i, i + K/2) of the last axis of x [..., heads, K]; cos, sin [..., K/2]."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Layer(nnx.Module):
    """One decoder layer: norm, attention, norm, gated MLP, with residuals.

    fused: fewer, larger matrices with outputs first, see fuse(). mixed: products in bfloat16, see
    product(). quantized: 8-bit matrices, see quantize.py; they are not fused.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        fused: bool = False,
        mixed: bool = False,
        quantized: bool = False,
    ) -> None:
        self.spec, self.fused, self.mixed = spec, fused, mixed
        self.quantized = quantized
        table = weight_table(spec)
        table = quantized_table(table) if quantized else table
        shapes = {name: w.shape[1:] for name, w in table["layers"].items()}
        if fused:
            shapes = jax.eval_shape(
                fuse, {n: jax.ShapeDtypeStruct(s, float) for n, s in shapes.items()}
            )
            shapes = {name: x.shape for name, x in shapes.items()}
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape)))

    def _weight(self, name: str, dtype: Any) -> Array:
        return getattr(self, name)[...].astype(dtype)

    def _times(self, x: Array, name: str) -> Array:
        """Multiply x [..., D] with a weight [D, ...], reshaped to two dimensions, inputs first."""
        weight = getattr(self, name)[...]
        if self.fused:
            return product(x, weight, mixed=self.mixed, outputs_first=True)
        weight = weight.reshape(x.shape[-1], -1)
        if not self.quantized:
            return product(x, weight, mixed=self.mixed)
        scale = getattr(self, name + SCALE)[...].reshape(-1)
        return product(x, weight, mixed=self.mixed, scale=scale)

    def qkv(self, x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """Return rotated queries and keys, and values, of x [..., D]: [..., H, K], [..., N, K],
        [..., N, K]."""
        spec = self.spec
        y = rms_norm(x, self._weight("attn_norm", x.dtype), spec.norm_eps)
        if self.fused:
            parts = (spec.heads, spec.heads + spec.kv_heads)
            qkv = _split_heads(self._times(y, "qkv_proj"), spec.head_dim)
            q, k, v = jnp.split(qkv, parts, axis=-2)
        else:
            q, k, v = (_split_heads(self._times(y, n), spec.head_dim) for n in ("q", "k", "v"))
        if spec.attention_bias:
            q, k, v = (
                a + self._weight(name, x.dtype)
                for a, name in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias"))
            )
        if spec.qk_norm:
            q = rms_norm(q, self._weight("q_norm", x.dtype), spec.norm_eps)
            k = rms_norm(k, self._weight("k_norm", x.dtype), spec.norm_eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(
        self,
        x: Array,
        attended: Array,
        experts: Experts = run_experts,
        choose: Choose = route,
    ) -> Array:
        """Apply the output projection and the MLP or the experts: x [..., D], attended [..., H, K]
        -> [..., D].

        experts: computes the experts, for which x must be [n, D]. choose: routes each token.
        """
        flat = attended.reshape(*attended.shape[:-2], -1)
        out = self._times(flat, "o")
        if self.spec.output_bias:
            out = out + self._weight("o_bias", x.dtype)
        x = x + out
        y = rms_norm(x, self._weight("mlp_norm", x.dtype), self.spec.norm_eps)
        if self.spec.experts:
            return x + self._routed(y, experts, choose)
        if self.fused:
            gate, up = jnp.split(self._times(y, "gate_up"), 2, axis=-1)
        else:
            gate, up = self._times(y, "gate"), self._times(y, "up")
        return x + self._times(jax.nn.silu(gate) * up, "down")

    def _routed(self, y: Array, experts: Experts, choose: Choose) -> Array:
        logits = product(y, self.router[...], mixed=False)
        ids, share = choose(logits, self.spec.experts_per_token)
        names = [n + end for n in ("gate", "up", "down") for end in ("", SCALE)]
        matrices = {n: getattr(self, n)[...] for n in names if hasattr(self, n)}
        rows = y.astype(jnp.bfloat16) if self.mixed else y
        return experts(rows, ids, share, matrices).astype(y.dtype)


def product(
    x: Array,
    weight: Array,
    *,
    mixed: bool = False,
    outputs_first: bool = False,
    scale: Array | None = None,
) -> Array:
    """Return x [..., D] @ weight [D, E] in x's number type.

    Args:
        x: [..., D].
        weight: [D, E], or [E, D] with outputs_first.
        mixed: round both to bfloat16 and sum in float32, which matrix units (also those of recent
            CPUs) do several times faster.
        outputs_first: the weight's first dimension is the output.
        scale: [E] float32, multiplied with the sums; of 8-bit weights.
    """
    number = jnp.bfloat16 if mixed else x.dtype
    contract = (((x.ndim - 1,), (int(outputs_first),)), ((), ()))
    out = jax.lax.dot_general(
        x.astype(number),
        weight.astype(number),
        contract,
        preferred_element_type=jnp.float32 if mixed or scale is not None else None,
    )
    return (out if scale is None else out * scale).astype(x.dtype)


def _split_heads(x: Array, head_dim: int) -> Array:
    """Reshape [..., H * K] to [..., H, K]."""
    return x.reshape(*x.shape[:-1], -1, head_dim)


def fuse(weights: dict[str, Array]) -> dict[str, Array]:
    """Join one layer's q, k, v into one matrix and gate, up into another, and transpose every
    matrix to [E, D], outputs first.

    Fewer and larger products, whose weights a CPU reads in memory order (a third faster for few
    rows): worth it if a step is short and nothing is sharded.
    """
    qkv = jnp.concatenate([weights["q"], weights["k"], weights["v"]], axis=1)
    fused = {
        **{n: w for n, w in weights.items() if n not in ("q", "k", "v")},
        "qkv_proj": qkv.reshape(qkv.shape[0], -1).T,
        "o": weights["o"].reshape(-1, weights["o"].shape[-1]).T,
    }
    if "router" in weights:  # experts stay as they are
        return fused
    gate_up = jnp.concatenate([fused.pop("gate"), fused.pop("up")], axis=1).T
    return {**fused, "gate_up": gate_up, "down": weights["down"].T}


@lru_cache(maxsize=16)
def layer_graph(
    spec: ModelSpec, *, fused: bool = False, mixed: bool = False, quantized: bool = False
) -> Any:
    """Return the layer's graph definition, made once; `nnx.merge(layer_graph(spec), weights)` is a
    Layer."""
    form = {"fused": fused, "mixed": mixed, "quantized": quantized}
    graph, _ = nnx.split(nnx.eval_shape(lambda: Layer(spec, **form)))
    return graph


def initial(weight: Weight, key: Array, dtype: Any) -> Array:
    """Return initial weights as declared: normal with standard deviation fan_in ** -0.5, ones or
    zeros."""
    if weight.init == "ones":
        return jnp.ones(weight.shape, dtype)
    if weight.init == "zeros":
        return jnp.zeros(weight.shape, dtype)
    return (jax.random.normal(key, weight.shape, jnp.float32) * weight.fan_in**-0.5).astype(dtype)
