"""Layers with a gated delta net in place of attention, and layers with gated attention."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.model.delta import (
    DeltaInputs,
    causal_convolution,
    continued_convolution,
    continued_delta_rule,
    delta_step,
    gated_delta_rule,
)
from jaxrl_async.model.families.parts import DeltaNet
from jaxrl_async.model.layers import Angles, Layer, rms_norm, split_heads
from jaxrl_async.model.layout import Layout
from jaxrl_async.model.moe import Choose, Experts, route, run_experts
from jaxrl_async.model.spec import ModelSpec


class GatedLayer(Layer):
    """A layer that multiplies attention's output by a sigmoid gate of its input, for each component
    of each head."""

    def attended(self, x: Array, angles: Angles | None, mix: Any) -> Array:
        """Return attention's output for x [n, D], times the gate: [n, H, K]."""
        y = self._norm(x, "attn_norm")
        wide = 2 * self.spec.head_dim
        q, gate = jnp.split(split_heads(self._times(y, "q"), wide), 2, axis=-1)
        k, v = (split_heads(self._times(y, n), self.spec.head_dim) for n in ("k", "v"))
        summed = mix(*self._rotated_heads(q, k, v, angles))
        return summed * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)


class DeltaLayer(Layer):
    """A layer whose tokens read one matrix per head, written by previous tokens (delta.py)."""

    @property
    def delta(self) -> DeltaNet:
        """The sizes of the gated delta net."""
        assert self.spec.delta is not None, "DeltaLayer is for specs with gated delta nets"
        return self.spec.delta

    def attended(self, x: Array, angles: Angles | None, mix: Any) -> Array:
        """Return the normed and gated reads of the tokens x [n, D]: [n, H, V].

        mix: (inputs of the convolution and the rule for n tokens, the convolution's weights) ->
        their reads, [n, H, V]. angles: not used.
        """
        y = self._norm(x, "attn_norm")
        inputs, z = self._projected(y)
        weights = tuple(getattr(self, f"delta_conv_{name}")[...] for name in "qkv")
        read = mix(inputs, weights).astype(x.dtype)
        read = rms_norm(read, self._weight("delta_norm", x.dtype), self.spec.norm_eps)
        return (read * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)

    def finish(
        self, x: Array, attended: Array, experts: Experts = run_experts, choose: Choose = route
    ) -> Array:
        """Apply the output projection and the rest, as Layer does, to the tokens' reads."""
        flat = attended.reshape(attended.shape[0], -1)
        return self._added(x, self._times(flat, "delta_out"), experts, choose)

    def _projected(self, y: Array) -> tuple[DeltaInputs, Array]:
        """Return the delta net's inputs for tokens [n, D], before the convolution, and the gate
        [n, H, V]."""
        sizes = self.delta
        if sizes.grouped:
            q, k, v, z, b, a = self._of_groups(y)
        else:
            q, k = (split_heads(self._times(y, f"delta_{x}"), sizes.key_width) for x in "qk")
            v, z = (split_heads(self._times(y, f"delta_{x}"), sizes.value_width) for x in "vz")
            b, a = (self._times(y, f"delta_{x}") for x in "ba")
        rate = jnp.exp(self._weight("delta_rate", jnp.float32))
        shift = self._weight("delta_shift", jnp.float32)
        log_decay = -rate * jax.nn.softplus(a.astype(jnp.float32) + shift)
        return DeltaInputs(q, k, v, log_decay, jax.nn.sigmoid(b)), z

    def _of_groups(self, y: Array) -> tuple[Array, ...]:
        """Return queries, keys, values, gates, strengths and steps from matrices that group them by
        key head."""
        sizes, n = self.delta, y.shape[0]
        narrow, wide = sizes.key_width, sizes.shared_by * sizes.value_width
        groups = self._times(y, "delta_qkvz").reshape(n, sizes.key_heads, -1)
        q, k, v, z = jnp.split(groups, [narrow, 2 * narrow, 2 * narrow + wide], axis=-1)
        b, a = jnp.split(self._times(y, "delta_ba").reshape(n, sizes.key_heads, -1), 2, axis=-1)
        v, z = (x.reshape(n, sizes.value_heads, -1) for x in (v, z))
        return q, k, v, z, b.reshape(n, -1), a.reshape(n, -1)


class DeltaState(NamedTuple):
    """A layer's state after the tokens so far, for n sequences, float32."""

    q: Array  # [n, kernel - 1, key heads, key width], the convolution's last inputs
    k: Array  # [n, kernel - 1, key heads, key width]
    v: Array  # [n, kernel - 1, value heads, value width]
    matrix: Array  # [n, value heads, key width, value width]


def empty_states(spec: ModelSpec, count: int) -> tuple[DeltaState, ...]:
    """Return the states of `count` empty sequences, one for each layer with a gated delta net."""
    sizes = spec.delta
    if sizes is None:
        return ()
    keys = jnp.zeros((count, sizes.kernel - 1, sizes.key_heads, sizes.key_width))
    values = jnp.zeros((count, sizes.kernel - 1, sizes.value_heads, sizes.value_width))
    matrix = jnp.zeros((count, sizes.value_heads, sizes.key_width, sizes.value_width))
    one = DeltaState(keys, keys, values, matrix)
    return (one,) * sum(kind.is_linear for kind in spec.kinds)


def advanced(
    state: DeltaState, inputs: DeltaInputs, kernels: Sequence[Array], lengths: Array
) -> tuple[Array, DeltaState]:
    """Run the convolution and the gated delta rule of a layer over the next tokens of B sequences.

    Args:
        state: state of the sequences.
        inputs: inputs of their tokens [B, T, ...].
        kernels: the convolution's weights for queries, keys and values.
        lengths: [B], number of tokens of each sequence, at most T.

    Returns the tokens' reads [B, T, H, V] and the states after them.
    """
    befores = (state.q, state.k, state.v)
    parts = zip(inputs[:3], kernels, befores, strict=True)
    convolved = [continued_convolution(x, kernel, old, lengths) for x, kernel, old in parts]
    (q, new_q), (k, new_k), (v, new_v) = convolved
    inputs = inputs._replace(q=q, k=k, v=v)
    if v.shape[1] == 1:
        read, matrix = delta_step(inputs, state.matrix)
    else:
        read, matrix = continued_delta_rule(inputs, state.matrix, lengths)
    return read, DeltaState(new_q, new_k, new_v, matrix)


def read_states(
    layout: Layout, segment_ids: Array, inputs: DeltaInputs, kernels: Sequence[Array]
) -> Array:
    """Run the convolution and the gated delta rule of a layer over packed rows; each device gets
    whole rows.

    Args:
        layout: the order of the tokens.
        segment_ids: [B, T], in natural order.
        inputs: inputs of the layout's tokens [n, ...].
        kernels: the convolution's weights for queries, keys and values.

    Returns [n, H, V] for the layout's tokens.
    """
    B = segment_ids.shape[0]
    rows = (layout.place(layout.rows(x, B), "batch", None) for x in inputs)
    q, k, v, log_decay, strength = rows
    q, k, v = (
        causal_convolution(x, kernel, segment_ids)
        for x, kernel in zip((q, k, v), kernels, strict=True)
    )
    out = gated_delta_rule(DeltaInputs(q, k, v, log_decay, strength), segment_ids)
    return layout.flat(out)
