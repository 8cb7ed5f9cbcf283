"""Checkpoints of the trainer's versions: a failed save is retried with the next version."""

import logging
from collections.abc import Callable

from jaxrl_async.errors import CheckpointError, EarlierSaveError, FolderLost
from jaxrl_async.metrics.spans import add_span
from jaxrl_async.trainer.step_clock import StepClock

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
