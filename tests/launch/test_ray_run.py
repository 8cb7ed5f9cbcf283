"""A real run on a local Ray cluster: a sampler is killed, another added, and one removed again."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxrl_async.metrics.recorder import read_lines

ray = pytest.importorskip("ray", reason="needs ray: pip install 'jaxrl_async[ray]'")
Cluster = importlib.import_module("ray.cluster_utils").Cluster
pytestmark = [
    pytest.mark.full,
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

ROOT = Path(__file__).parents[2]
SECRET = "5ec7e75ec7e75ec7e75ec7e75ec7e7"
LIMIT_S = 150.0
"""Longest wait for one thing to happen, seconds."""


@pytest.fixture
def address() -> Iterator[str]:
    """A cluster with room for a trainer and two samplers, whatever cores there are."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{ROOT}:{before}"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    yield nodes.address
    nodes.shutdown()
    os.environ["PYTHONPATH"] = before


class Launched:
    """The launcher as a user starts it, what it says, and the processes of its run."""

    def __init__(self, address: str, folder: Path) -> None:
        words = [
            *(sys.executable, "-m", "jaxrl_async.launch.ray", str(ROOT / "configs/addition.yaml")),
            *("--samplers", "1:2", "--address", address),
            *(f"run.dir={folder}", "run.name=ray", "run.steps=2000", "run.seed=1"),
            "model.architecture={family: qwen3, layers: 2, width: 64, heads: 4, kv_heads: 2, "
            "head_dim: 16, mlp: 128}",
            *(
                "sampler.slots=4",
                "sampler.block=1",
                "staleness.max_staleness=2",
                "warm_start.steps=0",
            ),
            *("algorithm.groups_per_step=16", "algorithm.group_size=8", "eval.every=0"),
            *("checkpoint.every=0", "data.addition.eval_size=8", "metrics.peak_flops=1e9"),
        ]
        self.folder, self.output = folder / "ray", list[tuple[float, str]]()
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "JAXRL_ASYNC_SECRET": SECRET},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.output.append((time.monotonic() - self._began, line.rstrip()))

    def log(self) -> str:
        return "\n".join(f"{at:6.1f} s  {text}" for at, text in self.output)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"it ended before {what}:\n{self.log()}"
            assert time.monotonic() < end, f"no {what}:\n{self.log()}\nliving {self.living()[-20:]}"
            time.sleep(0.2)

    def says(self, pattern: str) -> bool:
        return any(re.search(pattern, text) for _, text in self.output)

    def living(self) -> list[int]:
        """Return how many samplers were at work at the end of each step."""
        lines = read_lines(self.folder / "metrics.jsonl")
        return [int(line["sampler/living"]) for line in lines if "sampler/living" in line]

    def pids(self, module: str) -> set[int]:
        """Return the run's processes that run a module."""
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                ours = SECRET.encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
            if ours and [b"-m", module.encode()] == words[1:3]:
                found.add(int(entry.name))
        return found

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        code = self.process.wait(LIMIT_S)
        self._reader.join(10)
        return code


class Slowed:
    """Lets a process run a tenth of the time while the block lasts."""

    def __init__(self, pid: int) -> None:
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._pulse, daemon=True)

    def _pulse(self) -> None:
        while not self._over.is_set():
            os.kill(self._pid, signal.SIGSTOP)
            self._over.wait(0.9)
            os.kill(self._pid, signal.SIGCONT)
            self._over.wait(0.1)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_a_run_loses_a_sampler_gets_a_second_and_gives_it_back(
    address: str, tmp_path: Path
) -> None:
    """The second comes since the trainer waits, and goes since a slowed trainer does not."""
    run = Launched(address, tmp_path)
    try:
        run.until(lambda: len(run.living()) >= 2, "steps")
        (first,) = run.pids("jaxrl_async.sample")
        os.kill(first, signal.SIGKILL)
        run.until(lambda: run.says(r"sampler 0: ended with code 137; restarts in"), "restart")
        run.until(lambda: run.says(r"samplers: 1 -> 2 \(the trainer waits"), "second sampler")
        run.until(lambda: run.living()[-1] == 2, "join of the second")
        assert first not in run.pids("jaxrl_async.sample")
        (trainer,) = run.pids("jaxrl_async.train")
        with Slowed(trainer):
            run.until(lambda: run.says(r"samplers: 2 -> 1 \(the trainer waits"), "removal")
            run.until(lambda: run.living()[-1] == 1, "leave of the second")
        assert run.end(signal.SIGINT) in (0, 75), run.log()
    finally:
        if run.process.poll() is None:
            run.process.kill()
        print(run.log())
    lines = read_lines(run.folder / "metrics.jsonl")
    count = {
        name: sum(line.get(f"faults/samplers_{name}", 0) for line in lines)
        for name in ("joined", "left", "cut_off")
    }
    print(json.dumps(count), "living", run.living())
    assert count["joined"] >= 2 and count["cut_off"] >= 1 and count["left"] >= 1, count
    assert max(line["staleness/max"] for line in lines if "staleness/max" in line) <= 2
    words = [sys.executable, "-m", "jaxrl_async.audit", str(run.folder)]
    audit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    print(audit.stdout)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert not run.pids("jaxrl_async.train") | run.pids("jaxrl_async.sample"), "nothing is left"
