"""Observers of the parts: the rates of a step, and the watchdog."""

import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import jax

from jaxrl_async.config.schema import Config, FaultsSection, MetricsSection
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.fault_counts import AwakeClock, backoff_s
from jaxrl_async.run.builders.rollouts import RolloutSide
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.optional_parts import Serving
from jaxrl_async.run.rates import Counters, Observer, PivotCounts, Utilisation, measured_peak_flops
from jaxrl_async.run.watchdog import Reading, Watchdog
from jaxrl_async.trainer.trainer import Trainer
from jaxrl_async.types import Drop


def make_observer(
    section: MetricsSection, side: RolloutSide, lockstep: Lockstep, serving: Serving
) -> Observer:
    """Make the observer, which turns the parts' counters into rates of a step."""
    router, rollouts, faults = side.sampling.router, side.rollouts, side.inputs.faults
    trainer_mesh, scorers = side.inputs.slices.trainer, side.inputs.scorers

    def read() -> Counters:
        played = rollouts.stats()
        return Counters(
            at_s=time.perf_counter(),
            sampler=router.stats(),
            channel=side.sampling.channel.stats(),
            buffer=side.buffer.stats(),
            gate_wait_s=played.gate_wait_s,
            living=router.living,
            faults={
                **faults.read(),
                "outage_s": side.inputs.outages.total_s(),
                "failed_groups": played.failures,
                "lost_members": played.lost_members,
                "lost_forks": played.lost_forks,
                "restarted_groups": played.restarts,
                "continued_episodes": played.continued_episodes,
                "restarted_episodes": played.restarted_episodes,
            },
            judge=scorers.judges.cost(),
            process=scorers.judges.tally(),
            teachers=scorers.teachers.counts(),
            pivots=PivotCounts(
                forks=played.forks,
                tokens=played.fork_tokens,
                shared_tokens=played.shared_tokens,
            ),
            cancelled_members=played.cancelled_members,
            cancelled_turn_tokens=played.cancelled_turn_tokens,
            endpoint=serving.counts(),
        )

    def share(own: dict[str, float]) -> Sequence[Mapping[str, float]]:
        return lockstep.gather_json(own)[: lockstep.players]

    peak_flops = section.peak_flops or measured_peak_flops(trainer_mesh.local_devices[0])
    return Observer(
        read,
        utilisation=Utilisation(
            peak_flops * trainer_mesh.size, measured=section.peak_flops is None
        ),
        share=share,
    )


def make_watchdog(
    config: Config, side: RolloutSide, trainer: Trainer, paths: Paths, console: Console
) -> Watchdog:
    """Make the watchdog, which stops a run that makes no progress."""
    section, compiled = config.faults, compiled_programs()
    return Watchdog(
        lambda: reading(config, side, trainer, console, compiled),
        limit_s=section.watchdog_s,
        stacks=paths.stacks,
        clock=AwakeClock(time.monotonic, most_s=max(1.0, section.watchdog_s / 10)),
    )


@functools.cache
def compiled_programs() -> Counter[str]:
    """Return the counter of programs compiled by this process from now on, by event."""
    counts = Counter[str]()

    def note(event: str, duration_secs: float, **facts: str | int) -> None:
        if "compile" in event:
            counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(note)
    return counts


def within_limits(
    faults: FaultsSection, program_timeout_s: float, score_s: float, env_s: float, program_s: float
) -> bool:
    """Return whether a call is running that is within its own time limit.

    Args:
        faults: limits of scorers and environments.
        program_timeout_s: limit of programs, seconds; of several tasks the longest.
        score_s: age of the oldest call of a scorer, retries included, seconds; 0: no call.
        env_s: age of the oldest reply of an environment, seconds; 0: none.
        program_s: age of the oldest program, seconds; 0: none.
    """
    tries = faults.scorer_retries + 1
    waits_s = sum(backoff_s(faults.backoff_s, number) for number in range(tries))
    return (
        0 < score_s <= tries * faults.scorer_timeout_s + waits_s
        or 0 < env_s <= faults.env_timeout_s
        or 0 < program_s <= program_timeout_s
    )


def count_rejected(dropped: Mapping[str, int]) -> int:
    """Return the number of groups that count against a run that accepts none. Groups without a
    signal do not count: algorithm.max_resampled limits them."""
    return sum(groups for why, groups in dropped.items() if why != Drop.NO_SIGNAL.value)


def reading(
    config: Config,
    side: RolloutSide,
    trainer: Trainer,
    console: Console,
    compiled: Mapping[str, int],
) -> Reading:
    """Read the current state of every part."""
    router, channel = side.sampling.router, side.sampling.channel
    of_samplers, of_rollouts = router.stats(), side.rollouts.stats()
    of_buffer, inputs = side.buffer.stats(), side.inputs
    score_s, env_s = inputs.evals.oldest_s()
    score_s, env_s = max(score_s, inputs.scorers.oldest_s()), max(env_s, inputs.envs.oldest_s())
    program_s = inputs.play.oldest_s()
    most_s = max(section.env.program_timeout_s for section in config.by_task.values())
    return Reading(
        version=trainer.version,
        trainer=trainer.clock.doing,
        trainer_s=time.perf_counter() - trainer.clock.since,
        blocks=of_samplers.blocks + of_samplers.prefill_tokens,
        requests=router.num_waiting,
        living=router.living,
        accepted=of_buffer.trained + of_buffer.ready,
        rejected=count_rejected(of_buffer.dropped),
        groups_per_step=config.algorithm.groups_per_step,
        compiled=sum(compiled.values()),
        with_caller=console.with_caller,
        outage=inputs.outages.active,
        within_limits=within_limits(config.faults, most_s, score_s, env_s, program_s),
        playing=of_rollouts.active,
        score_s=score_s,
        env_s=max(env_s, program_s),
        published=channel.published_version,
        live=channel.live_version,
        ready=of_buffer.ready,
        slots_free=max(0, of_buffer.capacity - of_buffer.active),
    )
