"""The optional packages (wings): the only file of the core that names them.

Each is imported when a configuration uses it: unused ones are neither loaded nor needed.
optional_parts.py has the core's interfaces to them.
"""

import importlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.config.schema import Config, RunSection
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.metrics.recorder import MetricsWriter
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.outages import Outages
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.rollout.env import MakeEnv
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.optional_parts import (
    NO_NAMED_EVALUATIONS,
    AskedTeachers,
    CopyOfRun,
    JudgeScorers,
    NamedEvaluations,
    NoCopy,
    NoOpponents,
    NoServing,
    SeatFillers,
    Serving,
)
from jaxrl_async.tasks.task import Task
from jaxrl_async.types import Prompt, VersionedParams

if TYPE_CHECKING:  # what only some runs load; both builders import this module
    from jaxrl_async.rollout.chat_env import ChatEnvs
    from jaxrl_async.run.builders.inputs import Inputs
    from jaxrl_async.run.builders.sampler_teachers import SamplerModel
    from jaxrl_async.run.builders.samplers import Sampling
    from jaxrl_async.run.replay.player import ReplayedBuffer
    from jaxrl_async.tasks.game import Game

Count = Callable[[str, int], None]
"""Counts faults by name and number."""


def _of(module: str, name: str) -> Any:
    """Return an object of a wing's module."""
    return getattr(importlib.import_module(f"jaxrl_async.{module}"), name)


# ---- adapters: several runs in one


def several_runs() -> Any:
    """Return the job that trains several adapters (`runs`): a run.loop.Job."""
    return _of("adapters.run_several", "run_several")


# ---- endpoint: the policy over HTTP, and agent programs


def serving(config: Config, task: Task, count: Count) -> Serving:
    """Return the endpoint of a run, not open yet. Raises ConfigError, MissingExtraError."""
    if config.endpoint is None and task.program is None:
        return NoServing()
    made: Serving = _of("endpoint.run_serving", "RunServing")(config.serving, count=count)
    return made


def placeholder_program() -> Any:
    """Return the program of a task that external agents play."""
    return _of("endpoint.run_programs", "placeholder_program")


def make_members(
    config: Config, task: Task, serving: Serving, count: Count
) -> tuple[MakeEnv, Callable[[], float]]:
    """Make the environments of group members for a task with a program; return them with a function
    that reads the age of the oldest running program, seconds. Raises ConfigError."""
    made: tuple[MakeEnv, Callable[[], float]] = _of("endpoint.run_programs", "make_members")(
        config, task, serving, count
    )
    return made


# ---- evals: evaluations by name


def named_evaluations(config: Config, inputs: "Inputs", lockstep: Lockstep) -> NamedEvaluations:
    """Return the evaluations by name, checked; inputs: the run's. Raises JaxrlErrors."""
    if not config.named_evals:
        return NO_NAMED_EVALUATIONS
    made: NamedEvaluations = _of("evals.run_evals", "RunEvaluations")(config, inputs, lockstep)
    return made


# ---- games


def check_game(config: Config, name: str) -> None:
    """Raise ConfigError for settings that would compare the players of a game with each other."""
    _of("games.run_games", "check_game")(config, name)


def make_games(
    chat: "ChatEnvs",
    make: "Callable[[], Game]",
    opponents: SeatFillers,
    example: Prompt,
    config: Config,
) -> MakeEnv:
    """Make the environments of a game, which is begun once on an example. Raises ConfigError."""
    games: MakeEnv = _of("games.run_games", "make_games")(chat, make, opponents, example, config)
    return games


def opponents(
    config: Config,
    lockstep: Lockstep,
    chat: Callable[[], ChatFormat | None],
    spec: ModelSpec,
    faults: FaultCounts,
    outages: Outages,
) -> SeatFillers:
    """Return the opponents in a run's games, not started yet. Raises ConfigError, CheckpointError,
    DataError.

    Args:
        config: the whole configuration.
        lockstep: the processes of the run.
        chat: returns the policy's format; None: it has none.
        spec: the policy's.
        faults: counts handled faults.
        outages: tracker of outages of endpoints.
    """
    if not config.players:
        return NoOpponents()
    _of("games.league", "check_alone")(config, lockstep)
    made: SeatFillers = _of("games.league", "RunOpponents")(config, chat(), spec, faults, outages)
    return made


# ---- interop: other engines


def check_engines(config: Config, spec: ModelSpec) -> None:
    """Ask each server of another engine whether it can sample for this run. Raises ConfigError."""
    if config.sampler.engine == "vllm":
        _of("interop.engines", "check_engines")(config, spec)


def engine_sampling(
    config: Config,
    inputs: "Inputs",
    weights: VersionedParams,
    gate: "ReplayBuffer | ReplayedBuffer",
) -> "Sampling":
    """Make the samplers of another engine (sampler.engine). Arguments as
    builders.samplers.make_sampling's."""
    make = {
        "jetstream": ("interop.jetstream_samplers", "make_jetstream_sampling"),
        "vllm": ("interop.engines", "make_vllm_sampling"),
    }
    sampling: Sampling = _of(*make[config.sampler.engine])(config, inputs, weights, gate)
    return sampling


# ---- judge


def judges(
    config: Config, tokenizer: Tokenizer, faults: FaultCounts, outages: Outages | None
) -> JudgeScorers | None:
    """Return the judge and the process rewards; None: neither is configured. Raises ConfigError."""
    if config.reward.judge is None and config.reward.process is None:
        return None
    made: JudgeScorers = _of("judge.run_judges", "RunJudges")(config, tokenizer, faults, outages)
    return made


# ---- mirror: a remote copy of the run


def bring_back(run: RunSection) -> None:
    """Download the run's folder from its copy if it is to be resumed and is missing here. Raises
    ConfigError."""
    if run.copy_to is not None:
        _of("mirror.bring_back", "bring_back")(run)


def run_copy(run: RunSection) -> CopyOfRun:
    """Return the copier of the run, which starts with `begin`."""
    if run.copy_to is None:
        return NoCopy()
    copy: CopyOfRun = _of("mirror.copy_thread", "RunCopy")()
    return copy


def counting_copies(writer: MetricsWriter, run: RunSection, folder: Path) -> MetricsWriter:
    """Return the writer of a run's metrics, with the failures of its copy if it has one; folder:
    the run's, or a subfolder."""
    if run.copy_to is None:
        return writer
    counting: MetricsWriter = _of("mirror.copy_thread", "counting")(writer, folder)
    return counting


# ---- remote: samplers in other processes


def check_listening(config: Config, lockstep: Lockstep) -> None:
    """Check certificates, secret and ports early, although they are used only after a warm start.
    Raises ConfigError."""
    if config.mesh.remote and config.sampler.engine == "native":
        _of("remote.run.listening", "check_listening")(config, lockstep)


def remote_sampling(
    config: Config,
    inputs: "Inputs",
    weights: VersionedParams,
    gate: ReplayBuffer,
    lockstep: Lockstep,
    folder: Path,
    closing: ExitStack,
    base: Params | None,
) -> "Sampling":
    """Make the router and the channel that samplers in other processes join. Arguments as
    remote.run.remote_samplers.make_remote_sampling's."""
    make = _of("remote.run.remote_samplers", "make_remote_sampling")
    sampling: Sampling = make(config, inputs, weights, gate, lockstep, folder, closing, base)
    return sampling


# ---- teachers: asked while groups wait


def teachers(
    config: Config,
    tokenizer: Tokenizer,
    vocab: int,
    faults: FaultCounts,
    outages: Outages | None,
    chat: Callable[[], ChatFormat | None],
    models: "Mapping[str, SamplerModel]",
) -> AskedTeachers | None:
    """Return the teachers by name; None: the run has no teachers. Raises ConfigError.

    vocab: the policy's number of tokens. chat: returns its format; None: it has none. models:
    teachers on the sampler's chips, by name.
    """
    if not config.named_teachers:
        return None
    make = _of("teachers.run_teachers", "RunTeachers")
    made: AskedTeachers = make(config, tokenizer, vocab, faults, outages, chat, models)
    return made


# ---- view: the report


def write_report(folder: Path) -> Path:
    """Write the report of a run into its folder; return its path."""
    path: Path = _of("view.report", "write_report")(folder)
    return path
