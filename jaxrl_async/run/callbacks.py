"""A user's callbacks at the stages of a run."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_async.config.choice import Choice, arguments_of, name_of
from jaxrl_async.config.schema import Config
from jaxrl_async.config.userfile import is_own, load_attribute
from jaxrl_async.errors import ConfigError, StopTraining
from jaxrl_async.metrics.console import OnStep

log = logging.getLogger(__name__)


class Callback:
    """Functions called at the stages of a run; a subclass overrides those that it needs.

    The thread that trains calls all but on_save, and waits for them. StopTraining ends the run
    after the update; any other exception fails it, with everything saved. With several processes
    each calls its own, except on_save, which only the first calls.
    """

    def on_begin(self, config: Config, folder: Path) -> None:
        """Begin: the run's folder exists, and nothing has been trained."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an update; step 0: of the evaluation before the first."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation, eval/...; called before on_step."""

    def on_save(self, step: int, folder: Path) -> None:
        """Take a complete checkpoint, on the thread that writes it. An exception ends the run at
        its next update, or at its end, after on_end."""

    def on_end(self, folder: Path, weights: Path | None) -> None:
        """End: all is saved; not called if the run failed or was preempted. weights: the Hugging
        Face directory; None: the run stopped before its first update."""


STAGES = ("on_begin", "on_step", "on_evaluation", "on_save", "on_end")


class Callbacks:
    """All callbacks of a run, and the caller's `on_step`."""

    def __init__(self, callbacks: Sequence[Callback], on_step: OnStep | None) -> None:
        self._callbacks, self._on_step = tuple(callbacks), on_step
        self._failure: BaseException | None = None  # of on_save, raised by the next step

    def begin(self, config: Config, folder: Path) -> None:
        """Call on_begin."""
        for callback in self._callbacks:
            callback.on_begin(config, folder)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call on_evaluation, if there are metrics of one, and on_step."""
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure
        evaluated = {key: value for key, value in metrics.items() if key.startswith("eval/")}
        for callback in self._callbacks:
            if evaluated:
                callback.on_evaluation(step, evaluated)
            callback.on_step(step, metrics)
        if self._on_step is not None:
            self._on_step(step, metrics)

    def saved(self, step: int, folder: Path) -> None:
        """Call on_save; keep the first exception for the next step, or the end."""
        for callback in self._callbacks:
            try:
                callback.on_save(step, folder)
            except Exception as error:
                if not isinstance(error, StopTraining):
                    log.exception("%s.on_save failed", type(callback).__name__)
                self._failure = self._failure or error

    def end(self, folder: Path, weights: Path | None) -> None:
        """Call on_end. Raise the exception of an on_save after the last step."""
        for callback in self._callbacks:
            callback.on_end(folder, weights)
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure


def load_callbacks(choices: Sequence[Choice]) -> list[Callback]:
    """Make the callbacks that run.callbacks names. Raise ConfigError."""
    return [_load(choice) for choice in choices]


def load_class(name: str) -> Any:
    """Load a class that run.callbacks names. Raise ConfigError."""
    if not is_own(name):
        raise ConfigError(f"run.callbacks: {name!r} must be FILE.py:CLASS, a class of yours.")
    return load_attribute(name, "run.callbacks", "class", inspect.isclass)


def _load(choice: Choice) -> Callback:
    name = name_of(choice)
    made = load_class(name)
    try:
        callback = made(**arguments_of(choice))
    except Exception as error:
        raise ConfigError(
            f"run.callbacks: {name} cannot be made: {type(error).__name__}: {error}. Its arguments "
            "are given as {FILE.py:CLASS: {argument: value}}."
        ) from error
    check_callback(callback, f"run.callbacks: {name}")
    return callback


def check_callback(one: object, where: str) -> None:
    """Raise ConfigError unless an object is a Callback whose functions take what they are given."""
    if inspect.isclass(one) and issubclass(one, Callback):
        raise ConfigError(f"{where}: {one.__name__} is a class. Give an object: {one.__name__}().")
    if not isinstance(one, Callback):
        raise ConfigError(
            f"{where} must be a subclass of jaxrl_async.Callback, not {type(one).__name__}."
        )
    for stage in STAGES:
        method: Callable[..., Any] = getattr(one, stage)
        parameters = list(inspect.signature(getattr(Callback, stage)).parameters)[1:]
        try:
            inspect.signature(method).bind(*parameters)
        except TypeError as error:
            raise ConfigError(
                f"{where}: {stage} is called with ({', '.join(parameters)}): {error}."
            ) from None
        if inspect.iscoroutinefunction(method):
            raise ConfigError(f"{where}: {stage} must not be async: it is called by a thread.")
    if unknown := [n for n in dir(one) if n.startswith("on_") and n not in STAGES]:
        raise ConfigError(
            f"{where}: {unknown[0]} is never called; the stages are {', '.join(STAGES)}."
        )
