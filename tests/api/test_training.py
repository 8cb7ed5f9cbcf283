"""jaxrl_async.train and steps, as a script or a notebook calls them."""

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

import jaxrl_async as jr
from jaxrl_async.errors import RolloutError

pytestmark = pytest.mark.exhaustive

RECORDS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
TINY: dict[str, Any] = {
    "data": RECORDS,
    "task": jr.Task(words=tuple("0123456789+=")),
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


def digits(completion: str, answer: str) -> float:
    return sum(c.isdigit() for c in completion) / 4 + len(answer) * 0.0


def test_ten_lines_train_a_policy_that_answers(tmp_path: Path, nothing_frozen: None) -> None:
    seen: list[int] = []
    frozen: list[int] = []

    def on_step(number: int, _: object) -> None:
        seen.append(number)
        frozen.append(gc.get_freeze_count())

    run = jr.train(**TINY, reward=digits, dir=str(tmp_path), steps=3, on_step=on_step)
    assert min(frozen) > 0 == gc.get_freeze_count(), "the collector looks at new garbage only"
    assert seen == [0, 1, 2, 3] and run.path == tmp_path / "run"
    assert [step for step, _ in run.curve("reward/mean")] == [1, 2, 3]
    table = run.table(["reward/mean"])
    assert table["step"] == [0, 1, 2, 3] and table["reward/mean"][0] is None
    assert run.report.is_file() and run.config.run.steps == 3
    assert len(repr(run.policy)) < 200
    with jr.Asker(run.policy) as asker:
        answers = asker.generate(["1+2=", "3+4="], max_new_tokens=5, temperature=0)
        assert len(answers) == 2
        assert "".join(asker.stream("1+2=", max_new_tokens=5, temperature=0)) == answers[0]
        with pytest.raises(RolloutError):
            asker.generate("1" * 100_000)
    assert jr.generate(run.policy, "1+2=", max_new_tokens=5, temperature=0) == answers[:1]
    on = jr.train(**{**TINY, "model": run.policy}, reward=digits, dir=str(tmp_path), steps=1)
    assert (tmp_path / "run.1").is_dir() and on.curve("reward/mean")


def test_updates_come_one_by_one_and_an_early_end_saves(tmp_path: Path) -> None:
    async def inside_a_loop() -> jr.Run | None:  # as in a notebook
        updates = jr.steps(**TINY, reward=digits, dir=str(tmp_path), steps=50)
        for step in updates:
            assert threading.current_thread() is threading.main_thread()
            if step.number:
                assert 0 <= step["reward/mean"] <= 1
            if step.number == 2:
                break
        return updates.run

    run = asyncio.run(inside_a_loop())
    assert run is not None and run.metrics[-1]["step"] == 2
    resumed = jr.train(**TINY, reward=digits, dir=str(tmp_path), steps=3, resume=True)
    assert [line["step"] for line in resumed.metrics] == [0, 1, 2, 3]


def test_what_the_run_raises_reaches_the_caller(tmp_path: Path) -> None:
    def wrong(completion: str) -> float:
        raise ValueError("of the reward")

    with pytest.raises(jr.JaxrlError, match="of the reward"):
        for _ in jr.steps(**TINY, reward=wrong, dir=str(tmp_path), steps=2):
            raise AssertionError("nothing is made")

    def refused(step: int, metrics: object) -> None:
        raise LookupError("of the caller")

    with pytest.raises(LookupError, match="of the caller"):
        jr.train(**TINY, reward=digits, dir=str(tmp_path), steps=2, on_step=refused)
