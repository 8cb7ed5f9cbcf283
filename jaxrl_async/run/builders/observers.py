"""What watches the parts: the rates of a step, and the watchdog."""

import time
from collections.abc import Mapping, Sequence

from jaxrl_async.config.schema import FaultsSection, MetricsSection
from jaxrl_async.metrics.fault_counts import AwakeClock
from jaxrl_async.run.builders.rollouts import RolloutSide
from jaxrl_async.run.builders.serving import RunServing
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.rates import Counters, Observer, PivotCounts, Utilisation, measured_peak_flops
from jaxrl_async.run.watchdog import Reading, Watchdog
from jaxrl_async.trainer.trainer import Trainer


def make_observer(
    section: MetricsSection, side: RolloutSide, lockstep: Lockstep, serving: RunServing
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
                "failed_groups": played.failures,
                "lost_members": played.lost_members,
                "lost_forks": played.lost_forks,
                "restarted_groups": played.restarts,
            },
            judge=scorers.judge_cost(),
            process=scorers.process_tally(),
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
    section: FaultsSection, side: RolloutSide, trainer: Trainer, paths: Paths
) -> Watchdog:
    """Make the watchdog, which stops a run that makes no progress."""
    return Watchdog(
        lambda: reading(side, trainer),
        limit_s=section.watchdog_s,
        stacks=paths.stacks,
        clock=AwakeClock(time.monotonic, most_s=max(1.0, section.watchdog_s / 10)),
    )


def reading(side: RolloutSide, trainer: Trainer) -> Reading:
    """Read where every part is now."""
    router, channel = side.sampling.router, side.sampling.channel
    of_samplers, of_rollouts = router.stats(), side.rollouts.stats()
    of_buffer = side.buffer.stats()
    return Reading(
        version=trainer.version,
        trainer=trainer.doing,
        trainer_s=time.perf_counter() - trainer.since,
        blocks=of_samplers.blocks + of_samplers.prefill_tokens,
        requests=router.num_waiting,
        living=router.living,
        groups=of_rollouts.groups + of_rollouts.failures,
        playing=of_rollouts.active,
        score_s=side.inputs.scorers.oldest_s(),
        env_s=max(side.inputs.envs.oldest_s(), side.inputs.play.oldest_s()),
        published=channel.published_version,
        live=channel.live_version,
        ready=of_buffer.ready,
        slots_free=max(0, of_buffer.capacity - of_buffer.active),
    )
