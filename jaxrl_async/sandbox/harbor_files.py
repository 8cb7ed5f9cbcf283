"""Tasks in Harbor's format, as far as a run needs them. Standard library only.

    DIR/task.toml            timeouts and resources
    DIR/instruction.md       the agent's instruction
    DIR/tests/test.sh        writes the reward to /logs/verifier/reward.txt or reward.json
    DIR/environment/         Dockerfile and the files that it copies

Harbor's own package reads and checks a task when it is played.
"""

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_async.errors import ConfigError, DataError

COPIES = ("FROM", "WORKDIR", "COPY", "ENV")
"""Instructions of a Dockerfile that need no container engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task's folder and its contents."""

    folder: Path
    name: str
    instruction: str
    agent_s: float | None  # the agent's time; None: no limit
    verifier_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What a simple Dockerfile does."""

    workdir: str
    files: Sequence[tuple[Path, str]]  # (here, target in the container)
    environ: dict[str, str]


def read_tasks(path: str) -> list[HarborTask]:
    """Return the task in a folder, or all tasks in a folder of them, by name. Raises DataError."""
    folder = Path(path)
    if (folder / "task.toml").is_file():
        return [read_task(folder)]
    folders = sorted(file.parent for file in folder.glob("*/task.toml"))
    if not folders:
        raise DataError(
            f"{path}: neither a task of Harbor (task.toml) nor a folder of tasks. Give the folder "
            "that holds them."
        )
    return [read_task(one) for one in folders]


def read_task(folder: Path) -> HarborTask:
    """Read a task. Raises DataError."""
    try:
        settings = tomllib.loads((folder / "task.toml").read_text("utf-8"))
        steps = settings.get("steps") or []
        instruction = folder / "instruction.md"
        text = instruction.read_text("utf-8") if instruction.exists() or not steps else ""
        agent_s = settings.get("agent", {}).get("timeout_sec")
        verifier_s = settings.get("verifier", {}).get("timeout_sec", 600.0)
        return HarborTask(
            folder=folder.resolve(),
            name=folder.name,
            instruction=text,
            agent_s=None if agent_s is None else float(agent_s),
            verifier_s=float(verifier_s),
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{folder}: not a task of Harbor: {error}. Correct it.") from None


def copies_of(environment: Path) -> Copies:
    """Return what a task's Dockerfile does, if all it does is copying files.
    Raises ConfigError, which names the task.

    environment: the task's folder of that name.
    """
    task = environment.parent.name
    if (environment / "docker-compose.yaml").exists():
        raise ConfigError(f"{task}: has several containers (docker-compose.yaml). {USE_ENGINE}")
    file = environment / "Dockerfile"
    if not file.exists():
        raise ConfigError(f"{task}: has no environment/Dockerfile. {USE_ENGINE}")
    workdir, files, environ = "/app", list[tuple[Path, str]](), dict[str, str]()
    joined = file.read_text("utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    for line in (one for one in lines if one and not one.startswith("#")):
        word, _, rest = line.partition(" ")
        parts = shlex.split(rest)
        if word.upper() not in COPIES or (word.upper() == "COPY" and not _is_plain(parts)):
            raise ConfigError(
                f"{task}: its Dockerfile has `{line[:60]}`, which needs a container. {USE_ENGINE}"
            )
        if word.upper() == "WORKDIR":
            workdir = parts[0] if parts[0].startswith("/") else f"{workdir}/{parts[0]}"
        elif word.upper() == "ENV":
            environ |= _variables(parts)
        elif word.upper() == "COPY":
            target = parts[-1] if parts[-1].startswith("/") else f"{workdir}/{parts[-1]}"
            files += [
                (source, target) for name in parts[:-1] for source in _sources(environment, name)
            ]
    return Copies(workdir=workdir, files=files, environ=environ)


USE_ENGINE = "Play it in a container: environment: {type: docker}, or another type of Harbor's."


def _is_plain(parts: Sequence[str]) -> bool:
    return len(parts) > 1 and not any(part.startswith(("--", "[", "/../")) for part in parts)


def _variables(parts: Sequence[str]) -> dict[str, str]:
    if "=" not in parts[0]:
        return {parts[0]: " ".join(parts[1:])}
    pairs: Any = (part.partition("=") for part in parts)
    return {name: value for name, _, value in pairs}


def _sources(environment: Path, name: str) -> list[Path]:
    """Return the files that COPY names: one, or a pattern's. Raises ConfigError."""
    inside = environment.resolve()
    files = (
        sorted(environment.glob(name.lstrip("/")))
        if "*" in name
        else [environment / name.lstrip("/")]
    )
    if not files or any(not f.exists() or not f.resolve().is_relative_to(inside) for f in files):
        raise ConfigError(f"{environment.parent.name}: COPY {name}: there is no such file in it.")
    return files
