"""Faults while a tiny run goes on: what each one costs, and that the run ends as it should."""

import json
from pathlib import Path

import numpy as np
import pytest
from runs import many_digits, run_job
from safetensors.numpy import load_file

from jaxrl_async.data.addition import held_out
from jaxrl_async.errors import RolloutError, StalledError, WeightsError
from jaxrl_async.ports.rollout import Reply
from jaxrl_async.run import threads
from jaxrl_async.testing import fault_injection as faults
from jaxrl_async.testing.fault_injection import Hits, injected

pytestmark = pytest.mark.full

TINY = (
    "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition.eval_size=8",
    "warm_start.steps=2",
    "warm_start.batch_size=8",
    "sampler.slots=16",
    "sampler.max_new_tokens=16",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=4",
    "trainer.micro_batch_tokens=512",
    "run.steps=6",
    "eval.every=3",
    "checkpoint.every=0",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
    "faults={backoff_s: 0.05, scorer_timeout_s: 2, env_timeout_s: 2, watchdog_s: 120}",
)


def run(folder: Path, *overrides: str) -> list[dict]:
    return run_job("addition", folder, *TINY, many_digits(folder), *overrides)


def totals(lines: list[dict]) -> dict[str, float]:
    """All faults that the metrics tell of, and how often."""
    keys = {k for line in lines for k in line if k.startswith("faults/")}
    sums = {k.removeprefix("faults/"): sum(line.get(k, 0.0) for line in lines) for k in keys}
    return {k: n for k, n in sums.items() if n}


def assert_each_group_has_one_outcome(folder: Path) -> None:
    lines = [json.loads(s) for s in (folder / "addition/ledger.jsonl").read_text().splitlines()]
    trained = [line["group"] for line in lines if line["fate"] == "trained"]
    ended = [line["group"] for line in lines if line["fate"] != "admitted"]
    assert len(trained) == len(set(trained)) == 6 * 4
    assert len(ended) == len(set(ended))


@pytest.mark.exhaustive
def test_a_run_with_two_samplers_survives_everything_at_once(tmp_path: Path) -> None:
    async def no_reply() -> Reply:
        return Reply(token_ids=np.zeros((2, 2), np.int32), done=True)

    lines = []
    with injected(
        faults.sampler_dies(Hits(after=8), index=1),
        faults.sampler_hangs(Hits(after=8)),  # not the last one, to which transfers fail
        faults.completions_are_nan(Hits(after=40)),
        faults.scorer_raises(Hits(after=3)),
        faults.scorer_hangs(Hits(after=6)),
        faults.scores_are(Hits(after=9), lambda scores: scores[:-1]),
        faults.env_replies(Hits(after=2), no_reply),
        faults.env_replies(Hits(after=4), faults.forever),
        faults.transfer_fails(Hits(after=2)),
        faults.transfer_tears(Hits(after=5)),  # the dead sampler is back by then
        faults.out_of_memory(Hits(after=2)),
    ):
        lines = run(tmp_path, "mesh.samplers=2", "faults.sampler_restarts=9")
    assert [line["step"] for line in lines] == list(range(7))
    found = totals(lines)
    for name in (
        "sampler_deaths",
        "sampler_hangs",
        "sampler_restarts",
        "redone_requests",
        "nonfinite_completions",
        "scorer_retries",
        "scorer_timeouts",
        "refused_scores",
        "refused_replies",
        "env_timeouts",
        "failed_groups",
        "torn_transfers",
        "transfer_retries",
        "oom_retries",
    ):
        assert found.get(name, 0) >= 1, (name, found)
    assert "samplers_lost" not in found
    assert all(line["staleness/max"] <= 1 for line in lines[1:])
    assert_each_group_has_one_outcome(tmp_path)


NOT_AT_FIRST = """
held_out = {held_out}
calls = []

def reward(prompt, completion, reference):
    if prompt in held_out:
        calls.append(prompt)
    if len(calls) == 5 and prompt == calls[-1]:
        raise ValueError("a record that the judge does not know")
    return sum(c.isdigit() for c in completion) / 16
"""


def test_a_held_out_record_whose_scorer_fails_is_left_out_and_counted(tmp_path: Path) -> None:
    prompts = {problem.prompt for problem in held_out(4, 8)}
    (tmp_path / "judge.py").write_text(NOT_AT_FIRST.format(held_out=prompts))
    judge = f"reward.function={tmp_path / 'judge.py'}:reward"
    lines = run(tmp_path, judge, "faults.scorer_retries=0", "data.addition.digits=4")
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 3, 6]
    assert totals(lines) == {"eval_left_out": 1}


def test_at_max_staleness_0_a_lost_sampler_changes_no_token_and_no_weight(tmp_path: Path) -> None:
    weights, rewards = [], []
    for name, broken in (("whole", ()), ("hurt", (faults.sampler_dies(Hits(after=7)),))):
        folder = tmp_path / name
        folder.mkdir()
        with injected(*broken):
            lines = run(folder, "staleness.max_staleness=0")
        rewards.append([line.get("reward/mean") for line in lines])
        weights.append(load_file(folder / "addition/policy/model.safetensors"))
        assert totals(lines).get("sampler_deaths", 0) == len(broken)
    assert rewards[0] == rewards[1]
    for key, values in weights[0].items():
        np.testing.assert_allclose(values, weights[1][key], atol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        (faults.transfer_tears(Hits(times=2)), WeightsError, "arrived corrupted twice"),
        (faults.sampler_dies(Hits(after=8, times=99)), RolloutError, "no sampler is left"),
        (faults.scorer_raises(Hits(times=10**6)), RolloutError, "groups failed in a row"),
        pytest.param(
            faults.trainer_stalls(Hits(after=1)),
            StalledError,
            "the trainer .*learning",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_cannot_be_survived_stops_the_run_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: faults.Fault, error: type, words: str
) -> None:
    monkeypatch.setattr(threads, "JOIN_S", 3.0)
    with injected(broken), pytest.raises(error, match=words):
        run(tmp_path, "faults.sampler_restarts=2")
    if error is StalledError:
        assert "in broken" in (tmp_path / "addition/stacks.txt").read_text()
    else:
        assert any((tmp_path / "addition/checkpoints").iterdir()), "what was trained is saved"
