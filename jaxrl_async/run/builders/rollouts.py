"""The part of a run that makes groups, from prompts to buffer, and its records."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_async.algorithms.shaping import has_signal, shaping
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.buffer.select import RANKS, Rank, own_rank
from jaxrl_async.config.algorithm_section import PivotSection
from jaxrl_async.config.schema import AlgorithmSection, Config, PairsSection
from jaxrl_async.config.userfile import is_own, load_function
from jaxrl_async.data.curriculum import Curriculum
from jaxrl_async.data.prompts import PromptStream
from jaxrl_async.later import Later
from jaxrl_async.metrics.recorder import MetricsWriter
from jaxrl_async.model.spec import Params
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import Gate
from jaxrl_async.rollout.rollout_loop import RolloutLoop, RolloutSettings
from jaxrl_async.run import features
from jaxrl_async.run.builders.constraints import prompt_constraint
from jaxrl_async.run.builders.inputs import Inputs
from jaxrl_async.run.builders.learning import sampling_params
from jaxrl_async.run.builders.playing import Play
from jaxrl_async.run.builders.samplers import (
    GivingUp,
    Sampling,
    make_sampling,
)
from jaxrl_async.run.checkpoint.rollout_state import StartingPoint, reopened
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep, RunBuffer
from jaxrl_async.run.replay.recording import OrderedPrompts, RecordedSchedule, Recording, header_of
from jaxrl_async.run.reporting import make_recorder
from jaxrl_async.run.signals import Stop
from jaxrl_async.types import (
    EpisodeGroup,
    EpisodeLimits,
    Prompt,
    Ticket,
    TurnPriority,
    VersionedParams,
)

if TYPE_CHECKING:
    from jaxrl_async.algorithms import answer_pairs
    from jaxrl_async.data.mixed_prompts import MixedPrompts
    from jaxrl_async.rollout import pivots
    from jaxrl_async.rollout.pivots import PivotPlan
    from jaxrl_async.run.replay import player
    from jaxrl_async.run.replay.player import ReplayedBuffer, RunSchedule
else:
    answer_pairs = Later("jaxrl_async.algorithms.answer_pairs")
    pivots = Later("jaxrl_async.rollout.pivots")
    player = Later("jaxrl_async.run.replay.player")


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Files of a run: its metrics, what became of each group, and the schedule."""

    recorder: MetricsWriter
    ledger: Ledger  # the run's
    buffer_ledger: Ledger  # of this process's buffer; with one process the same
    schedule: "RunSchedule"
    answers: Path  # file of answers to held-out prompts


def open_records(
    config: Config,
    paths: Paths,
    start: StartingPoint,
    recorded: RecordedSchedule | None,
    lockstep: Lockstep,
    closing: ExitStack,
    *,
    continued: bool,
    scheduled: bool = True,
) -> Records:
    """Open the run's files.

    Args:
        config: the whole configuration.
        paths: the run's paths.
        start: lines of later versions than this are moved aside.
        recorded: a schedule to follow; None: this run records one.
        lockstep: the first process writes.
        closing: closes the files.
        continued: whether existing files are continued, as run.resume asked, even if no checkpoint
            existed.
        scheduled: whether the samplers serve this run alone: only then is a schedule recorded.
    """
    resume_step = start.version if continued else None
    recorder = make_recorder(config, paths, lockstep, resume_step)
    closing.callback(recorder.close)
    ledger = Ledger()
    if lockstep.writes:
        ledger = reopened(paths.ledger, start.whole, start.version, continued)
    closing.callback(ledger.close)
    # Samplers in other processes, and external engines, do not record which weights they take:
    # half a schedule is of no use.
    records_schedule = scheduled and not config.mesh.remote and config.sampler.engine == "native"
    file = lockstep.schedule_file(paths.schedule) if records_schedule else None
    recording = Recording(file, header_of(config, start.version))
    return Records(
        recorder=recorder,
        ledger=ledger,
        buffer_ledger=lockstep.buffer_ledger(ledger),
        schedule=recording if recorded is None else player.Replay(recorded, recording),
        answers=paths.answers,
    )


SharedSampling = Callable[
    [Config, Inputs, VersionedParams, "ReplayBuffer | ReplayedBuffer"], Sampling
]
"""Adds one of several runs to the samplers that they share: with its first weights, on the
trainer's slice, and the gate that is notified of live ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSide:
    """All parts that make groups, from the prompts to the trainer's source."""

    inputs: Inputs
    records: Records
    prompts: PromptStream | OrderedPrompts
    buffer: ReplayBuffer
    joined: RunBuffer  # the buffers of all processes, as the trainer uses them
    sampling: Sampling
    rollouts: RolloutLoop
    gives_up: Callable[[], bool]  # whether to stop waiting for the samplers' answers


def make_rollout_side(
    config: Config,
    inputs: Inputs,
    records: Records,
    weights: VersionedParams,
    lockstep: Lockstep,
    stop: Stop,
    folder: Path,
    closing: ExitStack,
    base: Params | None = None,
    shared: SharedSampling | None = None,
) -> RolloutSide:
    """Make buffer, samplers and rollouts.

    Args:
        config: the whole configuration.
        inputs: prompts, scorers, environments, and the devices.
        records: the files of the parts.
        weights: the samplers' first, on the trainer's slice.
        lockstep: the processes, each with its own buffer.
        stop: ends waiting for the groups of other processes.
        folder: the run's.
        closing: ends samplers in separate processes and the judge, in any case.
        base: weights that an adapter changes; None: all weights are trained.
        shared: samplers that several runs share; None: the run has its own.
    """
    schedule = records.schedule
    prompts, mix = ordered(inputs.prompts, schedule), mix_of(inputs)
    buffer = ReplayBuffer(
        buffer_settings(config, lockstep.players),
        ledger=records.buffer_ledger,
        note=schedule.write,
        dropped=(lambda task, number, reason: None) if mix is None else mix.dropped,
    )
    gate = schedule.gate(buffer, curriculum=isinstance(prompts, OrderedPrompts))
    if shared is not None:
        sampling = shared(config, inputs, weights, gate)
    elif config.sampler.engine != "native":  # vLLM servers are remote, too, but do not join
        sampling = features.engine_sampling(config, inputs, weights, gate)
    elif config.mesh.remote:
        sampling = features.remote_sampling(
            config, inputs, weights, buffer, lockstep, folder, closing, base
        )
    else:
        sampling = make_sampling(config, inputs, weights, schedule, gate, base)
    rollouts = make_rollouts(config, inputs, prompts, sampling.generate, gate, buffer)
    closing.callback(inputs.scorers.close)
    closing.callback(inputs.evals.close)
    if lockstep.plays:
        inputs.scorers.begin(folder, lockstep.player, lambda: sampling.channel.published_version)
    return RolloutSide(
        inputs=inputs,
        records=records,
        prompts=prompts,
        buffer=buffer,
        joined=lockstep.joined(gate, stop, records.buffer_ledger, records.ledger),
        sampling=sampling,
        rollouts=rollouts,
        gives_up=GivingUp(stop, sampling.router, inputs.serving.end_sessions, inputs.outages),
    )


def ordered(
    prompts: "PromptStream | Curriculum | MixedPrompts", schedule: "RunSchedule"
) -> PromptStream | OrderedPrompts:
    """Return the prompts in an order that a replay repeats. Groups decide the order of a curriculum
    and of several tasks."""
    return prompts if isinstance(prompts, PromptStream) else OrderedPrompts(prompts, schedule)


def mix_of(inputs: Inputs) -> "MixedPrompts | None":
    """Return the prompts of several tasks; None: the run has one."""
    prompts = inputs.prompts
    return None if isinstance(prompts, PromptStream | Curriculum) else prompts


def buffer_settings(config: Config, processes: int) -> BufferSettings:
    """Return the settings of the buffer in each of `processes` processes."""
    algorithm, staleness, buffer = config.algorithm, config.staleness, config.buffer
    return BufferSettings(
        groups_per_step=algorithm.groups_per_step // processes,
        max_staleness=staleness.max_staleness,
        lookahead=staleness.lookahead,
        when_too_old=staleness.when_too_old,
        overcommit=staleness.overcommit,
        reuse=buffer.reuse,
        rank=rank_of(buffer.select),
        max_resampled=algorithm.max_resampled,
        wants_pairs=config.pairs is not None,
        has_signal=signal_test(algorithm, config.pairs, config.run.seed),
        task_bounds={
            name: task.max_staleness
            for name, task in config.named_tasks.items()
            if task.max_staleness is not None
        },
        overtaken_tasks=frozenset(
            name for name, task in config.named_tasks.items() if not task.trainer_waits
        ),
    )


def rank_of(select: str) -> Rank:
    """Return the order of buffer.select. Raises ConfigError for a user's that cannot be loaded."""
    if not is_own(select):
        return RANKS[select]
    return own_rank(load_function(select, "buffer.select"), select)


def signal_test(
    algorithm: AlgorithmSection, pairs: PairsSection | None, seed: int
) -> Callable[[EpisodeGroup], bool]:
    """Return a function that says whether a group has a training signal. seed: the run's."""
    tests: list[Callable[[EpisodeGroup], bool]] = []
    if algorithm.dynamic_sampling:
        part, least = algorithm.signal_part, algorithm.signal_std
        tests.append(functools.partial(has_signal, part=part, least_std=least))
    if pairs is not None:
        shapings = [shaping.resolve(choice) for choice in algorithm.shaping]
        how = pairs.choose
        tests.append(
            functools.partial(answer_pairs.has_pair, shapings=shapings, how=how, seed=seed)
        )
    return lambda group: all(test(group) for test in tests)


def make_rollouts(
    config: Config,
    inputs: Inputs,
    prompts: PromptStream | OrderedPrompts,
    generate: Generate,
    gate: Gate,
    buffer: ReplayBuffer,
) -> RolloutLoop:
    """Make the loop that plays the groups."""
    tasks, mix = config.named_tasks, mix_of(inputs)
    limits = episode_limits(config, inputs.play, keep_mask=inputs.keep_mask)
    by_task = {
        name: episode_limits(part.config, part.play, keep_mask=inputs.keep_mask)
        for name, part in inputs.tasks.items()
        if tasks
    }

    def begins(ticket: Ticket, prompt: Prompt) -> None:
        inputs.opponents.begins(ticket, prompt)
        buffer.began(ticket, prompt)

    loop = RolloutLoop(
        prompts,
        generate,
        inputs.scorers.training,
        gate,
        settings=RolloutSettings(
            group_size=config.algorithm.group_size,
            oversample=config.algorithm.oversample,
            least_members=config.algorithm.min_members,
            limits=replace(limits, by_task=by_task),
            tasks=tuple(name for name, task in tasks.items() if task.weight > 0),
            timeouts_s={
                name: task.timeout_s for name, task in tasks.items() if task.timeout_s is not None
            },
            pivots=pivot_plan(config.algorithm.pivots, inputs),
            max_failures=config.faults.max_failures,
            backoff_s=config.faults.backoff_s,
        ),
        make_env=inputs.envs,
        observe=prompts.observe,
        begins=begins,
        outages=inputs.outages,
        may_begin=(lambda: True) if mix is None else mix.may_begin,
    )
    if mix is not None:
        mix.rests = loop.failures.is_backing_off
    return loop


def episode_limits(config: Config, play: Play, *, keep_mask: bool) -> EpisodeLimits:
    """Return the limits of a task's episodes, and how they are sampled.

    config: as the task has it. keep_mask: whether sampling masks go with the run's tokens.
    """
    return EpisodeLimits(
        sampling=sampling_params(config.sampler),
        stop_token_ids=play.stop_token_ids,
        max_new_tokens=config.sampler.max_new_tokens,
        max_length=config.sampler.max_length,
        keep_mask=keep_mask and config.sampler.truncates,
        takes_masks=keep_mask,
        keep_routing=config.algorithm.keep_routing,
        priority=TurnPriority(
            later=config.priorities.later_turns, older_first=config.priorities.older_first
        ),
        constraint=prompt_constraint(play.task),
    )


def pivot_plan(section: PivotSection | None, inputs: Inputs) -> "PivotPlan | None":
    """Return the plan of continuations from pivots; None: no continuations."""
    if section is None:
        return None
    decode = inputs.tokenizer.decode

    @functools.cache
    def marked(token: int) -> bool:
        return section.mark in decode([token])

    return pivots.PivotPlan(
        continuations=section.continuations,
        members=section.members,
        per_member=section.per_member,
        where=section.where,
        marked=marked,
    )
