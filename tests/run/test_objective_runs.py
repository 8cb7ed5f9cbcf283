"""Whole runs, as users start them: loss components with a resume, and pivots of conversations."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from runs import many_digits

from jaxrl_async.command.entry_point import main as jaxrl_async
from jaxrl_async.data.tokenizer import chat_tokenizer
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.metrics.recorder import read_lines

pytestmark = pytest.mark.full

OWN = """
import jax.numpy as jnp

def confident(x, *, least: float = 0.9):
    unsure = (jnp.exp(x.policy_logprobs) < least) & (x.rewards > 0)
    return jnp.where(unsure, -x.policy_logprobs, 0.0), {"unsure": unsure}
"""
TINY = {
    "model": {
        "architecture": {
            "layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp": 32
        }
    },
    "staleness": {"max_staleness": 0},
    "trainer": {"warmup_steps": 1, "micro_batch_tokens": 512},
    "eval": {"every": 0},
    "metrics": {"tensorboard": False, "peak_flops": 1e9},
}  # fmt: skip


def run(folder: Path, name: str, settings: dict, *overrides: str) -> list[dict]:
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**TINY, **settings}), "utf-8")
    words = [f"run.dir={folder}", f"run.name={name}", *overrides]
    assert jaxrl_async(["train", str(file), *words]) == 0
    lines = read_lines(folder / name / "metrics.jsonl")
    assert all(metric_of(key) for line in lines for key in line if key != "step")
    return lines


def test_components_of_all_kinds_are_trained_and_resumed(tmp_path):
    (own := tmp_path / "own.py").write_text(OWN)
    settings = {
        "data": {"addition": {"digits": 1, "eval_size": 8}},
        "warm_start": {"steps": 2, "batch_size": 8},
        "sampler": {"slots": 8, "max_length": 32, "max_new_tokens": 8},
        "checkpoint": {"every": 1},
        "algorithm": {
            "group_size": 4,
            "groups_per_step": 2,
            "minibatches": 2,
            "learning_rate": 1e-3,
            "supervised_batch": 2,
            "losses": {
                "sft": {
                    "loss": "nll",
                    "tokens": "demonstrations",
                    "coefficient": 0.2,
                    "coefficient_end": 0.0,
                    "ramp_steps": 4,
                },
                "right": {"loss": "nll", "tokens": "right", "right_reward": 0.1},
                "near": {"loss": "kl", "coefficient": 0.05},
                "bonus": {"loss": {"entropy": {"below": 2.0}}, "coefficient": 0.01},
                "drift": {"loss": "squared_log_ratio", "coefficient": 0.1},
                "mine": {"loss": {f"{own}:confident": {"least": 0.5}}, "coefficient": 0.1},
            },
        },
    }
    reward = many_digits(tmp_path)
    whole = run(tmp_path, "whole", settings, reward, "run.steps=4")
    run(tmp_path, "parts", settings, reward, "run.steps=2")
    parts = run(tmp_path, "parts", settings, reward, "run.steps=4", "run.resume=true")
    steps = [line for line in whole if "train/loss" in line]
    assert [x["loss_coefficient/sft"] for x in steps] == pytest.approx([0.2, 0.15, 0.1, 0.05])
    assert all(x["loss_tokens/sft"] > 0 and x["loss/mine/unsure"] <= 1 for x in steps)
    assert 0 < steps[0]["loss/near"] < steps[-1]["loss/near"]  # moved by its first update
    assert all(np.isfinite(v) for x in steps for v in x.values())
    keys = [k for k in steps[-1] if k.startswith(("loss/", "train/loss", "reward/mean"))]
    assert len(keys) >= 9
    for key in keys:
        again = [x[key] for x in parts if key in x]
        np.testing.assert_allclose(again, [x[key] for x in whole if key in x], rtol=1e-5, atol=1e-6)


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def traces(folder: Path, count: int = 24) -> Path:
    """Conversations whose call is always the same: easily taught_records, and often missed."""
    function = {"name": "add", "arguments": json.dumps({"a": 1})}
    records = [
        {
            "messages": [
                {"role": "user", "content": f"{number % 10}?"},
                {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
                {"role": "assistant", "content": "ok"},
            ],
            "tools": [TOOL],
        }
        for number in range(count)
    ]
    (file := folder / "traces.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


@pytest.mark.exhaustive
def test_turns_of_conversations_are_trained_profiled_and_resumed(tmp_path):
    """Imitation makes some calls right; the profile keeps the pivots where some miss; RL mends."""
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    file = traces(tmp_path)
    settings = {
        "data": {"tokenizer": str(tmp_path / "tokenizer")},
        "task": {f"pivots:{file}": {"turns": "calls"}},
        "warm_start": {"steps": 60, "batch_size": 16, "learning_rate": 5e-3},
        "sampler": {"slots": 16, "max_length": 160, "max_new_tokens": 64},
        "trainer": {"warmup_steps": 1, "micro_batch_tokens": 1024},
        "checkpoint": {"every": 2},
        "eval": {"every": 4},
        "algorithm": {
            "group_size": 8,
            "groups_per_step": 4,
            "learning_rate": 1e-3,
            "advantage": "rloo",
            "loss": "reinforce",
        },
    }
    lines = run(tmp_path, "pivots", settings, "run.steps=4")
    first, last = (lines[i]["reward/correct"] for i in (1, -1))
    assert 0 < first < 1 and "eval/accuracy" in lines[-1]
    missed = [v for k, v in lines[1].items() if k.startswith("logged/missed_")]
    assert sum(missed) == pytest.approx(1 - first, abs=1e-6)
    assert lines[1]["rollout/turns_mean"] == 1
    # the profile of the policy at the end, and a run on the pivots that it keeps
    policy, profile = tmp_path / "pivots/policy", tmp_path / "profile"
    choice = json.dumps({f"pivots:{file}": {"eval_path": str(file), "turns": "calls"}})
    words = ["--task", choice, "--samples", "4", "--temperature", "1", "--out", str(profile)]
    more = ["--max-new-tokens", "64"]
    assert jaxrl_async(["eval", str(policy), *words, *more]) == 0
    answers = [json.loads(x) for x in (profile / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 24 * 4
    kept = {i for i in range(24) if len({a["reward"] for a in answers if a["index"] == i}) == 2}
    assert kept, "the policy is neither perfect nor useless"
    again = {
        **settings,
        "warm_start": {"steps": 0},
        "model": {"path": str(policy)},
        "data": {},
        "task": {
            f"pivots:{file}": {
                "turns": "calls", "profile": str(profile / "answers.jsonl"),
                "eval_path": str(file),
            }
        },
    }  # fmt: skip
    whole = run(tmp_path, "whole", again, "run.steps=4")
    run(tmp_path, "parts", again, "run.steps=2")
    parts = run(tmp_path, "parts", again, "run.steps=4", "run.resume=true")
    for key in ("reward/mean", "rollout/length_mean", "train/tokens"):
        assert [x[key] for x in parts if key in x] == [x[key] for x in whole if key in x], key
    assert last >= first - 0.2
