"""Evaluation of the published versions: inline, alongside the next update, or none.

             before publish       after publish                     after save
    inline   pause new groups     wait until live, evaluate,        resume new groups
                                  report
    async    -                    report; a thread evaluates and    -
                                  completes the report
    none     -                    report                            -

The last version is evaluated inline. While an asynchronous evaluation runs, no further version is
published: all its answers come from one version.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxrl_async.errors import Closed
from jaxrl_async.metrics.spans import span
from jaxrl_async.ports.rollout import GroupSource
from jaxrl_async.ports.weights import Publisher
from jaxrl_async.trainer.learner import Learner
from jaxrl_async.trainer.step_clock import EVALUATE, EVALUATION, PUBLISH, StepClock
from jaxrl_async.types import EpisodeGroup

log = logging.getLogger(__name__)

Finish = Callable[[Mapping[str, float]], None]
"""Completes the report of a step with the values that its evaluation measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Functions that take the trainer's results. Called on the trainer's thread; an asynchronous
    evaluation calls `evaluate` on another."""

    # version, and whether it is the last; evaluates the weights that are live now
    evaluate: Callable[[int, bool], Mapping[str, float]]
    report: Callable[
        [int, Mapping[str, float], Sequence[EpisodeGroup]], Finish
    ]  # version, metrics, groups; shown once Finish is called, with further metrics or {}
    save: Callable[[Learner, int, Mapping[str, int]], None]  # learner, version, `Trainer.numbers`
    should_stop: Callable[[], bool]
    should_hurry: Callable[[], bool] = lambda: False  # stopping, with no time to evaluate
    gives_up: Callable[[], bool] = lambda: False  # polled during a wait for the samplers


LIVE_TIMEOUT_S = 600.0
"""Maximum wait for the samplers to take new weights before an evaluation, seconds (compilation
included)."""

Report = Callable[[Mapping[str, float]], Finish]
"""Ends a step and begins its report, with the values of an inline evaluation or {}."""


class VersionEvaluation(Protocol):
    """The evaluation of one version: its part of the step. Runs on the trainer's thread."""

    def before_publish(self) -> None:
        """Prepare the evaluation, before the version is published."""

    def after_publish(self, version: int, report: Report) -> None:
        """Evaluate the version, or begin to, and report the step."""

    def after_save(self) -> None:
        """End the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationParts:
    """The parts of a run that an evaluation uses."""

    source: GroupSource
    publisher: Publisher
    outlets: Outlets
    clock: StepClock

    def wait_live(self, version: int) -> None:
        """Wait until all samplers use this version; raise WeightsError after LIVE_TIMEOUT_S."""
        self.publisher.wait_live(version, LIVE_TIMEOUT_S, self.outlets.gives_up)


class NoEvaluation:
    """Reports the step without an evaluation."""

    def before_publish(self) -> None:
        """See VersionEvaluation."""

    def after_publish(self, version: int, report: Report) -> None:
        """See VersionEvaluation."""
        report({})({})

    def after_save(self) -> None:
        """See VersionEvaluation."""


@dataclass(frozen=True, slots=True)
class InlineEvaluation:
    """Evaluates while no new group starts and the trainer waits."""

    parts: EvaluationParts
    last: bool  # no group starts afterwards

    def before_publish(self) -> None:
        """See VersionEvaluation."""
        self.parts.source.pause()

    def after_publish(self, version: int, report: Report) -> None:
        """See VersionEvaluation."""
        self.parts.clock.now("waiting for live weights", EVALUATE)
        self.parts.wait_live(version)
        self.evaluate(version, report)

    def evaluate(self, version: int, report: Report) -> None:
        """Evaluate the weights that are live now, which are this version's, and report."""
        self.parts.clock.now("evaluating")
        report(self.parts.outlets.evaluate(version, self.last))({})

    def after_save(self) -> None:
        """See VersionEvaluation."""
        if not self.last:
            self.parts.source.resume()


class AsyncEvaluation:
    """Evaluates on a thread while the next version is learned."""

    def __init__(self, parts: EvaluationParts) -> None:
        """Prepare it; at most one version's evaluation runs at a time."""
        self._parts = parts
        self._under_way: EvaluationThread | None = None

    def before_publish(self) -> None:
        """See VersionEvaluation."""

    def after_publish(self, version: int, report: Report) -> None:
        """See VersionEvaluation."""

        def evaluate() -> Mapping[str, float]:
            self._parts.wait_live(version)
            return self._parts.outlets.evaluate(version, False)

        self._under_way = EvaluationThread(evaluate, report({}), version)

    def after_save(self) -> None:
        """See VersionEvaluation."""

    def complete(self) -> None:
        """Wait for the evaluation under way, if any, and complete its report; raise its error."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._parts.clock.now("evaluating", EVALUATION)
            under_way.complete()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTimes:
    """The versions that are evaluated, and when."""

    every: tuple[int, ...]  # of each evaluation, see `is_due`
    total_steps: int  # the last version, unless a stop is requested before
    alongside: bool  # while the next version is learned, except the last
    shares_slice: bool  # other runs wait while this one holds the trainer's slice


def is_due(every: int, version: int, *, last: bool) -> bool:
    """Return whether a version is evaluated.

    Args:
        every: versions from one evaluation to the next; 0: only the first and the last.
        version: its number.
        last: whether it is the run's last.
    """
    return last or version == 0 or (every > 0 and version % every == 0)


class EvaluationSchedule:
    """Chooses the evaluation of each version. Owned by the trainer's thread."""

    def __init__(self, parts: EvaluationParts, times: EvaluationTimes) -> None:
        """Prepare it; nothing is evaluated yet."""
        self._parts, self._times = parts, times
        self._async = AsyncEvaluation(parts)

    def start(self, version: int, report: Report) -> None:
        """Evaluate the version that the run starts from, if due; the samplers have its weights."""
        outlets = self._parts.outlets
        if outlets.should_stop() and outlets.should_hurry():
            return
        evaluation = self._of(version, last=False)
        if isinstance(evaluation, InlineEvaluation):
            evaluation.evaluate(version, report)
        elif isinstance(evaluation, AsyncEvaluation):
            evaluation.after_publish(version, report)

    def before_draw(self) -> None:
        """Complete the evaluation under way if, later in the step, other runs would wait, too."""
        if self._times.shares_slice:
            self.complete()

    def before_publish(self, version: int, report: Report) -> VersionEvaluation:
        """Complete the evaluation of the live weights; return this version's, prepared.

        If the completed evaluation raises an error, the step is reported before: its version will
        be saved, so no resumed run would report it.
        """
        try:
            self.complete()
        except BaseException:
            report({})
            raise
        self._parts.clock.now("publishing", PUBLISH)
        last = version == self._times.total_steps or self._parts.outlets.should_stop()
        evaluation = self._of(version, last=last)
        evaluation.before_publish()
        return evaluation

    def complete(self) -> None:
        """Wait for the evaluation under way, if any, and complete its report; raise its error."""
        self._async.complete()

    def _of(self, version: int, *, last: bool) -> VersionEvaluation:
        due = any(is_due(every, version, last=last) for every in self._times.every)
        if not due or self._parts.outlets.should_hurry():
            return NoEvaluation()
        if self._times.alongside and not last:
            return self._async
        return InlineEvaluation(self._parts, last)


class EvaluationThread:
    """One evaluation under way on its own thread. Owned by the trainer's thread."""

    def __init__(
        self, evaluate: Callable[[], Mapping[str, float]], finish: Finish, version: int
    ) -> None:
        """Begin it. evaluate: called on the new thread; version: the evaluated one."""
        self._finish, self._evaluate, self._version = finish, evaluate, version
        self._values: Mapping[str, float] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def complete(self) -> None:
        """Wait until it ends, complete the report, and raise the evaluation's error, if any."""
        self._thread.join()
        self._finish(self._values)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with span("evaluate", "evaluation", version=self._version):  # one track for all threads
                self._values = self._evaluate()
        except Closed:  # the samplers have ended: the run ends, too, for another reason
            log.debug("an evaluation ended: closed")
        except BaseException as error:
            self._error = error
