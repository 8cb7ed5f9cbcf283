"""Train from Python: in one call, or update by update.

The run is the same as with `python -m jaxrl_async.train`: the arguments become a configuration,
which is written to its folder.
"""

import inspect
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_async.api.arguments import Data, Reward, TrainInputs, configured, require_inputs
from jaxrl_async.api.finished_run import Run
from jaxrl_async.config.schema import Config
from jaxrl_async.config.userfile import end_loading
from jaxrl_async.errors import ConfigError, StopTraining
from jaxrl_async.host import limit_arenas
from jaxrl_async.metrics.console import OnStep
from jaxrl_async.metrics.json_logs import lines_for_people
from jaxrl_async.model.policy import Policy
from jaxrl_async.run import loop
from jaxrl_async.run.callbacks import Callback, check_callback
from jaxrl_async.tasks.task import Task, Tool


def train(
    model: str | Path | Policy | Mapping[str, object] | None = None,
    data: Data | Mapping[str, object] | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    task: str | Mapping[str, object] | Task | type | None = None,
    tools: Sequence[Tool] | None = None,
    eval_data: Data | None = None,
    config: str | Path | Mapping[str, object] | Config | None = None,
    on_step: OnStep | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: object,
) -> Run:
    """Train a policy and return the finished run; blocks.

    Ctrl-C on the main thread saves and ends the run. A run of the same name is moved aside, unless
    resume=True.

    Args:
        model: directory of a Hugging Face model, or a policy; None: random weights of the shape in
            model={"architecture": ...}.
        data: records to train on, as mappings (`question` or `messages`, `answer`, and columns that
            the reward reads) or texts; or a file of them.
        reward: a function of completion and any of prompt, reference and the records' columns, by
            name, or of lists of these (prompts, completions); the name of a built-in one; or a
            list of these, which are added up.
        task: environments, games, tools or a program (docs/environments.md).
        tools: functions with type hints that the policy may call, in addition to the task's; the
            reward then judges the whole answer.
        eval_data: held-out records; None: the last tenth of data, 64 at most.
        config: what the settings change: a YAML file, sections, or a Config.
        on_step: called after each update with its number and metrics; StopTraining ends the run.
        callbacks: objects called at each stage of the run.
        settings: any setting: a section as a mapping, such as sampler={"slots": 32}, or a setting
            by its own name, such as learning_rate=1e-5 or steps=100.

    Raises ConfigError for arguments that do not fit, JaxrlError if the run failed.
    """
    end_loading()
    inputs = TrainInputs(
        model=model, data=data, eval_data=eval_data, reward=reward, task=task, tools=tools or ()
    )
    if on_step is not None:
        _check_callback(on_step)
    for callback in callbacks:
        check_callback(callback, "train: callbacks")
    resolved, own_task = configured(inputs, config, settings)
    require_inputs(inputs, config, settings)
    if resolved.runs:
        raise ConfigError(
            "train: runs: several adapters that learn in one run have no single policy to return. "
            "Start them with python -m jaxrl_async.train FILE, or call train for each."
        )
    with lines_for_people():
        return Run(loop.train(resolved, on_step, own_task, callbacks))


def _check_callback(on_step: OnStep) -> None:
    """Raise ConfigError if a callback cannot be called as it will be, hours later perhaps."""
    try:
        inspect.signature(on_step).bind(0, {})
    except TypeError as error:
        raise ConfigError(
            f"train: on_step is called with the update's number and its metrics, and takes other "
            f"arguments: {error}. Write def on_step(number, metrics)."
        ) from None
    except ValueError:  # a function of C, which has no signature
        return


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One update."""

    number: int
    """How many updates were made; 0: the evaluation before the first."""
    metrics: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]


class Steps:
    """Updates of a run, to iterate over once: the next is made when it is asked for.

    Leaving the `for` early ends the run with everything saved. Between two updates samplers
    continue as far as the bound on staleness allows.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._made: queue.SimpleQueue[StepMetrics | None] = queue.SimpleQueue()
        self._requested = threading.Semaphore(0)
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="train", daemon=True)
        self.run: Run | None = None
        """The finished run; None: it has not ended."""

    def __iter__(self) -> Iterator[StepMetrics]:
        """Yield each update. Raises what the run raises, and RuntimeError the second time."""
        limit_arenas()  # before the thread, which would have one of its own
        self._thread.start()
        try:
            self._requested.release()
            while (step := self._made.get()) is not None:
                yield step
                self._requested.release()
        finally:
            self._closing = True
            self._requested.release()
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        self._requested.acquire()
        try:
            self.run = train(**self._arguments, on_step=self._put_step)
        except BaseException as error:
            self._error = error
        finally:
            self._made.put(None)

    def _put_step(self, step: int, values: Mapping[str, float]) -> None:
        if self._closing:
            raise StopTraining("the caller")
        self._made.put(StepMetrics(step, dict(values)))
        self._requested.acquire()
        if self._closing:
            raise StopTraining("the caller")


def steps(
    model: str | Path | Policy | Mapping[str, object] | None = None,
    data: Data | Mapping[str, object] | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    **arguments: object,
) -> Steps:
    """Return the updates of a run, to iterate over:

        for step in steps(model=..., data=..., reward=...): print(step.number, step["reward/mean"])

    Takes the arguments of `train`. Leaving the loop early ends the run.
    """
    end_loading()
    return Steps(model=model, data=data, reward=reward, **arguments)
