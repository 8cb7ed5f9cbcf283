"""Before a run begins whose checkpoints lie on a bucket: its records come back, and it takes over.

The newest checkpoint decides. A folder that is here stays, whether it was trained in or was fetched
from the run's copy (mirror), if it knows the sign of the trainer that wrote the checkpoint and
its metrics reach it. One that does not reach it, such as an older copy, gets the records of the
checkpoint; one that does not know the sign was continued elsewhere, and is moved aside.
"""

import logging
import uuid
from pathlib import Path

from jaxrl_async.config.run_section import CheckpointSection, RunSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.checkpoint.bucket import BucketStorage, open_bucket, unusable_error
from jaxrl_async.run.checkpoint.seal import saved_steps
from jaxrl_async.run.checkpoint.storage import check_same_dir
from jaxrl_async.run.folder import (
    WRITERS,
    Paths,
    add_signs,
    holds_something,
    move_aside,
    read_signs,
)

log = logging.getLogger(__name__)


def bring_back_records(section: CheckpointSection, run: RunSection) -> bool:
    """Make the run's folder from its newest checkpoint on a bucket if it is to be resumed and is
    not here, does not reach that, or was continued elsewhere since. Return whether there is such a
    checkpoint.

    Raises ConfigError if the bucket cannot be read, if it holds checkpoints of the run and this is
    a new one, if none of them is what was written, or if the run saved elsewhere before.
    """
    assert section.dir is not None, "checkpoints lie on a bucket"
    paths = Paths(Path(run.dir) / run.name)
    bucket = open_bucket(section.dir, run.name)
    try:
        steps = bucket.steps()
        if not steps:
            check_same_dir(section, run)
            return False
        if not (run.resume or run.resume_or_start):
            raise ConfigError(
                f"{bucket.directory} (checkpoint.dir) holds checkpoints of a run already. Continue "
                "it with --resume, choose another run.name, or remove them from the bucket "
                "(run.overwrite does not: nothing is moved there)."
            )
        _bring_back(bucket, _newest_unchanged(bucket, steps), paths)
    except OSError as error:
        raise unusable_error(str(bucket.directory), error) from error
    return True


def begin_writing(section: CheckpointSection, run: RunSection) -> None:
    """Make this process the trainer that writes a run's checkpoints to its bucket; another one that
    still runs ends at its next save. What it has saved since `bring_back_records` is brought, too.
    Raises ConfigError."""
    assert section.dir is not None, "checkpoints lie on a bucket"
    bucket, paths = open_bucket(section.dir, run.name), Paths(Path(run.dir) / run.name)
    sign = uuid.uuid4().hex
    try:
        before = bucket.writer()
        add_signs(paths.root / WRITERS, (sign,))  # first: it may be killed in between
        bucket.begin(sign)
        steps = bucket.steps()
        if steps and not run.resume:
            raise ConfigError(
                f"{bucket.directory} (checkpoint.dir): {before or 'another trainer'}, has saved "
                "the run's first checkpoint while this start was prepared. Start once more, with "
                "--resume or run.resume_or_start=true."
            )
        if steps:
            _bring_back(bucket, _newest_unchanged(bucket, steps), paths)
    except OSError as error:
        raise unusable_error(str(bucket.directory), error) from error
    if before is not None:
        log.info("%s was written by %s; if it still runs, it ends", bucket.directory, before)


def _bring_back(bucket: BucketStorage, step: int, paths: Paths) -> None:
    """Bring a run's folder to where its newest checkpoint is. Raises OSError, ConfigError."""
    root, writer = paths.root, bucket.writer()
    # A host that was not the first of its run has left no metrics, only files such as its trace.
    if holds_something(root) and (paths.metrics.is_file() or saved_steps(paths.checkpoints)):
        signs = read_signs(root / WRITERS)
        if writer is None or writer.sign in signs:
            if _reaches(paths, bucket, step):
                return
        elif not signs:
            raise ConfigError(
                f"{root} and {bucket.directory} (checkpoint.dir) hold runs that know nothing of "
                "each other. Move the one aside that is not to be continued, or choose another "
                "run.name."
            )
        else:
            log.warning("%s was continued elsewhere since, by %s", root, writer)
            log.warning("%s is moved aside, to %s", root, move_aside(root))
    log.warning("the records of version %d are fetched from %s to %s", step, bucket.directory, root)
    root.mkdir(parents=True, exist_ok=True)
    add_signs(root / WRITERS, () if writer is None else (writer.sign,))
    bucket.fetch_records(step, paths)


def _reaches(paths: Paths, bucket: BucketStorage, step: int) -> bool:
    """Return whether the metrics here are of this step or later, and the ledger is as long as the
    checkpoint's: a copy may have been made between the two."""
    last = max((line["step"] for line in read_lines(paths.metrics) if "step" in line), default=0)
    size = paths.ledger.stat().st_size if paths.ledger.is_file() else 0
    return last >= step and size >= bucket.record_size(step, paths.ledger)


def _newest_unchanged(bucket: BucketStorage, steps: list[int]) -> int:
    """Return the newest step whose objects are unchanged. Raises OSError if the bucket does not
    answer, ConfigError if no step's objects are."""
    for step in reversed(steps):
        try:
            bucket.check(step)
        except OSError as error:
            if error.errno is not None:
                raise
            log.warning("%s", error)
        else:
            return step
    raise ConfigError(
        f"{bucket.directory} (checkpoint.dir): none of the checkpoints {steps} is what was "
        "written. Bring their objects back, or choose another run.name to start again."
    )
