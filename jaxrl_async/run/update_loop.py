"""One update after another until a stop is requested: jobs without a sampler, and warm starts.

work.step() ──> work.save() every checkpoint.every updates, and at the end
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import TrainingError
from jaxrl_async.metrics.spans import span
from jaxrl_async.profiling import NO_TRACES, StepTraces
from jaxrl_async.run.lockstep import StopRequests
from jaxrl_async.trainer.trainer import skip_message


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
        raise TrainingError(skip_message(skipped, blown_up=blown_up))


# ---- the next examples, made on a separate thread while devices compute with the previous ones


T = TypeVar("T")


class Ahead(Generic[T]):
    """Values from a stream, one made ahead; the sequence of values is the stream's.

    make: takes the next value from the stream; called by one thread at a time.
    state: returns the stream's state, from which it can continue.
    """

    def __init__(self, make: Callable[[], T], state: Callable[[], object]) -> None:
        self._make, self._state = make, state
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="examples")
        self._next: Future[tuple[T, Any]] | None = None
        self._after: Any = None  # the state after the last value that was taken

    def take(self) -> T:
        """Return the next value, and start making the one after it. Raises the errors of `make`."""
        value, self._after = (self._next or self._thread.submit(self._make_next)).result()
        self._next = self._thread.submit(self._make_next)
        return value

    @property
    def state(self) -> Any:
        """The stream's state after the last value that was taken, not the one made ahead."""
        return self._state() if self._next is None else self._after

    def close(self) -> None:
        """Wait for the value that is made ahead, and discard it."""
        self._thread.shutdown(cancel_futures=True)

    def _make_next(self) -> tuple[T, Any]:
        value = self._make()
        return value, self._state()
