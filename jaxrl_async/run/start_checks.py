"""Checks before a run begins: the names and the paths in its configuration."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxrl_async.algorithms.preflight import check_algorithm
from jaxrl_async.algorithms.registry import is_absent
from jaxrl_async.config.schema import AlgorithmSection, Config, each_of, name_of
from jaxrl_async.config.several import merged, runs_of
from jaxrl_async.config.task_section import section_of_task
from jaxrl_async.config.userfile import is_own, load_function
from jaxrl_async.data.addresses import is_address, is_remote, local_folder
from jaxrl_async.data.hub import hub_records, is_hub_name, records_folder
from jaxrl_async.errors import ConfigError, naming
from jaxrl_async.later import Later
from jaxrl_async.scorers.rewards import find_reward
from jaxrl_async.trainer.optimizer import check_optimizer

if TYPE_CHECKING:
    from jaxrl_async.algorithms import answer_pairs, preference_losses
    from jaxrl_async.run import callbacks as user_callbacks
    from jaxrl_async.tasks import named_tasks
else:
    answer_pairs = Later("jaxrl_async.algorithms.answer_pairs")
    preference_losses = Later("jaxrl_async.algorithms.preference_losses")
    user_callbacks = Later("jaxrl_async.run.callbacks")
    named_tasks = Later("jaxrl_async.tasks.named_tasks")

NAMED = ("evals", "tasks", "teachers")
"""Settings that hold a section for each name."""


def check_names(config: Config) -> None:
    """Raise ConfigError if a function that the configuration names is unknown or refuses its
    arguments. User files that are missing here are checked on the machine that trains."""
    if "JAX_PLATFORMS" not in os.environ:  # another process may hold the accelerator
        jax.config.update("jax_platforms", "cpu")
    if not is_absent(config.trainer.optimizer):
        check_optimizer(config.trainer)
    for choice in config.run.callbacks:
        if not is_absent(choice):
            user_callbacks.load_class(name_of(choice))
    if config.run.job == "preference":
        preference_losses.preference_loss.resolve(config.preference.loss)
    for name, own in config.by_task.items():
        if own.task is not None and not is_absent(own.task):
            with naming(section_of_task(name)):
                named_tasks.check_task_name(own.task)
    if config.run.job != "rl":
        return
    for setting, function in (("mixing", config.mixing), ("buffer.select", config.buffer.select)):
        if function is not None and is_own(function) and not is_absent(function):
            load_function(function, setting)
    check_algorithm(_without_absent_files(config.algorithm), config.teacher)
    if config.pairs is not None and not is_absent(config.pairs.loss):
        answer_pairs.pairs_loss(config.pairs.loss)
    of_evals = config.named_evals.items()
    for name, section in of_evals:
        if section.task is not None and not is_absent(section.task):
            with naming(f"evals.{name}"):
                named_tasks.check_task_name(section.task, tuple(config.named_tasks))
    rewards = [(section_of_task(n), c.reward.function) for n, c in config.by_task.items()]
    rewards += [(f"evals.{n}", s.reward) for n, s in of_evals if s.reward is not None]
    for where, choice in [(where, choice) for where, f in rewards for choice in each_of(f)]:
        if name_of(choice) != "none" and not is_absent(choice):
            with naming(where):
                find_reward(name_of(choice))


def _without_absent_files(algorithm: AlgorithmSection) -> AlgorithmSection:
    """Return the section with defaults for the functions whose file is missing."""
    fields = ("advantage", "correction", "loss", "kl", "aggregate", "shaping")
    absent = [f for f in fields if any(map(is_absent, each_of(getattr(algorithm, f))))]
    defaults = AlgorithmSection()
    return algorithm.model_copy(update={field: getattr(defaults, field) for field in absent})


def with_hub_folders(config: Config) -> Config:
    """Return the configuration with folders in place of names (owner/name) of models and tokenizers
    on the Hugging Face hub: from its cache, or downloaded. Records by name are downloaded, too;
    files at an address (gs://...) are copied here; a GGUF file gets a folder in the cache. Raises
    ConfigError within seconds if they are not available."""
    if fetched := _fetch(config):
        config = Config.model_validate(merged(config.model_dump(), fetched))
    if not config.runs:
        return config
    runs = {
        name: merged(config.runs[name], _fetch(own, f"runs.{name}."))
        for name, own in runs_of(config).items()
    }
    return config.model_copy(update={"runs": runs})


def with_records_here(config: Config) -> Config:
    """Return the configuration with copies in place of records at an address; records on the hub
    are downloaded. Raises ConfigError."""
    fetched = _fetch(config, kinds=("dataset",))
    return Config.model_validate(merged(config.model_dump(), fetched)) if fetched else config


def _fetch(
    config: Config, of_run: str = "", kinds: Sequence[str] = ("dataset", "model", "tokenizer")
) -> dict[str, Any]:
    """Fetch the files on the hub and at addresses that a configuration names; return the settings
    of the copies, as a tree.

    of_run: prefix of the names of settings in messages. kinds: that are fetched, see `_read`.
    """
    tree: dict[str, Any] = {}
    for setting, path, kind in (found for found in _read(config) if found[2] in kinds):
        if is_address(path) or (kind != "dataset" and is_remote(path)):
            _put(tree, _names(setting), local_folder(path, of_run + setting, kind))
        elif kind == "dataset" and (records := hub_records(path)) is not None:
            records_folder(records, of_run + setting)
    for section in tree.keys() & NAMED:  # whole, since `merged` replaces them
        tree[section] = {
            name: merged(one.model_dump(exclude_unset=True), tree[section].get(name, {}), type(one))
            for name, one in getattr(config, section).items()
        }
    return tree


def _names(setting: str) -> Sequence[str]:
    """Return the names of a setting and its sections; an evaluation's name may have dots."""
    if not setting.startswith("evals."):
        return setting.split(".")
    return ["evals", *setting.removeprefix("evals.").rsplit(".", 1)]


def _put(tree: dict[str, Any], names: Sequence[str], path: Path) -> None:
    """Set the setting of these names in a tree."""
    *sections, last = names
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = str(path)


def hub_names(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield the run's sources on the Hugging Face hub: the setting, its value, and the kind of
    hub.model_folder, or "dataset"."""
    for setting, path, kind in _read(config):
        if hub_records(path) is not None if kind == "dataset" else is_hub_name(path):
            yield setting, path, kind


def _read(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield the run's inputs: the setting, the path that it names, and its kind, as hub_names."""
    for setting, path in _folders(config):
        if path is not None:
            yield setting, path, "tokenizer" if setting.endswith(".tokenizer") else "model"
    for setting, path in _files(config):
        if path is not None:
            yield setting, path, "dataset"


def check_paths(config: Config) -> None:
    """Raise ConfigError if a setting names a directory or a file that does not exist.

    os.path handles names that are too long to exist; pathlib raises.
    """
    for setting, path in _folders(config):
        if path is not None and not os.path.isdir(path):
            raise ConfigError(_missing(setting, path, "folder"))
    for setting, path in _files(config):
        if path is not None and not os.path.exists(path) and hub_records(path) is None:
            raise ConfigError(_missing(setting, path, "file"))


def _folders(config: Config) -> Iterator[tuple[str, str | None]]:
    """Yield the Hugging Face directories that the run will open."""
    yield "model.path", config.model.path
    yield "data.tokenizer", config.data.tokenizer
    if config.run.job == "preference":
        yield "preference.reference", config.preference.reference
    if config.run.job == "rl":
        yield from config.teacher_folders.items()
        for name, one in config.named_teachers.items():
            yield f"teachers.{name}.adapter", one.adapter
            yield f"teachers.{name}.tokenizer", one.tokenizer
        yield "critic.path", config.critic_settings.path
        yield "reward.model", config.reward.model
        for name, task in config.named_tasks.items():
            if task.reward is not None:
                yield f"tasks.{name}.reward.model", task.reward.model
        if config.refers:
            yield "reference.path", config.reference_settings.path


def _files(config: Config) -> Iterator[tuple[str, str | None]]:
    """Yield the files of records that the run will read."""
    yield "data.jsonl.path", config.data.records_path
    yield "data.jsonl.eval_path", config.data.record_fields.eval_path
    if config.data.chat_format.endswith(".jinja"):
        yield "data.chat_format", config.data.chat_format
    if config.warm_start.steps:
        yield "warm_start.path", config.warm_start.path
    for name, one in config.named_evals.items():
        yield f"evals.{name}.data", one.data
    for name, task in config.named_tasks.items():
        if task.data is not None:
            yield f"tasks.{name}.data.jsonl.path", task.data.records_path
            yield f"tasks.{name}.data.jsonl.eval_path", task.data.record_fields.eval_path


def _missing(setting: str, path: str, what: str) -> str:
    return (
        f"{setting} = {path!r}: there is no such {what} here. Correct the path; a relative path "
        f"starts at {Path.cwd()}."
    )
