"""Checkpoints of a run: asynchronous, atomic, the newest N kept. The only file that imports orbax.

One checkpoint is one folder, named by its version. It holds `state`, a pytree of device arrays;
`loop`, a JSON object with the loop's positions and counts; and for rl `rollouts`, records as bytes
(the replay buffer and running requests). Orbax writes into a folder without a name; seal.py adds
the digest of every file, has all of it written to the disk, and gives it its name. Only then are
older ones removed: a run that is killed, or loses power, at any moment leaves one that is whole.
"""

import errno
import functools
import logging
import math
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.typing import DTypeLike
from numpy.typing import NDArray
from orbax.checkpoint import v1

from jaxrl_async.config.changes import changes
from jaxrl_async.config.load import dump, flattened
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.config.renamed_settings import turn_off
from jaxrl_async.config.schema import CheckpointSection, Config
from jaxrl_async.errors import CheckpointError, EarlierSaveError, FolderLost
from jaxrl_async.host import give_back_memory
from jaxrl_async.mesh import HOST
from jaxrl_async.model.lora import scale_of
from jaxrl_async.run.checkpoint.array_shapes import check_arrays, shapes_of
from jaxrl_async.run.checkpoint.orbax_fixes import fix_orbax
from jaxrl_async.run.checkpoint.seal import CHECKSUMS, HashingAbandoned, is_transient, sync_records
from jaxrl_async.run.checkpoint.storage import CheckpointStorage, FolderStorage, storage_of
from jaxrl_async.run.folder import FolderWatch, Paths

STATE, LOOP, ROLLOUTS = "state", "loop", "rollouts"
STARTED_BY = ("run.resume", "run.overwrite", "distributed.")
"""Settings that only say how a run is started: a resumed run may have others."""
SCHEMA = 3
"""Version of the content of LOOP and ROLLOUTS; 1 had no rollouts, 2 had one process's alone."""
ONE_SAVE = threading.Lock()
"""Held while orbax writes: it numbers its operations by process, and concurrent saves of several
runs would confuse them."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that was read."""

    step: int
    state: Any  # like the abstract state asked for, on its shardings
    loop: dict[str, Any]  # JSON object
    rollouts: NDArray[np.uint8] | None = None  # of codec.dumps


OnSaved = Callable[[int, Path], None]
"""Called with a complete checkpoint: its step and its folder."""


class Checkpoints:
    """The checkpoints in one folder. Used by one thread at a time."""

    def __init__(
        self,
        directory: Path | CheckpointStorage,
        keep: int = 2,
        *,
        verify: bool = True,
        run: Paths | None = None,
        is_hurried: Callable[[], bool] = lambda: False,
        on_saved: OnSaved | None = None,
    ) -> None:
        """Remember the folder; its first use removes what a killed run half wrote.

        Args:
            directory: the folder, or another storage.
            keep: newest checkpoints that are kept.
            verify: compare checksums before a checkpoint is read.
            run: the run of the checkpoints; a save fails if its folder was removed or replaced.
                None: no run.
            is_hurried: whether the process must end soon: what is done after a checkpoint has its
                name is then left out. Called on several threads.
            on_saved: called by the first process on the thread that writes; None: nothing is.
        """
        self._storage: CheckpointStorage = (
            FolderStorage(directory.absolute()) if isinstance(directory, Path) else directory
        )
        self.directory, self._keep, self._verify = self._storage.directory, keep, verify
        self._run = run
        self._watch = None if run is None else FolderWatch(run.root)
        self._was_stale = False  # the folder's file handle, at the last save
        self._warned_of_records = False
        self._is_hurried, self._on_saved = is_hurried, on_saved
        self._swept = False
        self._pending: Future[None] | None = None
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(
        self,
        step: int,
        *,
        state: object,
        loop: Mapping[str, object],
        rollouts: Callable[[], NDArray[np.uint8]] | None = None,
    ) -> None:
        """Start a save and return. Saving a step again replaces its checkpoint.

        The arrays are being copied to host memory when this returns: they may be donated
        immediately. All else runs on a separate thread. (With several processes orbax begins here,
        since the processes communicate on the devices.) The save before is finished first; if it
        failed, EarlierSaveError is raised once this one has started. Raises FolderLost, or
        CheckpointError where the folder cannot be looked at now, and then starts nothing.

        Args:
            step: the version.
            state: a pytree of device arrays.
            loop: a JSON object.
            rollouts: makes the bytes of the rollouts, on the other thread; None: no rollouts.
        """
        failure = self._outcome()
        self._check_folder(failure)
        begin = functools.partial(
            self._begin, step, _on_host(state), {**loop, "schema": SCHEMA}, rollouts
        )
        if jax.process_count() > 1:
            try:
                writing = begin()
            except FolderLost:
                raise
            except Exception as error:
                raise self._write_error(error) from error
            self._pending = self._finisher.submit(self._write, step, lambda: writing)
        else:
            self._pending = self._finisher.submit(self._write, step, begin)
        if failure is not None:
            raise EarlierSaveError(str(self._write_error(failure))) from failure

    def _check_folder(self, earlier: BaseException | None) -> None:
        """Raise FolderLost if the run's folder is gone, CheckpointError where its file system does
        not say for now. earlier: error of the save before, which is logged if nothing is started.
        """
        try:
            if self._watch is not None and not jax.process_index():
                self._watch.check()
            self._sweep()
        except OSError as error:
            was_stale, self._was_stale = self._was_stale, error.errno == errno.ESTALE
            if was_stale and self._was_stale and self._watch is not None:  # it does not come back
                raise self._watch.lost(self.directory.parent) from error
            failure = self._write_error(error)
            if jax.process_count() > 1:  # the other processes write now, and wait for this one
                log.error("%s It is tried all the same.", failure)
                return
            if earlier is not None:
                log.error("%s", self._write_error(earlier))
            raise failure from error
        self._was_stale = False

    def _begin(
        self,
        step: int,
        state: object,
        loop: Mapping[str, object],
        rollouts: Callable[[], NDArray[np.uint8]] | None,
    ) -> Any:
        if not jax.process_index():
            self._make_room(step)
        items = {STATE: state, LOOP: loop}
        if rollouts is not None:
            items[ROLLOUTS] = {"bytes": rollouts()}
        return v1.save_checkpointables_async(self._storage.written(step), items, overwrite=True)

    def _make_room(self, step: int) -> None:
        """Prepare the storage for a step. With several processes a failure is only logged, since
        the others wait: what is left there has other sums than what is written now."""
        try:
            self._storage.make_room(step)
        except OSError as error:
            if jax.process_count() == 1:
                raise
            log.error("%s It is tried all the same.", self._write_error(error))

    def _write(self, step: int, begin: Callable[[], Any]) -> None:
        """Let orbax write, seal the checkpoint and give it its name; read it back, and remove those
        that are not kept. Runs on a separate thread."""
        try:
            with ONE_SAVE:
                begin().result()
            if not jax.process_index():  # the first process does it for all
                self._sync_records()
                self._storage.complete(step, self._run)
        except Exception:
            if not jax.process_index():
                self._storage.sweep_failed(step)
            raise
        give_back_memory()
        if jax.process_index():
            return
        try:
            self._storage.check(step, self._is_hurried)
        except HashingAbandoned:
            folder = self.directory / str(step)
            log.info("%s is not read back: the process ends; older ones are kept", folder)
        else:
            self._storage.forget_old(step, self._keep)
        if self._on_saved is not None:
            self._on_saved(step, self.directory / str(step))

    def _sync_records(self) -> None:
        """Have what the run has recorded so far written to the disk: a checkpoint that outlives a
        power cut has its metrics and its ledger. A failure is a warning, once: the checkpoint is
        whole without them."""
        if self._run is None:
            return
        root = self._run.root
        own = Paths(self.directory.parent) if isinstance(self.directory, Path) else self._run
        error = sync_records([*own.records, own.root, root, root.parent])
        if error is not None and not self._warned_of_records:
            self._warned_of_records = True
            log.warning(
                "%s: the run's records are not certainly on the disk (%s): a power cut may lose "
                "the last lines of metrics and ledger. Checkpoints are saved all the same.",
                root,
                _root_cause(error),
            )

    def _sweep(self) -> None:
        """Remove what a killed run half wrote, at the first use."""
        if not self._swept:
            fix_orbax()
            if not jax.process_index():
                self._storage.sweep()
            self._swept = True

    def wait(self) -> None:
        """Block until the running save is on disk. Raises CheckpointError if it failed, FolderLost
        if another trainer writes there now."""
        if (failure := self._outcome()) is not None:
            raise self._write_error(failure) from failure

    def _outcome(self) -> BaseException | None:
        """Wait for the running save; return its error, if any. Raises FolderLost."""
        pending, self._pending = self._pending, None
        error = None if pending is None else pending.exception()
        if isinstance(error, FolderLost):
            raise error
        return error

    def steps(self) -> tuple[int, ...]:
        """Return the steps that have a checkpoint, oldest first."""
        self._sweep()
        return tuple(self._storage.steps())

    def latest(self) -> int | None:
        """Return the newest step with a checkpoint; None: no step has one."""
        return max(self.steps(), default=None)

    def restore(self, step: int | None, abstract: object) -> Saved:
        """Read the newest checkpoint whose files are those that were written.

        One that is damaged is passed over, with a warning, for the one before it, and renamed once
        another was read. One without checksums is read only if none of those with checksums can be,
        and logged as an error. Raises CheckpointError if none can be read, if one does not fit
        `abstract`, or if one cannot be read for now (see `is_transient`): it may be whole.

        Args:
            step: of the newest checkpoint that is wanted; None: of any.
            abstract: a pytree of jax.ShapeDtypeStruct or arrays: shapes, dtypes and shardings.
        """
        self.wait()
        candidates = [s for s in reversed(self.steps()) if step is None or s <= step]
        if not candidates or (step is not None and candidates[0] != step):
            missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(
                f"{self.directory}: there is {missing} (steps there: {list(self.steps())}). Start "
                "without --resume, or check run.dir and run.name."
            )
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), abstract
        )
        failures: list[tuple[int, Exception]] = []
        for candidate in self._sealed_first(candidates):
            folder = self.directory / str(candidate)
            try:
                saved = self._read(candidate, like)
            except Exception as error:
                if not isinstance(error, CheckpointError) and is_transient(error):
                    raise _unreadable_now(folder, error) from error
                is_whole = self._verify and self._storage.is_sealed(candidate)
                if isinstance(error, CheckpointError) and is_whole:
                    raise  # its files are those that were written: it is another run's
                failures.append((candidate, error))
                log.warning(
                    "checkpoint %s cannot be read (%s); trying another one",
                    folder,
                    _root_cause(error),
                )
            else:
                self._pass_over([s for s in candidates if s > candidate])
                return saved
        if isinstance(failures[0][1], CheckpointError):
            raise failures[0][1]
        raise CheckpointError(
            f"{self.directory}: none of the checkpoints {[s for s, _ in failures]} can be read; "
            f"the newest says: {_root_cause(failures[0][1])}. {_advice(self.directory)}."
        ) from failures[0][1]

    def _sealed_first(self, steps: Sequence[int]) -> list[int]:
        """Return these steps, those with checksums before the others. Raises CheckpointError."""
        sealed: dict[int, bool] = {}
        for step in steps:
            try:
                sealed[step] = self._storage.is_sealed(step)
            except OSError as error:
                raise _unreadable_now(self.directory / str(step), error) from error
        return sorted(steps, key=sealed.__getitem__, reverse=True)

    def _pass_over(self, steps: Sequence[int]) -> None:
        """Rename checkpoints newer than the one from which the run continues; only the newest
        renamed one is kept. steps: newest first."""
        if jax.process_index():
            return
        newest: str | None = None
        for step in steps:
            folder = self.directory / str(step)
            why = "cannot be read" if self._storage.is_sealed(step) else f"has no {CHECKSUMS}"
            try:
                renamed = self._storage.set_aside(step)
            except OSError as error:
                log.warning("%s %s, and cannot be renamed: %s", folder, why, error)
            else:
                log.warning(
                    "%s %s: the run continues from an earlier checkpoint, and this one is "
                    "renamed to %s",
                    folder,
                    why,
                    renamed,
                )
                newest = newest or renamed
        if newest is not None and (removed := self._storage.forget_aside(newest)):
            log.warning(
                "%s: removed %s: one damaged checkpoint is kept", self.directory, ", ".join(removed)
            )

    def close(self) -> None:
        """Finish the running save. A second call does nothing."""
        try:
            self.wait()
        finally:
            self._finisher.shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, step: int, like: object) -> Saved:
        folder = self.directory / str(step)
        if not self._storage.is_sealed(step):
            log.error(
                "%s has no %s: nothing shows that its files are as they were written. It is read, "
                "since no checkpoint has the right checksums. Compare what the run does now with "
                "its metrics from before.",
                folder,
                CHECKSUMS,
            )
            self._storage.check_links(step)
        elif self._verify:
            self._storage.check(step)
        metadata = v1.checkpointables_metadata(folder).metadata
        check_arrays(folder, STATE, shapes_of(metadata[STATE]), shapes_of(like))
        items_like = {STATE: like, LOOP: None}
        if ROLLOUTS in metadata:
            size = metadata[ROLLOUTS]["bytes"].shape
            items_like[ROLLOUTS] = {"bytes": np.empty(size, np.uint8)}
        items = v1.load_checkpointables(folder, items_like)
        rollouts = np.asarray(items[ROLLOUTS]["bytes"]) if ROLLOUTS in items else None
        return Saved(step=step, state=items[STATE], loop=items[LOOP], rollouts=rollouts)

    def _write_error(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"{self.directory}: the checkpoint could not be written: {_root_cause(error)}. "
            f"{_remedy(self.directory)}; earlier ones are untouched."
        )


def open_checkpoints(
    section: CheckpointSection,
    paths: Paths,
    is_hurried: Callable[[], bool],
    on_saved: OnSaved | None = None,
) -> Checkpoints:
    """Open the checkpoints of a run; a warm start has its own. The last two: see Checkpoints."""
    storage = storage_of(section, paths.root.name, paths)
    return Checkpoints(
        storage,
        section.keep,
        verify=section.verify,
        run=paths,
        is_hurried=is_hurried,
        on_saved=on_saved,
    )


def read_trained(
    storage: CheckpointStorage,
    step: int,
    dtype: DTypeLike,
    *,
    on_host: bool = False,
    verify: bool = True,
) -> Any:
    """Read what a checkpoint's run trains (its weights, or its adapter) without the rest, onto the
    default device; the folder is not changed.

    Args:
        storage: of the checkpoints.
        step: of one.
        dtype: of the arrays; None: as they were saved.
        on_host: return NumPy arrays; no device is used.
        verify: compare checksums, if it has some.

    Raises CheckpointError.
    """
    folder = storage.directory / str(step)
    context = v1.Context()
    context.pytree.loading.partial_load = True
    try:
        if storage.is_sealed(step):
            if verify:
                storage.check(step)
        else:
            log.error("%s has no %s: its files may be damaged", folder, CHECKSUMS)
            storage.check_links(step)
        trained = v1.checkpointables_metadata(folder).metadata[STATE]["train"]["params"]
        like = jax.tree.map(functools.partial(_as_read, dtype=dtype, on_host=on_host), trained)
        with context:
            items = v1.load_checkpointables(folder, {STATE: {"train": {"params": like}}})
    except Exception as error:
        raise CheckpointError(
            f"{folder}: the checkpoint cannot be read: {_root_cause(error)}. Take another step."
        ) from error
    return items[STATE]["train"]["params"]


def _as_read(saved: Any, *, dtype: DTypeLike, on_host: bool) -> Any:
    """Return how orbax is to read an array."""
    kind = jnp.dtype(dtype or saved.dtype)
    if on_host:
        return np.empty(saved.shape, kind)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(saved.shape, kind, sharding=device)


def read_lora(
    storage: CheckpointStorage, step: int, otherwise: LoraSection | None
) -> LoraSection | None:
    """Return the adapter's settings that the checkpoint of this step was made with; None: all
    weights are trained. Raises CheckpointError.

    otherwise: returned if the checkpoint does not say.
    """
    folder = storage.directory / str(step)
    try:
        loop = v1.load_checkpointables(folder, {LOOP: None})[LOOP]
        return lora_section(loop, otherwise)
    except Exception as error:
        raise CheckpointError(
            f"{folder}: the checkpoint cannot be read: {_root_cause(error)}. Take another step."
        ) from error


def check_resumed(saved: Saved, config: Config, folder: Path) -> None:
    """Raise CheckpointError if another kind of job or another version of the code made the
    checkpoint; log the settings that have changed since."""
    made_by = saved.loop.get("job", "rl")
    if made_by != config.run.job:
        raise CheckpointError(
            f"{folder}: its checkpoints are of run.job={made_by}, and this is "
            f"run.job={config.run.job}. Resume with the configuration that made them, or choose "
            "another run.name; model.path=.../policy starts from a finished run's weights."
        )
    if saved.loop.get("schema", 1) != SCHEMA:
        raise CheckpointError(
            f"{folder / str(saved.step)} is of checkpoint schema {saved.loop.get('schema', 1)}, "
            f"and this version of jaxrl_async reads {SCHEMA}. Resume with the version that wrote "
            "it; model.path=.../policy starts from a finished run's weights."
        )
    if changed := changed_keys(saved.loop.get("config", ""), dump(config)):
        log.warning("resumed with other settings than before: %s", ", ".join(changed))


def check_scale(saved: Saved, config: Config, folder: Path) -> None:
    """Raise CheckpointError if model.lora would scale the saved adapter's change differently than
    in training: B would mean other weights."""
    lora = config.model.lora
    before = lora_section(saved.loop, None)
    if before is None or lora is None:
        return  # an adapter in place of all weights, or the reverse, has other arrays
    was, now = scale_of(before), scale_of(lora)
    if math.isclose(was, now, rel_tol=1e-6):
        return
    raise CheckpointError(
        f"{folder / str(saved.step)}: its adapter was trained with its change times {was:g} "
        f"(model.lora.alpha={before.alpha:g}, rslora={str(before.rslora).lower()}), and it would "
        f"be times {now:g} now: another policy than the one that was saved. Set both as before, "
        "or choose another run.name; model.path=.../policy starts from a finished run's weights."
    )


def lora_section(loop: Mapping[str, Any], otherwise: LoraSection | None) -> LoraSection | None:
    """Return the adapter's settings that a checkpoint was made with (LOOP); None: all weights are
    trained. otherwise: returned if it does not say."""
    settings = yaml.safe_load(loop.get("config", "")) or {}
    turn_off(settings)
    model = settings.get("model", {})
    if "lora" not in model:
        return otherwise
    return None if model["lora"] is None else LoraSection.model_validate(model["lora"])


def changed_keys(before: str, after: str) -> list[str]:
    """Return the dotted keys whose values differ between two YAML configurations, with both."""
    old, new = (flattened(yaml.safe_load(text) or {}) for text in (before, after))
    return [
        f"{one.name} {one.before} -> {one.now}"
        for one in changes(old, new)
        if not one.name.startswith(STARTED_BY)
        and not (_is_handed_over(one.before) and _is_handed_over(one.now))
    ]


def _is_handed_over(value: object) -> bool:
    """Return whether a setting is a Python program's object, which 0.3 numbered."""
    return isinstance(value, str) and value.partition(":")[0] == "python"


def _on_host(tree: object) -> Any:
    """Copy the arrays to the host memory of their devices; copies are still under way on return.

    Unlike copies on the devices they need no device memory."""
    return jax.tree.map(
        lambda x: (
            jax.device_put(x, x.sharding.with_memory_kind(HOST), may_alias=False)
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )


def _unreadable_now(folder: Path, error: BaseException) -> CheckpointError:
    """Return the error of a checkpoint that cannot be read for now, and may be whole."""
    return CheckpointError(
        f"{folder} cannot be read now: {_root_cause(error)}. That does not say that it is damaged, "
        "so the run does not continue from an earlier one. See to the disk, the memory or the "
        "permissions and start again with --resume; if the files stay unreadable, move this folder "
        "elsewhere, and the checkpoint before is used."
    )


def _advice(directory: object) -> str:
    """Return what to do where no checkpoint can be read."""
    if isinstance(directory, Path):
        backup = "Copy the folder from a backup"
        return f"{backup}, or start again with run.overwrite=true (the old run is moved aside)"
    return "Bring their objects back, or choose another run.name to start again"


def _remedy(directory: object) -> str:
    """Return what to look at when a checkpoint cannot be written."""
    if isinstance(directory, Path):
        return f"Check whether the disk is full{_free(directory)} and the folder writable"
    return "See that the bucket is there and that every host may read, write and delete in it"


def _free(folder: Path) -> str:
    """Return how much is free on the disk of a folder, in brackets; "" if that is unknown."""
    try:
        return f" ({shutil.disk_usage(folder).free / 1e6:.0f} MB are free)"
    except OSError:
        return ""


def _root_cause(error: BaseException) -> str:
    """Return the kind and the first line of the error that caused all others.

    Errors of this module are passed over. The chain may be a circle: orbax raises the error of a
    save again when it is closed.
    """
    chain = [error]
    while (below := chain[-1].__cause__ or chain[-1].__context__) and below not in chain:
        chain.append(below)
    error = next((e for e in reversed(chain) if not isinstance(e, CheckpointError)), chain[-1])
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
