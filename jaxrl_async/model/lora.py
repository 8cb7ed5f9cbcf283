"""LoRA: low-rank trained changes of frozen matrices.

    x W  ->  x W + scale (x A) B        W [in, out], A [in, rank], B [rank, out]

Hu et al. 2021 (arXiv:2106.09685), sec. 4.1. The frozen weights are the base. A and B of all adapted
matrices are the adapter, a separate tree that is trained, saved and sent alone. Both are `joined`
for a forward pass: the decoder gets A and scaled B with each matrix. B is initialised to 0, so the
policy is initially equal to its base, bit for bit.
"""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.config.lora_section import ALL_LINEAR, LoraSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.dropout import Noise, drops
from jaxrl_async.model.families.family import HF_NAMES
from jaxrl_async.model.spec import (
    LORA_A,
    LORA_B,
    LORA_DROP,
    ModelSpec,
    Params,
    Weight,
    contracted,
    is_routing,
    stacks_in,
    weight_table,
)

RANK = "rank"
"""Logical axis of an adapter's inner width: replicated on every device."""

PEFT_PREFIX = "base_model.model."
"""PEFT's prefix of the names of a model's modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The adapted matrices of a decoder, and the settings of the adapter."""

    names: tuple[str, ...]  # of the layers' weights, in each stack with them (spec.weight_table)
    rank: int
    scale: float  # of the product with B: alpha / rank, or alpha / sqrt(rank)
    rslora: bool = False  # whether scale is alpha / sqrt(rank)
    spread: bool = True  # init of A: uniform like PEFT's; False: normal with deviation 1 / rank
    dropout: float = 0.0  # share of A's inputs that an update drops


def lora_of(spec: ModelSpec, section: LoraSection | None) -> Lora | None:
    """Return the Lora of a configuration; None: all weights are trained. Raises ConfigError if a
    target matches nothing."""
    if section is None:
        return None
    return Lora(
        names=_targets(spec, section.targets),
        rank=section.rank,
        scale=scale_of(section),
        rslora=section.rslora,
        spread=section.init == "uniform",
        dropout=section.dropout,
    )


def scale_of(section: LoraSection) -> float:
    """Return the factor of the product with B."""
    return section.alpha / (section.rank**0.5 if section.rslora else section.rank)


def _targets(spec: ModelSpec, wanted: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the weights that PEFT's target_modules selects: by the suffix of a
    module's name, or a pattern of the whole name. ALL_LINEAR: all except routers."""
    matrices: dict[str, set[str]] = {}  # the modules of all layers, by the names of their weights
    for weights in _stacks(spec).values():
        for name, weight in weights.items():
            if weight.init == "normal" and not is_routing(name):
                matrices.setdefault(name, set()).update(_modules(name, weight))
    if wanted == ALL_LINEAR or (not isinstance(wanted, str) and ALL_LINEAR in wanted):
        return tuple(matrices)
    if not wanted:
        raise ConfigError(
            "model.lora.targets: it is empty, so nothing would be trained. Name matrices, such as "
            f"q_proj, or use {ALL_LINEAR}."
        )
    chosen: list[str] = []
    for target in (wanted,) if isinstance(wanted, str) else wanted:
        found = [n for n, modules in matrices.items() if any(_matches(target, m) for m in modules)]
        if not found:
            ends = sorted({m.rpartition(".")[2] for each in matrices.values() for m in each})
            raise ConfigError(
                f"model.lora.targets: {target!r} is not a matrix of a layer of this {spec.family} "
                f"model. Choose from {', '.join(ends)}, or use {ALL_LINEAR}."
            )
        if not all(_matches(target, module) for name in found for module in matrices[name]):
            raise ConfigError(
                f"model.lora.targets: {target!r} selects only some layers, but all layers are "
                "adapted alike. Name matrices, such as q_proj, or match any layer, such as "
                r"model\.layers\.\d+\.self_attn\.q_proj."
            )
        chosen += found
    return tuple(name for name in matrices if name in chosen)


def modules_of(spec: ModelSpec, lora: Lora) -> dict[str, str]:
    """Return the names of the adapted modules in a Hugging Face model, for one layer and expert 0,
    by the names of their weights."""
    return {
        name: _modules(name, weights[name])[0]
        for weights in _stacks(spec).values()
        for name in lora.names
        if name in weights
    }


def _stacks(spec: ModelSpec) -> dict[str, dict[str, Weight]]:
    """Return the tables of the stacks of layers."""
    table = weight_table(spec)
    return {stack: table[stack] for stack in stacks_in(table)}


def _matches(target: str, module: str) -> bool:
    try:
        return module.endswith("." + target) or re.fullmatch(target, module) is not None
    except re.error as error:
        raise ConfigError(
            f"model.lora.targets: {target!r} is not a regular expression: {error}. Name matrices, "
            "such as q_proj, or correct it."
        ) from None


def _modules(name: str, weight: Weight) -> list[str]:
    """Return the names of a weight's modules in a Hugging Face model: all layers, expert 0."""
    module = _module(name, weight)
    return [module.format(layer=layer, expert=0) for layer in weight.numbers]


def _module(name: str, weight: Weight) -> str:
    """Return the name of a weight's modules with {layer} and {expert}. Experts that files hold in
    one tensor, for which PEFT has no modules, get the names of most families."""
    if weight.hf_every is None:
        return weight.hf.removesuffix(".weight")
    return f"model.layers.{{layer}}.{HF_NAMES['expert_' + name]}"


def adapter_table(spec: ModelSpec, lora: Lora, *, one_input: bool = False) -> dict[str, Any]:
    """Return the adapter's weights, in the tree of its parameters.

    one_input: matrices that files join (Phi-3's qkv_proj) have one A in the file, as trained by
    PEFT. Otherwise each matrix has its own A; the file concatenates them, with B in blocks.
    """
    table = {
        stack: _adapter_stack(
            {n: w for n, w in weights.items() if n in lora.names}, lora, one_input
        )
        for stack, weights in _stacks(spec).items()
    }
    return {stack: weights for stack, weights in table.items() if weights}


def joined_modules(spec: ModelSpec, lora: Lora) -> dict[str, int]:
    """Return the number of adapted matrices in modules that join several, by the suffix of the
    module's name."""
    modules = list(modules_of(spec, lora).values())
    counts = {module: modules.count(module) for module in modules}
    return {module.rpartition(".")[2]: n for module, n in counts.items() if n > 1}


def _adapter_stack(weights: dict[str, Weight], lora: Lora, one_input: bool) -> dict[str, Weight]:
    """Return the adapter's weights for these matrices of a stack."""
    table: dict[str, Weight] = {}
    rank = lora.rank
    for name in (n for n in lora.names if n in weights):
        weight, inner = weights[name], contracted(weights[name])
        shape, axes, stacked = weight.shape, weight.axes, weight.stacked
        module = PEFT_PREFIX + _module(name, weight)
        out = weight.hf_shape[0] if weight.hf_every is None else shape[-1]
        joined = [n for n in weights if _module(n, weights[n]) == _module(name, weight)]
        nth, of = (0, 1) if one_input else (joined.index(name), len(joined))
        own = (nth * rank, nth * rank + rank) if of > 1 else None
        table[name + LORA_A] = Weight(
            shape=(*shape[: inner.stop], lora.rank),
            axes=(*axes[: inner.stop], RANK),
            init="uniform" if lora.spread else "narrow",
            decays=True,
            fan_in=weight.fan_in if lora.spread else lora.rank**2,
            hf=f"{module}.lora_A.weight",
            hf_shape=(of * rank, weight.fan_in),
            hf_rows=own,
            numbers=weight.numbers,
        )
        table[name + LORA_B] = Weight(
            shape=(*shape[:stacked], lora.rank, *shape[inner.stop :]),
            axes=(*axes[:stacked], RANK, *axes[inner.stop :]),
            init="off",
            decays=True,
            hf=f"{module}.lora_B.weight",
            hf_shape=(out, of * rank),
            hf_rows=weight.hf_rows,
            hf_columns=own,
            numbers=weight.numbers,
        )
    return table


def trained_table(spec: ModelSpec, lora: Lora | None) -> dict[str, Any]:
    """Return the table of the trained weights: the adapter's, or all."""
    return weight_table(spec) if lora is None else adapter_table(spec, lora)


def scaled(lora: Lora, adapter: Params) -> Params:
    """Return an adapter with B times scale, for the decoder."""
    stacks = {
        stack: {
            name: array * jnp.asarray(lora.scale, array.dtype) if name.endswith(LORA_B) else array
            for name, array in adapter[stack].items()
        }
        for stack in stacks_in(adapter)
    }
    return {**adapter, **stacks}


def combined(base: Params, adapter: Params) -> Params:
    """Combine base and scaled adapter to one decoder's parameters. Other weights of the adapter,
    such as a head, replace the base's."""
    stacks = {stack: {**base[stack], **adapter[stack]} for stack in stacks_in(adapter)}
    return {**base, **adapter, **stacks}


def is_whole(params: Params) -> bool:
    """Return whether these are a decoder's parameters, not only an adapter's."""
    return not isinstance(params, dict) or "embed" in params


def joined(
    lora: Lora | None, base: Params | None, trained: Params, noise: Noise | None = None
) -> Params:
    """Return the decoder's parameters for a forward pass; only B is copied.

    Args:
        lora: the adapted matrices; None: all weights are trained.
        base: the frozen weights; None: no frozen weights.
        trained: the adapter, or all weights.
        noise: keys of the dropout of the adapter's inputs; None: no dropout.
    """
    if lora is None or base is None or is_whole(trained):
        return trained
    whole = combined(base, scaled(lora, trained))
    if noise is None or not lora.dropout:
        return whole
    stacks = {}
    for stack in stacks_in(trained):
        count = next(w.shape[0] for name, w in trained[stack].items() if name.endswith(LORA_A))
        drop = drops(lora.dropout, noise, stack, count)
        stacks[stack] = {**whole[stack], LORA_DROP: drop}
    return {**whole, **stacks}


def merged(spec: ModelSpec, lora: Lora, base: Params, adapter: Params) -> Params:
    """Return the base with the adapter's change added to its matrices, in the base's types: W +
    scale A B, summed in float32."""
    table = weight_table(spec)
    stacks = {
        stack: _merged_stack(table[stack], lora, base[stack], adapter[stack])
        for stack in stacks_in(adapter)
    }
    return {**base, **adapter, **stacks}


def _merged_stack(table: dict[str, Weight], lora: Lora, base: Params, adapter: Params) -> Params:
    layers = dict(base)
    for name in adapted_names(adapter):
        change = change_of(table[name], lora, adapter, name)
        layers[name] = (layers[name].astype(jnp.float32) + change).astype(layers[name].dtype)
    return layers


def change_of(weight: Weight, lora: Lora, layers: Params, name: str) -> Array:
    """Return scale A B in the shape of its matrix (`weight`, named `name`), float32; layers holds A
    and B."""
    lead, shape = weight.shape[: weight.stacked], weight.shape
    assert contracted(weight).start == weight.stacked, "inputs come first"
    a, b = (layers[name + end].astype(jnp.float32) for end in (LORA_A, LORA_B))
    change = lora.scale * (a.reshape(*lead, -1, lora.rank) @ b.reshape(*lead, lora.rank, -1))
    return change.reshape(shape)


def adapted_names(layers: Params) -> tuple[str, ...]:
    """Return the names of the matrices with an adapter among these weights of layers, and LORA_DROP
    if its inputs are dropped."""
    names = (n.removesuffix(LORA_A) for n in layers if n.endswith(LORA_A))
    return (*names, *(n for n in layers if n == LORA_DROP))


def with_adapter(spec: ModelSpec, table: dict[str, Any], params: Params) -> dict[str, Any]:
    """Return a decoder's table, including the parameters' adapter if they have one."""
    names = {
        n: params[stack]
        for stack in stacks_in(params)
        for n in adapted_names(params[stack])
        if n != LORA_DROP
    }
    if not names:
        return table
    rank = next(arrays[name + LORA_A].shape[-1] for name, arrays in names.items())
    adapter = adapter_table(spec, Lora(names=tuple(names), rank=rank, scale=1.0))
    return {**table, **{stack: {**table[stack], **adapter[stack]} for stack in adapter}}


def merged_on(spec: ModelSpec, lora: Lora, shardings: object) -> Any:
    """Return `merged` as a compiled function of base and adapter, with these output shardings."""
    return jax.jit(lambda base, adapter: merged(spec, lora, base, adapter), out_shardings=shardings)


def as_sent(lora: Lora, adapter: Params, dtype: DTypeLike) -> Params:
    """Return a new copy of an adapter for samplers: B times scale, in dtype."""
    return jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), scaled(lora, adapter))
