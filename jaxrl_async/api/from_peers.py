"""A script of TRL's as arguments of `jaxrl_async.train`."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from jaxrl_async.config.peers.counterpart import NoCounterpart, converted
from jaxrl_async.config.peers.peer_files import nested, notes_of
from jaxrl_async.config.peers.trl_fields import TRL, lora_of
from jaxrl_async.errors import ConfigError

log = logging.getLogger(__name__)

COMPUTED = (
    "activation_checkpointing",
    "dataloader_pin_memory",
    "disable_tqdm",
    "generation_batch_size",
    "pad_to_multiple_of",
)
"""Fields that TRL's configuration fills itself where they are not given."""
SAME = {"model": "model", "train_dataset": "data", "eval_dataset": "eval_data", "tools": "tools"}
"""Arguments of GRPOTrainer that have a counterpart of the same meaning."""


def from_trl(
    args: Any,
    *,
    model: Any = None,
    reward_funcs: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    peft_config: Any = None,
    tools: Sequence[Any] | None = None,
    devices: int | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return TRL's GRPOConfig and arguments of its GRPOTrainer as arguments of `train`:

        train(**from_trl(GRPOConfig(...), model=..., reward_funcs=..., train_dataset=...))

    Settings that are not given have TRL's defaults. What has no counterpart, or another meaning, is
    logged. TRL need not be installed. Raises ConfigError for arguments that cannot be converted.

    Args:
        args: a GRPOConfig, or its fields as a mapping.
        model: a name, or a folder.
        reward_funcs: functions, or one; their weights are args.reward_weights.
        train_dataset: records to train on.
        eval_dataset: held-out records.
        peft_config: PEFT's LoraConfig, or its fields as a mapping.
        tools: functions that the policy may call.
        devices: number of devices that train there; None: args.world_size, or 1.
        others: further arguments of GRPOTrainer.
    """
    config = _fields_of(args)
    devices = devices or int(getattr(args, "world_size", 1) or 1)
    records = len(train_dataset) if hasattr(train_dataset, "__len__") else None
    weights = config.pop("reward_weights", None)
    conversion = converted(TRL, config, devices=devices, records=records)
    unconverted = dict(conversion.unconverted)
    for name, value in others.items():
        if name not in TRL.arguments:
            raise ConfigError(f"from_trl: GRPOTrainer of TRL has no argument {name}.")
        if value is not None:
            reason = TRL.arguments[name].reason
            unconverted[name] = reason or f"give {TRL.arguments[name].settings[0].path} to train"
    settings = dict(conversion.settings)
    if peft_config is not None:
        try:
            settings["model.lora"] = lora_of(peft_config)
        except NoCounterpart as error:
            raise ConfigError(f"from_trl: {error}.") from None
    for name, reason in unconverted.items():
        log.warning("from_trl: %s has no counterpart: %s", name, reason)
    for note in notes_of(TRL, conversion):
        log.info("from_trl: %s", note)
    arguments = {"config": nested(settings)}
    trainer = {"model": model, "train_dataset": train_dataset, "eval_dataset": eval_dataset}
    for name, value in {**trainer, "tools": tools}.items():
        if value is not None:
            arguments[SAME[name]] = value
    if reward_funcs is not None:
        arguments["reward"] = _weighed(reward_funcs, weights, config)
    return arguments


def _fields_of(args: object) -> dict[str, Any]:
    """Return the fields of a configuration by name."""
    if isinstance(args, Mapping):
        return dict(args)
    if not is_dataclass(args) or isinstance(args, type):
        raise ConfigError(
            f"from_trl: args is a {type(args).__name__}. Give TRL's GRPOConfig, or its fields as a "
            "mapping."
        )
    values = {f.name: getattr(args, f.name) for f in fields(args)}
    return {name: value for name, value in values.items() if name not in COMPUTED}


def _weighed(functions: Any, weights: Sequence[float] | None, config: Mapping[str, Any]) -> Any:
    """Return reward functions with their weights. Raises ConfigError."""
    if weights is None:
        return functions
    each = list(functions) if isinstance(functions, Sequence) else [functions]
    if len(each) != len(weights) or isinstance(functions, str):
        raise ConfigError(f"from_trl: {len(weights)} reward_weights, but other reward_funcs.")
    if config.get("multi_objective_aggregation") == "normalize_then_sum":
        raise ConfigError(
            "from_trl: reward_weights after a normalisation are the weights of parts by name: "
            "algorithm.advantage={gdpo: {weights: {NAME: 0.5}}}. Leave reward_weights out."
        )
    if not all(callable(function) for function in each):
        raise ConfigError("from_trl: reward_weights are for reward_funcs that are functions.")
    return [weighed(f, float(w)) for f, w in zip(each, weights, strict=True)]


def weighed(function: Callable[..., object], weight: float) -> Callable[..., Any]:
    """Return a reward function times a weight, under its own name and with its own arguments. None
    stays None, and so do items of a list that are None."""

    def scaled(result: Any) -> Any:
        if result is None:
            return None
        if isinstance(result, Mapping):
            return {name: scaled(value) for name, value in result.items()}
        if isinstance(result, list | tuple):
            return [scaled(value) for value in result]
        return weight * result

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waited(*values: Any, **named: Any) -> Any:
            return scaled(await function(*values, **named))

        return waited

    @functools.wraps(function)
    def called(*values: Any, **named: Any) -> Any:
        return scaled(function(*values, **named))

    return called
