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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jaxrl_async.algorithms.pacing import Bounds, Pace, next_pace
from jaxrl_async.errors import (
    CheckpointError,
    Closed,
    EarlierSaveError,
    FolderLost,
    TrainingError,
)
from jaxrl_async.mesh import NO_DEVICE_LOCK
from jaxrl_async.metrics.spans import add_span
from jaxrl_async.ports.rollout import GroupSource
from jaxrl_async.ports.run import Clock
from jaxrl_async.ports.weights import Publisher
from jaxrl_async.profiling import NO_TRACES, StepTraces
from jaxrl_async.trainer.async_evaluation import EvaluationBeside, Finish
from jaxrl_async.trainer.data_metrics import drop_measures, group_measures
from jaxrl_async.trainer.learner import Learner
from jaxrl_async.trainer.step_times import StepTimes
from jaxrl_async.types import Draw, EpisodeGroup, IntArray

STOP_S = 0.5
"""How often a trainer that waits for groups checks whether it must stop, seconds."""
MAX_FAILED_SAVES = 3
"""Checkpoints in a row that may fail."""
LIVE_TIMEOUT_S = 600.0
"""Longest wait for a sampler to take new weights before an evaluation, seconds (compiles
included)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Where the trainer's results go. Called on the trainer's thread, in this order; `evaluate` may
    be called on another, with `begin_report` in place of `report`."""

    evaluate: Callable[[], Mapping[str, float]]  # with the weights that are live now
    report: Callable[
        [int, Mapping[str, float], Sequence[EpisodeGroup]], None
    ]  # version, metrics, groups
    begin_report: Callable[[int, Mapping[str, float], Sequence[EpisodeGroup]], Finish]
    save: Callable[[Learner, int, Mapping[str, int]], None]  # learner, version, `Trainer.numbers`
    should_stop: Callable[[], bool]
    should_hurry: Callable[[], bool] = lambda: False  # stopping, with no time to evaluate
    gives_up: Callable[[], bool] = lambda: False  # asked while the samplers are waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How long a trainer learns, and what it does how often."""

    total_steps: int  # versions to make
    eval_every: int = 10  # versions; 0: only the first and the last
    eval_beside: bool = False  # while the next version is learnt; the last one is waited for
    save_every: int = 0  # versions; 0: only the last
    max_skipped_steps: int = 3  # non-finite ones in a row that stop the run
    pacing: Bounds | None = None  # of the buffer's staleness limit; None: it stays as it is
    probe: IntArray | None = None  # tokens whose log-probs go with the weights; None: none do


class Trainer:
    """Learns until `total_steps` versions are made, a stop is requested, or nothing is finite."""

    def __init__(
        self,
        *,
        learner: Learner,
        source: GroupSource,
        publisher: Publisher,
        outlets: Outlets,
        settings: TrainerSettings,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
        turn: AbstractContextManager[Any] | None = None,
        traces: StepTraces = NO_TRACES,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Build the trainer of a new run; `restore` continues a saved one.

        turn: held from the groups of a step to its publishing, where several runs share the slice;
            None: this run has it to itself.
        traces: takes the profiler's traces of chosen steps.
        """
        self.learner = learner
        self._source, self._publisher, self._outlets = source, publisher, outlets
        self._settings, self.version, self._skipped_in_row = settings, 0, 0
        self._blown_up = False  # whether the last skipped step was one by its new weights
        self._failed_saves, self._save_s = 0, 0.0  # in a row; of the last one, on this thread
        self._torn = False  # whether an update that failed has left weights of no version
        self._device_lock, self._turn, self._clock = device_lock, turn, clock
        self._traces = traces
        self._saved_version = -1
        self._beside: EvaluationBeside | None = None  # under way
        self.doing, self.since = "starting", clock()  # for the watchdog
        self.longest_update_s = 0.0  # of those so far
        self._pace = Pace(limit=settings.pacing.highest if settings.pacing else 0)

    def restore(self, version: int, numbers: Mapping[str, int]) -> None:
        """Continue from a saved version and its `numbers`, before `run`."""
        self.version = self._saved_version = version
        self._skipped_in_row = numbers["skipped"]
        if self._settings.pacing is not None:
            self._pace = Pace(limit=numbers["limit"], rest=numbers["rest"])

    def run(self) -> None:
        """Make one version after another.

        consumes      one step's groups from the buffer, in order
        waits for     source.draw()          unblocked by the rollout loop and by close()
                      publisher.publish()    while the sampler has not taken the last version
        produces      weights for the samplers, metrics, checkpoints
        on failure    a non-finite step is skipped and counted; several in a row stop the run, saved
        """
        in_a_hurry = self._outlets.should_stop() and self._outlets.should_hurry()
        due = self.version == 0 or self._evaluation_is_due()  # the same if this run was resumed
        if due and not in_a_hurry and self._settings.eval_beside:
            self._evaluate_beside(self._outlets.begin_report(self.version, {}, ()))
        elif due and not in_a_hurry:
            self._now("evaluating")
            self._outlets.report(self.version, self._outlets.evaluate(), ())
        if self._settings.save_every:
            self._save()  # the warm start, if nothing else
        self._source.resume()
        try:
            try:
                while self.version < self._settings.total_steps and not self._outlets.should_stop():
                    with self._traces.of(self.version + 1):
                        self._one_step()
            except Closed:
                if not self._outlets.should_stop():
                    raise
            self._complete_evaluation(self._clock())
        finally:
            self._save(last=True)

    def numbers(self) -> dict[str, int]:
        """Return what a checkpoint keeps of the trainer, beside learner and version."""
        pace = {"limit": self._pace.limit, "rest": self._pace.rest}
        return {**pace, "skipped": self._skipped_in_row}

    def _one_step(self) -> None:
        start = asked = self._clock()
        if self._turn is not None:  # not within the turn: the others would wait for it, too
            asked = self._complete_evaluation(start)
        self._now("waiting for groups")
        draw = self._draw()
        if draw is None:
            return
        self._traces.before_update()
        drawn = in_turn = self._clock()
        if self._turn is not None:
            self._now("waiting for its turn")
        with self._turn or NO_DEVICE_LOCK:
            if self._turn is not None:
                in_turn = self._clock()
            self._now("learning")
            values = self._learn(draw)
            trained = self._clock()
            self.longest_update_s = max(self.longest_update_s, trained - in_turn)
            times = partial(
                StepTimes, start=start, asked=asked, drawn=drawn, in_turn=in_turn, trained=trained
            )
            try:  # of weights that are live until the next are published
                evaluated = self._complete_evaluation(trained)
            except BaseException:  # these are saved all the same, and so is what they measured
                end = self._clock()
                values |= self._measures(times(evaluated=end, published=end, ended=end), draw)
                self._outlets.begin_report(self.version, values, draw.groups)
                raise
            last = self.version == self._settings.total_steps or self._outlets.should_stop()
            due = (last or self._evaluation_is_due()) and not self._outlets.should_hurry()
            beside = due and not last and self._settings.eval_beside
            evaluates = due and not beside
            if evaluates:
                self._source.pause()  # no new group starts until exactly this one is evaluated
            self._now("publishing")
            self._publish()
        published = self._clock()
        if evaluates:
            self._now("waiting for live weights")
            self._publisher.wait_live(self.version, LIVE_TIMEOUT_S, self._outlets.gives_up)
            self._now("evaluating")
            values |= self._outlets.evaluate()
        made = times(evaluated=evaluated, published=published, ended=self._clock())
        made.record(self.version, evaluates=evaluates)
        values |= self._measures(made, draw) | self._save_report()
        if beside:
            self._evaluate_beside(self._outlets.begin_report(self.version, values, draw.groups))
        else:
            self._outlets.report(self.version, values, draw.groups)
        if self._settings.save_every and self.version % self._settings.save_every == 0:
            self._save()
        if evaluates and not last:
            self._source.resume()
        self._stop_if_lost()

    def _measures(self, times: StepTimes, draw: Draw) -> dict[str, float]:
        """Return a step's metrics of time."""
        in_turns, beside = self._turn is not None, self._settings.eval_beside
        return times.measures(draw.waited_s, in_turns=in_turns, beside=beside)

    def _evaluate_beside(self, finish: Finish) -> None:
        """Begin to evaluate the version that was published last. Until it ends, no further one is:
        the answers are all of its weights."""
        version = self.version

        def evaluate() -> Mapping[str, float]:
            self._publisher.wait_live(version, LIVE_TIMEOUT_S, self._outlets.gives_up)
            return self._outlets.evaluate()

        self._beside = EvaluationBeside(evaluate, finish, version)

    def _complete_evaluation(self, since: float) -> float:
        """Wait for the evaluation under way; return when it ended, or `since` if there is none."""
        beside, self._beside = self._beside, None
        if beside is None:
            return since
        self._now("evaluating")
        beside.complete()
        return self._clock()

    def _evaluation_is_due(self) -> bool:
        return self._settings.eval_every > 0 and self.version % self._settings.eval_every == 0

    def _draw(self) -> Draw | None:
        """Return the next step's groups; None if a stop is requested meanwhile."""
        waited_s = 0.0
        while not self._outlets.should_stop():
            start = self._clock()
            try:
                draw = self._source.draw(self.version, STOP_S)
            except TimeoutError:
                waited_s += self._clock() - start
            else:
                return replace(draw, waited_s=waited_s + draw.waited_s)
        return None

    def _learn(self, draw: Draw) -> dict[str, float]:
        """Make one version from the groups drawn; return metrics of the data and of the step.

        If that fails, the groups go back to the source, and half-changed weights are never saved.
        """
        before = self.learner.params
        try:
            stats = self.learner.learn(draw.groups, self.version, self._device_lock)
        except BaseException:
            self._source.give_back()
            self._torn = self.learner.params is not before or _is_gone(before)
            raise
        values = group_measures(draw.groups, self.version)
        values |= drop_measures(draw.dropped, draw.cancelled, trained=len(draw.groups))
        values |= {**stats, **self._adapt(stats)}
        self._skipped_in_row = self._skipped_in_row + 1 if stats["train/skipped"] else 0
        self._blown_up = bool(stats.get("train/blown_up"))
        self.version += 1
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

    def _now(self, doing: str) -> None:
        self.doing, self.since = doing, self._clock()

    def _publish(self) -> None:
        self._publisher.wait_taken()  # without the lock: a sampler that waits for it cannot poll
        with self._device_lock:
            logprobs = None
            if self._settings.probe is not None:
                logprobs = self.learner.probe(self._settings.probe)
            self._publisher.publish(self.version, self.learner.params, logprobs)

    def _save(self, *, last: bool = False) -> None:
        """Save a checkpoint of this version.

        A failed save is counted; often only the next save reports it. Several in a row, or the
        last one, end the run.
        """
        if self._saved_version == self.version:
            return
        if self._torn:
            log.error(
                "version %d is not saved: the update that failed has changed its weights. --resume "
                "continues from the newest checkpoint.",
                self.version,
            )
            return
        self._now("saving")
        start = self._clock()
        try:
            self._outlets.save(self.learner, self.version, self.numbers())
        except FolderLost:
            self._saved_version = self.version  # a last save would wait for the other processes
            raise
        except CheckpointError as error:
            self._failed_saves += 1
            under_way = isinstance(error, EarlierSaveError)
            if (last and not under_way) or self._failed_saves >= MAX_FAILED_SAVES:
                raise
            if under_way:
                self._saved_version = self.version
            then = "another is under way" if under_way else "the next is tried when it is due"
            if self._failed_saves == 1:  # those that follow it are counted, and the last one raises
                log.error("%s The run continues; %s.", error, then)
        else:
            self._failed_saves, self._saved_version = 0, self.version
        self._save_s = self._clock() - start
        add_span("save", start, start + self._save_s, version=self.version)

    def _save_report(self) -> dict[str, float]:
        """Return the metrics of the save since the last report; none if there was none."""
        save_s, self._save_s = self._save_s, 0.0
        failed = {"checkpoint/failed": 1.0} if self._failed_saves and save_s else {}
        return {"time/save_s": save_s, **failed} if save_s else {}

    def _stop_if_lost(self) -> None:
        if self._skipped_in_row >= self._settings.max_skipped_steps:
            self._complete_evaluation(self._clock())
            raise TrainingError(
                lost(self._skipped_in_row, blown_up=self._blown_up)
                + f" The last one made version {self.version}. Rewards are in samples.jsonl."
            )


def lost(in_row: int, *, blown_up: bool) -> str:
    """Say that so many steps in a row were skipped, and what to do.

    blown_up: the last one was, because of the weights that it would have made.
    """
    kept = "the weights from before them are kept and saved."
    rate = "algorithm.learning_rate (of a warm start: warm_start.learning_rate)"
    if blown_up:
        return (
            f"{in_row} steps in a row were skipped: the last one would have made weights beyond "
            f"all measure, or that give NaN; {kept} The learning rate is too high: lower {rate}."
        )
    return (
        f"{in_row} steps in a row had a non-finite loss or gradient; {kept} Lower {rate} or "
        "trainer.max_grad_norm."
    )


def _is_gone(params: Any) -> bool:
    """Return whether an update has taken the memory of these weights."""
    return any(getattr(x, "is_deleted", bool)() for x in jax.tree.leaves(params))
