"""Drivers of clients in their own environments, and what the endpoint saw of them."""

import importlib.util
import json
import os
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DRIVERS = Path(__file__).parent / "drivers"
SHOWN = 4000  # characters of a driver's errors
TABLE: dict[tuple[str, str, str], list[str]] = defaultdict(list)
"""What a driver's mode with a client's version said, each time."""
OWN = ("PATH", "HOME", "LANG", "TMPDIR", "UV_CACHE_DIR")


def environments() -> Any:
    """The module benchmarks/peers/environments.py."""
    file = ROOT / "benchmarks/peers/environments.py"
    spec = importlib.util.spec_from_file_location("peer_environments", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python_of(environment: str) -> Path:
    """The Python of an environment; skips where it does not exist."""
    home = os.environ.get("JAXRL_PEERS")
    if home is None:
        pytest.skip("JAXRL_PEERS is not set: no environments of clients (docs/clients.md)")
    python = Path(home) / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(
            f"{python.parents[1]} does not exist: JAXRL_PEERS={home} python "
            f"benchmarks/peers/environments.py {environment}"
        )
    return python


@dataclass
class Driven:
    """A driver in its environment."""

    name: str
    process: subprocess.Popen
    log: Path

    def __call__(self, mode: str, address: str, key: str, model: str) -> Any:
        """The result of a mode. Fails with the driver's error."""
        told = {
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": key,
            "JAXRL_MODEL": model,
        }
        begun = self.log.stat().st_size
        line = json.dumps({"mode": mode, "environment": told})
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            pytest.fail(f"the driver ended: {self.errors(begun)}")
        said = json.loads(answer)
        TABLE[self.name, mode, said["version"]].append(said.get("error", "works"))
        if "error" in said:
            pytest.fail(f"{said['error']}\n{self.errors(begun)}", pytrace=False)
        return said["result"]

    def errors(self, begun: int) -> str:
        return self.log.read_text("utf-8", "replace")[begun:][-SHOWN:]

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def started(driver: str, environment: str, folder: Path) -> Driven:
    """Start a driver; skips where its environment does not exist."""
    words = [str(python_of(environment)), str(DRIVERS / f"drive_{driver}.py")]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{driver}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env={k: v for k, v in os.environ.items() if k in OWN} | {"HF_HUB_OFFLINE": "1"},
        )
    return Driven(driver, process, log)


def table() -> list[str]:
    """What each mode of each client said, first as a guest, as lines."""
    return [
        f"{name} {version} | {mode} | {'; '.join(dict.fromkeys(w[:300] for w in said))}"
        for (name, mode, version), said in TABLE.items()
    ]
