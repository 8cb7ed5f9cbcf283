"""The experts' part of an adapter in PEFT's format (target_parameters). transformers holds all
experts of a layer in one tensor in memory, independent of the files.

    lora_A [E * R, in]     expert e: rows e * R to e * R + R
    lora_B [out, R * E]    expert e: columns e, e + E, ...

PEFT wraps each such tensor, the second wrapper around the first. gate and up are one tensor: with
separate A matrices, R is twice the rank, and B is block-structured. If files hold experts one by
one, so does the adapter written here: PEFT joins them as transformers joins the weights. In an
adapter that PEFT wrote they are joined.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_async.model.lora import PEFT_PREFIX, Lora, adapter_table
from jaxrl_async.model.spec import (
    LORA_A,
    LORA_B,
    ModelSpec,
    Params,
    Weight,
    stacks_in,
    weight_table,
)

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""transformers' tensors with all experts of a layer."""
ONE_BY_ONE = {"gate": (GATE_UP, 0), "up": (GATE_UP, 1), "down": (DOWN, 0)}
"""Position in transformers of the experts that files hold one by one: the tensor, and the part of
its outputs."""


class ExpertTensor(NamedTuple):
    """The adapted weights in one tensor of all experts."""

    parts: dict[str, slice]  # slices of its outputs, by the names of the weights
    outputs: int


def expert_tensors(
    spec: ModelSpec, lora: Lora, *, one_by_one: bool = False
) -> dict[str, ExpertTensor]:
    """Return the tensors with all experts that an adapter changes, by their names with {layer}, in
    the order of the model.

    one_by_one: also for a model whose files hold experts one by one.
    """
    found: dict[str, ExpertTensor] = {}
    table = weight_table(spec)
    for stack in stacks_in(table):
        for name, weight in table[stack].items():
            location = _location(name, weight, one_by_one=one_by_one)
            if location is not None and name in lora.names:
                tensor, outputs, part = location
                found.setdefault(tensor, ExpertTensor({}, outputs)).parts[name] = part
    return found


def _location(name: str, weight: Weight, *, one_by_one: bool) -> tuple[str, int, slice] | None:
    """Return the tensor with all experts that contains a weight, the number of its outputs and the
    slice of the weight. None: no such tensor."""
    if weight.hf_every is not None:
        return weight.hf, weight.hf_shape[-1], slice(weight.hf_every[0], None, weight.hf_every[1])
    if not one_by_one or name not in ONE_BY_ONE or "expert" not in weight.axes:
        return None
    tensor, part = ONE_BY_ONE[name]
    size = weight.shape[-1]
    outputs = size * (2 if tensor == GATE_UP else 1)
    return f"model.layers.{{layer}}.{tensor}", outputs, slice(part * size, (part + 1) * size)


def target_parameters(spec: ModelSpec, lora: Lora) -> dict[str, int]:
    """Return PEFT's target_parameters, with the number of matrices with a separate A in each. Empty
    if target_modules is sufficient.

    PEFT 0.21 takes names in target_modules that experts have in files for the experts. If other
    modules have these names, too (a shared expert, a layer without experts), they are listed as
    parameters as well: a matrix is a valid parameter.
    """
    tensors = _after_layer(expert_tensors(spec, lora))
    if tensors:
        return tensors
    modules = mistaken_modules(spec, lora)
    every = _after_layer(expert_tensors(spec, lora, one_by_one=True))
    return {**every, **{f"{module}.weight": 1 for module in modules}} if modules else {}


def _after_layer(tensors: Mapping[str, ExpertTensor]) -> dict[str, int]:
    return {name.partition("{layer}.")[2]: len(t.parts) for name, t in tensors.items()}


def mistaken_modules(spec: ModelSpec, lora: Lora) -> list[str]:
    """Return the adapted modules that PEFT would mistake for experts, by their names within a
    layer."""
    ends = expert_ends(spec)
    return sorted(
        {
            module
            for name, weight in _weights(spec)
            if name in lora.names and "expert" not in weight.axes
            if (module := _within_layer(weight)).rpartition(".")[2] in ends
        }
    )


def expert_ends(spec: ModelSpec) -> set[str]:
    """Return the last parts of the experts' module names, for files with separate experts."""
    return {
        _within_layer(weight).rpartition(".")[2]
        for name, weight in _weights(spec)
        if _location(name, weight, one_by_one=True) and weight.hf_every is None
    }


def _weights(spec: ModelSpec) -> list[tuple[str, Weight]]:
    """Return the weights of all stacks with their names."""
    table = weight_table(spec)
    return [pair for stack in stacks_in(table) for pair in table[stack].items()]


def _within_layer(weight: Weight) -> str:
    return weight.hf.partition("{layer}.")[2].removesuffix(".weight")


def with_targets(spec: ModelSpec, lora: Lora, wanted: Iterable[str]) -> Lora | None:
    """Return the Lora of an adapter with exactly these target_parameters among the tensors with all
    experts. None if one of them does not exist.

    lora: has all modules that the adapter changes, and possibly experts.
    """
    every = [name for name, weight in _weights(spec) if weight.init == "normal"]
    whole = dataclasses.replace(lora, names=tuple(every))
    tensors = {
        tensor: set(found.parts)
        for tensor, found in expert_tensors(spec, whole, one_by_one=True).items()
    }
    for name, weight in _weights(spec):
        if name in every and "expert" not in weight.axes:
            tensors.setdefault(f"{_within_layer(weight)}.weight", set()).add(name)
    chosen: set[str] = set()
    for target in wanted:
        found = [t for t in tensors if t == target or t.endswith(f".{target}")]
        if not found:
            return None
        chosen.update(name for tensor in found for name in tensors[tensor])
    together = {name for t in expert_tensors(spec, whole).values() for name in t.parts}
    kept = {name for name in lora.names if name not in together} | chosen
    return dataclasses.replace(lora, names=tuple(dict.fromkeys(n for n in every if n in kept)))


def file_table(
    spec: ModelSpec, lora: Lora, *, one_input: bool = False, one_by_one: bool = False
) -> dict[str, Any]:
    """Return the table of the adapter's weights in files.

    Args:
        spec: spec of the decoder.
        lora: the adapted matrices.
        one_input: see lora.adapter_table.
        one_by_one: the model's files hold experts one by one, the adapter's file joins them.
    """
    table = adapter_table(spec, lora, one_input=one_input)
    whole = weight_table(spec)
    tensors = expert_tensors(spec, lora, one_by_one=one_by_one)
    for nth, (tensor, (parts, outputs)) in enumerate(tensors.items()):
        inner = ".base_layer" * (len(tensors) - 1 - nth)
        module = PEFT_PREFIX + tensor.rpartition(".")[0] + inner
        for stack in _stacks_with(whole, tuple(parts)):
            for name in parts:
                del table[stack][name + LORA_A], table[stack][name + LORA_B]
            first = next(iter(parts))
            layers, experts, inputs = whole[stack][first].shape[:3]
            numbers = whole[stack][first].numbers
            ranks = experts * lora.rank * (1 if one_input else len(parts))
            table[stack][first + LORA_A] = Weight(
                shape=(layers, inputs, ranks), axes=("layers", "", ""), init="uniform", decays=True,
                hf=f"{module}.lora_A.weight", hf_shape=(ranks, inputs), numbers=numbers,
            )  # fmt: skip
            table[stack][first + LORA_B] = Weight(
                shape=(layers, ranks, outputs), axes=("layers", "", ""), init="off", decays=True,
                hf=f"{module}.lora_B.weight", hf_shape=(outputs, ranks), numbers=numbers,
            )  # fmt: skip
    return table


def _stacks_with(table: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Return the stacks whose layers have experts with these names."""
    stacks = (s for s in stacks_in(table) if names[0] in table[s])
    return [stack for stack in stacks if "expert" in table[stack][names[0]].axes]


def as_filed(spec: ModelSpec, lora: Lora, adapter: Params) -> Params:
    """Return an adapter in the tree of file_table, each matrix with a separate A."""
    filed = {stack: dict(weights) for stack, weights in adapter.items()}
    whole = weight_table(spec)
    for parts, outputs in expert_tensors(spec, lora).values():
        for stack in _stacks_with(whole, tuple(parts)):
            _join(filed[stack], parts, outputs)
    return filed


def _join(layers: Params, parts: dict[str, slice], outputs: int) -> None:
    """Join the parts of a tensor's adapter in a stack."""
    inputs = jnp.concatenate([layers.pop(name + LORA_A) for name in parts], axis=-1)
    blocks = []
    for name, part in parts.items():
        own = layers.pop(name + LORA_B)
        wide = jnp.zeros((*own.shape[:-1], outputs), own.dtype)
        blocks.append(wide.at[..., part].set(own))
    first, whole = next(iter(parts)), jnp.concatenate(blocks, axis=-2)
    layers[first + LORA_A] = _flat(inputs.transpose(0, 2, 1, 3), last=True)
    layers[first + LORA_B] = _flat(whole.transpose(0, 2, 1, 3), last=False)


def _flat(x: Array, *, last: bool) -> Array:
    """Join the last two of four dimensions, or the two before the last."""
    a, b, c, d = x.shape
    return x.reshape((a, b, c * d) if last else (a, b * c, d))


def from_filed(spec: ModelSpec, lora: Lora, filed: Params, *, one_by_one: bool = False) -> Params:
    """Return an adapter in the tree of lora.adapter_table; an A shared by gate and up is in both.

    one_by_one: see file_table.
    """
    adapter = {stack: dict(weights) for stack, weights in filed.items()}
    whole = weight_table(spec)
    for parts, _ in expert_tensors(spec, lora, one_by_one=one_by_one).values():
        for stack in _stacks_with(whole, tuple(parts)):
            _divide(adapter[stack], parts, lora.rank, whole[stack][next(iter(parts))].shape[1])
    return adapter


def _divide(layers: Params, parts: dict[str, slice], rank: int, experts: int) -> None:
    """Separate the parts of a tensor's adapter in a stack."""
    first = next(iter(parts))
    a, b = (layers.pop(first + end) for end in (LORA_A, LORA_B))
    a = a.reshape(*a.shape[:2], experts, -1).transpose(0, 2, 1, 3)
    b = b.reshape(b.shape[0], -1, experts, b.shape[-1]).transpose(0, 2, 1, 3)
    shares = a.shape[-1] == rank
    for nth, (name, part) in enumerate(parts.items()):
        start = 0 if shares else nth * rank
        own = slice(start, start + rank)
        layers[name + LORA_A] = a[..., own]
        layers[name + LORA_B] = b[..., own, part]
