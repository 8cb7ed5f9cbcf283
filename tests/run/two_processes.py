"""Tiny runs in one process, and in two real ones (gloo on the CPU)."""

import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from builders import tiny_params, tiny_spec
from compile_flags import QUICK_COMPILE
from safetensors.numpy import load_file

from jaxrl_async.config.load import load
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.heads import save_head, with_head
from jaxrl_async.run.loop import train

ROOT = Path(__file__).parents[2]

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 6}",
    "data.max_prompt_tokens=16",
    "warm_start={steps: 1, batch_size: 4}",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 8}",
    "algorithm={group_size: 2, groups_per_step: 4, learning_rate: 1e-2}",
    "trainer={row_length: 32, micro_batch_tokens: 128}",
    "mesh={trainer: {fsdp: 2}, samplers: 2}",
    "eval.every=2",
    "checkpoint.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
    "staleness.max_staleness=0",
)
ENV = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": QUICK_COMPILE,  # devices of their own
}
REWARD = """
import time

def many_digits(prompt, completion, reference):
    time.sleep(0.05)  # a step takes long enough to be stopped after it
    return sum(c.isdigit() for c in completion) / 8
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def words(folder: Path, *overrides: str) -> list[str]:
    """A tiny run's configuration, as on the command line."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "empty.yaml").write_text("")
    settings = [*TINY, f"run.dir={folder}", f"reward.function={folder}/reward.py:many_digits"]
    return [str(folder / "empty.yaml"), *settings, *overrides]


def judge(folder: Path) -> str:
    """Make a reward model in this folder; return the override that chooses it."""
    tokenizer = addition_tokenizer()
    spec = tiny_spec(tokenizer.vocab_size)
    save_head(folder, spec, with_head(spec, tiny_params(spec), "reward", jax.random.key(1)))
    tokenizer.save_pretrained(folder)
    return f"reward.model={folder}"


def alone(folder: Path, *overrides: str) -> None:
    """A run in this process."""
    file, *rest = words(folder, *overrides)
    train(load(file, rest))


def start(
    folder: Path,
    *overrides: str,
    own: tuple[str, str] | None = None,
    more_env: Mapping[str, str] = types.MappingProxyType({}),
) -> list[subprocess.Popen]:
    """The same in two processes, on CPU devices of their own. own: an override of each."""
    meeting = f"distributed={{coordinator: 'localhost:{free_port()}', num_processes: 2}}"
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "jaxrl_async.train", *words(folder, *overrides)),
                *(meeting, f"distributed.process_id={i}", *(own[i : i + 1] if own else ())),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**ENV, **more_env},
        )
        for i in range(2)
    ]


def ended(processes: list[subprocess.Popen], timeout_s: float = 400) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left running."""
    try:
        outputs = [p.communicate(timeout=timeout_s)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]


def wait_for_lines(processes: list[subprocess.Popen], metrics: Path, count: int) -> None:
    """Until a run has made so many records."""
    deadline = time.monotonic() + 300
    while not (metrics.exists() and len(read_lines(metrics)) >= count):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.05)


def results(folder: Path, name: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    lines = [comparable(line) for line in read_lines(folder / name / "metrics.jsonl")]
    return lines, load_file(folder / name / "policy" / "model.safetensors")


def assert_same_run(one: tuple, other: tuple, *, atol: float = 1e-6) -> None:
    """The same numbers, up to the order in which devices add them up; a run that was stopped
    evaluates once more."""
    for line, twin in zip(one[0], other[0], strict=True):
        assert {k for k in line.keys() ^ twin.keys() if not k.startswith("eval/")} == set()
        for key in line.keys() & twin.keys():
            np.testing.assert_allclose(twin[key], line[key], rtol=1e-4, atol=atol, err_msg=key)
    for name, values in one[1].items():
        np.testing.assert_allclose(other[1][name], values, rtol=1e-3, atol=1e-5, err_msg=name)
