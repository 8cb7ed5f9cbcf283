"""Whole runs whose answers take longer than an update, so that requests are always under way: what
is half sampled is neither lost nor sampled again when trainer or samplers go."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from joined_run import TINY, JoinedRun, joined_run, saved_rollouts
from runs import run_job

from jaxrl_async.train_command import RESUME
from jaxrl_async.types import Partial

pytestmark = pytest.mark.full

RECORDED = """
import json
from pathlib import Path

def recorded(prompt, group):
    answers = [
        {
            "prompt": prompt,
            "tokens": episode.token_ids[episode.drawn].tolist(),
            "versions": episode.versions[episode.drawn].tolist(),
            "logprobs": episode.logprobs[episode.drawn].tolist(),
        }
        for episode in group
    ]
    with Path(__file__).with_name("answers.jsonl").open("a") as file:
        file.write("".join(json.dumps(answer) + chr(10) for answer in answers))
    return [sum(token % 2 for token in answer["tokens"]) / 256 for answer in answers]
"""
LONG_ANSWERS = (  # of so many tokens hardly one ends an answer: nearly all have 128
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64, "
    "vocab: 2048}",
    "sampler={slots: 2, max_length: 144, max_new_tokens: 128, block: 2}",
    "trainer.row_length=144",
)
Answer = dict[str, Any]


def recording(folder: Path) -> tuple[str, ...]:
    """Write a reward that keeps every answer; return all settings of a run with long answers."""
    folder.mkdir(exist_ok=True)
    (folder / "recorded.py").write_text(RECORDED, encoding="utf-8")
    return (*LONG_ANSWERS, f"reward.function={folder / 'recorded.py'}:recorded")


def answers(folder: Path) -> list[Answer]:
    """Return what has been scored so far."""
    file = folder / "answers.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def until_midst(run: JoinedRun, version: int) -> None:
    """Wait until an answer of this version is there: those after it are being sampled."""
    run.until(lambda: any(a["versions"][-1:] == [version] for a in answers(run.folder)))


def leave_in_midst(run: JoinedRun) -> None:
    """Have samplers join and leave until one left with sampled tokens.

    Between two steps a sampler has nothing, so that not every one leaves in mid-answer.
    """
    for number in range(10):
        name = f"leaving-{number}"
        run.sample(name)
        run.until(lambda joined=number + 3: run.faults().get("samplers_joined", 0) == joined)
        run.until_step(run.step + 1)
        run.signal(name, signal.SIGTERM)
        assert run.code(name) == 75
        run.until(lambda left=number + 1: run.faults().get("samplers_left") == left)
        if run.faults().get("moved_requests"):
            return
    raise AssertionError("ten samplers left, none with a half sampled answer")


def cut_off_in_midst(run: JoinedRun, name: str) -> None:
    """Stop a sampler until it is cut off with requests, each time letting it come back."""
    joined = run.faults()["samplers_joined"]
    for cuts in range(1, 11):
        until_midst(run, run.step + 1)
        run.signal(name, signal.SIGSTOP)
        run.until(lambda cuts=cuts: run.faults().get("samplers_cut_off") == cuts)
        run.signal(name, signal.SIGCONT)
        run.until(lambda count=joined + cuts: run.faults()["samplers_joined"] == count)
        if run.faults().get("redone_requests"):
            return
    raise AssertionError("cut off ten times, never with requests")


def of_first(given: list[Answer], versions: int) -> list[tuple[Any, ...]]:
    """Return the answers that the first versions sampled, without their order."""
    return sorted(
        (a["prompt"], a["tokens"], a["versions"])
        for a in given
        if a["versions"] and a["versions"][0] < versions
    )


def continues(answer: Answer, prompt: str, partial: Partial) -> bool:
    """Return whether an answer begins with the sampled tokens, by the same weights, bit by bit."""
    count = len(partial.token_ids)
    return (
        answer["prompt"] == prompt
        and answer["tokens"][:count] == partial.token_ids.tolist()
        and answer["versions"][:count] == partial.versions.tolist()
        and bool(np.array_equal(np.float32(answer["logprobs"][:count]), partial.logprobs))
    )


@pytest.mark.exhaustive
def test_half_sampled_answers_of_a_killed_trainer_are_kept_by_another_number_of_samplers(
    tmp_path: Path,
) -> None:
    often = ("staleness.max_staleness=2", "checkpoint={every: 1, keep: 2}", "run.steps=9")
    with joined_run(tmp_path, *recording(tmp_path), *often) as run:
        run.train()
        run.sample("first")
        # While the first update was compiled, all that the bound allows was sampled: steps 1 to 3.
        run.until(lambda: (run.run / "checkpoints" / "5" / "checksums.json").exists())
        run.kill("trainer")
        version, _, state = saved_rollouts(run.run)
        half = [
            (group.prompt.text, episode.partial)
            for group in state.groups
            for episode in group.episodes
            if episode.partial is not None and len(episode.partial.token_ids)
        ]
        assert half and any(p.versions[0] < version for _, p in half), "older weights sampled them"
        assert all(p.versions[-1] <= version for _, p in half)
        (tmp_path / "answers.jsonl").unlink()
        run.until_said("first", "waiting 600 s for it to come back")
        run.sample("second")
        run.train(*RESUME, "remote.min_samplers=2")
        assert run.code("trainer") == 0, run.said("trainer")
        assert run.code("first") == run.code("second") == 0
        final = answers(tmp_path)
        for prompt, partial in half:
            found = [answer for answer in final if continues(answer, prompt, partial)]
            assert len(found) == 1, f"{prompt}: {len(partial.token_ids)} tokens, {len(found)} found"
            assert len(found[0]["tokens"]) > len(partial.token_ids)
        assert run.step == 9 and not run.problems()


@pytest.mark.exhaustive
def test_samplers_that_leave_or_are_cut_off_in_mid_answer_change_no_token(tmp_path: Path) -> None:
    steps = 4
    equal = (  # log-probs may differ in the last bits, which larger updates would blow up
        "staleness.max_staleness=0",
        "checkpoint.every=0",
        "algorithm.learning_rate=1e-4",
    )
    joined, alone = tmp_path / "joined", tmp_path / "alone"
    undisturbed = (*TINY, *recording(alone), *equal, f"run.steps={steps}")
    run_job("addition", alone, *undisturbed)
    settings = (*recording(joined), *equal, "run.steps=5000", "remote.silence_s=3")
    with joined_run(joined, *settings) as run:
        run.train("remote.min_samplers=3")
        for name in ("stopped", "staying"):
            run.sample(name)
        leave_in_midst(run)
        assert "redone_requests" not in run.faults()
        cut_off_in_midst(run, "stopped")
        run.until_step(steps)
        run.signal("trainer", signal.SIGTERM)
        assert run.code("trainer") == 75, run.said("trainer")
        assert not run.problems()
    expected, got = of_first(answers(alone), steps), of_first(answers(joined), steps)
    assert len(expected) > 16 * steps and got == expected
