"""Adapters in runs whose samplers are processes of their own: the base goes once, then the adapter
alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from joined_run import TINY, joined_run
from runs import many_digits, run_job
from safetensors.numpy import load_file

from jaxrl_async.audit import audit_run
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.train_command import RESUME

pytestmark = pytest.mark.full

LORA = ("model.lora={rank: 2, alpha: 4}",)
SHORT = (*LORA, "staleness.max_staleness=0", "checkpoint.every=0", "run.steps=2")
LONG = (*LORA, "staleness.max_staleness=2", "checkpoint={every: 1, keep: 2}")


def adapter(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def model(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def num_bytes(arrays: dict[str, np.ndarray]) -> int:
    return sum(a.nbytes for a in arrays.values())


def sums(lines: list[dict[str, Any]], key: str) -> float:
    return sum(line.get(key, 0.0) for line in lines)


@pytest.mark.exhaustive
def test_two_processes_learn_the_adapter_of_two_threads_bit_by_bit(tmp_path: Path) -> None:
    settings = (*TINY, *SHORT, "mesh.samplers=2", many_digits(tmp_path))
    expected = run_job("addition", tmp_path, *settings, "run.name=threads")
    words = ("run.name=processes", "mesh.samplers_in=processes", "remote.min_samplers=2")
    got = run_job("addition", tmp_path, *settings, *words)
    assert [comparable(x) for x in got] == [comparable(x) for x in expected]
    assert got[-1]["reward/mean"] > 0
    one, other = adapter(tmp_path / "threads"), adapter(tmp_path / "processes")
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[k], other[k]) for k in one)
    base = model(tmp_path / "processes" / "base")
    sizes = {x["weights/transfer_bytes"] for x in got if "weights/transfer_bytes" in x}
    assert sizes == {num_bytes(one)}
    assert sums(got, "weights/base_bytes") == 2 * num_bytes(base), "once to each"
    transfers = sums(got, "weights/transfers")
    assert sums(got, "weights/sent_bytes") == transfers * num_bytes(one) > 0
    assert not audit_run(tmp_path / "processes").problems
    words = (f"model.path={tmp_path}/processes/base", "warm_start.steps=0", "run.steps=1")
    words += ("run.name=read", "mesh.samplers_in=processes", "mesh.samplers=1")
    read = run_job("addition", tmp_path, *settings, *words)
    assert sums(read, "weights/transfers") > 0 and sums(read, "weights/base_bytes") == 0
    (log,) = (tmp_path / "read" / "samplers").glob("*.log")
    assert "the frozen base was read from model.path" in log.read_text()


@pytest.mark.exhaustive
def test_samplers_join_die_and_pass_on_a_base_and_its_adapters(tmp_path: Path) -> None:
    ways = ("remote={transfer: tcp, fanout: 1, wait_s: 60}", "run.steps=90")
    with joined_run(tmp_path, *LONG, *ways) as run:
        run.train("remote.min_samplers=2")
        run.sample("first")
        run.sample("second")
        run.until_step(4)
        run.kill("second")
        run.sample("third")
        run.until(lambda: run.faults().get("samplers_joined") == 3)
        run.until_step(run.step + 2)
        run.kill("trainer")
        fetched = sums(run.lines(), "weights/base_bytes")
        steps = run.step + 3
        run.train(*RESUME, "remote.min_samplers=2", f"run.steps={steps}")
        assert run.code("trainer") == 0, run.said("trainer")
        assert run.code("first") == run.code("third") == 0
        lines = run.lines()
        whole = num_bytes(model(run.run / "base"))
        assert fetched == 3 * whole, "every sampler once, whatever was published meanwhile"
        assert sums(lines, "weights/base_bytes") == 5 * whole, "and once from the next trainer"
        assert sums(lines, "weights/passed_bytes") > 0, "samplers fetch from each other"
        passed = sums(lines, "weights/passed_bytes") + sums(lines, "weights/sent_bytes")
        assert passed % num_bytes(adapter(run.run)) == 0, "whole adapters, and nothing else"
        assert run.step == steps and not run.problems()


@pytest.mark.exhaustive
def test_a_trainer_over_two_processes_learns_the_same_adapter(tmp_path: Path) -> None:
    settings = (*TINY, *SHORT, many_digits(tmp_path))
    alone = run_job("addition", tmp_path, *settings, "run.name=alone")
    with joined_run(tmp_path, *SHORT, "remote.wait_s=60") as run:
        run.train_over_two(many_digits(tmp_path))
        run.sample("first")
        assert run.code("trainer") == 0, run.said("trainer")
        assert run.code("trainer-1") == run.code("first") == 0
        lines = run.lines()
    assert sums(lines, "weights/base_bytes") == num_bytes(model(tmp_path / "run" / "base"))
    rewards = [[x["reward/mean"] for x in run if "reward/mean" in x] for run in (alone, lines)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 2
    for read in (adapter, lambda run: model(run / "policy")):
        one, two = read(tmp_path / "alone"), read(tmp_path / "run")
        assert one.keys() == two.keys()
        for name, array in one.items():
            np.testing.assert_allclose(two[name], array, atol=1e-5, err_msg=name)
