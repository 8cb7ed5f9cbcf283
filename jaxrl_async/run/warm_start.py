"""The supervised warm start of a policy: one thread, with separate records and checkpoints.

    FittingPairs ──next──> pack ──> update ──> console, RUN/warm_start: metrics.jsonl, tensorboard
         │                             │
         └──state──> checkpoint <── TrainState     (RUN/warm_start/checkpoints, the newest one)

The run's own checkpoints begin where the warm start ends: once one exists, nothing here is read.
"""

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing

from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.data.prompts import FittingPairs, warm_start_pairs
from jaxrl_async.data.records import OwnRecords
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import Stopped
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.recorder import MetricsWriter
from jaxrl_async.model.spec import Params
from jaxrl_async.run.checkpoint.store import Checkpoints, check_resumed
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.reporting import NoRecorder, make_recorder
from jaxrl_async.run.signals import Stop, preempted
from jaxrl_async.run.update_loop import Ahead, make_updates
from jaxrl_async.trainer.objectives.supervised_objective import SupervisedObjective
from jaxrl_async.trainer.pack import pack_pairs
from jaxrl_async.trainer.update import Update
from jaxrl_async.types import PackedBatch

log = logging.getLogger(__name__)


class WarmUpdates:
    """The warm start's updates with their metrics and checkpoints; update_loop.Work."""

    def __init__(
        self,
        config: Config,
        step: Update[SupervisedObjective],
        pairs: FittingPairs,
        params: Params,
        checkpoints: Checkpoints,
        outlet: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        """params: at the start; outlet: takes each update's report."""
        self._config, self._step, self._pairs = config, step, pairs
        self._checkpoints, self._outlet = checkpoints, outlet
        self._state = step.init(params)
        self._batches = Ahead(self._pack, pairs.state)
        self._made, self._loss = 0, float("nan")  # updates so far; loss of the last one
        self._elapsed_s = 0.0  # in updates, over all starts

    @property
    def made(self) -> int:
        """Updates made so far, over all starts."""
        return self._made

    @property
    def params(self) -> Params:
        """The current weights."""
        return self._state.params

    def summary(self) -> dict[str, float]:
        """Return the warm start's metrics for the run's first line."""
        return {
            "warm/loss": self._loss,
            "warm/updates": float(self._made),
            "time/warm_start_s": self._elapsed_s,
        }

    def step(self) -> Mapping[str, float]:
        """Make one update from the next pairs, and report it."""
        start = time.perf_counter()
        self._state, report = self._step.update(self._state, self._batches.take(), at=self._made)
        self._made += 1
        self._loss = report["train/loss"]
        report.pop("train/flops")
        step_s = time.perf_counter() - start
        self._elapsed_s += step_s
        report |= {"time/step_s": step_s, "time/elapsed_s": self._elapsed_s}
        self._outlet(self._made, report)
        return report

    def _pack(self) -> PackedBatch:
        examples = [next(self._pairs) for _ in range(self._config.warm_start.batch_size)]
        return pack_pairs(examples, self._config.row_length, self._pairs.images)

    def close(self) -> None:
        """End the thread that makes batches ahead."""
        self._batches.close()

    def save(self) -> None:
        """Write the train state and the position in the pairs."""
        loop = {
            "job": self._config.run.job,
            "version": self._made,
            "config": dump(self._config),
            "pairs": self._batches.state,
            "loss": repr(self._loss),
            "elapsed_s": self._elapsed_s,
        }
        self._checkpoints.save(self._made, state=self._state, loop=loop)

    def restore(self) -> None:
        """Continue from the newest checkpoint."""
        saved = self._checkpoints.restore(None, self._state)
        check_resumed(saved, self._config, self._checkpoints.directory)
        self._pairs.restore(saved.loop["pairs"])
        self._state, self._made = saved.state, saved.step
        self._loss, self._elapsed_s = float(saved.loop["loss"]), saved.loop["elapsed_s"]
        log.info("the warm start continues after update %d", self._made)


def warm_pairs(config: Config, tokenizer: Tokenizer, own: OwnRecords | None = None) -> FittingPairs:
    """Return endless demonstrations for the warm start and a policy's supervised loss.

    own: a task's records, in place of the settings' records. Raises ConfigError, DataError.
    """
    return warm_start_pairs(
        config.limited_data,
        config.warm_start,
        tokenizer,
        seed=config.run.seed,
        max_length=config.longest_example,
        own=own,
    )


def nothing_meanwhile() -> None:
    """Do nothing during the warm start."""


def warm_start(
    config: Config,
    step: Update[SupervisedObjective],
    pairs: FittingPairs,
    params: Params,
    paths: Paths,
    *,
    resume: bool,
    console: Console,
    stop: Stop,
    lockstep: Lockstep,
    meanwhile: Callable[[], None] = nothing_meanwhile,
) -> tuple[Params, dict[str, float]]:
    """Train on demonstrations for warm_start.steps updates.

    Returns the weights, and the warm start's metrics for the run's first line. With `resume`,
    continues from the warm start's newest checkpoint, if any. `meanwhile` is called after each
    update: it starts work that can run during the others. Raises Stopped (Ctrl-C) or Preempted
    (SIGTERM) once all updates made are saved, and TrainingError.
    """
    agreed = lockstep.agreed_stop(stop)
    stop.answer = "stopping after this update of the warm start and saving"
    console.phase("warm start", "compiling")
    own, steps = paths.warm_start, config.warm_start.steps
    recorder: MetricsWriter = NoRecorder()  # until the first update is known

    def outlet(update: int, report: Mapping[str, float]) -> None:
        recorder.log(update, report)
        meanwhile()
        console.counted("warm start", update, steps, f"loss {report['train/loss']:.3f}")

    with ExitStack() as open_:
        checkpoints = open_.enter_context(
            Checkpoints(
                own.checkpoints,
                1,
                verify=config.checkpoint.verify,
                run=paths,
                is_hurried=lambda: stop.preempted,
            )
        )
        work = WarmUpdates(config, step, pairs, params, checkpoints, outlet)
        open_.enter_context(closing(work))
        if resume and checkpoints.latest() is not None:
            work.restore()
        resume_step = work.made if resume else None
        recorder = make_recorder(config, own, lockstep, resume_step)
        open_.enter_context(closing(recorder))
        saved = checkpoints.latest()
        make_updates(work, steps, config, agreed, saved=saved, keeps_last=False)
    if agreed.is_set():
        _leave(stop, f"update {work.made} of {steps} of the warm start")
    return work.params, work.summary()


def _leave(stop: Stop, what: str) -> None:
    if stop.preempted:
        raise preempted(stop, what)
    raise Stopped(f"stopped early by {stop.reason} after {what}")


def forget_warm_start(paths: Paths) -> None:
    """Remove the warm start's checkpoint once the run has one; its metrics stay."""
    shutil.rmtree(paths.warm_start.checkpoints, ignore_errors=True)
