"""Rules about samplers in separate processes (mesh.samplers_in, remote). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config

rule = RuleBook()


@rule(job="rl")
def a_replay_has_its_samplers_in_threads(config: Config) -> Iterator[str]:
    """Require the samplers of a replay in this process: other processes are not recorded."""
    if config.run.replay_schedule is not None and config.mesh.remote:
        yield (
            f"run.replay_schedule prescribes the order of each sampler's events, which samplers of "
            f"mesh.samplers_in={config.mesh.samplers_in} cannot follow. Set it to threads; at "
            "staleness.max_staleness=0 the numbers are the same, bit for bit."
        )


@rule(job="rl")
def the_least_number_of_samplers_is_started(config: Config) -> Iterator[str]:
    """Require the run to start as many processes as it waits for."""
    mesh, least = config.mesh, config.remote_settings.min_samplers
    if mesh.samplers_in == "processes" and least > mesh.samplers:
        yield (
            f"remote.min_samplers ({least}) is more than the {mesh.samplers} processes that "
            "mesh.samplers starts: the run would never begin. Lower it, or raise mesh.samplers."
        )
