"""The base of a user's own decoder: one layer as a Flax module, and what may differ around it.

A class named FILE.py:CLASS declares the weights of one layer and computes what comes before and
after the attention. Scan, rematerialisation, meshes, adapters and 8-bit weights in the trainer, and
pages, blocks and swaps in the sampler, are those of the built-in layer. docs/own_decoder.md.
"""

import math
from typing import Any

from jax import Array

from jaxrl_async.errors import ConfigError
from jaxrl_async.model.families.parts import LayerKind
from jaxrl_async.model.layers import Angles, Layer, normed, rotate
from jaxrl_async.model.own_code import class_of
from jaxrl_async.model.spec import SCALE, Init, ModelSpec, Params, Weight


class OwnLayer(Layer):
    """One decoder layer of the user's own. Subclasses define weights, qkv and finish, and may
    define the static methods after them."""

    @staticmethod
    def weights(spec: ModelSpec) -> dict[str, Weight]:
        """Return the weights of one layer by name, best made with `weight`."""
        raise NotImplementedError

    def qkv(self, x: Array, angles: Angles | None) -> tuple[Array, Array, Array]:
        """Return queries [n, H, K], keys and values [n, N, K] of hidden states [n, D].

        Attention divides the products of queries and keys by the root of K. angles: see `turned`.
        """
        raise NotImplementedError

    def finish(self, x: Array, attended: Array, *routing: Any) -> Array:
        """Return the hidden states [n, D] after the layer, given those before it and what attention
        returned, [n, H, K].

        routing: of the built-in layers with experts; nothing that an own layer must read.
        """
        raise NotImplementedError

    @staticmethod
    def pattern(spec: ModelSpec) -> tuple[LayerKind, ...]:
        """Return the kinds of the layers, repeated until there are enough."""
        return spec.pattern

    @staticmethod
    def outer_weights(spec: ModelSpec) -> dict[str, Weight]:
        """Return weights beside embed [V, D], final_norm [D] and lm_head [D, V] (if untied)."""
        return {}

    @staticmethod
    def embed(spec: ModelSpec, params: Params, token_ids: Array, positions: Array) -> Array:
        """Return the first hidden states [n, D] of tokens [n] at positions [n]."""
        found: Array = params["embed"][token_ids]
        return found

    @staticmethod
    def final(spec: ModelSpec, params: Params, x: Array) -> Array:
        """Return what the output head multiplies, [n, D], given the last hidden states [n, D]."""
        return normed(spec, x, params["final_norm"])

    def times(self, x: Array, name: str) -> Array:
        """Return x [n, inputs] @ the matrix of that name, [n, outputs]: dimensions of several are
        flattened. Adds its adapter, and knows 8 bits."""
        return self._times(x, name)

    def weight(self, name: str, like: Array) -> Array:
        """Return a weight as it was declared, in the number type of `like`; of a matrix, without
        its adapter. Raises ConfigError for a matrix in 4 bits, which `times` alone knows."""
        if self.scales not in ("", SCALE) and hasattr(self, name + self.scales):
            raise ConfigError(
                f"model.decoder: {type(self).__name__} reads the matrix {name} by weight(), and "
                "model.lora.base keeps it in 4 bits. Use times(), or model.lora.base=int8."
            )
        values = self._weight(name, like.dtype)
        if not hasattr(self, name + SCALE):
            return values
        scale = self._weight(name + SCALE, like.dtype)
        return values * scale.reshape((1,) * (values.ndim - scale.ndim) + scale.shape)


def weight(spec: ModelSpec, *axes: str, inputs: int = 1, init: Init = "normal") -> Weight:
    """Return a weight with these dimensions: embed, heads, kv_heads, head_dim, mlp or vocab.

    Args:
        spec: has their sizes.
        axes: the dimensions, those that are summed over first.
        inputs: how many of them are summed over.
        init: normal (divided by the root of the inputs), ones or zeros; only normal ones count as
            matrices, which have adapters and 8 bits.
    """
    known = {
        "embed": spec.width,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "mlp": spec.mlp,
        "vocab": spec.vocab,
    }
    if unknown := [axis for axis in axes if axis not in known]:
        raise ValueError(
            f"weight(spec, ...): {unknown[0]!r} is none of {', '.join(known)}. For other sizes "
            "declare Weight(shape=..., axes=..., init=...) with the axis ''."
        )
    shape = tuple(known[axis] for axis in axes)
    return Weight(shape=shape, axes=axes, init=init, fan_in=math.prod(shape[:inputs]))


def turned(x: Array, angles: Angles | None) -> Array:
    """Return queries or keys [n, heads, K] rotated as their positions say; None: as they are."""
    return x if angles is None else rotate(x, angles.cos, angles.sin)


def split_heads(x: Array, like: int) -> Array:
    """Return [n, heads * K] as [n, heads, K]; like: K."""
    return x.reshape(*x.shape[:-1], -1, like)


def first_states(spec: ModelSpec, params: Params, token_ids: Array, positions: Array) -> Array:
    """Return an own decoder's embedded tokens, [n, D]."""
    assert spec.own is not None
    states: Array = class_of(spec.own).embed(spec, params, token_ids, positions)
    return states


def last_states(spec: ModelSpec, params: Params, x: Array) -> Array:
    """Return an own decoder's hidden states for the head, [n, D], in x's number type."""
    assert spec.own is not None
    states: Array = class_of(spec.own).final(spec, params, x)
    return states.astype(x.dtype)
