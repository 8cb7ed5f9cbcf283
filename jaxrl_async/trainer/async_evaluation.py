"""An evaluation that goes on beside the trainer: a thread, and where its results go."""

import logging
import threading
from collections.abc import Callable, Mapping

from jaxrl_async.errors import Closed
from jaxrl_async.metrics.spans import span

log = logging.getLogger(__name__)

Finish = Callable[[Mapping[str, float]], None]
"""Completes the report of a step with what its evaluation has measured."""


class EvaluationBeside:
    """One evaluation under way. Owned by the trainer's thread."""

    def __init__(
        self, evaluate: Callable[[], Mapping[str, float]], finish: Finish, version: int
    ) -> None:
        """Begin it. evaluate: called on a thread of its own; version: what is evaluated."""
        self._finish, self._evaluate, self._version = finish, evaluate, version
        self._values: Mapping[str, float] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def complete(self) -> None:
        """Wait until it ends and complete the report; raise what it raised, the report complete."""
        self._thread.join()
        self._finish(self._values)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with span("evaluate", "evaluation", version=self._version):  # one track of all threads
                self._values = self._evaluate()
        except Closed:  # the samplers have ended: so does the run, for a reason of its own
            log.debug("an evaluation ended: closed")
        except BaseException as error:
            self._error = error
