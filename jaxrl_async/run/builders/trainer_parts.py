"""The trainer with its learner, and the outlets of its results."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxrl_async.algorithms.pacing import Bounds
from jaxrl_async.config.schema import Config, EvalSection, StalenessSection
from jaxrl_async.mesh import NO_DEVICE_LOCK, DeviceGuard
from jaxrl_async.metrics.console import Console
from jaxrl_async.profiling import StepTraces, TracedSamplers
from jaxrl_async.rollout.evaluate import EvalEffort
from jaxrl_async.run.builders.constraints import prompt_constraint
from jaxrl_async.run.builders.playing import Play
from jaxrl_async.run.builders.rollouts import RolloutSide
from jaxrl_async.run.checkpoint.rollout_state import RunSaver
from jaxrl_async.run.checkpoint.store import Checkpoints
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.rates import Observer
from jaxrl_async.run.reporting import Evaluation, StepReporter
from jaxrl_async.run.shown_answers import answers_writer
from jaxrl_async.trainer.evaluation import Outlets, is_due
from jaxrl_async.trainer.learner import Learner
from jaxrl_async.trainer.trainer import Trainer, TrainerSettings
from jaxrl_async.types import EpisodeLimits, SamplingParams, TurnPriority

log = logging.getLogger(__name__)


def make_trainer(
    config: Config,
    learner: Learner,
    side: RolloutSide,
    outlets: Outlets,
    lockstep: Lockstep,
    root: Path,
    turn: DeviceGuard = NO_DEVICE_LOCK,
) -> Trainer:
    """Make the trainer: it takes groups from the rollout side and publishes to its samplers.

    root: the run's folder.
    turn: the slice_lock of Trainer.
    """
    source, publisher = side.inputs.opponents.watched(side.joined.source, side.sampling.publisher)
    return Trainer(
        learner=learner,
        source=source,
        publisher=publisher,
        outlets=outlets,
        settings=TrainerSettings(
            total_steps=config.run.steps,
            eval_every=(config.eval.every, *(one.every for one in config.named_evals.values())),
            eval_async=_evaluates_async(config.eval, lockstep),
            save_every=config.checkpoint.every,
            max_skipped_steps=config.trainer.max_skipped_steps,
            pacing=make_pacing(config.staleness, config.lowest_limit),
            probe=side.sampling.probe,
        ),
        device_lock=side.inputs.locks.trainer,
        slice_lock=turn,
        traces=step_traces(config.run.profile, root, lockstep, side.sampling.members),
    )


def step_traces(
    steps: Sequence[int], root: Path, lockstep: Lockstep, samplers: TracedSamplers | None = None
) -> StepTraces:
    """Return the profiler's traces of these steps in this process, written to the run's folder."""
    process = "trainer" if lockstep.count == 1 else f"trainer-{lockstep.index}"
    return StepTraces(root, steps, process, samplers)


def _evaluates_async(section: EvalSection, lockstep: Lockstep) -> bool:
    """Return whether evaluations run during updates, which needs a single trainer process."""
    if section.asynchronous and lockstep.count > 1:
        log.warning(
            "eval.asynchronous=true: the updates of %d trainer processes wait for each evaluation.",
            lockstep.count,
        )
    return section.asynchronous and lockstep.count == 1


def make_pacing(section: StalenessSection, lowest: int) -> Bounds | None:
    """Return the bounds of an adaptive staleness target; None: it is always max_staleness. lowest:
    Config.lowest_limit."""
    if section.adapt == "none":
        return None
    return Bounds(target=section.ess_target, lowest=lowest, highest=section.max_staleness)


def make_evaluation(config: Config, side: RolloutSide, lockstep: Lockstep) -> Evaluation:
    """Make the evaluation of this process's share of the held-out prompts."""
    inputs = side.inputs
    tasks = inputs.tasks.items() if config.named_tasks else ()
    by_task = {name: evaluation_limits(part.config, part.play) for name, part in tasks}
    return Evaluation(
        generate=side.sampling.generate,
        prompts=inputs.held_out[lockstep.player :: lockstep.players],
        scorer=inputs.scorers.evaluation,
        make_env=inputs.envs,
        limits=replace(evaluation_limits(config, inputs.play), by_task=by_task),
        effort=EvalEffort(
            at_once=min(config.eval.episodes_at_once, config.serving.max_sessions),
            retries=max(one.env.retries for one in config.by_task.values()),
            backoff_s=config.faults.backoff_s,
            count=inputs.faults.add,
            outages=inputs.outages,
        ),
        decode=inputs.tokenizer.decode,
        write=answers_writer(side.records.answers),
        lockstep=lockstep,
        faults=inputs.faults,
        gives_up=side.gives_up,
    )


def evaluation_limits(config: Config, play: Play) -> EpisodeLimits:
    """Return the limits of a task's held-out episodes, and how they are sampled; config: as the
    task has it."""
    level = config.priorities.evaluation
    return EpisodeLimits(
        sampling=SamplingParams(temperature=config.eval.temperature),
        stop_token_ids=play.stop_token_ids,
        max_new_tokens=config.sampler.max_new_tokens,
        max_length=config.sampler.max_length,
        priority=TurnPriority(first=level, later=level),
        for_training=False,
        constraint=prompt_constraint(play.task),
    )


def make_evaluations(
    config: Config, side: RolloutSide, lockstep: Lockstep, version: int
) -> Callable[[int, bool], Mapping[str, float]]:
    """Return a function that makes the evaluations of a live version that are due; see
    Outlets.evaluate. version: from which the run starts."""
    own, every = make_evaluation(config, side, lockstep), config.eval.every
    channel = side.sampling.channel
    named = side.inputs.evals.begin(
        own, side.records.answers.parent, version, lambda: channel.published_version
    )

    def evaluate(version: int, last: bool) -> Mapping[str, float]:
        measured = own.run() if is_due(every, version, last=last) else {}
        return {**measured, **named(version, last)}

    return evaluate


def make_outlets(
    config: Config,
    learner: Learner,
    side: RolloutSide,
    observer: Observer,
    checkpoints: Checkpoints,
    console: Console,
    lockstep: Lockstep,
    version: int,
) -> Outlets:
    """Make the outlets of the trainer's results: evaluations, reports and checkpoints. version:
    from which the run starts."""
    inputs, stop = side.inputs, side.joined.stop
    reporter = StepReporter(
        observer=observer,
        recorder=side.records.recorder,
        console=console,
        tokenizer=inputs.tokenizer,
        prompts=side.prompts,
        samples_every=config.metrics.samples_every,
        lockstep=lockstep,
        opponents=inputs.opponents,
        views=lambda: learner.views,
    )
    saver = RunSaver(
        config=config,
        checkpoints=checkpoints,
        prompts=inputs.prompts,
        buffer=side.buffer,
        rollouts=side.rollouts,
        ledger=side.records.ledger,
        accounts=side.joined.accounts,
        lockstep=lockstep,
        images=inputs.tokenizer.images,
        digests=inputs.digests,
        lock=inputs.locks.saving,
    )
    return Outlets(
        evaluate=make_evaluations(config, side, lockstep, version),
        report=reporter.report,
        save=saver.save,
        should_stop=stop.is_set,
        should_hurry=lambda: stop.preempted,
        gives_up=side.gives_up,
    )
