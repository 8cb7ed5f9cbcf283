"""Rules about several tasks: what is refused says which task, and the way out."""

import pytest

from jaxrl_async.config.field_help import help_text
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import DataSection
from jaxrl_async.errors import ConfigError

TWO = {"a": {"data": {"addition": {"digits": 1}}}, "b": {"task": "calculator", "weight": 2}}


def refused(tasks=TWO, **sections):
    with pytest.raises(ConfigError) as caught:
        load({"tasks": tasks, **sections})
    return str(caught.value)


def with_a(**more):
    return {**TWO, "a": {**TWO["a"], **more}}


def test_each_task_has_its_sections_and_the_runs_others():
    config = load(
        {
            "tasks": with_a(
                sampling={"temperature": 0.5, "max_new_tokens": 8},
                reward={"function": "math"},
            ),
            "data": {"system_prompt": "Answer."},
            "sampler": {"top_k": 3},
            "reward": {"timeout_s": 5.0},
            "env": {"max_turns": 3},
        }
    )
    a, b = config.of_task("a"), config.of_task("b")
    assert a.task is None and b.task == "calculator" and not a.named_tasks
    assert (a.sampler.temperature, a.sampler.max_new_tokens, a.sampler.top_k) == (0.5, 8, 3)
    assert b.sampler == config.sampler
    assert a.data.addition.digits == 1 and a.data.system_prompt == "Answer."
    assert b.data == DataSection(system_prompt="Answer.")
    assert a.reward.function == "math" and b.reward.timeout_s == 5.0
    assert b.env.max_turns == 3
    assert config.truncates and config.has_task and [*config.by_task] == ["a", "b"]
    assert [*load({}).by_task] == [""]


def test_settings_of_a_task_are_set_on_the_command_line():
    config = load({"tasks": TWO}, ["tasks.a.weight=3", "tasks.a.data.addition.digits=2"])
    assert config.tasks["a"].weight == 3 and config.tasks["a"].data.addition.digits == 2
    assert "tasks.a.weight = 1.0" in help_text("tasks.a.weight").replace("NAME", "a")


def test_tasks_take_the_place_of_one():
    assert "task and tasks are both given" in refused(task="calculator")
    assert "data.jsonl is of one task" in refused(data={"jsonl": {"path": "x.jsonl"}})
    assert "data.curriculum is of one task" in refused(data={"curriculum": "hard_first"})
    assert "run.job=sft trains on one source" in refused(run={"job": "sft"})
    assert "no task has a weight above 0" in refused({"a": {**TWO["a"], "weight": 0}})
    assert "tasks={} names no task. Give each task a section" in refused({})
    assert "weight" not in refused({})
    assert "mixing (x.py:choose) has no effect without tasks" in refused(None, mixing="x.py:choose")
    load({"tasks": TWO, "data": {"addition": None}})


def test_what_all_share_is_set_once():
    own = {"addition": {"digits": 1}, "tokenizer": "dir"}
    assert "tasks.a.data.tokenizer is shared" in refused(with_a(data=own))
    judge = {"judge": {"url": "http://x/v1", "model": "m", "rubric": "r"}}
    assert "Move it to tasks.NAME.reward.judge" in refused(reward=judge)


def test_limits_of_a_task_are_within_the_runs():
    message = refused(with_a(sampling={"max_new_tokens": 65}))
    assert "max_new_tokens (65) must be at most sampler.max_new_tokens (64)" in message
    assert "tasks.a.max_staleness (3)" in refused(with_a(max_staleness=3))
    assert "tasks.a.kl_weight" in refused(with_a(kl_weight=2.0))
    greedy = refused(with_a(sampling={"temperature": 0.0}))
    assert "tasks.a: sampler.temperature (0)" in greedy
    assert "tasks.b" not in greedy


def test_a_task_that_may_lag_needs_a_limit_and_room_for_the_others():
    assert "Set tasks.a.max_in_flight" in refused(with_a(trainer_waits=False))
    many = with_a(trainer_waits=False, max_in_flight=20)
    assert "could not fill a step" in refused(many, algorithm={"groups_per_step": 16})
    load(
        {"tasks": with_a(trainer_waits=False, max_in_flight=4), "algorithm": {"groups_per_step": 8}}
    )


def test_each_task_keeps_the_rules_of_a_run():
    none = {**TWO, "c": {"data": {"jsonl": {"path": "x.jsonl", "answer_field": None}}}}
    assert "tasks.c: reward.function=exact needs the records' answers" in refused(none)
    loop = with_a(data={"curriculum_pool": 5})
    assert (
        "tasks.a.data.curriculum_pool (5) has no effect without tasks.a.data.curriculum="
        in refused(loop)
    )
    assert "tasks.a.env has no effect" in refused(with_a(env={"max_turns": 2}))


def test_each_setting_of_a_task_is_read_by_it():
    assert "tasks.a.reward.processes (3) has no effect" in refused(with_a(reward={"processes": 3}))
    own = {"addition": {"digits": 1}, "system_prompt": "Answer."}
    assert "tasks.a.data.system_prompt (Answer.) has no effect" in refused(with_a(data=own))
    load({"tasks": {**TWO, "b": {"task": "calculator", "reward": {"processes": 3}}}})
    load({"tasks": {**TWO, "b": {"task": "calculator", "data": {"system_prompt": "Answer."}}}})
    left_out = with_a(warm_start=False)
    assert "tasks.a.warm_start=false has no effect without" in refused(left_out)
    assert "those of warm_start.path" in refused(
        left_out, warm_start={"steps": 2, "path": "x.jsonl"}
    )
    load({"tasks": left_out, "warm_start": {"steps": 2}})
    load({"tasks": left_out, "warm_start": {"steps": 0}})


def test_what_the_run_gives_its_tasks_is_read_by_one():
    env, reward = {"env": {}}, {"reward": {"function": "math"}}
    each = {"a": {**TWO["a"], **reward}, "b": {**TWO["b"], **reward, **env}}
    assert "env.max_turns (3) has no effect" in refused(each, env={"max_turns": 3})
    assert "reward.function (gsm8k) has no effect" in refused(each, reward={"function": "gsm8k"})
    more = {"env": {"max_turns": 3}, "reward": {"function": "gsm8k"}}
    load({"tasks": each, **more, "evals": {"x": {"task": "guess_number"}}})
    load({"tasks": {**each, "b": TWO["b"]}, **more})


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.5), ("top_k", 4), ("top_p", 0.9), ("min_p", 0.1)]
)
def test_a_sampling_setting_that_every_task_has_itself_is_refused(name, value):
    own, sampler = {"sampling": {name: value}}, {"sampler": {name: value}}
    each = {task: {**section, **own} for task, section in TWO.items()}
    assert f"sampler.{name} ({value:g}) has no effect: each task has its own" in refused(
        each, **sampler
    )
    load({"tasks": each})
    load({"tasks": {**each, "b": TWO["b"]}, **sampler})
    short = {"sampling": {"max_new_tokens": 8}}
    longest = {"sampler": {"max_new_tokens": 9}}  # that a task may set
    load({"tasks": {task: {**section, **short} for task, section in TWO.items()}, **longest})


def test_a_loss_component_names_tasks_of_the_run():
    component = {"loss": "nll", "tasks": ["b", "c"]}
    message = refused(algorithm={"losses": {"x": component}})
    assert "losses.x.tasks names c, and the run's tasks are a, b. Correct the name." in message
    assert message.count("losses.x") == 1
    load({"tasks": TWO, "algorithm": {"losses": {"x": {**component, "tasks": ["b"]}}}})


def test_evaluations_by_name_name_a_task():
    assert "Set evals.x.task to one of a, b" in refused(evals={"x": {}})
    assert "is also a task" in refused(evals={"a": {"task": "a"}})
    load({"tasks": TWO, "evals": {"x": {"task": "b"}}})


def test_features_of_a_runs_only_task_are_refused():
    assert "endpoint.external_agents" in refused(endpoint={"external_agents": True})
    assert "seats" in refused(seats={"second": {"model": "initial"}})
    limited = with_a(max_in_flight=3)
    assert "run.replay_schedule cannot follow" in refused(
        limited, run={"replay_schedule": "schedule.jsonl"}
    )


def test_different_temperatures_refuse_whole_distributions():
    warm = with_a(sampling={"temperature": 0.5})
    kl = {"kl": "full", "kl_coefficient": 0.1}
    assert "the tasks sample at 0.5, 1" in refused(warm, algorithm=kl)
    load({"tasks": TWO, "algorithm": kl})


def test_different_temperatures_refuse_a_teacher_on_the_samplers_chips():
    def of(chips):
        return {
            "teacher": {"source": "teachers"},
            "teachers": {"t": {"path": "dir", "chips": chips}},
        }

    warm = with_a(sampling={"temperature": 0.5})
    message = refused(warm, **of("sampler"))
    assert "teachers.t.chips=sampler computes at one temperature" in message
    assert "the tasks sample at 0.5, 1" in message
    load({"tasks": TWO, **of("sampler")})
    load({"tasks": warm, **of("trainer")})
