"""The supervised warm start of a policy: one thread, with records and checkpoints of its own.

    FittingPairs ──next──> pack ──> update ──> console, RUN/warm_start: metrics.jsonl, tensorboard
         │                             │
         └──place──> checkpoint <── TrainState     (RUN/warm_start/checkpoints, the newest one)

The run's own checkpoints begin where it ends: with one of them, nothing here is looked at again.
"""

import logging
import shutil
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.data.prompts import FittingPairs
from jaxrl_async.errors import Stopped, TrainingError
from jaxrl_async.metrics.console import Console
from jaxrl_async.run.checkpoint.store import Checkpoints, check_resumed
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep, StopRequests
from jaxrl_async.run.outlets import MetricsWriter, make_recorder
from jaxrl_async.run.signals import Stop, preempted
from jaxrl_async.trainer.supervised import SupervisedStep
from jaxrl_async.trainer.update import Params, TrainState

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class WarmProgress:
    """All that a resumed warm start takes up again, beside the place in its pairs."""

    state: TrainState
    update: int = 0  # made so far
    loss: float = float("nan")  # of the last one
    elapsed_s: float = 0.0  # in updates, over all starts


def warm_start(
    config: Config,
    step: SupervisedStep,
    pairs: FittingPairs,
    params: Params,
    paths: Paths,
    *,
    resume: bool,
    console: Console,
    stop: Stop,
    lockstep: Lockstep,
) -> tuple[Params, dict[str, float]]:
    """Train on worked answers for warm_start.steps updates; the weights, and what the run's first
    line of metrics says of them. With `resume` from the warm start's newest checkpoint, if any.

    Raises Stopped (Ctrl-C) or Preempted (SIGTERM) once what was made is saved, TrainingError.
    """
    asked = lockstep.agreed_stop(stop)
    stop.answer = "stopping after this update of the warm start and saving"
    console.phase("warm start", "compiling")
    own = paths.warm_start
    with ExitStack() as open_:
        checkpoints = open_.enter_context(
            Checkpoints(own.checkpoints, 1, verify=config.checkpoint.verify)
        )
        progress = WarmProgress(state=step.init(params))
        if resume and checkpoints.latest() is not None:
            _restore(config, progress, pairs, checkpoints)
        resume_step = progress.update if resume else None
        recorder = make_recorder(config.metrics, own, lockstep, resume_step)
        open_.enter_context(closing(recorder))
        _learn(config, step, pairs, progress, checkpoints, recorder, console, asked)
    if asked.is_set():
        _leave(stop, f"update {progress.update} of {config.warm_start.steps} of the warm start")
    told = {
        "warm/loss": progress.loss,
        "warm/updates": float(progress.update),
        "time/warm_start_s": progress.elapsed_s,
    }
    return progress.state.params, told


def _learn(
    config: Config,
    step: SupervisedStep,
    pairs: FittingPairs,
    progress: WarmProgress,
    checkpoints: Checkpoints,
    recorder: MetricsWriter,
    console: Console,
    asked: StopRequests,
) -> None:
    """Make one update after another, until all are made or somebody asks for a stop.

    produces      metrics, checkpoints, the weights in `progress`
    on failure    a non-finite update is skipped and counted; several in a row stop the run, saved
    """
    section, every = config.warm_start, config.checkpoint.every
    saved, skipped, stopped = checkpoints.latest(), 0, False
    try:
        while progress.update < section.steps and not (stopped := asked.is_set()):
            values = _update(step, pairs, progress, section.batch_size)
            recorder.log(progress.update, values)
            made = f"{progress.update}/{section.steps}"
            console.phase("warm start", f"{made}, loss {progress.loss:.3f}")
            skipped = skipped + 1 if values["train/skipped"] else 0
            stop_if_lost(skipped, config)
            if every and progress.update % every == 0:
                _save(config, progress, pairs, checkpoints)
                saved = progress.update
    except TrainingError:
        stopped = True
        raise
    finally:
        if (stopped or (every and progress.update == section.steps)) and saved != progress.update:
            _save(config, progress, pairs, checkpoints)


def _update(
    step: SupervisedStep, pairs: FittingPairs, progress: WarmProgress, batch_size: int
) -> dict[str, float]:
    """One update from the next pairs; its line of metrics."""
    start = time.perf_counter()
    batch = step.pack([next(pairs) for _ in range(batch_size)])
    progress.state, values = step.update(progress.state, batch, at=progress.update)
    progress.update += 1
    progress.loss = values["train/loss"]
    values.pop("train/flops")
    step_s = time.perf_counter() - start
    progress.elapsed_s += step_s
    return values | {"time/step_s": step_s, "time/elapsed_s": progress.elapsed_s}


def stop_if_lost(skipped: int, config: Config) -> None:
    """Raise TrainingError after trainer.max_skipped_steps steps in a row that were not finite."""
    if skipped >= config.trainer.max_skipped_steps:
        raise TrainingError(
            f"{skipped} steps in a row had a non-finite loss or gradient; the weights from before "
            "them are kept and saved. Lower algorithm.learning_rate (of the warm start: "
            "warm_start.learning_rate) or trainer.max_grad_norm."
        )


def _leave(stop: Stop, what: str) -> None:
    if stop.preempted:
        raise preempted(stop, what)
    raise Stopped(f"stopped early by {stop.reason} after {what}")


def _save(
    config: Config, progress: WarmProgress, pairs: FittingPairs, checkpoints: Checkpoints
) -> None:
    loop = {
        "job": config.run.job,
        "version": progress.update,
        "config": dump(config),
        "pairs": pairs.state(),
        "loss": repr(progress.loss),
        "elapsed_s": progress.elapsed_s,
    }
    checkpoints.save(progress.update, state=progress.state, loop=loop)


def _restore(
    config: Config, progress: WarmProgress, pairs: FittingPairs, checkpoints: Checkpoints
) -> None:
    saved = checkpoints.restore(None, progress.state)
    check_resumed(saved, config, checkpoints.directory)
    pairs.restore(saved.loop["pairs"])
    progress.state, progress.update = saved.state, saved.step
    progress.loss, progress.elapsed_s = float(saved.loop["loss"]), saved.loop["elapsed_s"]
    log.info("the warm start goes on after update %d", progress.update)


def forget_warm_start(paths: Paths) -> None:
    """Remove the warm start's checkpoint, where the run has one of its own; its metrics stay."""
    shutil.rmtree(paths.warm_start.checkpoints, ignore_errors=True)
