"""Destinations of the trainer's results: evaluation, reports and checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxrl_async.trainer.learner import Learner
from jaxrl_async.types import EpisodeGroup

Finish = Callable[[Mapping[str, float]], None]
"""Completes the report of a step with the values that its evaluation measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Functions that take the trainer's results. Called on the trainer's thread; an asynchronous
    evaluation calls `evaluate` on another."""

    evaluate: Callable[[], Mapping[str, float]]  # with the weights that are live now
    report: Callable[
        [int, Mapping[str, float], Sequence[EpisodeGroup]], Finish
    ]  # version, metrics, groups; shown once Finish is called, with further metrics or {}
    save: Callable[[Learner, int, Mapping[str, int]], None]  # learner, version, `Trainer.numbers`
    should_stop: Callable[[], bool]
    should_hurry: Callable[[], bool] = lambda: False  # stopping, with no time to evaluate
    gives_up: Callable[[], bool] = lambda: False  # polled during a wait for the samplers
