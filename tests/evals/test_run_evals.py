"""Evaluations by name in whole runs: what they sample, keep, measure and leave alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.data.prompts import EVAL_POSITION
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.evals.estimates import pass_at_k
from jaxrl_async.evals.eval_answers import read_answers_of
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.loop import train
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Request, SamplingParams

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 2, kv_heads: 1, head_dim: 16, mlp: 32}",
    "warm_start.steps=0",
    "data.addition.digits=1",
    "data.addition.eval_size=8",
    "sampler.slots=16",
    "sampler.max_length=24",
    "sampler.max_new_tokens=8",
    "algorithm.group_size=2",
    "algorithm.groups_per_step=4",
    "trainer.warmup_steps=1",
    "run.steps=4",
    "eval.every=2",
    "metrics.tensorboard=false",
    "metrics.peak_flops=1e9",
)
ALONE = ("sampler.slots=1", "sampler.reserve=0", "staleness.max_staleness=0")
"""Equal to the last bit: one sequence at a time, on policy."""
FOUR = "{samples: 4, temperature: 0.7, every: 1, pass_reward: 0.1}"


def job(folder: Path, *overrides: str) -> Config:
    return config_of("addition", folder, *TINY, many_digits(folder), *overrides)


def folder_of(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name / "evals"


def files_of(config: Config, name: str) -> list[str]:
    return sorted(path.name for path in (folder_of(config) / name).iterdir())


@pytest.mark.full
@pytest.mark.parametrize("age", [0, 1])
def test_two_evaluations_by_name_alongside_training(tmp_path: Path, age: int) -> None:
    records = tmp_path / "own.jsonl"
    lines = [{"q": f"{i}+{i}=", "a": f"{2 * i}"} for i in range(5)]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = f"{{data: {records}, prompt_field: q, answer_field: a, reward: exact, every: 3}}"
    config = job(
        tmp_path,
        f"staleness.max_staleness={age}",
        f"eval.asynchronous={'true' if age else 'false'}",
        f"evals={{four: {FOUR}, own: {own}}}",
    )
    train(config)
    lines = metrics_of(config)
    for name, steps in {"four": [0, 1, 2, 3, 4], "own": [0, 3, 4]}.items():
        assert [x["step"] for x in lines if f"eval/{name}/reward" in x] == steps
    assert [x["step"] for x in lines if "eval/reward" in x] == [0, 2, 4]
    assert files_of(config, "four") == [f"{i}.jsonl" for i in range(5)]
    assert files_of(config, "own") == ["0.jsonl", "3.jsonl", "4.jsonl"]
    before = np.zeros((8, 4))
    for line in lines:
        answers = read_answers_of(folder_of(config) / "four" / f"{line['step']}.jsonl")
        assert [(a.index, a.sample) for a in answers] == [divmod(i, 4) for i in range(32)]
        assert {a.version for a in answers} == {line["step"]}
        rewards = np.array([a.reward for a in answers]).reshape(8, 4)
        assert line["eval/four/reward"] == pytest.approx(rewards.mean())
        error = np.std(rewards.mean(1), ddof=1) / np.sqrt(8)
        assert line["eval/four/reward_stderr"] == pytest.approx(error)
        passed = (rewards >= 0.1).sum(1)
        for k in (1, 2, 4):
            mean = np.mean([pass_at_k(4, int(c), k) for c in passed])
            assert line[f"eval/four/pass_at_{k}"] == pytest.approx(mean)
        if line["step"]:
            change = (rewards - before).mean(1)
            assert line["eval/four/reward_change"] == pytest.approx(change.mean(), abs=1e-9)
        before = rewards
    answers = read_answers_of(folder_of(config) / "own" / "4.jsonl")
    assert [a.prompt for a in answers] == [f"{i}+{i}=" for i in range(5)]
    assert all("correct" in a.parts for a in answers) and "eval/own/accuracy" in lines[-1]
    assert "eval/four/accuracy" not in lines[-1] and "eval/own/maj_at_1" not in lines[-1]


@pytest.mark.full
def test_four_samples_are_the_samplers_four_answers(tmp_path: Path) -> None:
    config = job(tmp_path, f"evals={{four: {FOUR}}}", "run.steps=1", "run.seed=11")
    train(config)
    answers = read_answers_of(folder_of(config) / "four" / "1.jsonl")
    policy = Policy.from_pretrained(Path(config.run.dir) / config.run.name / "policy")
    tokens = policy.tokenizer
    requests = [
        Request(
            request_id=f"{a.index}/{a.sample}",
            token_ids=tokens.encode_prompt(a.prompt),
            max_new_tokens=8,
            sampling=SamplingParams(temperature=0.7),
            stop_token_ids=tokens.eos_ids,
            key=(EVAL_POSITION + a.index, a.sample),
        )
        for a in answers
    ]
    with Sampler(policy, section=config.sampler, seed=11) as sampler:
        sampled = [tokens.decode(c.token_ids) for c in sampler.generate(requests)]
    assert sampled == [a.completion for a in answers]
    assert all(len({a.completion for a in answers[i : i + 4]}) > 1 for i in range(0, 32, 4))


@pytest.mark.full
def test_evaluations_by_name_change_nothing_else(tmp_path: Path) -> None:
    plain = job(tmp_path, *ALONE, "run.name=plain")
    named = job(tmp_path, *ALONE, "run.name=named", f"evals={{four: {FOUR}}}")
    again = job(tmp_path, *ALONE, "run.name=again", f"evals={{four: {FOUR}}}")
    for config in (plain, named, again):
        train(config)
    own = ("eval/four/", "sampler/")  # the sampler's counters hold the answers of all evaluations
    kept = [
        [{k: v for k, v in comparable(x).items() if not k.startswith(own)} for x in metrics_of(c)]
        for c in (plain, named)
    ]
    assert kept[0] == kept[1]
    assert not folder_of(plain).exists()
    for file in files_of(named, "four"):
        one, other = (folder_of(c) / "four" / file for c in (named, again))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.full
def test_a_resumed_run_compares_with_the_evaluation_before_and_may_change_its_evaluations(
    tmp_path: Path,
) -> None:
    whole = ("checkpoint.every=2", "run.name=whole", *ALONE)
    every_two = FOUR.replace("every: 1", "every: 2")
    train(job(tmp_path, *whole, f"evals={{four: {every_two}}}"))
    parts = ("checkpoint.every=2", "run.name=parts", *ALONE)
    begun = job(tmp_path, *parts, "run.steps=2", f"evals={{four: {FOUR}, gone: {{prompts: 2}}}}")
    train(begun)
    late = folder_of(begun) / "four" / "3.jsonl"
    late.write_text("an evaluation that a resumed run has undone\n")
    new = "{prompts: 3, every: 0}"
    resumed = job(
        tmp_path,
        *parts,
        "run.resume=true",
        "run.overwrite=false",
        f"evals={{four: {every_two}, new: {new}}}",
    )
    train(resumed)
    assert (folder_of(begun) / "four" / "3.superseded.jsonl").exists() and not late.exists()
    assert files_of(begun, "gone") == ["0.jsonl", "2.jsonl"]
    assert files_of(begun, "new") == ["4.jsonl"]
    last, lines = metrics_of(resumed)[-1], metrics_of(load(tmp_path / "whole" / "config.yaml"))
    for key in ("eval/four/reward_change", "eval/four/reward_change_stderr", "eval/four/reward"):
        assert last[key] == lines[-1][key], key
    assert last["step"] == 4 and "eval/new/reward" in last and "eval/gone/reward" not in last


FAILING = """
from jaxrl_async.tasks.task import Environment, Task

class Fails(Environment):
    def reset(self, record):
        self.number = record["number"]
        return f"{self.number}"
    def step(self, message):
        if self.number == 2:
            raise ValueError("no such number")
        return None
    def score(self):
        return {"correct": 1.0}

task = Task(
    environment=Fails,
    records=[{"number": i} for i in range(9)],
    held_out=[{"number": i} for i in range(4)],
    words=tuple("0123456789"),
)
all_fail = Task(environment=Fails, records=[{"number": 2}] * 3, held_out=[{"number": 2}] * 3)
"""


@pytest.mark.full
def test_a_failing_environment_costs_its_prompt_and_failing_ones_their_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "task.py"
    file.write_text(FAILING)
    some = f"{{task: '{file}:task', every: 0}}"
    none = f"{{task: '{file}:all_fail', every: 0}}"
    config = config_of(
        "guess_number",
        tmp_path,
        "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
        "warm_start.steps=5",
        "algorithm.group_size=2",
        "algorithm.groups_per_step=2",
        "trainer.warmup_steps=1",
        "run.steps=1",
        "eval.every=0",
        "env.retries=0",
        "metrics.tensorboard=false",
        "metrics.peak_flops=1e9",
        f"evals={{some: {some}, none: {none}}}",
    )
    train(config)
    lines = metrics_of(config)
    for line in lines:
        assert line["eval/some/prompts"] == 3 and line["eval/some/accuracy"] == 1.0
        assert "eval/none/reward" not in line and line["eval/none/time_s"] > 0
    assert "the evaluation none is skipped" in caplog.text
    assert lines[-1]["faults/eval_left_out"] + lines[0].get("faults/eval_left_out", 0) >= 2
    assert files_of(config, "none") == []


def refused(tmp_path: Path, own: str, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        train(job(tmp_path, f"evals={{x: {own}}}", "run.steps=1"))
    assert not (tmp_path / "addition").exists(), "nothing was begun"
    return str(caught.value)


@pytest.mark.full
def test_what_cannot_be_evaluated_is_reported_before_a_run_begins(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"question": "1+1="}\n')
    assert "answer" in refused(tmp_path, f"{{data: {empty}}}", DataError)
    assert "program or a game" in refused(tmp_path, "{task: nim}")
    file = tmp_path / "own.py"
    file.write_text(FAILING)
    message = refused(tmp_path, f"{{task: '{file}:task', data: {empty}}}")
    assert "its task has its own records" in message
    assert "names no function" in refused(tmp_path, "{reward: none}")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"samples": 2}, "all be the same answer"),
        ({"samples": 2, "temperature": 1.0, "top_k": 1}, "all be the same answer"),
        ({"max_new_tokens": 65}, "(65) must be at most sampler.max_new_tokens (64)"),
        ({"answer_mark": "#"}, "evals.x.answer_mark (#) has no effect without evals.x.data"),
        ({"smaples": 2}, "evals.x.smaples is not a setting; did you mean evals.x.samples?"),
        ({"every": -1}, "evals.x.every"),
    ],
)
def test_settings_that_do_not_fit_are_refused(own: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"evals": {"x": own}})
    assert message in str(caught.value)


def test_a_setting_of_one_evaluation_is_overridden_by_its_name() -> None:
    config = load({"evals": {"x": {"prompts": 3}}}, ["evals.x.every=7", "evals.y-2.samples=1"])
    assert config.named_evals["x"].every == 7 and config.named_evals["x"].prompts == 3
    assert set(config.named_evals) == {"x", "y-2"}
