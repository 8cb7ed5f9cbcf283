"""Hugging Face folders of the policies in the checkpoints of a run (checkpoint.hugging_face).

    checkpoint N has its name ──> RUN/hugging_face/.N.writing ──named once it is whole──> .../N

They are read from the checkpoint into the host's memory, on the thread that writes checkpoints, so
training continues meanwhile. `jaxrl-async export RUN OUT --step N` writes the same files.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax

from jaxrl_async.config.schema import Config
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.run.checkpoint.storage import storage_of
from jaxrl_async.run.checkpoint.store import OnSaved
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.saved_policy import write_step
from jaxrl_async.whole_files import UNFINISHED

log = logging.getLogger(__name__)


class PolicyCopies:
    """Writes a folder for each complete checkpoint, and removes it with its checkpoint."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        tokenizer: Tokenizer,
        *,
        is_hurried: Callable[[], bool],
        failed: Callable[[], None],
        on_saved: OnSaved | None,
    ) -> None:
        """Remember where they go. Raises ConfigError if they cannot be written.

        Args:
            config: the run's.
            paths: the run's.
            tokenizer: the policy's.
            is_hurried: whether the process must end soon: then no folder is written.
            failed: called for each folder that could not be written.
            on_saved: called after the folder is written.
        """
        if jax.process_count() > 1:
            raise ConfigError(
                f"checkpoint.hugging_face needs one trainer process, and this run has "
                f"{jax.process_count()}, which would read a checkpoint together. Set it to false: "
                "jaxrl-async export RUN OUT --step N writes the same folder, also during the run."
            )
        self._config, self._paths, self._tokenizer = config, paths, tokenizer
        self._is_hurried, self._failed, self._on_saved = is_hurried, failed, on_saved

    def __call__(self, step: int, folder: Path) -> None:
        """Write the folder of a checkpoint, and remove those whose checkpoint is gone."""
        target = self._paths.hugging_face / str(step)
        if self._is_hurried():
            log.info("%s is not written: the process ends", target)
        else:
            try:
                self._write(step, target)
            except Exception as error:  # the checkpoint is whole all the same
                self._failed()
                log.error(
                    "%s could not be written (%s: %s): checkpoint %d is whole, and jaxrl-async "
                    "export --step %d makes the same files.",
                    target,
                    type(error).__name__,
                    error,
                    step,
                    step,
                )
        self._forget()
        if self._on_saved is not None:
            self._on_saved(step, folder)

    def _write(self, step: int, target: Path) -> None:
        half = target.with_name(f".{step}{UNFINISHED}")
        shutil.rmtree(half, ignore_errors=True)
        write_step(
            self._paths,
            step,
            half,
            adapter_only=self._config.model.lora is not None,
            tokenizer=self._tokenizer,
            within_run=True,
        )
        shutil.rmtree(target, ignore_errors=True)  # of a run that made this step before
        os.replace(half, target)

    def _forget(self) -> None:
        """Remove the folders whose checkpoint is gone, and what a killed run left half written."""
        if not self._paths.hugging_face.is_dir():
            return
        try:
            storage = storage_of(self._config.checkpoint, self._config.run.name, self._paths)
            kept = {str(step) for step in storage.steps()}
            for folder in self._paths.hugging_face.iterdir():
                is_own = folder.name.isdigit() or folder.name.endswith(UNFINISHED)
                if is_own and folder.name not in kept:
                    shutil.rmtree(folder)
        except Exception as error:  # such as a bucket's
            log.warning("%s: old folders remain: %s", self._paths.hugging_face, error)
