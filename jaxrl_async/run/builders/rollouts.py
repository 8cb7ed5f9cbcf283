"""The side of a run that makes groups, from prompts to buffer, and what is recorded of them."""

import functools
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from jaxrl_async.algorithms.shaping import has_signal
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.buffer.select import RANKS
from jaxrl_async.config.schema import (
    AlgorithmSection,
    BufferSection,
    Config,
    SamplerSection,
    StalenessSection,
)
from jaxrl_async.data.curriculum import Curriculum
from jaxrl_async.data.prompts import PromptStream
from jaxrl_async.ports import Gate, Generate
from jaxrl_async.rollout.episode import EpisodeLimits
from jaxrl_async.rollout.rollout_loop import RolloutLoop, RolloutSettings
from jaxrl_async.run.builders.inputs import Inputs
from jaxrl_async.run.builders.remote_samplers import make_remote_sampling
from jaxrl_async.run.builders.samplers import Sampling, make_sampling
from jaxrl_async.run.checkpoint.rollout_state import StartingPoint, reopened
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Joined, Lockstep
from jaxrl_async.run.outlets import MetricsWriter, make_recorder
from jaxrl_async.run.replay.player import (
    OrderedPrompts,
    Replay,
    RunSchedule,
)
from jaxrl_async.run.replay.recording import Recorded, Recording, header_of
from jaxrl_async.run.signals import Stop
from jaxrl_async.trainer.learner import Learner
from jaxrl_async.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What a run writes down: its numbers, what became of each group, and in which order."""

    recorder: MetricsWriter
    ledger: Ledger  # the run's
    buffer_ledger: Ledger  # this process's buffer's; of one process the same
    schedule: RunSchedule


def open_records(
    config: Config,
    paths: Paths,
    start: StartingPoint,
    recorded: Recorded | None,
    lockstep: Lockstep,
    closing: ExitStack,
    *,
    continued: bool,
) -> Records:
    """Open the run's files.

    Args:
        config: what is recorded.
        paths: where.
        start: lines of later versions than this are moved aside.
        recorded: a schedule to follow; None: this run makes its own.
        lockstep: the first process writes.
        closing: closes the files.
        continued: whether the files of before are continued, as run.resume asked, even if there was
            no checkpoint yet.
    """
    resume_step = start.version if continued else None
    recorder = make_recorder(config.metrics, paths, lockstep, resume_step)
    closing.callback(recorder.close)
    ledger = Ledger()
    if lockstep.writes:
        ledger = reopened(paths.ledger, start.whole, start.version, continued)
    closing.callback(ledger.close)
    # Samplers in other processes do not write down what they take in: half a schedule is none.
    file = None if config.mesh.remote else lockstep.schedule_file(paths.schedule)
    recording = Recording(file, header_of(config, start.version))
    return Records(
        recorder=recorder,
        ledger=ledger,
        buffer_ledger=lockstep.buffer_ledger(ledger),
        schedule=recording if recorded is None else Replay(recorded, recording),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSide:
    """All that makes groups, from the prompts to the draw of the trainer."""

    inputs: Inputs
    records: Records
    prompts: PromptStream | OrderedPrompts
    buffer: ReplayBuffer
    joined: Joined  # the buffers of all processes, as the trainer uses them
    sampling: Sampling
    rollouts: RolloutLoop


def make_rollout_side(
    config: Config,
    inputs: Inputs,
    records: Records,
    learner: Learner,
    start: StartingPoint,
    lockstep: Lockstep,
    stop: Stop,
    folder: Path,
    closing: ExitStack,
) -> RolloutSide:
    """Make buffer, samplers and rollouts.

    Args:
        config: staleness, sampler, and so on.
        inputs: prompts, scorers, environments, and the devices.
        records: where each of them writes.
        learner: its weights are the samplers' first.
        start: has the version of these weights.
        lockstep: the processes, each with a buffer of its own.
        stop: ends waiting for the others' groups.
        folder: the run's.
        closing: ends samplers in processes of their own, whatever happens.
    """
    schedule = records.schedule
    prompts = ordered(inputs.prompts, schedule)
    buffer = ReplayBuffer(
        buffer_settings(config.algorithm, config.staleness, config.buffer, lockstep.players),
        ledger=records.buffer_ledger,
        note=schedule.write,
    )
    gate = schedule.gate(buffer, curriculum=isinstance(inputs.prompts, Curriculum))
    if config.mesh.remote:
        sampling = make_remote_sampling(
            config, inputs, learner.params, start.version, buffer, lockstep, folder, closing
        )
    else:
        sampling = make_sampling(config, inputs, learner.params, start.version, schedule, gate)
    rollouts = make_rollouts(config, inputs, prompts, sampling.router, gate)
    return RolloutSide(
        inputs=inputs,
        records=records,
        prompts=prompts,
        buffer=buffer,
        joined=lockstep.joined(gate, stop, records.buffer_ledger, records.ledger),
        sampling=sampling,
        rollouts=rollouts,
    )


def ordered(
    prompts: PromptStream | Curriculum, schedule: RunSchedule
) -> PromptStream | OrderedPrompts:
    """Return the prompts in an order that a replay repeats; a curriculum's depends on groups."""
    return OrderedPrompts(prompts, schedule) if isinstance(prompts, Curriculum) else prompts


def buffer_settings(
    algorithm: AlgorithmSection, staleness: StalenessSection, buffer: BufferSection, processes: int
) -> BufferSettings:
    """Return the settings of the buffer in each of so many processes."""
    settings = BufferSettings(
        groups_per_step=algorithm.groups_per_step // processes,
        max_staleness=staleness.max_staleness,
        lookahead=staleness.lookahead,
        when_too_old=staleness.when_too_old,
        overcommit=staleness.overcommit,
        reuse=buffer.reuse,
        rank=RANKS[buffer.select],
        max_resampled=algorithm.max_resampled,
    )
    if not algorithm.dynamic_sampling:
        return settings
    signal = functools.partial(
        has_signal, part=algorithm.signal_part, least_std=algorithm.signal_std
    )
    return replace(settings, has_signal=signal)


def make_rollouts(
    config: Config,
    inputs: Inputs,
    prompts: PromptStream | OrderedPrompts,
    generate: Generate,
    gate: Gate,
) -> RolloutLoop:
    """Make the loop that plays the groups."""
    limits = EpisodeLimits(
        sampling=sampling_params(config.sampler),
        stop_token_ids=inputs.tokenizer.eos_ids,
        max_new_tokens=config.sampler.max_new_tokens,
        max_length=config.sampler.max_length,
        keep_mask=inputs.keep_mask,
        keep_routing=config.algorithm.keep_routing,
    )
    return RolloutLoop(
        prompts,
        generate,
        inputs.scorers.training,
        gate,
        settings=RolloutSettings(
            group_size=config.algorithm.group_size,
            limits=limits,
            max_failures=config.faults.max_failures,
        ),
        make_env=inputs.envs,
        observe=prompts.observe,
    )


def sampling_params(section: SamplerSection) -> SamplingParams:
    """Return the distribution that tokens are drawn from."""
    return SamplingParams(
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
    )
