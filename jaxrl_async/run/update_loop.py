"""One update after another until a stop is requested: jobs without a sampler, and warm starts.

work.step() ──> work.save() every checkpoint.every updates, and at the end
"""

from collections.abc import Mapping
from typing import Protocol

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import TrainingError
from jaxrl_async.metrics.spans import span
from jaxrl_async.profiling import NO_TRACES, StepTraces
from jaxrl_async.run.lockstep import StopRequests
from jaxrl_async.trainer.trainer import lost


class Work(Protocol):
    """Training with a position in its examples."""

    @property
    def made(self) -> int:
        """Updates made so far."""

    def step(self) -> Mapping[str, float]:
        """Make one update and record it; return its report."""

    def save(self) -> None:
        """Write a checkpoint that a resumed run continues from."""


def make_updates(
    work: Work,
    steps: int,
    config: Config,
    stop: StopRequests,
    *,
    saved: int | None,
    keeps_last: bool,
    traces: StepTraces = NO_TRACES,
) -> None:
    """Make updates until `steps` of them are made or a stop is requested.

    on failure    a non-finite update is skipped and counted; several in a row stop the run, saved

    Args:
        saved: the update that the newest checkpoint holds; None: no checkpoint exists.
        keeps_last: save in any case at the end. Otherwise save at the end only after a stop or a
            TrainingError, or if all updates are made and checkpoint.every is set.
        traces: takes the profiler's traces of selected updates.
    """
    every, skipped, stopped = config.checkpoint.every, 0, False
    try:
        while work.made < steps and not (stopped := stop.is_set()):
            with traces.of(work.made + 1), span("update", number=work.made + 1):
                report = work.step()
            skipped = skipped + 1 if report["train/skipped"] else 0
            stop_if_lost(skipped, config, blown_up=bool(report.get("train/blown_up")))
            if every and work.made % every == 0:
                with span("save"):
                    work.save()
                saved = work.made
    except TrainingError:
        stopped = True
        raise
    finally:
        ends = keeps_last or stopped or (every > 0 and work.made == steps)
        if ends and saved != work.made:
            with span("save"):
                work.save()


def stop_if_lost(skipped: int, config: Config, *, blown_up: bool = False) -> None:
    """Raise TrainingError after trainer.max_skipped_steps steps in a row that were skipped.

    blown_up: the last step was skipped because it would have made non-finite weights.
    """
    if skipped >= config.trainer.max_skipped_steps:
        raise TrainingError(lost(skipped, blown_up=blown_up))
