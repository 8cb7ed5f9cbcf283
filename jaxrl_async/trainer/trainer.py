"""The trainer: one thread that draws groups, learns from them, and publishes the new weights.

ReplayBuffer ──draw──> Learner: shape, pack, advantages, update ──────┐
     ^                                                                │ version + 1
     │ slots freed when live                                          v
Live(version) <────────────── WeightChannel <──────publish────── new weights
                                                                      │
                                        report (metrics), save (checkpoint), evaluate
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax

from jaxrl_async.algorithms.pacing import Bounds, Pace, next_pace
from jaxrl_async.errors import CheckpointError, Closed, EarlierSaveError, FolderLost, TrainingError
from jaxrl_async.mesh import NO_DEVICE_LOCK, DeviceGuard
from jaxrl_async.metrics.spans import add_span
from jaxrl_async.model.spec import Params
from jaxrl_async.ports.rollout import GroupSource
from jaxrl_async.ports.weights import Publisher
from jaxrl_async.profiling import NO_TRACES, StepTraces
from jaxrl_async.trainer.data_metrics import drop_measures, group_measures, task_measures
from jaxrl_async.trainer.evaluation import (
    EvaluationParts,
    EvaluationSchedule,
    EvaluationTimes,
    Finish,
    Outlets,
)
from jaxrl_async.trainer.learner import Learner
from jaxrl_async.trainer.step_clock import EVALUATION, GROUPS, LEARN, TURN, StepClock
from jaxrl_async.types import Draw, IntArray

MAX_FAILED_SAVES = 3
"""Consecutive failed checkpoints that end the run."""

log = logging.getLogger(__name__)


class Saver:
    """Saves versions and counts failed saves. Owned by the trainer's thread."""

    def __init__(self, save: Callable[[int], None], clock: StepClock) -> None:
        """Prepare it. save: writes a checkpoint of this version, or begins to."""
        self.saved_version = -1
        self.torn = False  # True: a failed update has left weights of no version
        self._write, self._clock = save, clock
        self._failed, self._save_s = 0, 0.0  # in a row; of the last save, on this thread

    def save(self, version: int, *, last: bool = False) -> None:
        """Save a checkpoint of this version, unless it is saved.

        A failed save is counted; often only the next save reports it. MAX_FAILED_SAVES in a row, or
        a failure of the last save, end the run.
        """
        if self.saved_version == version:
            return
        if self.torn:
            log.error(
                "version %d is not saved: the update that failed has changed its weights. --resume "
                "continues from the newest checkpoint.",
                version,
            )
            return
        self._clock.now("saving")
        try:
            self._write(version)
        except FolderLost:
            self.saved_version = version  # a last save would wait for the other processes
            raise
        except CheckpointError as error:
            self._count_failure(error, version, last=last)
        else:
            self._failed, self.saved_version = 0, version
        start, self._save_s = self._clock.since, self._clock.elapsed_s()
        add_span("save", start, start + self._save_s, version=version)

    def _count_failure(self, error: CheckpointError, version: int, *, last: bool) -> None:
        """Count a failed save, this one or one before it; raise the error if it ends the run."""
        self._failed += 1
        under_way = isinstance(error, EarlierSaveError)
        if (last and not under_way) or self._failed >= MAX_FAILED_SAVES:
            raise error
        if under_way:
            self.saved_version = version
        then = "another is under way" if under_way else "the next is tried when it is due"
        if self._failed == 1:  # the following ones are counted, and the last one raises
            log.error("%s The run continues; %s.", error, then)

    def report(self) -> dict[str, float]:
        """Return the metrics of the save since the last report; {} if there was none."""
        save_s, self._save_s = self._save_s, 0.0
        failed = {"checkpoint/failed": 1.0} if self._failed and save_s else {}
        return {"time/save_s": save_s, **failed} if save_s else {}


STOP_S = 0.5
"""Interval at which a trainer that waits for groups checks for a stop request, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Length of a training run, and how often it evaluates and saves."""

    total_steps: int  # versions to make
    eval_every: tuple[int, ...] = (10,)  # versions, of each evaluation; 0: the first and the last
    eval_async: bool = False  # while the next version is learned; the last one inline
    save_every: int = 0  # versions; 0: only the last
    max_skipped_steps: int = 3  # consecutive non-finite steps that stop the run
    pacing: Bounds | None = None  # of the buffer's staleness limit; None: it is constant
    probe: IntArray | None = None  # tokens whose log-probs go with the weights; None: no log-probs


class Trainer:
    """Learns until `total_steps` versions are made, a stop is requested, or updates diverge."""

    def __init__(
        self,
        *,
        learner: Learner,
        source: GroupSource,
        publisher: Publisher,
        outlets: Outlets,
        settings: TrainerSettings,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
        slice_lock: DeviceGuard = NO_DEVICE_LOCK,
        traces: StepTraces = NO_TRACES,
    ) -> None:
        """Build the trainer of a new run; `restore` continues a saved one.

        slice_lock: held from the update of a step to its publishing, if runs share the slice.
        traces: takes the profiler's traces of chosen steps.
        """
        self.learner = learner
        self._source, self._publisher, self._outlets = source, publisher, outlets
        self._settings, self.version, self._skipped_in_row = settings, 0, 0
        self._blown_up = False  # whether the last skipped step was skipped for its new weights
        self._device_lock, self._slice_lock, self._traces = device_lock, slice_lock, traces
        self.longest_update_s = 0.0  # so far
        self._pace = Pace(limit=settings.pacing.highest if settings.pacing else 0)
        shares_slice = slice_lock is not NO_DEVICE_LOCK
        possible = {TURN: shares_slice, EVALUATION: settings.eval_async}
        self.clock = StepClock([wait for wait, is_possible in possible.items() if is_possible])
        self._saver = Saver(
            lambda version: outlets.save(self.learner, version, self.numbers()), self.clock
        )
        self._evaluations = EvaluationSchedule(
            EvaluationParts(source=source, publisher=publisher, outlets=outlets, clock=self.clock),
            EvaluationTimes(
                every=settings.eval_every,
                total_steps=settings.total_steps,
                alongside=settings.eval_async,
                shares_slice=shares_slice,
            ),
        )

    def restore(self, version: int, numbers: Mapping[str, int]) -> None:
        """Continue from a saved version and its `numbers`, before `run`."""
        self.version = self._saver.saved_version = version
        self._skipped_in_row = numbers["skipped"]
        if self._settings.pacing is not None:
            self._pace = Pace(limit=numbers["limit"], rest=numbers["rest"])

    def numbers(self) -> dict[str, int]:
        """Return what a checkpoint keeps of the trainer, in addition to learner and version."""
        pace = {"limit": self._pace.limit, "rest": self._pace.rest}
        return {**pace, "skipped": self._skipped_in_row}

    def run(self) -> None:
        """Make one version after another.

        consumes      one step's groups from the buffer, in order
        waits for     source.draw()          unblocked by the rollout loop and by close()
                      publisher.publish()    while the sampler has not taken the last version
        produces      weights for the samplers, metrics, checkpoints
        on failure    a non-finite step is skipped and counted; several in a row stop the run, saved
        """
        self._evaluations.start(
            self.version, lambda values: self._outlets.report(self.version, values, ())
        )
        if self._settings.save_every:
            self._saver.save(self.version)  # the warm start, if nothing else
        self._source.resume()
        try:
            try:
                while self.version < self._settings.total_steps and not self._outlets.should_stop():
                    with self._traces.of(self.version + 1):
                        self._one_step()
            except Closed:
                if not self._outlets.should_stop():
                    raise
            self._evaluations.complete()
        finally:
            self._saver.save(self.version, last=True)

    def _one_step(self) -> None:
        """Make one version: draw, learn, publish, report, save."""
        self._evaluations.before_draw()
        draw = self._draw()
        if draw is None:
            return
        self._traces.before_update()
        self.clock.now("waiting for its turn", TURN)
        with self._slice_lock:
            values = self._learn(draw)
            report = partial(self._report, draw, values)
            evaluation = self._evaluations.before_publish(self.version, report)
            self._publish()
        evaluation.after_publish(self.version, report)
        if self._settings.save_every and self.version % self._settings.save_every == 0:
            self._saver.save(self.version)
        evaluation.after_save()
        self._stop_if_lost()

    def _draw(self) -> Draw | None:
        """Return the next step's groups; None if a stop is requested first."""
        self.clock.now("waiting for groups", GROUPS)
        waited_s = 0.0
        while not self._outlets.should_stop():
            start = time.perf_counter()
            try:
                draw = self._source.draw(self.version, STOP_S)
            except TimeoutError:
                waited_s += time.perf_counter() - start
            else:
                return replace(draw, waited_s=waited_s + draw.waited_s)
        return None

    def _learn(self, draw: Draw) -> dict[str, float]:
        """Make one version from these groups; return metrics of the data and of the step.

        If that fails, the groups go back to the source, and half-changed weights are never saved.
        """
        self.clock.now("learning", LEARN)
        before = self.learner.params
        try:
            stats = self.learner.learn(draw.groups, self.version, self._device_lock)
        except BaseException:
            self._source.give_back()
            self._saver.torn = self.learner.params is not before or _is_donated(before)
            raise
        values = group_measures(draw.groups, self.version)
        values |= task_measures(draw.groups, self.version)
        values |= drop_measures(draw.dropped, draw.cancelled, trained=len(draw.groups))
        values |= {**stats, **self._adapt(stats)}
        self._skipped_in_row = self._skipped_in_row + 1 if stats["train/skipped"] else 0
        self._blown_up = bool(stats.get("train/blown_up"))
        self.version += 1
        self.longest_update_s = max(self.longest_update_s, self.clock.elapsed_s())
        return values

    def _adapt(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Set the buffer's limit by the effective sample size, if it is paced."""
        if self._settings.pacing is None:
            return {}
        self._pace = next_pace(
            self._pace, stats.get("offpolicy/ess_share", float("nan")), self._settings.pacing
        )
        self._source.set_limit(self._pace.limit)
        return {"staleness/limit": float(self._pace.limit)}

    def _publish(self) -> None:
        self._publisher.wait_taken()  # without the lock: a sampler that waits for it cannot poll
        with self._device_lock:
            logprobs = None
            if self._settings.probe is not None:
                logprobs = self.learner.probe(self._settings.probe)
            self._publisher.publish(self.version, self.learner.params, logprobs)

    def _report(self, draw: Draw, values: Mapping[str, float], more: Mapping[str, float]) -> Finish:
        """End the step and begin its report; more: of an inline evaluation."""
        measures = self.clock.end_step(self.version, draw.waited_s) | self._saver.report()
        return self._outlets.report(self.version, {**values, **more, **measures}, draw.groups)

    def _stop_if_lost(self) -> None:
        if self._skipped_in_row >= self._settings.max_skipped_steps:
            self._evaluations.complete()
            raise TrainingError(
                skip_message(self._skipped_in_row, blown_up=self._blown_up)
                + f" The last one made version {self.version}. Rewards are in samples.jsonl."
            )


def skip_message(in_row: int, *, blown_up: bool) -> str:
    """Return the message after `in_row` consecutive skipped steps, with the remedy.

    blown_up: the last one was skipped for the weights that it would have made.
    """
    ending = "the weights before them are kept and saved."
    rate = "algorithm.learning_rate (of a warm start: warm_start.learning_rate)"
    if blown_up:
        return (
            f"{in_row} steps in a row were skipped: the weights of the last one were far too large "
            f"or gave NaN; {ending} The learning rate is too high: lower {rate}."
        )
    return (
        f"{in_row} steps in a row had a non-finite loss or gradient; {ending} Lower {rate} or "
        "trainer.max_grad_norm."
    )


def _is_donated(params: Params) -> bool:
    """Return whether an update has donated the memory of these weights."""
    return any(getattr(x, "is_deleted", bool)() for x in jax.tree.leaves(params))
