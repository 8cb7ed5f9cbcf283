"""A run whose task constrains its answers: valid answers, and a ratio of 1."""

from pathlib import Path
from typing import Any

import pytest

import jaxrl_async as jr
from jaxrl_async.errors import ConfigError

RECORDS = [
    {"question": f"{a}+{b}=", "answer": str(a + b), "free": a == 3}
    for a in range(6)
    for b in range(6)
]
DIGITS = jr.Constraint(kind="regex", text="[1-9][0-9]?")
TINY: dict[str, Any] = {
    "data": RECORDS,
    "model": {
        "architecture": {
            **{"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 16}
        }
    },
    "sampler": {"slots": 8, "max_length": 16, "max_new_tokens": 4},
    "group_size": 2,
    "groups_per_step": 2,
    "tensorboard": False,
}
SEEN: list[str] = []


def noted(completion: str, free: bool) -> float:
    SEEN.append(f"{'free' if free else 'bound'} {completion}")
    return float(len(completion))


def of_record(record: Any) -> jr.Constraint | None:
    return None if record["free"] else DIGITS


def task_of(constraint: Any) -> jr.Task:
    return jr.Task(words=tuple("0123456789+="), constraint=constraint)


@pytest.mark.full
def test_a_run_samples_and_trains_within_its_tasks_constraint(tmp_path: Path) -> None:
    SEEN.clear()
    run = jr.train(
        **TINY, task=task_of(of_record), reward=noted, dir=str(tmp_path), steps=4,
        on_step=lambda number, metrics: None, max_staleness=0,
    )  # fmt: skip
    bound = [text.split(" ", 1)[1] for text in SEEN if text.startswith("bound")]
    assert bound and all(text.isdigit() and len(text) <= 2 for text in bound)
    assert any(len(text) > 7 or not text[5:].isdigit() for text in SEEN if text[:4] == "free")
    steps = [line for line in run.metrics if "mismatch/max" in line]
    assert steps and max(line["mismatch/max"] for line in steps) < 1e-4
    assert all(line["rollout/kept_mean"] < 12 for line in steps if "rollout/kept_mean" in line)
    assert any("rollout/kept_mean" in line for line in steps)


def test_constraints_that_a_run_cannot_follow_are_refused_at_the_start(tmp_path: Path) -> None:
    wrong = jr.Constraint(kind="regex", text="(a")
    for task, more, text in (
        (task_of(wrong), {}, "unclosed group"),
        (task_of(lambda record: record["nothing"]), {}, "raised KeyError"),
        (task_of(DIGITS), {"kl": "full", "kl_coefficient": 0.1}, r"Set algorithm\.kl=k3"),
        (task_of(DIGITS), {"pivots": {"continuations": 2}}, r"algorithm\.pivots"),
    ):
        with pytest.raises(ConfigError, match=text):
            jr.train(**TINY, **more, task=task, reward=noted, dir=str(tmp_path), steps=1)
