"""Adapters as files that PEFT reads and writes: adapter_config.json, adapter_model.safetensors."""

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from pydantic import ValidationError

from jaxrl_async.config.lora_section import ALL_LINEAR, LoraSection
from jaxrl_async.errors import CheckpointError, ConfigError
from jaxrl_async.model.families.family import HF_NAMES
from jaxrl_async.model.hf import (
    ADAPTER,
    ADAPTER_CONFIG,
    load_weights,
    read_adapter_config,
    save_adapter,
)
from jaxrl_async.model.lora import Lora, adapter_table, joined_modules, lora_of, modules_of
from jaxrl_async.model.peft_experts import (
    ONE_BY_ONE,
    as_filed,
    expert_ends,
    file_table,
    from_filed,
    target_parameters,
    with_targets,
)
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.model.tensorfile import read_header

log = logging.getLogger(__name__)

UNSUPPORTED = {
    "use_dora": "weights decomposed by DoRA",
    "modules_to_save": "whole modules beside the adapter",
    "layers_to_transform": "only some of the layers",
    "rank_pattern": "ranks that differ",
    "alpha_pattern": "scales that differ",
    "fan_in_fan_out": "matrices stored the other way round",
    "lora_bias": "biases of the adapter's own",
    "layer_replication": "layers that stand several times",
    "trainable_token_indices": "changed embeddings",
    "alora_invocation_tokens": "an adapter that begins within a sequence",
    "arrow_config": "adapters mixed by a router",
    "use_qalora": "inputs summed by groups",
    "use_bdlora": "block-diagonal matrices",
}
"""Settings of adapter_config.json that change what an adapter computes, and what they ask for."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of init_lora_weights that change the base, too: the adapter is of those weights."""


def save_peft(
    folder: str | Path, spec: ModelSpec, lora: Lora, adapter: Params, base: str | None
) -> None:
    """Write an adapter as PEFT's LoraConfig and its tensors.

    base: the directory or name of the model that it changes; None: it has none.
    """
    parameters = target_parameters(spec, lora)
    if parameters and lora.dropout:
        log.info(
            "%s: lora_dropout is written as 0, not %g: PEFT has none for experts, and it matters "
            "to training alone",
            folder,
            lora.dropout,
        )
    ends = {module.rpartition(".")[2] for module in modules_of(spec, lora).values()}
    if parameters:
        ends -= {HF_NAMES["expert_" + name].rpartition(".")[2] for name in ONE_BY_ONE}
        ends -= expert_ends(spec)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * _divisor(lora, lora.rank),
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        **_of_joined(spec, lora),
        "target_modules": sorted(ends),
    }
    if parameters:
        config["target_parameters"] = list(parameters)
    save_adapter(folder, config, file_table(spec, lora), as_filed(spec, lora, adapter))


def _divisor(lora: Lora, rank: int) -> float:
    """Return what PEFT divides alpha by, of a module of this rank."""
    return rank**0.5 if lora.rslora else rank


def _of_joined(spec: ModelSpec, lora: Lora) -> dict[str, Any]:
    """Return the rank and alpha of modules that join several matrices, each of which has an A of
    its own (lora.adapter_table)."""
    counts = joined_modules(spec, lora) | target_parameters(spec, lora)
    ranks = {module: n * lora.rank for module, n in counts.items() if n > 1}
    alphas = {module: lora.scale * _divisor(lora, rank) for module, rank in ranks.items()}
    return {"rank_pattern": ranks, "alpha_pattern": alphas} if ranks else {}


def load_peft(
    folder: str | Path, spec: ModelSpec, shardings_of: Any = None, dtype: Any = jnp.float32
) -> tuple[Lora, Params]:
    """Load an adapter that PEFT wrote for this model.

    Args:
        folder: with both files.
        spec: of the model that it changes.
        shardings_of: makes the shardings of a table of weights; None: the default device.
        dtype: of the arrays.

    Raises CheckpointError for an adapter of another kind or another model.
    """
    folder = Path(folder)
    config, where = read_adapter_config(folder), folder / ADAPTER_CONFIG
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{where}: peft_type {config.get('peft_type')!r} is not supported, only LORA."
        )
    lora = _adapted(spec, config, where)
    ours = _of_joined(spec, lora)
    for key, what in UNSUPPORTED.items():
        if config.get(key) and not _are(config[key], ours.get(key)):
            raise CheckpointError(f"{where}: {key} ({what}) is not supported.")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{where}: bias {config['bias']!r} is not supported, only none.")
    made = config.get("init_lora_weights")
    if isinstance(made, str) and made.lower().startswith(CHANGES_BASE):
        raise CheckpointError(
            f"{where}: init_lora_weights {made!r} has changed the base that this adapter is of. "
            "Convert it: PEFT's save_pretrained(FOLDER, path_initial_model_for_weight_conversion=)."
        )
    together = has_together(folder / ADAPTER)
    one_input = not config.get("rank_pattern")
    filed = file_table(spec, lora, one_input=one_input, one_by_one=together)
    read = load_weights(folder, filed, shardings_of and shardings_of(filed), dtype, single=ADAPTER)
    if not together:
        return lora, read
    where_to = shardings_of and shardings_of(adapter_table(spec, lora))
    divided = partial(from_filed, spec, lora, one_by_one=True)
    return lora, jax.jit(divided, out_shardings=where_to)(read)


def has_together(file: Path) -> bool:
    """Return whether an adapter's file holds all experts of a layer in one tensor. Raises
    CheckpointError."""
    ends = (".experts.lora_A.weight", ".experts.base_layer.lora_A.weight")
    return file.exists() and any(name.endswith(ends) for name in read_header(file))


def _are(said: Any, ours: Any) -> bool:
    """Return whether a setting is the one that is computed here; rank_pattern and alpha_pattern may
    have the ends of names, as PEFT writes those that it makes itself (".*\\.gate_up_proj")."""
    if not isinstance(said, dict) or not isinstance(ours, dict) or len(said) != len(ours):
        return bool(said == ours)
    ends = {str(key).removeprefix(r".*\.").replace("\\", ""): value for key, value in said.items()}
    return all(
        any(name == end or name.endswith("." + end) for end in ends if ends[end] == value)
        for name, value in ours.items()
    )


def _adapted(spec: ModelSpec, config: dict[str, Any], where: Path) -> Lora:
    """Return what an adapter changes: modules, and tensors of all experts. Raises
    CheckpointError."""
    try:
        lora = lora_of(spec, _section(config, where))
    except ConfigError as error:  # told of the setting, which nobody has set
        raise CheckpointError(
            f"{where}: target_modules {config.get('target_modules')!r:.200} are not those of this "
            f"{spec.family} model, or beyond its layers' matrices, which alone are adapted here. "
            f"({error})"
        ) from error
    assert lora is not None
    wanted = config.get("target_parameters") or []
    right = isinstance(wanted, list) and all(isinstance(name, str) for name in wanted)
    if not config.get("target_modules", ALL_LINEAR):  # experts alone
        lora = replace(lora, names=())
    found = with_targets(spec, lora, wanted) if right else None
    if found is None or not found.names:
        raise CheckpointError(
            f"{where}: target_parameters {wanted!r:.200} is not supported for this {spec.family} "
            "model, only a list of tensors that hold all experts of a layer."
        )
    return found


def _section(config: dict[str, Any], where: Path) -> LoraSection:
    """Return the settings that an adapter was made with. Raises CheckpointError."""
    targets = config.get("target_modules", ALL_LINEAR)
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    dropout: Any = config.get("lora_dropout", 0.0)
    right = type(rank) is int and rank > 0 and type(alpha) in (int, float) and alpha > 0
    right = right and type(dropout) in (int, float) and 0 <= dropout < 1
    named = isinstance(targets, str) or (
        isinstance(targets, list) and all(isinstance(t, str) for t in targets)
    )
    if not right or not named:
        raise CheckpointError(
            f"{where}: r, lora_alpha, lora_dropout and target_modules must be a whole number above "
            "0, a number above 0, one from 0 to below 1, and a text or a list of texts. Copy the "
            "file again."
        )
    try:
        return LoraSection(
            rank=rank,
            alpha=alpha,
            rslora=bool(config.get("use_rslora")),
            dropout=dropout,
            targets=_of_any_layer(targets),
        )
    except ValidationError as error:  # a rank or an alpha beyond all limits
        first = error.errors()[0]
        raise CheckpointError(f"{where}: {first['loc'][0]}: {first['msg']}.") from None


def _of_any_layer(targets: str | list[str]) -> str | tuple[str, ...]:
    """Return target_modules with one pattern for a module of all layers, which PEFT writes one by
    one; a layer that has none is missing in the file. None at all: whatever there is."""
    if not targets:
        return ALL_LINEAR
    if isinstance(targets, str):
        return targets
    any_layer = r"model\\.layers\\.\\d+\\."
    return tuple(sorted({re.sub(r"^model\.layers\.\d+\.", any_layer, t) for t in targets}))
