"""Rules about several adapters that are trained in one run (`runs`). Needs no JAX."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config

SHARED = (
    "distributed",
    "mesh",
    "endpoint",
    "remote",
    "model",
    "warm_start",
    "sampler",
    "weights",
    "faults",
)
"""Sections that all runs share: they cannot differ in one run."""
OWN_OF_RUN = ("steps",)
"""Settings of the section `run` that may differ in each run."""
FILES = (
    *("base", "base.json", "base.tmp", "config.yaml", "decoder", "lock", "run.log"),
    *("starts.jsonl", "trace.json", "older.trace.json", "warm_start", "policy", "adapter"),
)
"""Other files in the folder of several runs."""

rule = RuleBook()


@rule("runs")
def several_runs_learn_adapters(config: Config) -> Iterator[str]:
    """Require an adapter for each run, trained by rewards: they share a base."""
    if not config.runs:
        return
    if config.model.lora is None:
        yield (
            "runs: each run trains an adapter of a shared base, and model.lora is null: it would "
            "train all weights. Set model.lora.rank, or start each run separately."
        )
    if config.run.job != "rl":
        yield (
            f"runs: several runs in one need run.job=rl, and it is {config.run.job}. Set "
            "run.job=rl, or start each run separately."
        )


@rule("runs")
def several_runs_share_one_process(config: Config) -> Iterator[str]:
    """Require samplers of our engine in threads of the run's only process."""
    if not config.runs:
        return
    mesh, sampler, run = config.mesh, config.sampler, config.run
    wrong = {
        f"mesh.samplers_in={mesh.samplers_in}": mesh.remote,
        "mesh.colocated=true": mesh.colocated,
        f"sampler.engine={sampler.engine}": sampler.engine != "native",
        f"distributed.num_processes={config.distributed.num_processes}": (
            (config.distributed.num_processes or 1) > 1
        ),
        "run.replay_schedule": run.replay_schedule is not None,
    }
    for setting in (setting for setting, is_so in wrong.items() if is_so):
        yield (
            f"runs: {setting} is not possible with several adapters in one run: their "
            "samplers are threads of its only process, on separate devices, and their events are "
            "not recorded. Leave it out, or start each run separately."
        )


@rule("runs")
def several_runs_have_no_callbacks(config: Config) -> Iterator[str]:
    """Refuse callbacks: they are called with one run's steps and folders."""
    if config.runs and config.run.callbacks:
        yield (
            "run.callbacks: the steps of several adapters in one run (runs) call no callbacks. "
            "Leave it out, or start each run separately."
        )


@rule("runs")
def runs_share_model_and_samplers(config: Config) -> Iterator[str]:
    """Refuse a run's own values of shared settings, and names of the folder's other files."""
    for name, own in config.runs.items():
        if name in FILES:
            yield f"runs.{name}: RUN/{name} is another file of the run. Choose another name."
        for setting in _shared_in(own, config):
            yield (
                f"runs.{name}.{setting} is shared by all runs, and cannot differ in one. Set "
                f"{setting} outside of `runs` for all, or start {name} separately."
            )
        judge = own.get("reward", {}).get("model", config.reward.model)
        if config.mesh.trainer.num_devices > 1 and judge is not None:
            yield (
                f"runs.{name}.reward.model computes on the trainer's devices while other runs step "
                "there, and mesh.trainer has several. Use one device, use reward.judge instead, "
                "or start this run separately."
            )
        if own.get("seats"):
            yield (
                f"runs.{name}.seats: other players of a game are not supported with several "
                "adapters in one run. Leave it out, or start this run separately."
            )
    if config.runs and config.players:
        yield (
            "seats: other players of a game are not supported with several adapters in one run "
            "(runs). Leave it out, or start each run separately."
        )


@rule("runs")
def each_run_serves_its_own_metrics(config: Config) -> Iterator[str]:
    """Require different addresses at which Prometheus reads the runs' metrics."""
    by_address: dict[str, list[str]] = {}
    for name, own in config.runs.items():
        address = own.get("metrics", {}).get("prometheus", config.metrics.prometheus)
        if address is not None and not address.endswith(":0"):
            by_address.setdefault(address, []).append(name)
    for address, names in by_address.items():
        if len(names) > 1:
            yield (
                f"metrics.prometheus={address} would be served by {', '.join(names)} at the same "
                "time. Set a different port in runs.NAME.metrics.prometheus for each, or port 0, "
                "which takes any free one."
            )


def _shared_in(own: Mapping[str, Any], config: Config) -> list[str]:
    """Return the settings among a run's own that all runs share."""
    of_run = [f"run.{key}" for key in own.get("run", {}) if key not in OWN_OF_RUN]
    of_shared: list[str] = []
    for name in SHARED:
        if name in own and None in (own[name], getattr(config, name)):
            of_shared.append(name)  # a section that one of both lacks
        else:
            of_shared += [f"{name}.{key}" for key in own.get(name, {})]
    of_shared += ["checkpoint.dir"] if "dir" in own.get("checkpoint", {}) else []
    return [*of_run, *of_shared, *(["runs"] if "runs" in own else [])]
