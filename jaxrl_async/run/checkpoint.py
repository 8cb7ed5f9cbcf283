"""Checkpoints of a run: asynchronous, atomic, the newest N kept. The only file that imports orbax.

One checkpoint is one folder, named by its version, with two items: `state`, a pytree of device
arrays, and `loop`, a JSON object (where the loop was). Orbax writes into a temporary folder and
renames it, so that a killed run leaves the earlier checkpoints readable.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1

from jaxrl_async.errors import CheckpointError

STATE, LOOP = "state", "loop"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint, read back."""

    step: int
    state: Any  # like the abstract state asked for, on its shardings
    loop: dict[str, Any]  # JSON object


class Checkpoints:
    """The checkpoints in one folder. One thread may use it at a time."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = directory.absolute()
        self._orbax = v1.training.Checkpointer(
            self.directory,
            preservation_policy=v1.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )
        self._pending: Any = None

    def save(self, step: int, items: Mapping[str, Any]) -> None:
        """Start to write {"state": pytree of jax arrays, "loop": JSON object} and return.

        The arrays are copied off the devices before it returns: they may be donated at once. A save
        under way is finished first, and its failure raised here. The same step again replaces it.
        """
        assert set(items) == {STATE, LOOP}, (
            f"a checkpoint has the items state and loop, not {set(items)}"
        )
        self.wait()
        try:
            self._pending = self._orbax.save_checkpointables_async(
                step, dict(items), force=True, overwrite=True
            )
        except Exception as error:
            raise self._write_error(error) from error

    def wait(self) -> None:
        """Block until the save under way lies on disk. Raises CheckpointError where it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except Exception as error:
                raise self._write_error(error) from error

    def steps(self) -> tuple[int, ...]:
        """Steps that have a complete checkpoint, oldest first."""
        return tuple(int(c.step) for c in self._orbax.checkpoints)

    def latest(self) -> int | None:
        """Newest step that has a complete checkpoint; None where there is none."""
        return max(self.steps(), default=None)

    def restore(self, step: int | None, abstract: Any) -> Saved:
        """Read the checkpoint of `step` (None: the newest) onto the shardings of `abstract`.

        abstract: a pytree of jax.ShapeDtypeStruct with shardings, or of arrays to be like. A
        checkpoint that cannot be read gives way, with a logged warning, to the one before it.
        Raises CheckpointError where none can be read, or where one does not fit `abstract`.
        """
        self.wait()
        candidates = [s for s in reversed(self.steps()) if step is None or s <= step]
        if not candidates or (step is not None and candidates[0] != step):
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(
                f"{self.directory}: there is {wanted} (steps there: {list(self.steps())}). Start "
                "without --resume, or look whether run.dir and run.name are right."
            )
        like = jax.tree.map(_abstract, abstract)
        failures: list[tuple[int, Exception]] = []
        for candidate in candidates:
            try:
                return self._read(candidate, like)
            except CheckpointError:
                raise
            except Exception as error:
                _hush_late_reads()
                failures.append((candidate, error))
                log.warning(
                    "checkpoint %s cannot be read (%s); trying the one before it",
                    self.directory / str(candidate),
                    _root_cause(error),
                )
        raise CheckpointError(
            f"{self.directory}: none of the checkpoints {[s for s, _ in failures]} can be read; "
            f"the newest says: {_root_cause(failures[0][1])}. Copy the folder from a backup, or "
            "start anew with run.overwrite=true (the old run is moved aside)."
        ) from failures[0][1]

    def close(self) -> None:
        """Finish the save under way and let go of the folder. A second call does nothing."""
        try:
            self.wait()
        finally:
            try:
                self._orbax.close()
            except Exception as error:
                raise self._write_error(error) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, step: int, like: Any) -> Saved:
        saved, wanted = self._saved_shapes(step), _shapes(like)
        # What is saved and not wanted, or of another shape, is certainly another run's; what is
        # wanted and not found may just as well be torn.
        if problem := mismatch(saved, {k: v for k, v in wanted.items() if k in saved}):
            raise CheckpointError(
                f"{self.directory / str(step)} does not fit this run: {problem}. Resume with the "
                "configuration that made it (config.yaml beside it), or choose another run.name."
            )
        if missing := mismatch(saved, wanted):
            raise FileNotFoundError(f"{missing}, or cannot read it")
        items = self._orbax.load_checkpointables(step, {STATE: like, LOOP: None})
        return Saved(step=step, state=items[STATE], loop=items[LOOP])

    def _saved_shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        return _shapes(self._orbax.checkpointables_metadata(step).metadata[STATE])

    def _write_error(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.directory}: the checkpoint could not be written: {_root_cause(error)}. "
            "Look whether the disk is full and the folder writable; earlier ones are untouched."
        )


def check_job(saved: Saved, job: str, folder: Path) -> None:
    """Raise CheckpointError where another kind of job made the checkpoint."""
    made_by = saved.loop.get("job", "rl")
    if made_by != job:
        raise CheckpointError(
            f"{folder}: its checkpoints are of run.job={made_by}, and this is run.job={job}. "
            "Resume with the configuration that made them, or choose another run.name; a finished "
            "run's weights are taken over by model.path=.../policy."
        )


def mismatch(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> str:
    """What differs first between two tables of array shapes by path; "" where nothing does."""
    for path in sorted(saved.keys() | wanted.keys()):
        if path not in saved:
            return f"it has no {path}"
        if path not in wanted:
            return f"it has {path} {list(saved[path])}, which this run does not know"
        if saved[path] != wanted[path]:
            return f"{path} is {list(saved[path])} there and {list(wanted[path])} here"
    return ""


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): tuple(v.shape) for k, v in leaves}


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _hush_late_reads() -> None:
    """Keep what a failed restore leaves running from printing tracebacks.

    Orbax closes its event loop at the first failed read; reads that end later cannot report to it,
    and Python would print one "Event loop is closed" for each, even at exit.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        late = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
        log.debug("late read of a failed restore") if late else before(unraisable)

    sys.unraisablehook = hook


def _root_cause(error: BaseException) -> str:
    """Kind and first line of the error that all others came from."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
