"""Real processes: a trainer over two, a sampler over two, compared with single processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from builders import tiny_params, tiny_spec
from joined_run import TINY as TINIER
from joined_run import joined_run, saved_rollouts
from runs import many_digits, run_job
from safetensors.numpy import load_file

from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.heads import save_head, with_head
from jaxrl_async.train_command import RESUME

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
TINY = (
    "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 8}",
    "warm_start={steps: 4, batch_size: 8}",
    "trainer={warmup_steps: 0, micro_batch_tokens: 512}",
    "sampler={slots: 16, max_new_tokens: 8, max_length: 32}",
    "algorithm={group_size: 4, groups_per_step: 4, learning_rate: 1e-3}",
    "metrics={peak_flops: 1e9, tensorboard: false}",
    "run.steps=3",
    "eval.every=3",
    "checkpoint={every: 2, keep: 1}",
    "staleness.max_staleness=0",
)


def started(module: str, words: list[str], log: Path) -> "subprocess.Popen[bytes]":
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def trainer(folder: Path, name: str, *words: str) -> list[str]:
    fixed = [f"run.dir={folder}", f"run.name={name}", many_digits(folder)]
    return ["configs/addition.yaml", *TINY, *fixed, *words]


def ended_well(processes: "list[tuple[subprocess.Popen[bytes], Path]]") -> None:
    """Wait for all; show the output of one that failed."""
    try:
        for process, log in processes:
            assert process.wait(240) == 0, log.read_text(errors="replace")[-3000:]
    finally:
        for process, _ in processes:
            process.kill()


def trained_params(folder: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(folder / name / "policy" / "model.safetensors")


def rewards(folder: Path, name: str) -> list[float]:
    lines = read_lines(folder / name / "metrics.jsonl")
    return [line["reward/mean"] for line in lines if "reward/mean" in line]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process."""
    folder = tmp_path_factory.mktemp("runs")
    log = folder / "alone.log"
    ended_well([(started("jaxrl_async.train", trainer(folder, "alone"), log), log)])
    return folder


@pytest.mark.exhaustive
def test_a_trainer_over_two_processes_with_two_samplers_learns_the_same(alone):
    port = free_port()
    words = ("mesh.samplers_in=external", "mesh.trainer.fsdp=2", "remote.wait_s=120")
    processes = []
    for index in (0, 1):
        distributed = (
            f"distributed.coordinator=127.0.0.1:{port}",
            "distributed.num_processes=2",
            f"distributed.process_id={index}",
        )
        log = alone / f"trainer{index}.log"
        words_of = trainer(alone, "hosts", *words, *distributed)
        processes.append((started("jaxrl_async.train", words_of, log), log))
    for index in (0, 1):
        log = alone / f"sampler{index}.log"
        join = ["--join", str(alone / "hosts"), "--wait", "120", "--name", f"s{index}"]
        processes.append((started("jaxrl_async.sample", join, log), log))
    ended_well(processes)
    assert rewards(alone, "hosts") == rewards(alone, "alone")
    one, two = trained_params(alone, "alone"), trained_params(alone, "hosts")
    off = {name: np.abs(two[name] - weights) for name, weights in one.items()}
    # Sums in another order: Adam's step of a gradient near 0 is that of its rounding
    for name, by in off.items():
        assert by.max() < 1e-4, f"{name}: a tenth of one update's step"
    every = np.concatenate([by.ravel() for by in off.values()])
    assert np.quantile(every, 0.99) < 1e-6


@pytest.mark.exhaustive
def test_a_sampler_over_two_processes_samples_the_same(alone):
    words = ("mesh.samplers_in=external", "mesh.sampler.tensor=2", "remote.wait_s=120")
    log = alone / "trainer.log"
    processes = [(started("jaxrl_async.train", trainer(alone, "joined", *words), log), log)]
    port = free_port()
    for index in (0, 1):
        log = alone / f"part{index}.log"
        join = ["--join", str(alone / "joined"), "--wait", "120", "--mesh", "tensor=2"]
        options = ["--process", f"{index}/2", "--coordinator", f"127.0.0.1:{port}"]
        processes.append((started("jaxrl_async.sample", [*join, *options], log), log))
    ended_well(processes)
    assert rewards(alone, "joined") == rewards(alone, "alone")
    one, two = trained_params(alone, "alone"), trained_params(alone, "joined")
    for name, weights in one.items():
        np.testing.assert_allclose(two[name], weights, atol=1e-5, err_msg=name)


JUDGED = (  # a curriculum whose pass rates come from a function and a reward model together
    "data.curriculum=hard_first",
    "data.curriculum_pool=8",
    "data.curriculum_threshold=0.2",
    "reward.model_weight=0.25",
    "staleness.max_staleness=0",
    "metrics.samples_every=1",
    "run.steps=4",
)


def reward_model(folder: Path) -> str:
    """Write a random reward model; return the override that chooses it."""
    spec = tiny_spec(24)
    save_head(folder, spec, with_head(spec, tiny_params(spec), "reward", jax.random.key(1)))
    return f"reward.model={folder}"


@pytest.mark.exhaustive
def test_a_reward_model_and_a_curriculum_go_on_in_a_trainer_over_two_processes(
    tmp_path: Path,
) -> None:
    settings = (*JUDGED, reward_model(tmp_path / "judge"))
    with joined_run(tmp_path, *settings, "checkpoint={every: 1, keep: 2}") as run:
        digits = f"reward.function={tmp_path / 'reward.py'}:slow_digits"
        alone = run_job("addition", tmp_path, *TINIER, *settings, digits, "run.name=alone")
        run.train_over_two()
        run.sample("first")
        run.until(lambda: (run.run / "checkpoints" / "1" / "checksums.json").exists())
        run.kill("trainer", "trainer-1")
        version, positions, _ = saved_rollouts(run.run)
        (curriculum,) = positions["prompts"]  # of the process that has the rollouts
        assert 1 <= version < 4 and curriculum["next"] == 4 * version
        assert curriculum["rates"] and curriculum["passed_over"]
        run.train_over_two(*RESUME)
        assert run.code("trainer") == 0, run.said("trainer")
        assert run.code("trainer-1") == run.code("first") == 0
        judged = run.lines()
        assert [line["step"] for line in judged] == list(range(5)) and not run.problems()
    for one, two in zip(alone, judged, strict=True):
        keys = [k for k in one if k.startswith(("reward/", "data/"))]
        assert {k: two[k] for k in keys} == pytest.approx({k: one[k] for k in keys}, abs=1e-5)
    assert {"reward/model", "reward/function", "data/difficulty_mean"} <= judged[-1].keys()
    assert len({line["reward/model"] for line in judged[1:]}) == 4, "it judges each step again"
    assert samples(tmp_path, "run") == samples(tmp_path, "alone")


def samples(folder: Path, name: str) -> list[tuple[object, ...]]:
    """Return prompts and answers of each step."""
    lines = read_lines(folder / name / "samples.jsonl")
    return [(x["step"], x["prompt"], x["completion"]) for x in lines]
