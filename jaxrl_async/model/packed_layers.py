"""Layers' matrices packed for the CPU kernels (cpu/kernel_calls.py), in float32, bfloat16 or 8
bits."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.cpu.kernel_calls import PANEL, packed
from jaxrl_async.model.layers import MATRICES, fuse
from jaxrl_async.model.quantize import quantize, scales_among
from jaxrl_async.model.spec import SCALE, ModelSpec, Params, stacks_in, weight_table


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
    beside = {s: {n: w for n, w in params[s].items() if n not in table[s]} for s in stacks}
    rounded: Params = quantize(table, {**params, **base}, "int8", dtype)
    return {**rounded, **{s: {**rounded[s], **beside[s]} for s in stacks}}


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
