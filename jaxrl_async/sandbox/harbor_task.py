"""Harbor's tasks, played unchanged by Harbor's own package: harbor:DIR.

    HarborPlayer.play ──config, session──> harbor_trials.py, in Harbor's Python ──> Trial
           ^                                                     agent ──chat──> the run's endpoint
           └──── the verifier's reward, or the error             sandbox or container, verifier

task: {harbor:tasks/: {python: ..., agent: {name: terminus-2}, environment: sandbox}}

What happened decides what a trial is worth. An error of the machine (a container that does not
start, a verifier that breaks) is never scored: the trial is played again after growing waits. An
agent that ran out of time or context is scored by the verifier, or with 0 if that did not run. Any
other error of an agent fails its group.
"""

import asyncio
import functools
import itertools
import json
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxrl_async.errors import Away, ConfigError, RolloutError, in_a_line
from jaxrl_async.keeper import kept
from jaxrl_async.metrics.metric import part_name
from jaxrl_async.sandbox.harbor_files import HarborTask, copies_of, read_tasks
from jaxrl_async.sandbox.sandbox import Sandbox, limits_of
from jaxrl_async.shown_environment import without_secrets
from jaxrl_async.tasks.task import Task, TaskRecord
from jaxrl_async.tasks.usercode import run_async
from jaxrl_async.tasks.verifiers_task import PlayedSession
from jaxrl_async.types import CORRECT, Score

log = logging.getLogger(__name__)

SANDBOX = "sandbox"
CLASS = "jaxrl_async.sandbox.harbor_environment:SandboxHarborEnvironment"
REWARD = "reward"
"""Harbor's name of the reward where a verifier gives several numbers."""
OUT_OF_TIME = ("AgentTimeoutError",)
OUT_OF_CONTEXT = (
    "ContextLengthExceededError", "ContextWindowExceededError", "OutputLengthExceededError",
    "OutputTokenExceededError",
)  # fmt: skip
"""Harbor's errors of agents that are scored."""
OF_THE_AGENT = ("NonZeroAgentExitCodeError", "AgentSafetyRefusalError", "AgentAuthenticationError")
"""Harbor's errors of agents that are not scored, and which a second trial would repeat."""
WITHOUT_MODEL = ("oracle", "nop")
"""Harbor's agents that call no model."""
START_S = 300.0
"""Maximum time for Harbor's package to be imported, seconds."""
CHECK = "import harbor.trial.trial, importlib.metadata as m; print(m.version('harbor'))"
VERSION = (0, 26)
"""Oldest version of Harbor that is supported."""
COLUMN = "harbor_task"
"""Column of a record that holds its task's folder."""


class HarborProcess:
    """The process that plays trials; started when first needed, and again if it ended. Any
    thread."""

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        """python: Harbor's. environ: the process's variables."""
        self._python, self._environ = python, dict(environ)
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, tuple[subprocess.Popen[bytes], Future[dict[str, Any]]]] = {}

    def begin(self, config: Mapping[str, object], environ: Mapping[str, str]) -> tuple[int, Any]:
        """Begin a trial; return its number and the Future of its result. Raises Away."""
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._start()
            number, result = next(self._numbers), Future[dict[str, Any]]()
            self._waiting[number] = process, result
            self._send({"id": number, "config": config, "environ": environ})
            return number, result

    def cancel(self, number: int) -> None:
        """End a trial, if it is played."""
        with self._lock:
            if number in self._waiting:
                with suppress(Away):
                    self._send({"id": number, "cancel": True})

    def close(self) -> None:
        """End the process with all its trials. Idempotent."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        script = str(Path(__file__).with_name("harbor_trials.py"))
        self._process = process = subprocess.Popen(
            kept([self._python, "-P", script]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environ,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(process,), name="harbor", daemon=True).start()
        return process

    def _send(self, message: Mapping[str, object]) -> None:
        try:
            assert self._process is not None and self._process.stdin is not None, "started"
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Away(f"Harbor's process has ended: {error}") from None

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None, "stdout=PIPE"
        with process.stdout:
            for line in process.stdout:
                reply = json.loads(line)
                if "ready" in reply:
                    log.info("harbor %s is ready", reply["ready"])
                    continue
                with self._lock:
                    _, result = self._waiting.pop(reply["id"], (None, None))
                if result is not None and result.set_running_or_notify_cancel():
                    result.set_result(reply)
        process.wait()
        with suppress(OSError):
            assert process.stdin is not None, "stdin=PIPE"
            process.stdin.close()
        with self._lock:
            numbers = [number for number, (of, _) in self._waiting.items() if of is process]
            unanswered = [self._waiting.pop(number)[1] for number in numbers]
        for result in unanswered:
            if result.set_running_or_notify_cancel():
                result.set_exception(Away("Harbor's process has ended"))


class HarborPlayer:
    """Plays records' tasks through sessions."""

    def __init__(
        self,
        process: HarborProcess,
        trial: Mapping[str, object],
        trials_dir: str | None,
        at_once: int,
    ) -> None:
        """Play nothing yet.

        Args:
            process: plays the trials.
            trial: fields of Harbor's TrialConfig.
            trials_dir: folder that keeps the trials' files; None: they are removed.
            at_once: maximum number of trials that are played at the same time.
        """
        self._process, self._trial, self._trials_dir = process, dict(trial), trials_dir
        self._slots = asyncio.Semaphore(at_once)  # used on the loop for user code alone

    async def play(self, session: PlayedSession) -> Score:
        """Play the record's task once (endpoint.agent_programs.Program). Raises RolloutError, Away
        for an error of the machine."""
        outcome = await run_async(lambda: self._play_trial(session), None, reap_s=1.0)
        if outcome.error is not None:
            raise outcome.error
        score: Score = outcome.value
        return score

    async def _play_trial(self, session: PlayedSession) -> Score:
        folder = self._trials_dir or tempfile.mkdtemp(prefix="jaxrl-trial-")
        config = trial_config(self._trial, session, folder)
        environ = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_BASE": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": session.api_key,
        }
        number = None
        try:
            async with self._slots:
                number, result = await asyncio.to_thread(self._process.begin, config, environ)
                return score_of_trial(await asyncio.wrap_future(result))
        finally:
            if number is not None:
                self._process.cancel(number)
            if self._trials_dir is None:
                shutil.rmtree(folder, ignore_errors=True)


def trial_config(trial: Mapping[str, Any], session: PlayedSession, folder: str) -> dict[str, Any]:
    """Return a TrialConfig as JSON. The agent calls the session's endpoint, and knows neither its
    reward key nor another session's."""
    agent = {
        "model_name": f"openai/{session.model}",
        "base_url": session.base_url,
        **trial["agent"],
    }
    return {
        **trial,
        "agent": agent,
        "task": {"path": session.record[COLUMN]},
        "trials_dir": folder,
    }


def score_of_trial(result: Mapping[str, Any]) -> Score:
    """Return the score of a trial's result: the verifier's reward, its other numbers as parts, and
    whether the agent ran out of time or context.

    Raises Away for an error of the machine, RolloutError for another error of the agent.
    """
    errors = result["errors"]
    kinds = {error["type"] for error in errors}
    if unscored := [e for e in errors if e["type"] not in (*OUT_OF_TIME, *OUT_OF_CONTEXT)]:
        text = f"a trial of Harbor failed: {unscored[0]['type']}: {unscored[0]['message'][:300]}"
        raise (RolloutError if unscored[0]["type"] in OF_THE_AGENT else Away)(text)
    rewards = dict(result["rewards"] or {})
    if not rewards and not errors:
        raise Away("a trial of Harbor ended without a reward")
    if not rewards:
        rewards = {REWARD: 0.0}
    if REWARD not in rewards and len(rewards) > 1:
        raise RolloutError(
            f"the verifier gives {', '.join(sorted(rewards))} and no `{REWARD}`. Let it write one."
        )
    reward = float(rewards.pop(REWARD) if REWARD in rewards else rewards.popitem()[1])
    parts = {part_name(name): float(value) for name, value in rewards.items()}
    return Score(
        reward=reward,
        parts={
            **parts,
            **({CORRECT: reward} if 0.0 <= reward <= 1.0 else {}),
            "out_of_time": float(bool(kinds & set(OUT_OF_TIME))),
            "out_of_context": float(bool(kinds & set(OUT_OF_CONTEXT))),
        },
    )


def harbor_task(
    path: str,
    *,
    eval_path: str | None = None,
    python: str | None = None,
    agent: str | Mapping[str, object] = "terminus-2",
    environment: str | Mapping[str, object] = SANDBOX,
    trial: Mapping[str, object] | None = None,
    trials_dir: str | None = None,
    at_once: int = 64,
    variables: Sequence[str] = (),
) -> Task:
    """Return a task of one or several tasks of Harbor.

    Args:
        path: folder of a task, or of tasks.
        eval_path: folder of held-out tasks; None: the last ones of path.
        python: Python of the environment with Harbor; None: the command `harbor`'s Python.
        agent: name of an agent of Harbor, or fields of its AgentConfig: name, import_path, kwargs.
        environment: sandbox, a type of Harbor's (docker, gke, ...), or fields of its
            EnvironmentConfig; {type: sandbox, kwargs: {...}} sets a sandbox's limits.
        trial: further fields of its TrialConfig: verifier, timeout_multiplier, ...
        trials_dir: folder that keeps each trial's files; None: they are removed.
        at_once: maximum number of trials that are played at the same time; others wait, which
            counts as idle time of their sessions (env.program_idle_s).
        variables: environment variables that Harbor sees in addition to the usual ones (DOCKER_*).

    Raises ConfigError, DataError.
    """
    if not isinstance(at_once, int) or at_once < 1:
        raise ConfigError(f"at_once ({at_once!r}) must be a whole number of at least 1.")
    agent_config = {"name": agent} if isinstance(agent, str) else dict(agent)
    if agent_config.get("name") in WITHOUT_MODEL:
        raise ConfigError(f"the agent {agent_config['name']!r} asks no model. Choose another one.")
    harbor = harbor_python(python)
    tasks = read_tasks(path)
    held_out = None if eval_path is None else read_tasks(eval_path)
    environment_config: dict[str, Any] = (
        {"type": environment} if isinstance(environment, str) else {**environment}
    )
    if environment_config.get("type") == SANDBOX:
        for one in (*tasks, *(held_out or ())):
            copies_of(one.folder / "environment")
        limits = dict(environment_config.pop("kwargs", {}))
        environment_config.pop("type")
        check_sandbox(limits)
        environment_config |= {"import_path": CLASS, "kwargs": {"limits": limits}}
    config = {
        **(trial or {}),
        "agent": agent_config,
        "environment": environment_config,
    }
    environ = without_secrets(os.environ, also=variables)
    environ.pop("PYTHONPATH", None)
    environ.pop("PYTHONHOME", None)
    player = HarborPlayer(HarborProcess(harbor, environ), config, trials_dir, at_once)
    return Task(
        records=records_of(tasks),
        held_out=None if held_out is None else records_of(held_out),
        program=player.play,
    )


def check_sandbox(limits: Mapping[str, object]) -> None:
    """Start a sandbox with these limits once. Raises ConfigError."""
    with Sandbox(limits_of(limits)) as box:
        box.wait_ready()


def records_of(tasks: Sequence[HarborTask]) -> list[TaskRecord]:
    """Return tasks as records."""
    return [
        {"question": task.instruction, "name": task.name, COLUMN: str(task.folder)}
        for task in tasks
    ]


@functools.cache
def harbor_python(python: str | None) -> str:
    """Return the Python with Harbor. Raises ConfigError if it has none that is new enough."""
    if python is None:
        command = shutil.which("harbor")
        python = None if command is None else str(Path(os.path.realpath(command)).parent / "python")
    how = (
        "Harbor needs Python 3.12 or newer and an environment of its own: uv tool install "
        "'harbor>=0.26', or task: {harbor:DIR: {python: ENVIRONMENT/bin/python}}."
    )
    if python is None:
        raise ConfigError(f"Harbor's command `harbor` is not found. {how}")
    try:
        done = subprocess.run(
            [python, "-P", "-c", CHECK],
            capture_output=True,
            text=True,
            timeout=START_S,
            env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} cannot be run: {in_a_line(error)}. {how}") from None
    version = done.stdout.strip()
    if done.returncode or tuple(int(n) for n in version.split(".")[:2]) < VERSION:
        found = version or done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{python} has no Harbor that is new enough ({found}). {how}")
    return python
