"""Environments of the library verifiers (version 1), played unchanged through the endpoint.

    VerifiersPlayer.play ──task──> Env.run_episode ──> harness ──chat──> its interception server
           ^                                                                     │
           └────── rewards and metrics of the traces           EvalClient ──> the run's endpoint

The library's EvalClient is used, which relays a harness's calls in the harness's own protocol. The
endpoint generates the tokens, so the environment needs no tokenizer, and each call's tokens are the
session's. Its TrainClient would encode them a second time, with a renderer that must match the
run's.

task: {verifiers:NAME: {taskset: {...}, agent: {...}}}      the arguments are the environment's own
"""

import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from jaxrl_async.away import says_away
from jaxrl_async.data.tokenizer import PRINTABLE
from jaxrl_async.errors import Away, ConfigError, RolloutError, extra_module
from jaxrl_async.metrics.metric import part_name
from jaxrl_async.tasks.game import SeatScore
from jaxrl_async.tasks.task import Task, TaskRecord
from jaxrl_async.tasks.usercode import TooLate, run_async
from jaxrl_async.types import Score

log = logging.getLogger(__name__)

ENDLESS_SIZE = 10_000
"""Number of tasks from an endless taskset, unless the arguments have a size."""
SHOWN_TASKS = 256
"""Number of tasks from which the words of the task's own tokenizer are taken."""
SERVED_MOST = 256
"""Episodes per set of services, which keep a client for each episode."""
LONGEST_S = 7 * 24 * 3600.0
"""Timeout of an episode, seconds; the session's own (env.program_timeout_s) ends it earlier."""
KEY_HEADER = "x-session-key"
"""Header that names the session, regardless of the key that the client also sends."""
NO_KEY = "JAXRL_NO_API_KEY"
"""Environment variable that is not set, since the header has the key."""
MARK = "verifiers_task"
"""Column of a record that identifies its task: [split, index]."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Services:
    """Services of one environment while episodes are played: tools, servers, clients."""

    env: Any
    begun: int = 0  # episodes so far
    num_played: int = 0  # episodes that are currently played
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    failed: BaseException | None = None

    async def serve(self) -> None:
        """Open, wait until no episode needs them, close; the same task opens and closes."""
        try:
            async with self.env.serving():
                self.ready.set()
                await self.over.wait()
        except Exception as error:
            self.failed = error
            if self.ready.is_set():
                log.warning("the services of an environment of verifiers: %r", error)
        finally:
            self.ready.set()


class EnvironmentServices:
    """Opens an environment's services with the first episode and closes them after the last.

    They are renewed after SERVED_MOST episodes. For one event loop.
    """

    def __init__(self, make: Callable[[], object]) -> None:
        """make: returns a new environment."""
        self._make = make
        self._current: _Services | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Any]:
        """Yield an environment with open services. Raises RolloutError if they cannot be opened."""
        services = self._current
        if services is None or services.begun >= SERVED_MOST:
            services = self._current = _Services(env=self._make())
            self._begin(services)
        services.begun += 1
        services.num_played += 1
        try:
            await services.ready.wait()
            if services.failed is not None:
                raise RolloutError(
                    "the environment's services could not be opened: "
                    f"{type(services.failed).__name__}: {services.failed}"
                ) from services.failed
            yield services.env
        finally:
            services.num_played -= 1
            if not services.num_played:
                if self._current is services:
                    self._current = None
                services.over.set()

    def _begin(self, services: _Services) -> None:
        task = asyncio.get_running_loop().create_task(services.serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PlayedSession(Protocol):
    """The part of a session that is used here (endpoint.agent_programs.AgentSession)."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def record(self) -> Mapping[str, Any]: ...


class VerifiersPlayer:
    """Plays tasks of an environment through sessions."""

    def __init__(
        self, tasks: Mapping[str, Sequence[object]], make: Callable[[], object], clients: Any
    ) -> None:
        """Create a player of an environment.

        Args:
            tasks: its tasks by split.
            make: returns a new environment.
            clients: the library's module of clients.
        """
        self._tasks, self._clients = tasks, clients
        self.services = EnvironmentServices(make)

    async def play(self, session: PlayedSession) -> Score | tuple[SeatScore, ...]:
        """Play the record's task once (endpoint.agent_programs.Program). Raises RolloutError."""
        try:
            outcome = await run_async(lambda: self._episode(session), LONGEST_S)
        except TooLate:
            raise RolloutError(f"an episode took more than {LONGEST_S:g} s") from None
        if outcome.error is not None:
            raise outcome.error
        score: Score | tuple[SeatScore, ...] = outcome.value
        return score

    async def _episode(self, session: PlayedSession) -> Score | tuple[SeatScore, ...]:
        split, index = session.record[MARK]
        client = self._clients.EvalClientConfig(
            base_url=session.base_url, headers={KEY_HEADER: session.api_key}, api_key_var=NO_KEY
        )
        context = self._clients.ModelContext(model=session.model, client=client)

        def begun(trace: Any) -> None:
            if not trace.agent.trainable and trace.agent.config.client == client:
                raise RolloutError(
                    f"{trace.agent.name!r} is not trained, and the policy would play it. "
                    f"Give it a separate endpoint: {trace.agent.name}: {{model: ..., "
                    "client: {base_url: ..., api_key_var: ...}}."
                )

        async with self.services.opened() as env:
            slot = env.slots(self._tasks[split][index])[0]
            episode = await env.run_slot(slot, context, on_trace=begun)
        return score_of_traces(episode)


def score_of_traces(episode: Any) -> Score | tuple[SeatScore, ...]:
    """Return the score of a played episode: the score of the trained trace or, with several, each
    trace's own score, by the trace's id.

    Parts are a trace's rewards (before their weights) and metrics; if several seats play, they are
    named SEAT.PART. Parts of untrained seats, averaged over their traces, are added to every
    trained trace. Raises RolloutError for a failed episode, Away if a connection broke.
    """
    if not episode.ok:
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        words = [f"{error.type}: {error.message}" for error in errors]
        reason = words[-1] if words else "the environment says that the episode failed"
        raise (Away if says_away(reason) else RolloutError)(reason)
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not trained:
        raise RolloutError("no seat of the environment is trained")
    several = len({trace.agent.name for trace in episode.traces}) > 1
    others: dict[str, list[float]] = {}
    for trace in episode.traces:
        if not trace.agent.trainable:
            for name, value in _parts_of(trace, several).items():
                others.setdefault(name, []).append(value)
    shared = {name: sum(values) / len(values) for name, values in others.items()}
    scores = [
        Score(reward=float(trace.reward), parts={**shared, **_parts_of(trace, several)})
        for trace in trained
    ]
    if len(scores) == 1:
        return scores[0]
    seats = [part_name(trace.agent.name) if several else "" for trace in trained]
    return tuple(
        SeatScore(player=trace.id, seat=seat, score=score, alike=seats.count(seat) > 1)
        for trace, seat, score in zip(trained, seats, scores, strict=True)
    )


def _parts_of(trace: Any, several: bool) -> dict[str, float]:
    seat = f"{trace.agent.name}." if several else ""
    return {f"{seat}{name}": value for name, value in numbers_of(trace).items()}


def numbers_of(trace: Any) -> dict[str, float]:
    """Return a trace's rewards, before their weights, and its metrics. A metric with the name of a
    reward becomes metric.NAME."""
    rewards = {name: float(r.score) for name, r in trace.rewards.items() if r is not None}
    metrics = {name: float(m) for name, m in trace.metrics.items() if m is not None}
    return rewards | {
        f"metric.{name}" if name in rewards else name: value for name, value in metrics.items()
    }


def verifiers_task(
    name: str,
    *,
    size: int | None = None,
    eval_taskset: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Task:
    """Return the task of an installed taskset.

    Args:
        name: of the taskset: a module that exports it.
        size: maximum number of tasks; default: all, or ENDLESS_SIZE of an endless taskset.
        eval_taskset: settings of the taskset that differ for held-out tasks, such as its split;
            without them the last tasks are held out.
        arguments: of the environment, as in its own configuration: `id` (of an environment that is
            not the taskset's own), `taskset`, and each seat (`agent`).

    Raises ConfigError if loading fails, MissingExtraError without the library.
    """
    loaders, clients = _module(".utils.loaders"), _module(".clients")
    if size is not None and not (isinstance(size, int) and size > 0):
        raise ConfigError(f"size ({size}) must be a whole number > 0.")
    try:
        config = environment_config(loaders, name, arguments)
        tasks = {"train": _tasks(loaders, config.taskset, size)}
        if eval_taskset is not None:
            taskset = {**arguments.get("taskset", {}), **eval_taskset}
            held_out = environment_config(loaders, name, {**arguments, "taskset": taskset})
            tasks["eval"] = _tasks(loaders, held_out.taskset, size)
        loaders.load_environment(config)  # fail early
    except ConfigError:
        raise
    except Exception as error:
        if (module := module_of_version_0(name)) is not None:
            raise ConfigError(
                f"{name!r} is an environment of verifiers' version 0 ({module} has "
                "load_environment), but only tasksets of version 1 are supported: use a "
                "release of it for verifiers 1, or train on its records with its reward functions "
                "(reward.function=FILE.py:FUNCTION)."
            ) from error
        if isinstance(error, ValidationError):
            raise
        raise ConfigError(
            f"the taskset {name!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    check_containers(config, tasks["train"])
    player = VerifiersPlayer(tasks, lambda: loaders.load_environment(config), clients)
    return Task(
        records=records_of(tasks["train"], "train"),
        held_out=records_of(tasks["eval"], "eval") if "eval" in tasks else None,
        program=player.play,
        words=_characters(tasks["train"][:SHOWN_TASKS]),
    )


def environment_config(loaders: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """Return an environment's configuration. A seat without a runtime runs as a process of this
    machine if its harness runs nothing that the policy writes; otherwise raises ConfigError."""
    fields = {**arguments, "taskset": {**arguments.get("taskset", {}), "id": name}}
    kind = loaders.env_config_type(name, fields.get("id", ""))
    seats = _module(".configs.agent").AgentConfig
    without_runtime = []
    for seat, declared in kind.model_fields.items():
        if not isinstance(declared.default, seats):
            continue
        settings = fields.get(seat) or {}
        if "runtime" in settings or "runtime" in declared.default.model_fields_set:
            continue
        fields[seat] = {**settings, "runtime": {"type": "subprocess"}}
        without_runtime.append(seat)
    config = loaders.resolve_env_config(fields)
    harnesses = config.agent_harnesses()
    for seat in without_runtime:
        if loaders.harness_class(harnesses[seat].id).EXECUTES_CODE:
            raise ConfigError(
                f"{seat!r} is played by the harness {harnesses[seat].id!r}, which runs the "
                f"policy's code. Say where: {seat}: {{runtime: {{type: docker}}}} (or subprocess: "
                f"this machine, unprotected), or use one that runs nothing: {seat}: {{harness: "
                "{id: null}} (null in quotes)."
            )
    return config


def check_containers(config: Any, tasks: Sequence[Any]) -> None:
    """Raise ConfigError if a harness or a task needs a container, and its seat's runtime is not
    one, or is Docker on a machine without it: every episode would fail."""
    loaders, harnesses = _module(".utils.loaders"), config.agent_harnesses()
    kinds = {seat: getattr(config, seat).runtime.type for seat in harnesses}
    for seat, harness in harnesses.items():
        needs = loaders.harness_class(harness.id).NEEDS_CONTAINER
        if needs and kinds[seat] == "subprocess":
            raise ConfigError(
                f"{seat!r} is played by the harness {harness.id!r}, which needs a container. Say "
                f"which: {seat}: {{runtime: {{type: docker}}}}, or use a harness that needs none: "
                f'{seat}: {{harness: {{id: "null"}}}}.'
            )
        if kinds[seat] == "docker" and shutil.which("docker") is None:
            raise ConfigError(
                f"{seat!r} runs in Docker, which is not installed on this machine. Install it, or "
                f"use another runtime: {seat}: {{runtime: {{type: ...}}}}."
            )
    needing = [t for t in tasks if type(t).NEEDS_CONTAINER or t.data.image]
    if needing and set(kinds.values()) == {"subprocess"}:
        raise ConfigError(
            f"{len(needing)} of the {len(tasks)} tasks need a container, and every seat runs as a "
            f"process of this machine. Say which: {next(iter(kinds))}: {{runtime: {{type: "
            "docker}}."
        )


def module_of_version_0(name: str) -> str | None:
    """Return the module of an installed environment of verifiers' version 0, which defines
    load_environment; None if there is no such module. Imports nothing of it.

    name: of a module, of an installed distribution, or owner/name on the environments' hub.
    """
    plain = name.rsplit("/", 1)[-1].split("@", 1)[0]
    modules = [plain.replace("-", "_"), plain.replace("-", "_").lower()]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files(plain) or []
        modules += sorted({file.parts[0].removesuffix(".py") for file in files})
    for module in dict.fromkeys(modules):
        if module.isidentifier() and _defines(module, OF_VERSION_0):
            return module
    return None


OF_VERSION_0 = re.compile(
    r"^(?:[ \t]*(?:async )?def load_environment\(|load_environment\s*(?::[^=\n]+)?=(?!=))",
    re.MULTILINE,
)
"""Matches a definition of load_environment: a function, or an assignment, such as of a partial."""


def _defines(module: str, code: re.Pattern[str]) -> bool:
    """Return whether a file of a module has a matching line."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None or not found.origin.endswith(".py"):
            return False
        file = Path(found.origin)
        files = file.parent.rglob("*.py") if file.name == "__init__.py" else [file]
        return any(code.search(one.read_text("utf-8", "replace")) for one in files)
    return False


def records_of(tasks: Sequence[Any], split: str) -> list[TaskRecord]:
    """Return tasks as records: their columns, the question, and the task's identity."""
    return [
        {
            **task.data.model_dump(
                mode="json", exclude={"prompt"}, exclude_none=True, exclude_defaults=True
            ),
            "question": task.data.prompt_text,
            MARK: [split, index],
        }
        for index, task in enumerate(tasks)
    ]


def _tasks(loaders: Any, config: Any, size: int | None) -> list[Any]:
    taskset = loaders.load_taskset(config)
    most = size if taskset.bounded or size is not None else ENDLESS_SIZE
    tasks = list(itertools.islice(iter(taskset), most))
    if not tasks:
        raise ConfigError(f"the taskset {config.id!r} has no tasks.")
    return tasks


def _characters(tasks: Sequence[Any]) -> tuple[str, ...]:
    """Return the characters of some tasks' texts, and the printable ones that environments also
    write."""
    texts = [str(value) for task in tasks for value in dict(task.data).values()]
    return tuple(sorted({*PRINTABLE, *itertools.chain.from_iterable(texts)}))


def _module(part: str) -> Any:
    extra_module("verifiers.v1", "verifiers", "task verifiers:NAME needs verifiers")
    return importlib.import_module(f"verifiers.v1{part}")
