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
def several_runs_can_be_one(config: Config) -> Iterator[str]:
    """Require adapters of a shared base, trained by rewards, whose samplers are threads of the
    run's only process, and nothing that belongs to a run with a folder of its own."""
    mesh, sampler, run = config.mesh, config.sampler, config.run
    threads = (
        "their samplers are threads of its only process, on separate devices, and their events are "
        "not recorded. Leave it out"
    )
    num_processes = config.distributed.num_processes or 1
    wrong = {
        "model.lora=null": (
            config.model.lora is None,
            "each trains an adapter of a shared base, not all weights. Set model.lora.rank",
        ),
        f"run.job={run.job}": (run.job != "rl", "all train by rewards. Set run.job=rl"),
        f"mesh.samplers_in={mesh.samplers_in}": (mesh.remote, threads),
        "mesh.colocated=true": (mesh.colocated, threads),
        f"sampler.engine={sampler.engine}": (sampler.engine != "native", threads),
        f"distributed.num_processes={num_processes}": (num_processes > 1, threads),
        "run.replay_schedule": (run.replay_schedule is not None, threads),
        "run.callbacks": (
            bool(run.callbacks),
            "they are called with the steps and the folder of one. Leave it out",
        ),
        "seats": (bool(config.players), "a game has no players but the policy. Leave it out"),
    }
    for setting, (applies, why) in wrong.items():
        if config.runs and applies:
            yield (
                f"runs: {setting} is not possible with several adapters in one run: {why}, or "
                "start each run separately."
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
