"""A trainer and its samplers as real processes, started, killed and watched by a test."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1

from jaxrl_async.audit import audit_run
from jaxrl_async.codec import loads
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.checkpoint.rollout_state import ROLLOUT_KINDS, RolloutsState
from jaxrl_async.run.checkpoint.seal import saved_steps
from jaxrl_async.run.checkpoint.store import LOOP, ROLLOUTS

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0
TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "warm_start={steps: 1, batch_size: 4}",
    "sampler={slots: 8, max_length: 48, max_new_tokens: 24}",
    "algorithm={group_size: 4, groups_per_step: 4, learning_rate: 1e-2}",
    "trainer={row_length: 48, micro_batch_tokens: 512, warmup_steps: 0}",
    "eval.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
SLOW_REWARD = """
import time

def slow_digits(prompt, completion, reference):
    time.sleep(0.03)  # a step takes long enough to be met
    return sum(c.isdigit() for c in completion) / 24
"""


def environment() -> dict[str, str]:
    """Return the environment of a process: it claims the devices that it needs itself."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = " ".join(flag for flag in flags if "device_count" not in flag)
    return {**os.environ, "XLA_FLAGS": kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class JoinedRun:
    """The processes of one run, which a test starts and ends."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder, self.settings = folder, settings
        self.run = folder / "run"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "reward.py").write_text(SLOW_REWARD, encoding="utf-8")

    def train(self, *more: str, name: str = "trainer") -> None:
        """Start the trainer, whose samplers come from elsewhere."""
        self._start(
            name,
            *("jaxrl_async.train", str(ROOT / "configs" / "addition.yaml"), *TINY),
            *(f"run.dir={self.folder}", "run.name=run", "mesh.samplers_in=external"),
            f"reward.function={self.folder / 'reward.py'}:slow_digits",
            *(*self.settings, *more),
        )

    def train_over_two(self, *more: str) -> None:
        """Start the trainer as two JAX processes, `trainer` and `trainer-1`, of a device each."""
        meeting = f"distributed.coordinator=127.0.0.1:{free_port()}"
        for index, name in enumerate(("trainer", "trainer-1")):
            place = ("distributed.num_processes=2", f"distributed.process_id={index}")
            self.train("mesh.trainer.fsdp=2", meeting, *place, *more, name=name)

    def sample(self, name: str, *more: str, join: str | None = None) -> None:
        """Start a sampler."""
        where = join or str(self.run)
        self._start(name, "jaxrl_async.sample", "--join", where, "--name", name, *more)

    def _start(self, name: str, module: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                env=environment(),
                stdout=log,
                stderr=log,
            )

    def kill(self, *names: str) -> None:
        """Kill these processes and forget them: their names are free."""
        for name in names:
            self.signal(name, signal.SIGKILL)
        for name in names:
            assert self.running.pop(name).wait(WAIT_S) == -signal.SIGKILL

    def signal(self, name: str, number: int = signal.SIGTERM) -> None:
        self.running[name].send_signal(number)

    def code(self, name: str) -> int:
        """Wait for the end of a process; return its exit code."""
        return self.running[name].wait(WAIT_S)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.run / "metrics.jsonl")

    @property
    def step(self) -> int:
        return max((int(line["step"]) for line in self.lines()), default=-1)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds while the trainer runs."""
        end = time.monotonic() + WAIT_S
        while not holds():
            ended = "trainer" in self.running and self.running["trainer"].poll() is not None
            assert not ended, f"the trainer has ended:\n{self.said('trainer')[-3000:]}"
            assert time.monotonic() < end, f"it never came:\n{self.said('trainer')[-3000:]}"
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step >= step)

    def until_said(self, name: str, words: str) -> None:
        self.until(lambda: words in self.said(name))

    def faults(self) -> dict[str, int]:
        """Return what the metrics count, of the whole run."""
        sums: dict[str, int] = {}
        for line in self.lines():
            for key in (k for k in line if k.startswith("faults/")):
                name = key.removeprefix("faults/")
                sums[name] = sums.get(name, 0) + int(line[key])
        return {name: count for name, count in sums.items() if count}

    def problems(self) -> tuple[str, ...]:
        """Return what the audit finds."""
        return audit_run(self.run).problems

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def saved_rollouts(run: Path) -> tuple[int, dict[str, Any], RolloutsState]:
    """Return version, positions and rollouts of the newest checkpoint of a run that has ended."""
    version = max(saved_steps(run / "checkpoints"))
    folder = run / "checkpoints" / str(version)
    metadata = v1.checkpointables_metadata(folder).metadata
    rollouts = {"bytes": np.empty(metadata[ROLLOUTS]["bytes"].shape, np.uint8)}
    items = v1.load_checkpointables(folder, {LOOP: None, ROLLOUTS: rollouts})
    state = loads(np.asarray(items[ROLLOUTS]["bytes"]), ROLLOUT_KINDS)
    assert isinstance(state, RolloutsState)
    return version, items[LOOP], state


@contextmanager
def joined_run(folder: Path, *settings: str) -> Iterator[JoinedRun]:
    """Make a run; end what is left of it."""
    made = JoinedRun(folder, *settings)
    try:
        yield made
    finally:
        made.close()
