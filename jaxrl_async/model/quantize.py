"""The sampler's weights in 8 bits: the layers' matrices, with a scale for each output.

    w [in, out]  ->  values [in, out] int8 or float8_e4m3fn, scale [out] float32: max |w| / largest

x @ w is then (x @ values) * scale: the values are widened as they are read, and half as many bytes
as in bfloat16 are sent and read in each step. Embedding, head, norms, biases and routers keep their
type. Rounding changes log-probs; algorithm.correction accounts for the mismatch.
"""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.model.spec import SCALE, Weight, contracted

Kind = Literal["int8", "float8_e4m3fn"]
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def is_quantized(params: Any) -> bool:
    """Return whether a tree of parameters, or a table of weights, has 8-bit matrices."""
    return any(name.endswith(SCALE) for name in params["layers"])


def quantized_table(table: dict[str, Any]) -> dict[str, Any]:
    """Return a decoder's table with the scales that `quantize` adds."""
    scales = {
        name + SCALE: replace(
            weight,
            shape=_without(weight.shape, weight),
            axes=_without(weight.axes, weight),
            init="ones",
        )
        for name, weight in table["layers"].items()
        if _is_matrix(name, weight)
    }
    return {**table, "layers": {**table["layers"], **scales}}


def table_of(table: dict[str, Any], params: Any) -> dict[str, Any]:
    """Return a decoder's table, with scales if the parameters have them."""
    return quantized_table(table) if is_quantized(params) else table


def quantize(table: dict[str, Any], params: Any, kind: Kind, dtype: Any) -> Any:
    """Return new arrays in the tree of quantized_table(table): matrices of this kind, the rest in
    dtype."""
    layers: dict[str, Array] = {}
    for name, array in params["layers"].items():
        weight = table["layers"][name]
        if _is_matrix(name, weight):
            layers[name], layers[name + SCALE] = _rounded(array, weight, kind)
        else:
            layers[name] = jnp.array(array, dtype, copy=True)
    rest = {name: part for name, part in params.items() if name != "layers"}
    return {**jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), rest), "layers": layers}


def _rounded(array: Array, weight: Weight, kind: Kind) -> tuple[Array, Array]:
    array = array.astype(jnp.float32)
    inputs = contracted(weight)
    largest = jnp.max(jnp.abs(array), axis=tuple(range(inputs.start, inputs.stop)), keepdims=True)
    scale = jnp.maximum(largest, 1e-12) / LARGEST[kind]
    values = array / scale
    values = jnp.round(values) if kind == "int8" else values
    return values.astype(kind), scale.reshape(_without(array.shape, weight))


def _without(sizes: Any, weight: Weight) -> Any:
    """Return sizes or names of dimensions without those that are summed over."""
    inputs = contracted(weight)
    return (*sizes[: inputs.start], *sizes[inputs.stop :])


def _is_matrix(name: str, weight: Weight) -> bool:
    return weight.init == "normal" and name != "router"
