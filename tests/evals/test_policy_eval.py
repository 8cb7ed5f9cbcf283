"""Any policy is evaluated: of a run, a folder, an adapter or an endpoint, and compared."""

import json
import random
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fake_judge import FakeJudge
from runs import config_of, many_digits

import jaxrl_async as jr
from jaxrl_async.command.eval_command import main
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.evals.eval_answers import read_answers_of
from jaxrl_async.model.lora import Lora
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.loop import train

SMALL = (
    "model.architecture={layers: 1, width: 32, heads: 2, kv_heads: 1, head_dim: 16, mlp: 32}",
    "warm_start.steps=0",
    "data.addition.digits=1",
    "data.addition.eval_size=6",
    "sampler.slots=8",
    "sampler.max_length=24",
    "sampler.max_new_tokens=8",
    "algorithm.group_size=2",
    "algorithm.groups_per_step=4",
    "trainer.warmup_steps=1",
    "run.steps=1",
    "run.seed=5",
    "metrics.tensorboard=false",
    "metrics.peak_flops=1e9",
)
QUESTIONS = [{"question": f"{i}+{i}=", "answer": f"{2 * i}"} for i in range(5)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run with an evaluation by name."""
    folder = tmp_path_factory.mktemp("trained")
    named = "evals={x: {samples: 3, temperature: 0.9, pass_reward: 0.1}}"
    train(config_of("addition", folder, *SMALL, many_digits(folder), named))
    return folder / "addition"


@pytest.mark.full
def test_a_runs_policy_is_evaluated_as_the_run_has_evaluated_it(trained):
    found = jr.evaluate(trained, samples=3, temperature=0.9, pass_reward=0.1, seed=5)
    assert [*found.answers] == [
        jr.EvalAnswer(**{**vars_of(a), "version": 0})
        for a in read_answers_of(trained / "evals" / "x" / "1.jsonl")
    ]
    last = jr.Run(trained).metrics[-1]
    for name, one in found.estimates.items():
        assert one.mean == pytest.approx(last[f"eval/x/{name}"])
        assert one.stderr == pytest.approx(last[f"eval/x/{name}_stderr"])
    again = jr.evaluate(trained, samples=3, temperature=0.9, pass_reward=0.1, seed=5)
    assert again == found
    assert jr.evaluate(trained, samples=3, temperature=0.9, seed=6).answers != found.answers


def vars_of(one):
    return {name: getattr(one, name) for name in type(one).__dataclass_fields__}


@pytest.mark.full
def test_records_and_rewards_of_the_caller_and_another_policy_to_compare_with(trained, tmp_path):
    def length(completion):
        return len(completion) / 10

    args = {"data": QUESTIONS, "reward": length, "samples": 2, "temperature": 1.0}
    policy = Policy.from_pretrained(trained / "policy")
    args["config"] = trained / "config.yaml"
    with pytest.raises(ConfigError, match="task"):
        jr.evaluate(policy, **{**args, "task": "calculator"})
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    noisy = policy.with_params(
        {**policy.params, "embed": policy.params["embed"] * 1.5}
        if "embed" in policy.params
        else policy.params
    )
    found = jr.evaluate(
        trained / "policy", data=file, reward="exact", samples=2, temperature=1.0,
        max_new_tokens=6, compare=noisy,
    )  # fmt: skip
    assert [a.prompt for a in found.answers[::2]] == [q["question"] for q in QUESTIONS]
    assert {a.reference for a in found.answers} == {q["answer"] for q in QUESTIONS}
    own = [np.mean([a.reward for a in found.answers if a.index == i]) for i in range(5)]
    other = [np.mean([a.reward for a in found.compared.answers if a.index == i]) for i in range(5)]
    assert found.differences["reward"].mean == pytest.approx(np.mean(np.subtract(own, other)))
    folder = found.save(tmp_path / "out")
    message = json.loads((folder / "evaluation.json").read_text())
    assert message["estimates"]["accuracy"]["mean"] == found.estimates["accuracy"].mean
    assert message["compared"]["prompts"] == 5 and "differences" in message
    assert read_answers_of(folder / "answers.jsonl") == [*found.answers]
    assert read_answers_of(folder / "compared.jsonl") == [*found.compared.answers]


@pytest.mark.full
def test_an_adapter_is_evaluated_on_its_base(trained, tmp_path):
    import jax

    base = Policy.from_pretrained(trained / "policy")
    lora = Lora(rank=2, scale=8.0, names=("q", "v"))
    adapted = base.adapted(lora, jax.random.key(0))
    adapter = jax.tree.map(lambda x: x + 0.3, adapted.adapter)
    adapted = adapted.with_trained(adapter)
    adapted.save_adapter(tmp_path / "adapter", str(trained / "policy"))
    args = {"data": trained_file(tmp_path), "samples": 2, "temperature": 1.0, "max_new_tokens": 6}
    found = jr.evaluate(tmp_path / "adapter", **args)
    merged = jr.evaluate(adapted, **args)
    assert [a.completion for a in found.answers] == [a.completion for a in merged.answers]
    plain = jr.evaluate(trained / "policy", **args)
    assert [a.completion for a in found.answers] != [a.completion for a in plain.answers]
    named = jr.evaluate(tmp_path / "adapter", base=trained / "policy", **args)
    assert named.answers == found.answers
    with pytest.raises(ConfigError, match="is no adapter"):
        jr.evaluate(trained / "policy", base=trained / "policy", **args)


def trained_file(folder: Path) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    return file


def chatty(body):
    """Answer a sum rightly for half of the seeds."""
    first, second = body["messages"][-1]["content"].rstrip("=").split("+")
    right = random.Random(body["seed"]).random() < 0.5
    return f"It is #{int(first) + int(second) + (not right)}"


@pytest.mark.full
def test_a_policy_behind_an_endpoint_is_asked_in_chats(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_KEY", "secret")
    with FakeJudge() as fake:
        fake.reply = chatty
        fake.faults = ["429", "500"]
        found = jr.evaluate(
            fake.url, data=trained_file(tmp_path), samples=4, temperature=0.5, top_p=0.9,
            max_new_tokens=7, model="m", key_variable="OWN_KEY", concurrency=3,
            config={"data": {"system_prompt": "Be short."}},
        )  # fmt: skip
        assert set(fake.keys) == {"Bearer secret"} and fake.most_at_once <= 3
        body = fake.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    sent = {name: body[name] for name in ("model", "temperature", "top_p", "max_tokens")}
    assert sent == {"model": "m", "temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
    assert len({one["seed"] for one in fake.bodies}) == 20, "each sample has its own seed"
    assert found.facts["prompts"] == 5 and 0 < found.estimates["accuracy"].mean < 1
    assert found.estimates["pass_at_4"].mean > found.estimates["pass_at_1"].mean
    assert all(a.answer == a.completion.partition("#")[2] for a in found.answers)
    assert {a.prompt for a in found.answers} == {q["question"] for q in QUESTIONS}


def test_an_endpoint_that_refuses_or_plays_no_environment_is_an_error(tmp_path):
    with FakeJudge() as fake:
        fake.reply = chatty
        fake.faults = ["400"] * 40
        with pytest.raises(RolloutError, match="answers 400"):
            jr.evaluate(fake.url, data=trained_file(tmp_path), model="m")
        assert len(fake.bodies) <= 5, "a refused question is not asked again"
        with pytest.raises(ConfigError, match="environment or tools"):
            jr.evaluate(fake.url, task="guess_number", model="m")
        with pytest.raises(ConfigError, match="does not list its models"):
            jr.evaluate(fake.url, data=trained_file(tmp_path))
    with pytest.raises(ConfigError, match="its questions must be given"):
        jr.evaluate(fake.url, model="m")


@pytest.mark.full
def test_the_command_prints_a_table_and_writes_the_answers(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [str(trained), "--samples", "2", "--temperature", "0.8", "--prompts", "4"]
    assert main([*argv, "--compare", str(trained / "policy"), "eval.episodes_at_once=8"]) == 0
    out = capsys.readouterr().out
    assert "4 prompts, 2 answers each, temperature 0.8" in out and "pass@2" in out
    _, _, difference = out.partition("difference on the prompts of both\n")
    assert difference.startswith("  reward     +0.0000   95 % +0.0000 to +0.0000\n")
    message = json.loads((tmp_path / "evaluations/addition/evaluation.json").read_text())
    assert message["settings"]["temperature"] == 0.8 and message["prompts"] == 4
    assert main([*argv, "--out", "evaluations/addition"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([str(trained), "--samples", "2"]) == 2
    assert "all be the same answer" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing"), "--task", "calculator"]) in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 4}, r"^evaluate: samples \(4\) with temperature 0 and top_k 0 would all be"),
        ({"top_p": 0.0}, r"^evaluate: top_p = 0\.0 is not allowed"),
        ({"n_samples": 4}, r"n_samples is not a setting; it is samples \(--samples\) here\.$"),
        ({"overrides": ["num_samples=4"]}, r"it is samples \(--samples\) here\.$"),
        ({"algorithm": {"n_samples": 4}}, r"it is samples \(--samples\) here"),
        ({"base": "b"}, r"base \(--base\) is of an adapter's folder, and http://h/v1 is none"),
        (
            {"policy": "folder"},
            r"model \(--model\) names a model at an endpoint, and folder is none",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named_as_they_were_given(arguments, message):
    given = {"policy": "http://h/v1", "data": QUESTIONS, "model": "m", **arguments}
    with pytest.raises(ConfigError, match=message):
        jr.evaluate(**given)


def test_records_at_an_address_are_copied_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    lines = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    fsspec.filesystem("memory").pipe("/questions/test.jsonl", lines.encode())
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/v1/models does not list"):
        jr.evaluate("http://127.0.0.1:9/v1", data="memory://questions/test.jsonl")
