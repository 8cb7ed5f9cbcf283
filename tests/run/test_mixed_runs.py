"""Whole runs on several tasks: their shares, their settings, a resume, and tasks that misbehave."""

import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from runs import many_digits, metrics_of, weights_of

from jaxrl_async import evaluate
from jaxrl_async.audit import audit_run
from jaxrl_async.command.config_checks import check_config
from jaxrl_async.config.load import dump, load
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.metrics.metric import comparable, metric_of
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.loop import train
from jaxrl_async.run.start_checks import check_names

pytestmark = pytest.mark.full

SUMS = {"data": {"addition": {"digits": 1, "eval_size": 4}}}
LONG = {"data": {"addition": {"digits": 3, "eval_size": 4}}}
GAME = {"task": {"guess_number": {"highest": 4, "guesses": 2}}}
TOOLS = {"task": {"calculator": {"numbers": 2, "digits": 1, "eval_size": 4}}}
ALONE = ("sampler.slots=1", "sampler.reserve=0", "staleness.max_staleness=0")
"""Equal to the last bit: one sequence at a time, on policy."""


def job(folder: Path, tasks: dict, *overrides: str, **sections) -> Config:
    """Load a tiny run of these tasks."""
    tree = {
        "run": {"name": "mixed", "dir": str(folder), "steps": 4},
        "model": {
            "architecture": {
                **{"layers": 1, "width": 32, "heads": 2, "kv_heads": 1},
                **{"head_dim": 16, "mlp": 32},
            }
        },
        "tasks": tasks,
        "sampler": {"slots": 16, "max_length": 48, "max_new_tokens": 8},
        "algorithm": {"group_size": 2, "groups_per_step": 4},
        "trainer": {"warmup_steps": 1, "micro_batch_tokens": 512},
        "eval": {"every": 0},
        "metrics": {"tensorboard": False, "peak_flops": 1e9},
        "faults": {"backoff_s": 0.01},
        **sections,
    }
    digits = many_digits(folder).partition("=")[2]
    for own in tasks.values():
        if "task" not in own:
            own.setdefault("reward", {"function": digits})
    return load(tree, overrides)


def run_of(config: Config) -> list[dict]:
    train(config)
    folder = Path(config.run.dir) / config.run.name
    assert not audit_run(folder).problems
    lines = metrics_of(config)
    assert all(metric_of(key) for line in lines for key in line if key != "step")
    return lines


def ledger_of(config: Config) -> list[dict]:
    return read_lines(Path(config.run.dir) / config.run.name / "ledger.jsonl")


def trained_of(config: Config) -> list[tuple[int, str]]:
    lines = ledger_of(config)
    return [(x["group"], x["task"]) for x in lines if x["fate"] == "trained"]


# ---- one task by name is the same run


@pytest.mark.parametrize("curriculum", ["none", "hard_first"])
def test_one_task_by_name_trains_as_the_same_run_without_it(
    tmp_path: Path, curriculum: str
) -> None:
    data = {"addition": {"digits": 1, "eval_size": 8}, "curriculum": curriculum}
    reward = {"function": many_digits(tmp_path).partition("=")[2]}
    sampling = {"temperature": 0.8, "top_k": 5}
    more = ("eval.every=2", "warm_start.steps=2", "trainer.warmup_steps=1", *ALONE)
    named = job(tmp_path, {"only": {"data": data, "reward": reward, "sampling": sampling}}, *more)
    plain = job(
        tmp_path,
        {},
        "run.name=plain",
        "tasks=null",
        *more,
        data=data,
        reward=reward,
        sampler={"max_length": 48, "max_new_tokens": 8, **sampling},
    )
    lines = [run_of(config) for config in (named, plain)]
    own = ("task/", "data/", "eval/only/")
    kept = [
        [{k: v for k, v in comparable(x).items() if not k.startswith(own)} for x in of_run]
        for of_run in lines
    ]
    assert kept[0] == kept[1]
    assert lines[0][-1]["task/only/groups"] == 4.0 and lines[0][-1]["task/only/share"] == 1.0
    assert lines[0][-1]["task/only/reward/mean"] == lines[0][-1]["reward/mean"]
    assert lines[0][-1]["eval/only/reward"] == pytest.approx(lines[0][-1]["eval/reward"])
    for name, values in weights_of(named).items():
        np.testing.assert_array_equal(values, weights_of(plain)[name], err_msg=name)


# ---- shares, and a resume


FOUR = {
    "sums": {**SUMS, "weight": 4, "sampling": {"temperature": 0.8}},
    "long": {**LONG, "weight": 3, "data": {**LONG["data"], "curriculum": "hard_first"}},
    "game": {**GAME, "weight": 2, "sampling": {"max_new_tokens": 2}},
    "tools": {**TOOLS, "weight": 1},
}


@pytest.mark.exhaustive
def test_four_tasks_have_their_shares_of_1000_groups_and_a_resume_changes_no_bit(
    tmp_path: Path,
) -> None:
    sizes = ("algorithm.groups_per_step=20", "run.steps=50", "checkpoint.every=10")
    tasks = json.loads(json.dumps(FOUR))
    whole = job(tmp_path, tasks, *ALONE, *sizes, "run.name=whole")
    lines = run_of(whole)
    trained = trained_of(whole)
    assert len(trained) == 1000
    shares = {name: n / 1000 for name, n in Counter(task for _, task in trained).items()}
    assert shares == pytest.approx({"sums": 0.4, "long": 0.3, "game": 0.2, "tools": 0.1}, abs=0.01)
    for number in range(20, 1001, 20):
        seen = Counter(task for _, task in trained[:number])
        for name, share in {"sums": 0.4, "long": 0.3, "game": 0.2, "tools": 0.1}.items():
            assert abs(seen[name] - share * number) < 1 + 1e-6
    assert lines[-1]["task/sums/share"] == pytest.approx(0.4, abs=0.001)

    train(job(tmp_path, tasks, *ALONE, *sizes, "run.name=parts", "run.steps=23"))
    again = job(tmp_path, tasks, *ALONE, *sizes, "run.name=parts", "run.resume=true")
    resumed = run_of(again)
    assert trained_of(again) == trained
    first, second = (
        [{k: v for k, v in comparable(x).items() if not k.startswith("eval/")} for x in of_run]
        for of_run in (lines, resumed)  # the stopped run has ended with an evaluation
    )
    assert first == second
    weights = weights_of(whole)
    for name, values in weights_of(again).items():
        np.testing.assert_array_equal(values, weights[name], err_msg=name)


def test_tasks_may_be_added_and_stopped_at_a_resume_and_not_removed(tmp_path: Path) -> None:
    two = {"sums": dict(SUMS), "long": dict(LONG)}
    on_policy = ("staleness.max_staleness=1", "checkpoint.every=1")
    train(job(tmp_path, two, *on_policy, "run.steps=2"))
    resumed = (*on_policy, "run.resume=true", "run.steps=6")
    with pytest.raises(DataError, match=r"task 'long'.*weight: 0"):
        train(job(tmp_path, {"sums": dict(SUMS), "other": dict(LONG)}, *resumed))
    with pytest.raises(DataError, match=r"several tasks \(tasks\)"):
        plain = {"data": SUMS["data"], "reward": {"function": "exact"}}
        train(job(tmp_path, {}, *resumed, "tasks=null", **plain))
    three = {**two, "long": {**LONG, "weight": 0}, "more": {"data": {"addition": {"digits": 2}}}}
    config = job(tmp_path, three, *resumed)
    lines = run_of(config)
    assert [x["step"] for x in lines] == [*range(7)]
    late = Counter(
        x["task"] for x in ledger_of(config) if x["fate"] == "trained" and x["version"] > 4
    )
    assert set(late) == {"sums", "more"}
    train(
        job(
            tmp_path, {}, "tasks=null", "run.name=one", "checkpoint.every=1", "run.steps=1", **plain
        )
    )
    with pytest.raises(DataError, match="run with one task"):
        train(job(tmp_path, two, "run.name=one", "run.resume=true", "run.steps=2"))


# ---- a task's own settings


@pytest.mark.parametrize("minibatches", [1, 2])
def test_each_task_is_sampled_and_trained_at_its_own_temperature(
    tmp_path: Path, minibatches: int
) -> None:
    tasks = {
        "cold": {**SUMS, "sampling": {"temperature": 0.5}},
        "hot": {**SUMS, "sampling": {"temperature": 1.6, "top_k": 6}, "loss_weight": 0.5},
        "game": {**GAME, "sampling": {"temperature": 1.2, "max_new_tokens": 2}, "kl_weight": 2.0},
    }
    lines = run_of(
        job(
            tmp_path,
            tasks,
            "staleness.max_staleness=0",
            "algorithm.kl_coefficient=0.1",
            f"algorithm.minibatches={minibatches}",
            "algorithm.groups_per_step=6",
        )
    )
    steps = [line for line in lines if "train/loss" in line]
    assert max(line["mismatch/max"] for line in steps) < 1e-4, "as the sampler sampled them"
    assert all(line["task/game/length_mean"] <= 2 * 2 for line in steps)
    assert all(0 < line["rollout/kept_mean"] <= 6 for line in steps), "masks of one task"


def test_a_loss_weight_of_0_trains_nothing_of_a_task(tmp_path: Path) -> None:
    """Its tokens are in the step, and the weights are those of a run whose rewards are 0 there."""
    flat = tmp_path / "flat.py"
    flat.write_text("def zero(prompt, completion, reference):\n    return 0.0\n")
    more = (*ALONE, "algorithm.advantage=reinforce", "algorithm.loss=gpg", "run.steps=2")
    tasks = {"sums": dict(SUMS), "long": {**LONG, "loss_weight": 0}}
    without = job(tmp_path, tasks, *more)
    run_of(without)
    tasks = {"sums": dict(SUMS), "long": {**LONG, "reward": {"function": f"{flat}:zero"}}}
    zero = job(tmp_path, tasks, *more, "run.name=zero")
    run_of(zero)
    weights = weights_of(zero)
    for name, values in weights_of(without).items():
        np.testing.assert_allclose(values, weights[name], atol=1e-6, err_msg=name)


def test_loss_components_cover_the_answers_of_their_tasks(tmp_path: Path) -> None:
    losses = {
        "of_sums": {"loss": "nll", "tasks": ["sums"], "coefficient": 0.1, "gradient_every": 2},
        "of_others": {"loss": "nll", "tasks": ["game", "long"], "coefficient": 0.1},
    }
    tasks = {"sums": dict(SUMS), "long": dict(LONG), "game": dict(GAME)}
    algorithm = {"group_size": 2, "groups_per_step": 6, "minibatches": 2, "losses": losses}
    lines = run_of(job(tmp_path, tasks, algorithm=algorithm))
    steps = [line for line in lines if "train/loss" in line]
    for line in steps:
        counts = [line[f"loss_tokens/{name}"] for name in losses]
        assert min(counts) > 0 and sum(counts) == line["train/tokens"]
    measured = [line["step"] for line in steps if "loss_grad_norm/of_sums" in line]
    assert measured == [2, 4]
    assert not any("loss_grad_norm/of_others" in line for line in lines)


def test_evaluations_ask_each_task_and_one_of_them_by_name(tmp_path: Path) -> None:
    exact = {"reward": {"function": "exact"}}
    tasks = {"sums": dict(SUMS), "tools": dict(TOOLS), "long": {**LONG, **exact}}
    four = {"task": "tools", "samples": 4, "temperature": 1.0, "every": 2, "max_new_tokens": 4}
    config = job(tmp_path, tasks, "eval.every=2", evals={"tools_at_4": four})
    lines = run_of(config)
    last = lines[-1]
    kinds = ("reward", "reward_stderr")
    assert all(f"eval/{name}/{kind}" in last for name in tasks for kind in kinds)
    assert "eval/long/accuracy" in last
    assert "eval/sums/accuracy" not in last, "its reward has no part `correct`"
    assert "eval/tools_at_4/pass_at_4" in last
    mean = sum(last[f"eval/{name}/reward"] for name in tasks) / 3
    assert last["eval/reward"] == pytest.approx(mean)
    graded = [last[f"eval/{n}/accuracy"] for n in tasks if f"eval/{n}/accuracy" in last]
    assert last["eval/accuracy"] == pytest.approx(sum(graded) / len(graded))
    samples = read_lines(Path(config.run.dir) / "mixed" / "samples.jsonl")
    assert all(sample["task"] in tasks for sample in samples)


OWN_MIX = """
def choose(view):
    if view.draw < 6:
        return "long"
    return {"sums": 3.0, "long": 1.0}

def tools_last(group, version):
    return group.prompt.task == "sums"
"""


def test_functions_of_the_users_choose_tasks_and_order_groups(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_MIX)
    more = (f"mixing={file}:choose", f"buffer.select={file}:tools_last", "staleness.lookahead=2")
    config = job(tmp_path, {"sums": dict(SUMS), "long": dict(LONG)}, *more)
    lines = run_of(config)
    assert lines[-1]["task/overruled"] == 0.0
    admitted = dict(trained_of(config))
    assert [admitted[n] for n in range(6)] == ["long"] * 6
    later = Counter(admitted[n] for n in range(6, 14) if n in admitted)
    assert later["sums"] >= 2 * later["long"]


def test_tasks_share_filters_drops_and_records(tmp_path: Path) -> None:
    """Chat records, an environment and embedded problems, with groups that run ahead."""
    records = tmp_path / "chat.jsonl"
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{i}+1?"},
                {"role": "assistant", "content": f"{i + 1}"},
            ]
        }
        for i in range(9)
    ]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = {
        "chat": {"data": {"jsonl": {"path": str(records), "eval_size": 2}}, "max_staleness": 1},
        "tools": {**TOOLS, "max_in_flight": 3, "sampling": {"temperature": 1.3}},
        "game": {**GAME, "timeout_s": 60.0},
    }
    config = job(
        tmp_path,
        tasks,
        "algorithm.dynamic_sampling=true",
        "algorithm.max_resampled=0",
        "staleness={max_staleness: 2, when_too_old: drop}",
        "buffer.select=recent",
        "staleness.lookahead=3",
        f"data.tokenizer={tokenizer(tmp_path)}",
        "algorithm.group_size=4",
        "run.steps=3",
    )
    lines = run_of(config)
    steps = [line for line in lines if "train/loss" in line]
    assert all(line["reward/zero_variance_share"] == 0.0 for line in steps)
    dropped = [x for x in ledger_of(config) if x["fate"] == "dropped"]
    assert {x["task"] for x in dropped} <= {*tasks} and dropped
    reported = Counter()
    for line in lines:
        for key, value in line.items():
            if "/dropped_" in key and key.startswith("task/"):
                reported[key.split("/")[1], key.split("dropped_")[1]] += int(value)
    known = Counter((x["task"], x["reason"]) for x in dropped)
    assert all(known[key] >= count for key, count in reported.items())
    ages = [
        x["version"] - x["oldest"]
        for x in ledger_of(config)
        if x.get("task") == "chat" and x["fate"] == "trained"
    ]
    assert max(ages, default=0) <= 1


def tokenizer(folder: Path) -> Path:
    """Write a tokenizer of characters with a chat template."""
    from jaxrl_async.data.tokenizer import chat_tokenizer

    chat_tokenizer().save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


# ---- tasks that misbehave


BAD = """
import asyncio
from jaxrl_async import Environment, Step, Task

class Hangs(Environment):
    async def reset(self, record):
        if record["in_training"]:
            await asyncio.sleep(3600)
        return record["question"]

class Fails(Environment):
    def reset(self, record):
        if record["in_training"]:
            raise ValueError("down")
        return record["question"]

class Good(Environment):
    def step(self, message):
        return Step(reward=float(len(message["content"])), done=True)

def records(split):
    return [{"question": "1" * (1 + i % 3), "in_training": split == "train"} for i in range(12)]

def of(environment):
    return Task(records=records, environment=environment, words="0123456789")

hangs, fails, good = of(Hangs), of(Fails), of(Good)
"""


@pytest.mark.parametrize("bad", ["hangs", "fails"])
def test_a_task_that_hangs_or_fails_slows_no_other(tmp_path: Path, bad: str) -> None:
    file = tmp_path / "tasks.py"
    file.write_text(BAD)
    careful = {"max_in_flight": 2, "timeout_s": 600.0, "trainer_waits": False}
    tasks = {
        "good": {"task": f"{file}:good"},
        "bad": {"task": f"{file}:{bad}", **careful},
        "sums": dict(SUMS),
    }
    config = job(
        tmp_path, tasks, "staleness.max_staleness=2", "run.steps=8", "faults.max_failures=2"
    )
    start = time.monotonic()
    lines = run_of(config)
    assert time.monotonic() - start < 120, "not one timeout was waited for"
    trained = Counter(task for _, task in trained_of(config))
    assert trained["bad"] == 0
    assert abs(trained["good"] - trained["sums"]) <= 3 and sum(trained.values()) == 32
    last = lines[-1]
    assert last["task/bad/in_flight"] <= 2.0
    if bad == "hangs":
        assert last["task/bad/in_flight"] == 2.0 and last["task/bad/behind"] > 0
    else:
        assert sum(line.get("task/bad/dropped_failed", 0.0) for line in lines) >= 2.0
        assert all("task/bad/resting" in line for line in lines if "train/loss" in line)


def test_groups_of_a_task_that_hangs_time_out_and_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "tasks.py"
    file.write_text(BAD)
    tasks = {
        "good": {"task": f"{file}:good"},
        "bad": {"task": f"{file}:hangs", "max_in_flight": 1, "timeout_s": 0.2},
    }
    config = job(tmp_path, tasks, "staleness.max_staleness=1", "run.steps=6")
    lines = run_of(config)
    assert sum(line.get("task/bad/dropped_failed", 0.0) for line in lines) >= 1.0
    assert {task for _, task in trained_of(config)} == {"good"}
    log = (Path(config.run.dir) / "mixed" / "ledger.jsonl").read_text()
    assert '"task": "bad", "reason": "failed"' in log


# ---- other ways to run


@pytest.mark.exhaustive
def test_a_recorded_mix_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    tasks = {"sums": {**SUMS, "weight": 2}, "long": dict(LONG), "game": dict(GAME)}
    tasks["long"]["data"] = {**LONG["data"], "curriculum": "hard_first"}
    first = job(tmp_path, json.loads(json.dumps(tasks)), "run.steps=6", "run.name=first")
    run_of(first)
    schedule = tmp_path / "first" / "schedule.jsonl"
    assert '"tasks": [' in schedule.read_text()
    again = job(
        tmp_path,
        json.loads(json.dumps(tasks)),
        "run.steps=6",
        "run.name=again",
        f"run.replay_schedule={schedule}",
    )
    run_of(again)
    assert trained_of(again) == trained_of(first)
    for name, values in weights_of(again).items():
        np.testing.assert_allclose(values, weights_of(first)[name], atol=1e-6, err_msg=name)


@pytest.mark.exhaustive
def test_tasks_are_sampled_in_other_processes(tmp_path: Path) -> None:
    tasks = {
        "sums": {**SUMS, "sampling": {"temperature": 0.7}},
        "tools": {**TOOLS, "weight": 2},
    }
    more = ("mesh.samplers_in=processes", "mesh.samplers=2", "remote.min_samplers=2")
    config = job(tmp_path, tasks, *more, "run.steps=6")
    lines = run_of(config)
    assert max(line.get("mismatch/max", 0.0) for line in lines) < 1e-3
    counts = Counter(task for _, task in trained_of(config))
    assert abs(counts["tools"] - 16) <= 1


@pytest.mark.exhaustive
def test_each_of_several_runs_may_have_several_tasks(tmp_path: Path) -> None:
    tasks = {"sums": dict(SUMS), "long": dict(LONG)}
    config = job(
        tmp_path,
        tasks,
        "run.name=both",
        "run.steps=2",
        "model.lora.rank=2",
        runs={"one": {}, "two": {"algorithm": {"learning_rate": 1e-4}}},
    )
    train(config)
    for name in ("one", "two"):
        last = read_lines(tmp_path / "both" / name / "metrics.jsonl")[-1]
        assert last["step"] == 2 and last["task/sums/groups"] + last["task/long/groups"] == 4.0


@pytest.mark.exhaustive
def test_a_mix_with_code_in_a_sandbox_runs(tmp_path: Path) -> None:
    tasks = {
        "code": {"task": {"code:small_functions": {"eval_size": 4}}, "timeout_s": 120.0},
        "tools": dict(TOOLS),
        "sums": dict(SUMS),
    }
    config = job(tmp_path, tasks, "warm_start.steps=3", "warm_start.batch_size=8", "run.steps=2")
    lines = run_of(config)
    assert lines[-1]["task/code/groups"] >= 1.0


def test_a_configuration_of_tasks_is_printed_checked_and_examined(tmp_path: Path) -> None:
    config = job(tmp_path, json.loads(json.dumps(FOUR)))
    again = load(yaml.safe_load(dump(config)))
    assert again == config
    check_names(config)
    findings = list(check_config(config, None))
    assert all(finding.level == "ok" for finding in findings if "tokenizer" in finding.text)
    code = {"code": {"task": "code:small_functions"}, "b": dict(SUMS)}
    assert not [f for f in check_config(job(tmp_path, code), None) if "no such file" in f.text]
    missing = {"a": {"task": f"{tmp_path}/none.py:task"}, "b": dict(SUMS)}
    texts = [f.text for f in check_config(job(tmp_path, missing), None)]
    assert any(text.startswith("tasks.a.task=") and "no such file" in text for text in texts)


def test_the_doctor_looks_at_the_problems_of_code(tmp_path: Path) -> None:
    problems, broken = tmp_path / "problems.jsonl", tmp_path / "broken.jsonl"
    problem = {"question": "Print 1.", "tests": [{"input": "", "output": "1"}]}
    problems.write_text(f"{json.dumps(problem)}\n" * 3)
    broken.write_text('{"question": "Print 1."}\n')

    def found(file: Path, **sections) -> list:
        tasks = {"a": {"task": f"code:{file}"}, "b": dict(SUMS)}
        return list(check_config(job(tmp_path, tasks, **sections), None))

    def texts(level: str, findings: list) -> list[str]:
        return [f.text for f in findings if f.level == level]

    assert f"tasks.a.task=code:{problems}: 3 records" in texts("ok", found(problems))
    (error,) = texts("error", found(broken))
    assert error.startswith("task: tasks.a: ") and f"{broken}, line 1: has no tests." in error
    absent = tmp_path / "none.jsonl"
    of_file = f"tasks.a.task={absent}: there is no such file here"
    assert of_file in texts("error", found(absent))
    options = {"evals": {"x": {"task": f"code:{broken}"}}}
    (error,) = texts("error", found(problems, **options))
    assert error.startswith("task: evals.x: ") and f"{broken}, line 1: has no tests." in error


def test_an_error_in_a_tasks_records_or_settings_names_the_task(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    bad = {"sums": dict(SUMS), "file": {"data": {"jsonl": {"path": str(empty)}}}}
    with pytest.raises(DataError, match=r"^tasks\.file: "):
        train(job(tmp_path, bad, f"data.tokenizer={tokenizer(tmp_path)}"))
    with pytest.raises(ConfigError, match=r"tasks\.x: task = 'calculatr' is unknown"):
        train(job(tmp_path, {"sums": dict(SUMS), "x": {"task": "calculatr"}}))
    unknown = {"sums": dict(SUMS), "x": {**TOOLS, "reward": {"function": "mathh"}}}
    with pytest.raises(ConfigError, match=r"^tasks\.x: reward\.function = 'mathh' is unknown"):
        check_names(job(tmp_path, unknown))
    of_run = "did you mean 'sums'. Known: the run's tasks sums, tools; calculator"
    with pytest.raises(ConfigError, match=rf"^evals\.y: task = 'sumz' is unknown; {of_run}"):
        two = {"sums": dict(SUMS), "tools": dict(TOOLS)}
        check_names(job(tmp_path, two, evals={"y": {"task": "sumz"}}))


def test_a_saved_policy_is_evaluated_on_one_of_its_runs_tasks(tmp_path: Path) -> None:
    config = job(tmp_path, {"sums": dict(SUMS), "tools": dict(TOOLS)}, "eval.every=1")
    lines = run_of(config)
    folder = Path(config.run.dir) / "mixed"
    found = evaluate(folder, task="tools")
    assert found.estimates["reward"].mean == pytest.approx(lines[-1]["eval/tools/reward"])
    with pytest.raises(ConfigError, match=r"several tasks \(sums, tools\)"):
        evaluate(folder)
