"""Measure our sampler and its peers in turns, with the same weights, prompts and lengths.

Each engine is a process in an environment of its own (environments.py); only one computes at a
time. For each workload every engine runs once to compile and warm up, then all of them run
`repeats` times in turns, so that a slow minute of the machine affects every engine equally.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import MODELS, Row, long_tail, make_params, random_prompts

from jaxrl_async.model.policy import Policy

from .environments import ENVIRONMENTS, preloaded, python_of

HERE = Path(__file__).parent
NUMBERS = {
    "float32": ("full", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("int8", "bfloat16"),
}
"""Numbers that products are made of: our sampler.matmul, and vLLM's dtype, which has no 8 bits for
weights that were not rounded before."""


class Worker:
    """One engine's process."""

    def __init__(
        self, name: str, python: Path, script: str, folder: Path, *words: str, preload: str = ""
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [str(python), str(HERE / script), str(folder), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **({"LD_PRELOAD": preload} if preload else {})},
        )
        answer = self._read()
        self.startup_s, self.version = float(answer["startup_s"]), str(answer["version"])

    def measure(self, prompts: Sequence[Any], lengths: Sequence[int], concurrency: int) -> Any:
        """Generate and return the worker's measurements. Raises RuntimeError if it failed."""
        assert self._process.stdin is not None
        request = {
            "prompts": [p.tolist() for p in prompts],
            "lengths": list(lengths),
            "concurrency": concurrency,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def workloads(concurrency: int, *, quick: bool) -> Mapping[str, list[int]]:
    """Return each request's answer length, tokens."""
    if quick:
        return {"8 each": [8] * concurrency, "long tail": long_tail(2 * concurrency, most=16)}
    return {
        "64 each": [64] * concurrency,
        "128 each": [128] * concurrency,
        "long tail": long_tail(4 * concurrency),
        "stragglers": [160 if i % 10 == 0 else 16 for i in range(4 * concurrency)],
    }


def measure_peers(
    models: Sequence[str],
    slots: Sequence[int],
    repeats: int,
    names: Sequence[str],
    *,
    replicas: Mapping[str, int],
    answers: Sequence[str] = (),
    numbers: str = "float32",
    quick: bool = False,
) -> list[Row]:
    """Measure all engines on the workloads of these answers, or on all; report and skip an engine
    that cannot be set up. numbers: of NUMBERS."""
    rows: list[Row] = []
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            Policy(MODELS[model], make_params(MODELS[model])).save_pretrained(folder)
            workers = start_all(Path(folder), names, replicas.get(model, 1), numbers)
            try:
                for concurrency in slots:
                    for kind, lengths in workloads(concurrency, quick=quick).items():
                        if answers and kind not in answers:
                            continue
                        rows += one_workload(workers, model, concurrency, kind, lengths, repeats)
                        for row in rows[-len(workers) :]:
                            print(json.dumps(row), file=sys.stderr, flush=True)
            finally:
                for worker in workers:
                    worker.close()
    return rows


def measure_starts(model: str, names: Sequence[str]) -> list[Row]:
    """Time each engine from its start to the first token of eight prompts, in a fresh process.

    Ours runs twice: with an empty compilation cache, and with the cache that the first run left.
    Peers run as installed and may use whatever they keep between processes.
    """
    rows: list[Row] = []
    prompts = random_prompts(MODELS[model].vocab, 8)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        Policy(MODELS[model], make_params(MODELS[model])).save_pretrained(folder)
        arguments: tuple[str, tuple[str, ...]] = ("worker_ours.py", (folder, "1", "full", cache))
        engines: list[tuple[str, str, str, tuple[str, ...]]] = [
            ("ours, cold", sys.executable, *arguments),
            ("ours, warm cache", sys.executable, *arguments),
        ]
        for name in names:
            there = ENVIRONMENTS[name]
            engines.append((name, str(python_of(there)), there.script, (folder, *there.words)))
        for name, python, script, words in engines:
            start = time.perf_counter()
            worker = Worker(name, Path(python), script, Path(words[0]), *words[1:])
            try:
                worker.measure(prompts, [1] * 8, 8)
                taken_s = time.perf_counter() - start
            finally:
                worker.close()
            rows.append({"engine": name, "model": model, "start_to_first_token_s": taken_s})
    return rows


def start_all(folder: Path, names: Sequence[str], replicas: int, numbers: str) -> list[Worker]:
    """Start ours, then the peers that can be installed here."""
    matmul, of_peers = NUMBERS[numbers]
    arguments = (str(replicas), matmul)
    workers = [Worker("ours", Path(sys.executable), "worker_ours.py", folder, *arguments)]
    for name in names:
        environment = ENVIRONMENTS[name]
        try:
            python = python_of(environment)
            words = (str(folder), *environment.words, *([of_peers] if name == "vllm" else []))
            libraries = preloaded(environment)
            print(f"# {name} with {libraries or 'nothing'} preloaded", file=sys.stderr)
            made = Worker(name, python, environment.script, folder, *words[1:], preload=libraries)
            workers.append(made)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(f"# {name} is left out: {error}", file=sys.stderr)
    return workers


def one_workload(
    workers: list[Worker],
    model: str,
    concurrency: int,
    kind: str,
    lengths: list[int],
    repeats: int,
) -> list[Row]:
    """Measure one row for each engine; report an engine that fails and leave it out afterwards."""
    prompts = random_prompts(MODELS[model].vocab, len(lengths))
    first_s: dict[str, float] = {}
    for worker in list(workers):
        try:
            first_s[worker.name] = worker.measure(prompts, lengths, concurrency)["seconds"]
            worker.measure(prompts[:concurrency], [1] * concurrency, concurrency)
        except RuntimeError as error:
            print(f"# left out from here on: {error}", file=sys.stderr)
            workers.remove(worker)
    taken: dict[str, list[Any]] = {w.name: [] for w in workers}
    token: dict[str, list[float]] = {w.name: [] for w in workers}
    for _ in range(repeats):
        for worker in workers:
            taken[worker.name].append(worker.measure(prompts, lengths, concurrency))
            first = worker.measure(prompts[:concurrency], [1] * concurrency, concurrency)
            token[worker.name].append(first["seconds"])
    ours = statistics.median(a["seconds"] for a in taken["ours"])
    rows = []
    for worker in workers:
        seconds = [a["seconds"] for a in taken[worker.name]]
        useful = sum(lengths)
        rows.append(
            {
                "engine": worker.name,
                "model": model,
                "sequences": concurrency,
                "answers": kind,
                "tokens_per_s": useful / statistics.median(seconds),
                "least": useful / max(seconds),
                "most": useful / min(seconds),
                "useful": useful / max(1, taken[worker.name][-1]["computed_tokens"]),
                "first_tokens_ms": 1e3 * statistics.median(token[worker.name]),
                "start_s": worker.startup_s,
                "first_run_s": first_s[worker.name],
                "peak_MiB": taken[worker.name][-1]["peak_rss_bytes"] / 2**20,
                "ours_over_it": statistics.median(seconds) / ours,
            }
        )
    return rows
