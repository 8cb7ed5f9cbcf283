"""Weights in 8 or 4 bits: the layers' matrices, with their scales.

    8 bits   w [in, out]  ->  values [in, out] int8 or float8_e4m3fn, scale [out] float32:
                              max |w| / largest
    4 bits   four_bits.py: packed values, and scales for groups of inputs

In 8 bits, x @ w is (x @ values) * scale: the values are widened as they are read, and half the
bytes of bfloat16 are sent and read in each step. Embedding, head, norms, biases and routers keep
their type. The name of a matrix's scales determines its kind of quantisation. If only the sampler's
weights are rounded (weights.dtype), log-probs change, and algorithm.correction accounts for the
mismatch. A frozen base (frozen_base.py) is the same in trainer and sampler.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.later import Later
from jaxrl_async.model.spec import (
    LORA_DROP,
    SCALE,
    Params,
    Weight,
    contracted,
    is_routing,
    is_stack,
    stacks_in,
)

if TYPE_CHECKING:
    from jaxrl_async.model import four_bits
    from jaxrl_async.model.four_bits import FourBits
else:
    four_bits = Later("jaxrl_async.model.four_bits")

Kind = Literal["int8", "float8_e4m3fn"]
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
PACKED: "dict[FourBits, str]" = {
    "nf4": "_nf4" + SCALE,
    "int4": "_int4" + SCALE,
    "q4_1": "_q4_1" + SCALE,
}
"""Suffixes of the names of the scales of matrices in 4 bits."""


def is_quantized(params: Params) -> bool:
    """Return whether a tree of parameters, or a table of weights, has matrices in 8 or 4 bits."""
    return any(scales_among(params[stack]) for stack in stacks_in(params))


def scales_among(layers: Iterable[str]) -> str:
    """Return the suffix of the names of the scales among weights of layers; "": no scales."""
    found = [name for name in layers if name.endswith(SCALE)]
    endings = (end for end in PACKED.values() if any(name.endswith(end) for name in found))
    return next(endings, SCALE if found else "")


def quantized_table(table: dict[str, Any]) -> dict[str, Any]:
    """Return a decoder's table with the scales that `quantize` adds."""
    return {**table, **{stack: _with_scales(table[stack]) for stack in stacks_in(table)}}


def _with_scales(stack: dict[str, Weight]) -> dict[str, Weight]:
    scales = {
        name + SCALE: replace(
            weight,
            shape=_without(weight.shape, weight),
            axes=_without(weight.axes, weight),
            init="ones",
            decays=False,
        )
        for name, weight in stack.items()
        if is_matrix(name, weight)
    }
    return {**stack, **scales}


def table_of(table: dict[str, Any], params: Params) -> dict[str, Any]:
    """Return a decoder's table, with scales if the parameters have them."""
    endings = {scales_among(params[stack]) for stack in stacks_in(params)} - {""}
    if not endings:
        return table
    if endings == {SCALE}:
        return quantized_table(table)
    (ending,) = endings
    stacks = {stack: dict(table[stack]) for stack in stacks_in(table)}
    for stack, weights in stacks.items():
        for name, weight in table[stack].items():
            if is_matrix(name, weight):
                for part in (name, name + ending):
                    weights[part] = replace(weight, shape=params[stack][part].shape)
    return {**table, **stacks}


def quantize(table: dict[str, Any], params: Params, kind: Kind, dtype: DTypeLike) -> Any:
    """Return new arrays in the tree of quantized_table(table): matrices in this kind, the rest in
    dtype."""
    stacks = {
        stack: _quantized_stack(table[stack], params[stack], kind, dtype)
        for stack in stacks_in(params)
    }
    rest = {name: part for name, part in params.items() if not is_stack(name)}
    return {**jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), rest), **stacks}


def _quantized_stack(
    table: dict[str, Weight], params: Params, kind: Kind, dtype: DTypeLike
) -> dict[str, Array]:
    layers: dict[str, Array] = {}
    for name, array in params.items():
        weight = table[name]
        if is_matrix(name, weight):
            layers[name], layers[name + SCALE] = rounded(array, weight, kind)
        else:
            layers[name] = jnp.array(array, dtype, copy=True)
    return layers


def rounded(array: Array, weight: Weight, kind: Kind) -> tuple[Array, Array]:
    """Return a stacked matrix in 8 bits, and the scales of its outputs."""
    array = array.astype(jnp.float32)
    inputs = contracted(weight)
    largest = jnp.max(jnp.abs(array), axis=tuple(range(inputs.start, inputs.stop)), keepdims=True)
    scale = jnp.maximum(largest, 1e-12) / LARGEST[kind]
    values = array / scale
    values = jnp.round(values) if kind == "int8" else values
    return values.astype(kind), scale.reshape(_without(array.shape, weight))


def _without(sizes: Any, weight: Weight) -> Any:
    """Return sizes or names of dimensions without the summed ones."""
    inputs = contracted(weight)
    return (*sizes[: inputs.start], *sizes[inputs.stop :])


def is_matrix(name: str, weight: Weight) -> bool:
    """Return whether a layer's weight is quantised: a matrix other than a router."""
    return weight.init == "normal" and not is_routing(name)


# ---- in a pass


def computed_in(dtype: DTypeLike, layers: dict[str, Array]) -> dict[str, Array]:
    """Return a layer's weights in the type of a computation. Quantised matrices, their scales and
    dropout keys are unchanged."""
    ending = scales_among(layers)
    kept = {
        name for name in layers if ending and (name.endswith(ending) or name + ending in layers)
    } | {LORA_DROP}
    return {name: w if name in kept else w.astype(dtype) for name, w in layers.items()}


def quantized_product(
    x: Array, values: Array, scales: Array, ending: str, dot: Callable[[Array, Array], Array]
) -> Array:
    """Return x [..., in] times one quantised matrix [in, out], in float32.

    The widened weights are not kept for the backward pass, which widens them again: in a scan over
    the layers they would add up to the whole model.

    Args:
        x: the rows, in the dtype of the product.
        values: [in, out] in 8 bits, or [in / 2, out] packed; experts are leading dimensions.
        scales: [out], applied to each row of the result, or [groups, out] for packed values.
        ending: suffix of the name of the scales.
        dot: multiplies rows by weights of the same type, with a float32 result.
    """
    widened = jax.checkpoint(partial(_widened_product, ending=ending, dot=dot), prevent_cse=False)
    product: Array = widened(x, values, scales)
    return product


def _widened_product(
    x: Array, values: Array, scales: Array, *, ending: str, dot: Callable[[Array, Array], Array]
) -> Array:
    for kind, packed in PACKED.items():
        if ending == packed:
            return four_bits.packed_product(x, values, scales, kind, dot)
    return dot(x, values.astype(x.dtype)) * scales


def restored(weight: Weight, layers: Params, name: str) -> Array:
    """Return a matrix in float32, dequantised if it has scales.

    Args:
        weight: the matrix, stacked like the arrays.
        layers: arrays with the matrix and, if it is quantised, its scales.
        name: name of the matrix.
    """
    values, ending, inputs = layers[name], scales_among(layers), contracted(weight)
    if not ending or name + ending not in layers:
        return values.astype(jnp.float32)
    scales = layers[name + ending]
    if ending == SCALE:
        return values.astype(jnp.float32) * jnp.expand_dims(scales, tuple(inputs))
    lead, out = weight.shape[: weight.stacked], math.prod(weight.shape[inputs.stop :])
    kind = next(kind for kind, packed in PACKED.items() if packed == ending)
    packed, scales = (array.reshape(*lead, -1, out) for array in (values, scales))
    return four_bits.unpack_codes(packed, scales, kind).reshape(weight.shape)
