"""The base class of a user's own decoder: one layer as a Flax module, and hooks around the layers.

A class named FILE.py:CLASS declares the weights of one layer and computes the parts before and
after the attention. Scan, rematerialisation, meshes, adapters and 8-bit weights in the trainer, and
pages, blocks and swaps in the sampler, work as for the built-in layer. See docs/own_decoder.md.
"""

import math

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
        """Return the weights of one layer by name, preferably made with `weight`."""
        raise NotImplementedError

    def qkv(self, x: Array, angles: Angles | None) -> tuple[Array, Array, Array]:
        """Return queries [n, H, K], keys and values [n, N, K] of hidden states [n, D].

        Attention divides the scores by the square root of K. angles: see `turned`.
        """
        raise NotImplementedError

    def finish(self, x: Array, attended: Array, *routing: object) -> Array:
        """Return the hidden states [n, D] after the layer, given the hidden states before it and
        attention's output, [n, H, K].

        routing: for the built-in layers with experts; an own layer may ignore it.
        """
        raise NotImplementedError

    @staticmethod
    def pattern(spec: ModelSpec) -> tuple[LayerKind, ...]:
        """Return the kinds of the layers; the pattern is repeated over all layers."""
        return spec.pattern

    @staticmethod
    def outer_weights(spec: ModelSpec) -> dict[str, Weight]:
        """Return weights other than embed [V, D], final_norm [D] and, if untied, lm_head [D, V]."""
        return {}

    @staticmethod
    def embed(spec: ModelSpec, params: Params, token_ids: Array, positions: Array) -> Array:
        """Return the first hidden states [n, D] of tokens [n] at positions [n]."""
        found: Array = params["embed"][token_ids]
        return found

    @staticmethod
    def final(spec: ModelSpec, params: Params, x: Array) -> Array:
        """Return the input of the output head, [n, D], given the last hidden states [n, D]."""
        return normed(spec, x, params["final_norm"])

    def times(self, x: Array, name: str) -> Array:
        """Return x [n, inputs] @ the named matrix, [n, outputs]; multiple dimensions are flattened.
        Adds the matrix's adapter, and supports quantised matrices."""
        return self._times(x, name)

    def weight(self, name: str, like: Array) -> Array:
        """Return a weight in its declared shape and the dtype of `like`; for a matrix, without its
        adapter. Raises ConfigError for a matrix in 4 bits, which only `times` supports."""
        if self.scales not in ("", SCALE) and hasattr(self, name + self.scales):
            raise ConfigError(
                f"model.decoder: {type(self).__name__} reads the matrix {name} with weight(), but "
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
        spec: defines their sizes.
        axes: the dimensions; the summed ones come first.
        inputs: number of summed dimensions.
        init: normal (divided by the square root of the inputs), ones or zeros. Only normal weights
            are matrices, which can have adapters and be quantised.
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
            f"weight(spec, ...): {unknown[0]!r} is not one of {', '.join(known)}. For other sizes "
            "declare Weight(shape=..., axes=..., init=...) with the axis ''."
        )
    shape = tuple(known[axis] for axis in axes)
    return Weight(shape=shape, axes=axes, init=init, fan_in=math.prod(shape[:inputs]))


def turned(x: Array, angles: Angles | None) -> Array:
    """Return queries or keys [n, heads, K] rotated by their positions; angles None: unchanged."""
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
    """Return an own decoder's hidden states for the head, [n, D], in x's dtype."""
    assert spec.own is not None
    states: Array = class_of(spec.own).final(spec, params, x)
    return states.astype(x.dtype)
