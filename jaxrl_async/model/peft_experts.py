"""The experts' part of an adapter as PEFT has it (target_parameters), of models whose files hold
all experts of a layer in one tensor.

    lora_A [E * R, in]     expert e: rows e * R to e * R + R
    lora_B [out, R * E]    expert e: columns e, e + E, ...

PEFT wraps each such tensor, the second one around the first. gate and up are one tensor: with A of
their own, R is twice the rank, and B has them in blocks.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

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


def expert_tensors(spec: ModelSpec, lora: Lora) -> dict[str, tuple[str, ...]]:
    """Return the adapted weights in tensors of all experts, by the names of these tensors with
    {layer}, in the order of the model; empty: files hold experts one by one, or none is adapted."""
    table = weight_table(spec)
    found: dict[str, list[str]] = {}
    for stack in stacks_in(table):
        for name, weight in table[stack].items():
            if weight.hf_every is not None and name in lora.names:
                found.setdefault(weight.hf, []).append(name)
    return {tensor: tuple(names) for tensor, names in found.items()}


def target_parameters(spec: ModelSpec, lora: Lora) -> dict[str, int]:
    """Return PEFT's names of the adapted tensors of all experts, and how many matrices with an A of
    their own each has."""
    tensors = expert_tensors(spec, lora)
    return {name.partition("{layer}.")[2]: len(parts) for name, parts in tensors.items()}


def with_targets(spec: ModelSpec, lora: Lora, wanted: Iterable[str]) -> Lora | None:
    """Return how an adapter changes a decoder whose target_parameters are these, and no other
    tensor of all experts; None: one of them is none.

    lora: with all modules that it changes, and maybe experts.
    """
    of_experts = expert_tensors(
        spec, dataclasses.replace(lora, names=tuple(_experts_of(weight_table(spec))))
    )
    chosen: set[str] = set()
    for target in wanted:
        found = [t for t in of_experts if t == target or t.endswith(f".{target}")]
        if not found:
            return None
        chosen.update(name for tensor in found for name in of_experts[tensor])
    outside = {name for names in of_experts.values() for name in names} - chosen
    modules = [name for name in lora.names if name not in outside and name not in chosen]
    order = [name for names in of_experts.values() for name in names if name in chosen]
    return dataclasses.replace(lora, names=(*modules, *order))


def _experts_of(table: dict[str, Any]) -> list[str]:
    """Return the names of the matrices that files hold in tensors of all experts."""
    stacks = (table[stack] for stack in stacks_in(table))
    return [
        name
        for weights in stacks
        for name, weight in weights.items()
        if weight.hf_every is not None and weight.init == "normal"
    ]


def file_table(spec: ModelSpec, lora: Lora, *, one_input: bool = False) -> dict[str, Any]:
    """Return the adapter's weights as files have them; one_input: see lora.adapter_table."""
    table = adapter_table(spec, lora, one_input=one_input)
    whole = weight_table(spec)
    tensors = expert_tensors(spec, lora)
    for nth, (tensor, names) in enumerate(tensors.items()):
        inner = ".base_layer" * (len(tensors) - 1 - nth)
        module = PEFT_PREFIX + tensor.rpartition(".")[0] + inner
        stack = next(s for s in stacks_in(whole) if names[0] in whole[s])
        weight = whole[stack][names[0]]
        layers, experts, inputs = weight.shape[:3]
        ranks = experts * lora.rank * (1 if one_input else len(names))
        for name in names:
            del table[stack][name + LORA_A], table[stack][name + LORA_B]
        table[stack][names[0] + LORA_A] = Weight(
            shape=(layers, inputs, ranks), axes=("layers", "", ""), init="uniform",
            hf=f"{module}.lora_A.weight", hf_shape=(ranks, inputs), numbers=weight.numbers,
        )  # fmt: skip
        table[stack][names[0] + LORA_B] = Weight(
            shape=(layers, ranks, weight.hf_shape[-1]), axes=("layers", "", ""), init="off",
            hf=f"{module}.lora_B.weight", hf_shape=(weight.hf_shape[-1], ranks),
            numbers=weight.numbers,
        )  # fmt: skip
    return table


def as_filed(spec: ModelSpec, lora: Lora, adapter: Params) -> Params:
    """Return an adapter in the tree of file_table, each matrix with an A of its own."""
    filed = {stack: dict(weights) for stack, weights in adapter.items()}
    whole = weight_table(spec)
    for names in expert_tensors(spec, lora).values():
        stack = next(s for s in stacks_in(whole) if names[0] in whole[s])
        layers = filed[stack]
        inputs = jnp.concatenate([layers.pop(name + LORA_A) for name in names], axis=-1)
        blocks = []
        for name in names:
            own = layers.pop(name + LORA_B)
            first, step = whole[stack][name].hf_every or (0, 1)
            wide = jnp.zeros((*own.shape[:-1], whole[stack][name].hf_shape[-1]), own.dtype)
            blocks.append(wide.at[..., first::step].set(own))
        outputs = jnp.concatenate(blocks, axis=-2)
        layers[names[0] + LORA_A] = _flat(inputs.transpose(0, 2, 1, 3), last=True)
        layers[names[0] + LORA_B] = _flat(outputs.transpose(0, 2, 1, 3), last=False)
    return filed


def _flat(x: Array, *, last: bool) -> Array:
    """Join the last two of four dimensions, or the two before the last."""
    a, b, c, d = x.shape
    return x.reshape((a, b, c * d) if last else (a, b * c, d))


def from_filed(spec: ModelSpec, lora: Lora, filed: Params) -> Params:
    """Return an adapter in the tree of lora.adapter_table; an A that gate and up share is in
    both."""
    adapter = {stack: dict(weights) for stack, weights in filed.items()}
    whole = weight_table(spec)
    for names in expert_tensors(spec, lora).values():
        stack = next(s for s in stacks_in(whole) if names[0] in whole[s])
        layers = adapter[stack]
        experts = whole[stack][names[0]].shape[1]
        a, b = (layers.pop(names[0] + end) for end in (LORA_A, LORA_B))
        a = a.reshape(*a.shape[:2], experts, -1).transpose(0, 2, 1, 3)
        b = b.reshape(b.shape[0], -1, experts, b.shape[-1]).transpose(0, 2, 1, 3)
        shares = a.shape[-1] == lora.rank
        for nth, name in enumerate(names):
            first, step = whole[stack][name].hf_every or (0, 1)
            start = 0 if shares else nth * lora.rank
            own = slice(start, start + lora.rank)
            layers[name + LORA_A] = a[..., own]
            layers[name + LORA_B] = b[..., own, first::step]
    return adapter
