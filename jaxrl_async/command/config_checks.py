"""Check a machine for a configuration: files, extras, tokenizer, functions, devices, memory.
Nothing is trained, and no weight is read."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp

from jaxrl_async.algorithms.registry import is_absent
from jaxrl_async.command.diagnostic import Diagnostic, gib
from jaxrl_async.command.machine import Devices, check_disk
from jaxrl_async.config.schema import Choice, Config, each_of, name_of
from jaxrl_async.data.addresses import is_address
from jaxrl_async.data.gguf_file import is_gguf
from jaxrl_async.data.hub import cached_folder, hub_records
from jaxrl_async.errors import JaxrlError, naming
from jaxrl_async.host import host_memory, more_of_a_gpu
from jaxrl_async.model.lora import lora_of, trained_table
from jaxrl_async.model.spec import ModelSpec, num_in, num_weights
from jaxrl_async.run.builders.device_memory import both_bytes, sampler_bytes, trainer_bytes
from jaxrl_async.run.builders.devices import CACHE_FOLDER
from jaxrl_async.run.builders.initial_policy import make_tokenizer, spec_of_run
from jaxrl_async.run.builders.playing import tasks_of, tokenizer_source
from jaxrl_async.run.start_checks import check_names, check_paths, hub_names, with_hub_folders
from jaxrl_async.tasks.named_tasks import files_of, is_of_library, load_task
from jaxrl_async.tasks.task import Task
from jaxrl_async.trainer.optimizer import optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """An optional dependency, and which configurations use it."""

    name: str
    module: str
    used_by: Callable[[Config], str | None]  # the setting that needs it, or None


def _task(library: str) -> Callable[[Config], str | None]:
    def used(config: Config) -> str | None:
        tasks = {f"tasks.{n}.task" if n else "task": c.task for n, c in config.by_task.items()}
        tasks |= {f"evals.{n}.task": section.task for n, section in config.named_evals.items()}
        named = ((setting, name_of(task)) for setting, task in tasks.items() if task is not None)
        uses = (f"{where}={name}" for where, name in named if name.partition(":")[0] == library)
        return next(uses, None)

    return used


def _records(config: Config) -> str | None:
    paths = [config.warm_start.path]
    for files in (own.data.record_fields for own in config.by_task.values()):
        paths += [files.path, files.eval_path]
    paths += [section.data for section in config.named_evals.values()]
    tables = [p for p in paths if p and (p.endswith(".parquet") or os.path.isdir(p))]
    return f"records in {tables[0]}" if tables else None


def _gguf(config: Config) -> str | None:
    settings = {
        "model.path": config.model.path,
        "data.tokenizer": config.data.tokenizer,
        **config.teacher_folders,
        **{f"teachers.{name}.tokenizer": t.tokenizer for name, t in config.named_teachers.items()},
        "critic.path": config.critic_settings.path,
        "reference.path": config.reference_settings.path,
        "preference.reference": config.preference.reference,
        "reward.model": config.reward.model,
        **{f"tasks.{n}.reward.model": c.reward.model for n, c in config.by_task.items() if n},
    }
    named = (f"{name}={path}" for name, path in settings.items() if path and is_gguf(path))
    return next(named, None)


EXTRAS = (
    Extra(name="gguf", module="gguf", used_by=_gguf),
    Extra(name="reasoning_gym", module="reasoning_gym", used_by=_task("reasoning_gym")),
    Extra(name="verifiers", module="verifiers", used_by=_task("verifiers")),
    Extra(name="openenv", module="websockets", used_by=_task("openenv")),
    Extra(name="datasets", module="pyarrow", used_by=_records),
    Extra(
        name="serve",
        module="uvicorn",
        used_by=lambda config: None if config.endpoint is None else "endpoint",
    ),
)


def cache_of(config: Config | None) -> Path:
    """Return the folder of compiled programs."""
    runs = Path("runs" if config is None else config.run.dir)
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or runs / CACHE_FOLDER)


def check_config(config: Config, devices: Devices | None) -> Iterator[Diagnostic]:
    """Check everything that a configuration needs.

    devices: JAX's devices; None: not known.
    """
    if devices is None:
        config = config.on_devices("cpu")
    else:
        config = config.on_devices(devices.platform, devices.capability)
    yield from _extras(config)
    try:
        check_names(config)
        yield Diagnostic("ok", "names of functions and tasks")
    except (JaxrlError, OSError) as error:
        yield Diagnostic("error", f"names of functions and tasks: {error}")
    yield from _user_files(config)
    if absent := [d for d in map(_not_cached, hub_names(config)) if d is not None]:
        yield from absent
        return
    try:
        config = with_hub_folders(config)
        check_paths(config)
        yield Diagnostic("ok", "files and folders")
    except (JaxrlError, OSError) as error:
        yield Diagnostic("error", f"files and folders: {error}")
        return
    try:
        tasks = tasks_of(config)
        yield from _library_tasks(config, tasks)
    except (JaxrlError, OSError) as error:
        yield Diagnostic("error", f"task: {error}")
        return
    try:
        data, task = tokenizer_source(config, tasks)
        tokenizer = make_tokenizer(data, config.model, task)
        yield Diagnostic("ok", f"tokenizer: {tokenizer.vocab_size:,} tokens")
        spec = spec_of_run(config.model, tokenizer, config.longest_example)
        yield Diagnostic("ok", f"model: {spec.family}, {num_weights(spec):,} weights")
    except (JaxrlError, OSError) as error:
        yield Diagnostic("error", f"tokenizer or model: {error}")
        return
    yield from _devices(config, devices)
    yield from _memory(config, spec, devices)
    yield _checkpoints(config, spec)


def _extras(config: Config) -> Iterator[Diagnostic]:
    for extra in EXTRAS:
        setting = extra.used_by(config)
        if setting is None:
            continue
        if find_spec(extra.module) is None:
            yield Diagnostic(
                "error",
                f"{setting} needs {extra.module}",
                f"pip install 'jaxrl_async[{extra.name}]'",
            )
        else:
            yield Diagnostic("ok", f"extra [{extra.name}] for {setting}")


def _not_cached(named: tuple[str, str, str]) -> Diagnostic | None:
    """Report what the run would download; nothing is downloaded here."""
    setting, value, kind = named
    name, option = value.split(":")[0], " --repo-type dataset" if kind == "dataset" else ""
    if cached_folder(name, kind) is not None:
        return None
    return Diagnostic(
        "warning",
        f"{setting}={value} is a name on the Hugging Face hub that is not in the cache: the run "
        "downloads it when it starts, and its needs are not known before",
        f"hf download {name}{option}",
    )


def _user_files(config: Config) -> Iterator[Diagnostic]:
    """Check the files of user functions: check_names tolerates a missing file on other machines."""
    choices: list[tuple[str, Choice]] = []
    tasks: list[tuple[str, Choice]] = []
    for name, own in config.by_task.items():
        prefix = f"tasks.{name}." if name else ""
        functions = each_of(own.reward.function)
        choices += [(f"{prefix}reward.function", choice) for choice in functions]
        tasks += [] if own.task is None else [(f"{prefix}task", own.task)]
    choices += [] if config.mixing is None else [("mixing", config.mixing)]
    choices += [("buffer.select", config.buffer.select)]
    choices += [("trainer.optimizer", config.trainer.optimizer)]
    choices += [("run.callbacks", choice) for choice in config.run.callbacks]
    for name, section in config.named_evals.items():
        tasks += [] if section.task is None else [(f"evals.{name}.task", section.task)]
        rewards = () if section.reward is None else each_of(section.reward)
        choices += [(f"evals.{name}.reward", choice) for choice in rewards]
    choices += [(setting, choice) for setting, choice in tasks if not is_of_library(choice)]
    absent = [(setting, name_of(choice)) for setting, choice in choices if is_absent(choice)]
    for setting, choice in tasks:
        absent += [(setting, path) for path in files_of(choice) if _is_missing(path)]
    for setting, path in absent:
        yield Diagnostic(
            "error",
            f"{setting}={path}: there is no such file here",
            f"correct the path; it is relative to {Path.cwd()}",
        )


def _is_missing(path: str) -> bool:
    """Return whether a path is neither here nor fetched when the run starts."""
    return not (os.path.exists(path) or is_address(path) or hub_records(path) is not None)


def _library_tasks(config: Config, tasks: Mapping[str, Task]) -> Iterator[Diagnostic]:
    """Report the tasks that a library has made of files: the run's, and those of evaluations, which
    are loaded here. Raises JaxrlErrors."""
    for name, own in config.by_task.items():
        if own.task is not None and files_of(own.task):
            yield _loaded(f"tasks.{name}.task" if name else "task", own.task, tasks[name])
    for name, section in config.named_evals.items():
        if section.task is not None and files_of(section.task):
            with naming(f"evals.{name}"):
                yield _loaded(f"evals.{name}.task", section.task, load_task(section.task))


def _loaded(setting: str, choice: Choice, task: Task) -> Diagnostic:
    records = task.records
    number = f": {len(records):,} records" if isinstance(records, Sequence) else ""
    return Diagnostic("ok", f"{setting}={name_of(choice)}{number}")


def _devices(config: Config, devices: Devices | None) -> Iterator[Diagnostic]:
    mesh = config.mesh if config.run.job == "rl" else config.mesh.without_samplers
    needed, several = mesh.num_devices, (config.distributed.num_processes or 1) > 1
    if devices is None or several:
        yield Diagnostic(
            "warning",
            f"the mesh needs {needed} devices, which could not be counted here",
            "run doctor on each host",
        )
    elif devices.platform == "cpu":
        yield Diagnostic("ok", f"the mesh needs {needed} devices; the CPU simulates them")
    elif devices.count < needed:
        yield Diagnostic(
            "error",
            f"the mesh needs {needed} devices, and there are {devices.count}",
            "lower mesh.trainer, mesh.sampler or mesh.samplers, or set "
            "mesh.colocated=true: both sides share the devices",
        )
    else:
        yield Diagnostic("ok", f"the mesh needs {needed} of {devices.count} devices")


def _memory(config: Config, spec: ModelSpec, devices: Devices | None) -> Iterator[Diagnostic]:
    """Compare a run's permanent memory with the available memory. Activations are extra."""
    trainer = trainer_bytes(config, spec)
    sampler = sampler_bytes(config, spec) if config.run.job == "rl" else 0.0
    mesh = config.mesh
    smaller = (
        "choose a smaller model, train an adapter (model.lora.rank), lower sampler.slots or "
        "sampler.max_length, or take more devices"
    )
    if devices is not None and devices.platform == "gpu":
        smaller = more_of_a_gpu() + smaller
    if devices is not None and devices.platform != "cpu" and devices.memory is None:
        least = max(trainer / mesh.trainer.num_devices, sampler / mesh.sampler.num_devices)
        yield Diagnostic(
            "warning",
            f"memory of a device: {gib(least)} at least, and JAX does not report the limit",
            "check the devices' own tool (nvidia-smi, tpu-info); `jaxrl-async plan` computes what "
            "a run needs",
        )
        return
    if devices is None or devices.memory is None:
        total = trainer + sampler * (0 if mesh.samplers_in == "external" else mesh.samplers)
        if mesh.colocated and sampler:
            total = both_bytes(config, spec)
        yield _fits("host memory: trainer and samplers", total, host_memory()[1], smaller)
        return
    each_trainer = trainer / mesh.trainer.num_devices
    each_sampler = sampler / mesh.sampler.num_devices
    if mesh.colocated:
        both = both_bytes(config, spec) / mesh.sampler.num_devices if sampler else each_trainer
        yield _fits("memory of a device, both sides", both, devices.memory, smaller)
        return
    yield _fits("memory of a trainer's device", each_trainer, devices.memory, smaller)
    if sampler and mesh.samplers_in != "external":
        yield _fits("memory of a sampler's device", each_sampler, devices.memory, smaller)


TIGHT = 0.7
"""Share of the memory above which activations and temporaries may not fit in addition."""


def _fits(what: str, needed: float, available: float, smaller: str) -> Diagnostic:
    text = f"{what}: {gib(needed)} at least, of {gib(available)}"
    if needed > available:
        return Diagnostic("error", text, smaller)
    if needed > TIGHT * available:
        return Diagnostic(
            "warning",
            f"{text}, plus activations",
            "`jaxrl-async plan` compiles the programs to find out; or " + smaller,
        )
    return Diagnostic("ok", text)


def _checkpoints(config: Config, spec: ModelSpec) -> Diagnostic:
    dtype = jnp.dtype(config.model.param_dtype)
    trained = num_in(trained_table(spec, lora_of(spec, config.model.lora)))
    size = trained * (dtype.itemsize + optimizer_bytes(config.trainer, dtype))
    count = config.checkpoint.keep + 1
    text = f"for {count} checkpoints of {gib(size)}"
    return check_disk(Path(config.run.dir), count * size, text)
