"""Adapters as files in PEFT's format: adapter_config.json, adapter_model.safetensors."""

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
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
    "modules_to_save": "whole modules in addition to the adapter",
    "layers_to_transform": "only some of the layers",
    "rank_pattern": "different ranks",
    "alpha_pattern": "different scales",
    "fan_in_fan_out": "transposed matrices",
    "lora_bias": "biases in the adapter",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "trained embeddings",
    "alora_invocation_tokens": "an adapter that begins within a sequence",
    "arrow_config": "adapters mixed by a router",
    "use_qalora": "inputs summed by groups",
    "use_bdlora": "block-diagonal matrices",
}
"""Unsupported settings of adapter_config.json that change the adapter's function, and their
meaning."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of init_lora_weights that also change the base; the adapter belongs to that base."""


def save_peft(
    folder: str | Path, spec: ModelSpec, lora: Lora, adapter: Params, base: str | None
) -> None:
    """Write an adapter as PEFT's LoraConfig and its tensors.

    base: directory or name of the base model; None: unnamed.
    """
    parameters = target_parameters(spec, lora)
    if parameters and lora.dropout:
        log.info(
            "%s: lora_dropout is written as 0, not %g: PEFT does not support it for experts, and "
            "it matters only in training",
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
    """Return PEFT's divisor of alpha for a module of this rank."""
    return rank**0.5 if lora.rslora else rank


def _of_joined(spec: ModelSpec, lora: Lora) -> dict[str, Any]:
    """Return the rank and alpha of modules that join several matrices with separate A matrices
    (lora.adapter_table)."""
    counts = joined_modules(spec, lora) | target_parameters(spec, lora)
    ranks = {module: n * lora.rank for module, n in counts.items() if n > 1}
    alphas = {module: lora.scale * _divisor(lora, rank) for module, rank in ranks.items()}
    return {"rank_pattern": ranks, "alpha_pattern": alphas} if ranks else {}


def load_peft(
    folder: str | Path, spec: ModelSpec, shardings_of: Any = None, dtype: DTypeLike = jnp.float32
) -> tuple[Lora, Params]:
    """Load an adapter that PEFT wrote for this model.

    Args:
        folder: directory with both files.
        spec: spec of the base model.
        shardings_of: makes the shardings of a table of weights; None: the default device.
        dtype: type of the arrays.

    Raises CheckpointError for an adapter of another kind or another model.
    """
    folder = Path(folder)
    config, where = read_adapter_config(folder), folder / ADAPTER_CONFIG
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{where}: peft_type {config.get('peft_type')!r} is not supported, only LORA."
        )
    lora = _adapted(spec, config, where)
    joined = _of_joined(spec, lora)
    for key, what in UNSUPPORTED.items():
        if config.get(key) and not _are(config[key], joined.get(key)):
            raise CheckpointError(f"{where}: {key} ({what}) is not supported.")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{where}: bias {config['bias']!r} is not supported, only none.")
    made = config.get("init_lora_weights")
    if isinstance(made, str) and made.lower().startswith(CHANGES_BASE):
        raise CheckpointError(
            f"{where}: init_lora_weights {made!r} changed the base model of this adapter. "
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


def _are(found: object, expected: object) -> bool:
    """Return whether a setting is equal to the expected one. rank_pattern and alpha_pattern may
    have suffixes of names, as in the patterns that PEFT generates (".*\\.gate_up_proj")."""
    if not isinstance(found, dict) or not isinstance(expected, dict) or len(found) != len(expected):
        return bool(found == expected)
    ends = {str(key).removeprefix(r".*\.").replace("\\", ""): value for key, value in found.items()}
    return all(
        any(name == end or name.endswith("." + end) for end in ends if ends[end] == value)
        for name, value in expected.items()
    )


def _adapted(spec: ModelSpec, config: dict[str, Any], where: Path) -> Lora:
    """Return the modules and the expert tensors that an adapter changes. Raises
    CheckpointError."""
    try:
        lora = lora_of(spec, _section(config, where))
    except ConfigError as error:  # it names a setting that the user has not set
        raise CheckpointError(
            f"{where}: target_modules {config.get('target_modules')!r:.200} do not match this "
            f"{spec.family} model, or are outside its layers' matrices; only these can be adapted. "
            f"({error})"
        ) from error
    assert lora is not None
    wanted = config.get("target_parameters") or []
    right = isinstance(wanted, list) and all(isinstance(name, str) for name in wanted)
    if not config.get("target_modules", ALL_LINEAR):  # only experts
        lora = replace(lora, names=())
    found = with_targets(spec, lora, wanted) if right else None
    if found is None or not found.names:
        raise CheckpointError(
            f"{where}: target_parameters {wanted!r:.200} is not supported for this {spec.family} "
            "model, only a list of tensors that hold all experts of a layer."
        )
    return found


def _section(config: dict[str, Any], where: Path) -> LoraSection:
    """Return the settings of an adapter's training. Raises CheckpointError."""
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
            f"{where}: r must be a whole number above 0, lora_alpha a number above 0, lora_dropout "
            "a number from 0 to below 1, and target_modules a text or a list of texts. Copy the "
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
    except ValidationError as error:  # a rank or an alpha beyond the limits
        first = error.errors()[0]
        raise CheckpointError(f"{where}: {first['loc'][0]}: {first['msg']}.") from None


def _of_any_layer(targets: str | list[str]) -> str | tuple[str, ...]:
    """Return target_modules with one pattern for a module of all layers, which PEFT lists per
    layer; a layer without an adapter is missing in the file. An empty list: all modules."""
    if not targets:
        return ALL_LINEAR
    if isinstance(targets, str):
        return targets
    any_layer = r"model\\.layers\\.\\d+\\."
    return tuple(sorted({re.sub(r"^model\.layers\.\d+\.", any_layer, t) for t in targets}))
