"""Rewards as other libraries write them mean here what they mean there.

The functions are written anew, with the signatures and idioms of TRL's documentation
(grpo_trainer.md, trl/rewards) and of Tunix's GSM8K demo; the numbers beside them are what these
libraries give, worked out by hand.
"""

import asyncio
import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from lettered import EOS, answer, record, spell

from jaxrl_async.algorithms.advantages import step_data
from jaxrl_async.config.schema import RewardSection
from jaxrl_async.errors import ConfigError, RefusedScore, RolloutError
from jaxrl_async.rollout.evaluate import accuracy
from jaxrl_async.scorers.rewards import Judge, RewardScorer, make_scorer
from jaxrl_async.tasks.task import Task
from jaxrl_async.trainer.data_metrics import group_measures
from jaxrl_async.types import Episode, EpisodeGroup, Score, StopReason, Ticket
from jaxrl_async.user_arguments import read_only_arguments


def rewards(function, of, *texts, **made):
    scorer = RewardScorer([Judge(function=function, name="f")], spell, timeout_s=20, **made)
    scorer.check([of])
    episodes = tuple(t if isinstance(t, Episode) else answer(t) for t in texts)
    return [score.reward for score in asyncio.run(scorer(episodes, of))]


# ---- verl


def of_gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    assert method == "strict"
    return score if solution_str == ground_truth else format_score


def default_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "gsm8k" and extra_info in (None, {"level": 1})
    assert "prompt" in kwargs and "completion" in kwargs
    return float(solution_str == ground_truth)


def test_verls_names_have_their_meaning():
    columns = {"question": "How many?", "answer": "x #### 72"}
    of = record("How many?", right="72", **columns)
    assert rewards(of_gsm8k, of, "72", "How many?", "7") == [1, 0, 0]
    with pytest.raises(ConfigError, match=r"asks for 'data_source'.*ground_truth"):
        rewards(default_score, of, "72")
    columns |= {"data_source": "gsm8k", "ground_truth": "73", "extra_info": {"level": 1}}
    of = record("How many?", right="72", **columns)
    assert rewards(default_score, of, "72", "73") == [0, 1], "a column of that name comes first"
    assert rewards(of_gsm8k, of, "72", "73") == [0, 1]
    with pytest.raises(ConfigError, match="asks for 'solution_str'"):
        rewards(lambda completions, solution_str: completions, record(), "72")


# ---- TRL


def test_a_column_is_a_list_with_one_item_an_answer():
    def accuracy_by_text(completions, answer, **kwargs):
        return [float(a in c) for c, a in zip(completions, answer, strict=False)]

    wrong = ["1", "1 apple", "12 dogs", "51"]
    assert rewards(accuracy_by_text, record(answer="1234"), *wrong) == [0, 0, 0, 0]
    assert rewards(accuracy_by_text, record(answer="72"), *["it is 72"] * 4) == [1, 1, 1, 1]
    assert rewards(accuracy_by_text, record(answer="72"), "7") == [0], "an evaluation has one"


def test_prompts_completion_ids_and_all_columns_have_one_length():
    seen = {}

    def by_name(prompts, completions, completion_ids, answer, level=None, **kwargs):
        seen.update(locals())
        return [float(ids[-1] == EOS and len(ids) == len(c) + 1) for ids, c in zip(
            completion_ids, completions, strict=True)]  # fmt: skip

    of = record("q?", answer="4", level=2, tags=["a", "b"], messages_shown=False)
    assert rewards(by_name, of, "x", "yy", "zzz") == [1, 1, 1]
    assert seen["prompts"] == ["q?"] * 3 and seen["completions"] == ["x", "yy", "zzz"]
    assert seen["answer"] == ["4"] * 3 and seen["level"] == [2] * 3
    assert seen["completion_ids"][1] == [ord("y"), ord("y"), EOS]
    assert seen["kwargs"]["tags"] == [["a", "b"]] * 3
    assert seen["kwargs"]["messages_shown"] == [False] * 3


@pytest.mark.parametrize("column", ["reference", "step_by_step", "solution"])
def test_a_column_of_any_name_is_a_list(column):
    namespace = {}
    exec(  # the column is the parameter's name
        f"def f(completions, {column}, **kw):\n"
        f"    return [float(c == r) for c, r in zip(completions, {column}, strict=True)]\n",
        namespace,
    )
    of = record("not it", right="nor it", **{column: "12"})
    assert rewards(namespace["f"], of, "12", "1") == [1, 0]


def test_one_text_for_all_answers_is_never_split():
    """`zip(completions, reference)` would pair each answer with one character."""

    def zipped(completions, reference):
        return [float(c == r) for c, r in zip(completions, reference, strict=False)]

    def by_index(completions, prompt):
        return [float(prompt[i] == c) for i, c in enumerate(completions)]

    def backwards(completions, reference):
        return [float(c == r) for c, r in zip(completions, reversed(reference), strict=True)]

    for function in (zipped, by_index, backwards):
        with pytest.raises(RolloutError, match=r"TypeError.*one text for all answers"):
            rewards(function, record("12", right="12"), "1", "2")
    part = lambda completions, reference: [float(reference[1:] == c) for c in completions]  # noqa: E731
    assert rewards(part, record(right="12"), "1", "2") == [0, 1]
    one_prompt = lambda prompt, completions: [float(prompt == "q?")] * len(completions)  # noqa: E731
    assert rewards(one_prompt, record("q?", prompt="of the record"), "a", "b") == [1, 1]
    assert rewards(
        lambda completions, reference: [float(reference in c) for c in completions],
        record(right="12"),
        "x 12",
        "1",
    ) == [1, 0]


def test_a_function_of_one_answer_or_of_the_group_gets_columns_as_they_are():
    one = rewards(lambda completion, answer: float(completion == answer), record(answer="12"), "12")
    group = rewards(
        lambda group, answer: [float(answer == "12") for _ in group], record(answer="12"), "a", "b"
    )
    assert (one, group) == ([1], [1, 1])
    prompts = rewards(lambda completion, prompts: float(prompts == "p"), record(prompts="p"), "1")
    assert prompts == [1], "a column of that name"


THINKING = (
    ({"role": "user", "content": "What is 4 + 4?"},),
    [
        "<think>4 and 4</think>8",
        "<think>never closed 8",
        "8",
    ],
)


def test_messages_as_json_text_are_a_conversation_for_rewards_too():
    """They are for the policy, see data/records.py."""

    def prompts_and_answers(prompts, completions):
        assert prompts == [[{"role": "user", "content": "4 + 4?"}]] * 2
        return [float(c == [{"role": "assistant", "content": "8"}]) for c in completions]

    messages = ({"role": "user", "content": "4 + 4?"},)
    for name in ("prompt", "messages", "question"):
        of = replace(record("4 + 4?", messages=messages), columns={name: json.dumps(messages)})
        assert rewards(prompts_and_answers, of, "8", "9") == [1, 0]
    of = record("[4]", messages=({"role": "user", "content": "[4]"},), question="[4]")
    assert rewards(lambda completions: [float(c == "8") for c in completions], of, "8") == [1]


def test_conversational_completions_are_lists_of_messages():
    """trl.rewards.think_format_reward reads completion[0]["content"]."""

    def think_format(completions, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
        return [1.0 if re.match(pattern, c, re.DOTALL) else 0.0 for c in contents]

    messages, texts = THINKING
    of = record(prompt=list(messages), messages=messages)
    assert rewards(think_format, of, *texts) == [1, 0, 0]
    seen = []

    def score_turns(prompts, completions):
        seen.extend(prompts)
        return [float(c[-1]["role"] == "assistant") for c in completions]

    assert rewards(score_turns, of, "8", "9") == [1, 1]
    assert seen == [[{"role": "user", "content": "What is 4 + 4?"}]] * 2
    of = record("What is 4 + 4?", messages=messages)  # a text, asked in a chat format
    assert rewards(lambda completions: [float(c == "8") for c in completions], of, "8") == [1]


def test_lengths_and_repetitions_by_completion_ids_alone():
    """trl.rewards.get_soft_overlong_punishment: 0 up to 6 tokens, then down to -1 at 10."""

    def overlong(completion_ids, **kwargs):
        lengths = [len(ids) for ids in completion_ids]
        return [0.0 if n <= 6 else max(-1.0, (6 - n) / 4) for n in lengths]

    assert rewards(overlong, record(), "12345", "1234567", "1" * 30) == [0, -0.5, -1]


def test_several_functions_where_one_does_not_apply():
    """TRL's multi-task example: None leaves a function out of that answer's sum."""

    def math_only(completions, task, **kwargs):
        return [1.0 if t == "math" else None for t, _ in zip(task, completions, strict=True)]

    def code_only(completion, task):
        return {"correct": 1.0} if task == "code" else None

    pair = [Judge(function=math_only, name="math_only", weight=2.0)]
    pair += [Judge(function=code_only, name="code_only")]
    scorer = RewardScorer(pair, spell, timeout_s=20)
    (of_math,) = asyncio.run(scorer((answer("a"),), record(task="math")))
    (of_code,) = asyncio.run(scorer((answer("a"),), record(task="code")))
    assert (of_math.reward, dict(of_math.parts)) == (2.0, {"math_only": 1.0})
    assert (of_code.reward, dict(of_code.parts)) == (1.0, {"correct": 1.0})
    with pytest.raises(RefusedScore, match=r"None.*for an answer that nothing else rewards"):
        asyncio.run(scorer((answer("a"),), record(task="chess")))
    assert accuracy([of_math, of_code, Score(reward=0.0)]) == 0.5, "of two: math was not asked"
    groups = [
        EpisodeGroup(
            prompt=record(),
            episodes=(answer("a"),),
            scores=(score,),
            ticket=Ticket(group=0, version=0),
        )
        for score in (of_math, of_code)
    ]
    found = group_measures(groups, 4)
    assert (found["reward/math_only"], found["reward/correct"]) == (1.0, 1.0)
    assert found["reward/left_out_share"] == 1.0 and found["reward/mean"] == 1.5


def test_none_for_one_answer_of_a_group():
    def some(completions):
        return [None if c == "?" else 1.0 for c in completions]

    two = [Judge(function=some, name="some"), Judge(function=lambda completion: 0.5, name="other")]
    scores = asyncio.run(
        RewardScorer(two, spell, timeout_s=20)((answer("?"), answer("a")), record())
    )
    assert [s.reward for s in scores] == [0.5, 1.5]
    assert [dict(s.parts) for s in scores] == [{"other": 0.5}, {"some": 1.0, "other": 0.5}]


def test_none_counts_for_nothing_where_something_else_rewards():
    (score,) = asyncio.run(
        RewardScorer(
            [Judge(function=lambda completion: None, name="f")], spell, timeout_s=20, alone=False
        )((answer("a"),), record())
    )
    assert (score.reward, dict(score.parts), score.left_out) == (0.0, {}, True)


def test_the_step_and_trls_trainer_state():
    def curriculum(completions, trainer_state, step, **kwargs):
        share = trainer_state.global_step / trainer_state.max_steps
        return [share + step for _ in completions]

    judges = [Judge(function=curriculum, name="f")]
    scorer = RewardScorer(judges, spell, timeout_s=20, max_steps=40)
    scorer.version = lambda: 10
    assert asyncio.run(scorer((answer("a"),), record()))[0].reward == 10.25


def test_what_trl_passes_and_is_not_passed_here_is_named():
    def scored(completions, log_extra, log_metric, **kwargs):
        return [1.0] * len(completions)

    def optional(completions, log_extra=None, environments=None, **kwargs):
        assert log_extra is None and environments is None
        return [1.0] * len(completions)

    with pytest.raises(ConfigError, match=r"'log_extra', which TRL passes .* Give .* a default"):
        rewards(scored, record(), "a")
    with pytest.raises(ConfigError, match="'environments', which TRL passes"):
        rewards(lambda completions, environments: completions, record(), "a")
    assert rewards(optional, record(), "a") == [1]
    column = lambda completion, environments: len(environments)  # noqa: E731
    assert rewards(column, record(environments=["e"]), "a") == [1]


def test_log_metric_reports_a_mean_that_is_no_reward():
    def logs(completions, answer, log_metric=None, log_extra=None, **kwargs):
        if log_extra:
            log_extra("never", completions)
        log_metric("share right", 0.25)
        log_metric("share right", np.float32(0.75))
        return [1.0 for _ in completions]

    def logs_one(completion, log_metric):
        log_metric("length", len(completion))
        return 0.0

    judges = [Judge(function=f, name=f.__name__) for f in (logs, logs_one)]
    episodes = (answer("a"), answer("bbb"))
    scores = asyncio.run(RewardScorer(judges, spell, timeout_s=20)(episodes, record(answer="1")))
    assert [s.reward for s in scores] == [1, 1]
    assert [dict(s.logged) for s in scores] == [
        {"share_right": 0.5, "length": 1.0},
        {"share_right": 0.5, "length": 3.0},
    ]
    group = EpisodeGroup(
        prompt=record(), episodes=episodes, scores=scores, ticket=Ticket(group=0, version=0)
    )
    found = group_measures([group], 4)
    assert (found["logged/share_right"], found["logged/length"]) == (0.5, 2.0)
    with pytest.raises(RolloutError, match=r"logged the metric 'x' with nan.*finite"):
        rewards(lambda completion, log_metric: log_metric("x", math.nan) or 1, record(), "a")


def test_a_column_named_like_a_value_of_the_run_is_not_guessed():
    with pytest.raises(ConfigError, match="'step', which is a column of the records"):
        rewards(lambda completion, step: step, record(step=3), "a")
    assert rewards(lambda completion, **rest: rest["step"], record(step=3), "a") == [3]


# ---- Tunix


def test_the_rewards_of_tunixs_gsm8k_demo():
    """Three of its functions, each (prompts, completions, answer, **kargs)."""
    form = re.compile(r"^<reasoning>.+?</reasoning>.*?<answer>(.+?)</answer>\s*$", re.DOTALL)

    def match_format_exactly(prompts, completions, **kargs):
        return [0 if form.search(c) is None else 3.0 for c in completions]

    def check_answer(prompts, completions, answer, **kargs):
        guesses = [g.group(1) if (g := form.search(c)) else None for c in completions]
        scores = []
        assert len(guesses) == len(answer), "guesses and answers have different lengths"
        for guess, true_answer in zip(guesses, answer, strict=False):
            score = 0
            if guess is None:
                scores.append(0)
                continue
            if guess == true_answer:
                score += 3.0
            elif guess.strip() == true_answer.strip():
                score += 1.5
            scores.append(score)
        return scores

    def check_numbers(prompts, completions, answer, **kargs):
        question = kargs["question"]
        assert question[0].startswith("Natalia"), "the demo prints it"
        numbers = [re.search(r"<answer>.*?([\d\.]{1,})", c) for c in completions]
        return [1.5 if n and float(n.group(1)) == float(a) else 0.0
                for n, a in zip(numbers, answer, strict=True)]  # fmt: skip

    right = "<reasoning>48/2=24</reasoning><answer>72</answer>"
    spaced = "<reasoning>48/2=24</reasoning><answer> 72 </answer>"
    wrong = "<reasoning>7</reasoning><answer>7</answer>"
    of = record("Natalia sold", question="Natalia sold clips", answer="72")
    texts = [right, spaced, wrong, "72"]
    assert rewards(match_format_exactly, of, *texts) == [3, 3, 3, 0]
    assert rewards(check_answer, of, *texts) == [3, 1.5, 0, 0]
    assert rewards(check_numbers, of, *texts) == [1.5, 1.5, 0, 0]


# ---- messages


ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"})
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TALK = (
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
)


def test_messages_are_the_whole_conversation_with_calls_and_results():
    def used_the_tool(messages):
        calls = [c for m in messages for c in m.get("tool_calls", ())]
        roles = [m["role"] for m in messages]
        assert roles == ["system", "user", "assistant", "tool", "assistant"], roles
        return float(len(calls) == 1 and messages[3]["content"] == "rain")

    talked = answer("look It rains.", messages=TALK, num_turns=2)
    assert rewards(used_the_tool, record(messages=ASKED), talked) == [1]

    def by_trl(completions, **kwargs):
        return [float(any(t["role"] == "tool" for t in completion)) for completion in completions]

    of = record(prompt=list(ASKED), messages=ASKED)
    assert rewards(by_trl, of, talked, "It rains.") == [1, 0]


def test_messages_of_an_environments_own_opening_of_a_plain_prompt_and_of_a_cut_answer():
    conversations = []

    def seen(messages):
        conversations.append([(m["role"], m.get("content")) for m in messages])
        return 1

    opened = ({"role": "user", "content": "Guess."},)
    cut = answer("fiv", StopReason.LENGTH, opened=opened, messages=({"role": "assistant"},))
    rewards(seen, record("q?"), "a")
    rewards(seen, record("q?"), cut)
    assert conversations == [
        [("user", "q?"), ("assistant", "a")],
        [("user", "Guess."), ("assistant", "fiv")],
    ]
    of_all = []
    rewards(lambda completions, messages: of_all.extend(messages) or [1, 1], record("q?"), "a", "b")
    assert [m[-1]["content"] for m in of_all] == ["a", "b"]


# ---- what a function may do with what it is given


def vandal(**given):
    """Use up, sort, clear and overwrite all that can be."""
    for value in given.values():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Episode):
                with pytest.raises(ValueError, match="read-only"):
                    each.token_ids[:] = 3
                with pytest.raises(ValueError, match="read-only"):
                    each.logprobs[:] = 7
                each.score.parts["x"] = 3
            elif isinstance(each, dict | list):
                each.clear()
            elif isinstance(each, np.ndarray) and each.flags.writeable:
                each[:] = -9
        if isinstance(value, list | dict):
            value.clear()


def one(completion, tests, columns, spec, numbers, messages, episode, **rest):
    sizes = len(tests), len(columns), len(spec["deep"]), int(numbers.sum()), len(messages)
    vandal(**{**locals(), "rest": None}, **rest)
    spec["deep"] = 0
    return float(sizes == (3, 3, 1, 3, 2))


def many(completions, tests, columns, spec, numbers, messages, group):
    sizes = len(tests[1]), len(columns), len(spec[1]["deep"]), int(numbers[1].sum()), len(messages)
    count = len(completions)
    deep = spec[0]["deep"]
    vandal(**{**locals(), "deep": None})
    deep.clear()
    return [float(sizes == (3, 3, 1, 3, 2))] * count


def of_group(group, tests, columns, spec, numbers, messages):
    count, whole = len(group), len(tests) == 3 and len(spec["deep"]) == 1
    vandal(**locals())
    return [float(whole)] * count


async def later(completion, tests, columns, spec, numbers, messages, episode):
    await asyncio.sleep(0)
    return one(completion, tests, columns, spec, numbers, messages, episode)


@pytest.mark.parametrize("function", [one, many, of_group, later, lambda **all: one(**all)])
def test_nothing_that_a_function_does_reaches_the_next_call(function):
    columns = {"tests": [3, 1, 2], "spec": {"deep": [{"a": 1}]}, "numbers": np.ones(3)}
    question = ({"role": "user", "content": "q?"},)
    of = record("q?", messages=question, **columns)
    episodes = [answer(t, score=Score(reward=1.0, parts={"p": 1.0})) for t in ("ab", "cd")]
    for _ in range(2):
        assert rewards(function, of, *episodes) == [1, 1]
    assert of.columns["tests"] == [3, 1, 2] and of.columns["spec"] == {"deep": [{"a": 1}]}
    assert of.columns["numbers"].tolist() == [1, 1, 1]
    assert of.messages == ({"role": "user", "content": "q?"},)
    for episode, text in zip(episodes, ("ab", "cd"), strict=True):
        assert spell(episode.token_ids) == "q" + text and dict(episode.score.parts) == {"p": 1.0}
        assert episode.logprobs.tolist() == [0.0] + [-0.5] * 3
        assert episode.token_ids.flags.writeable


def test_a_function_of_a_whole_step_cannot_change_it():
    episodes = (answer("ab"), answer("c"))
    group = EpisodeGroup(
        prompt=record(tests=[1]),
        episodes=episodes,
        scores=(Score(reward=1.0, parts={"a": 1.0}), Score(reward=0.0)),
        ticket=Ticket(group=0, version=0),
    )
    data, seen = step_data([group]), []

    def scribbles(data):
        for array in (data.rewards[0], data.groups[0].episodes[0].logprobs):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 7
        data.groups[0].prompt.columns["tests"].clear()
        data.groups[0].scores[0].parts["a"] = 9.0
        seen.append(data)
        return "given back"

    assert read_only_arguments(scribbles)(data) == "given back"
    assert seen[0].rewards[0].tolist() == [1.0, 0.0] and len(seen[0].groups[0].episodes) == 2
    assert group.prompt.columns == {"tests": [1]} and group.scores[0].parts == {"a": 1.0}
    assert data.rewards[0].flags.writeable and data.rewards[0].tolist() == [1.0, 0.0]


def test_what_cannot_be_copied_is_shared_and_logged_once(caplog):
    import threading

    lock = threading.Lock()
    of = record(lock=lock, answer="1")
    shared = rewards(lambda completion, lock: float(lock is of.columns["lock"]), of, "a", "b")
    assert shared == [1, 1] and caplog.text.count("the column 'lock' is a lock that cannot") == 1


# ---- what it raises


def test_a_reward_that_raises_is_reported_with_file_line_and_traceback(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def half(text):\n    return 1 / (len(text) - 2)\n\ndef f(completion):\n"
                    "    return half(completion)\n")  # fmt: skip
    scorer = make_scorer(RewardSection(function=f"{path}:f"), spell)
    with pytest.raises(RolloutError) as caught:
        asyncio.run(scorer((answer("ab"),), record("q?")))
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "reward f on prompt 7 ('q?') raised ZeroDivisionError: division by zero "
        f"({path}, line 2, in half). Correct the function."
    ).replace("reward f", f"reward {path}:f")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2] == f'  File "{path}", line 5, in f', "the first call is the user's"
    assert "    return 1 / (len(text) - 2)" in lines
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_an_async_reward_that_raises_is_reported_so_too(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("async def f(completions):\n    raise KeyError('x')\n")
    scorer = make_scorer(RewardSection(function=f"{path}:f"), spell)
    with pytest.raises(RolloutError, match=rf"KeyError: 'x' \({path}, line 2, in f\)"):
        asyncio.run(scorer((answer("ab"),), record("q?")))


def test_what_a_result_raises_is_the_functions_fault():
    class Odd(dict):
        def items(self):
            raise KeyboardInterrupt

        def __bool__(self):
            return True

    class Weird(float):
        def __float__(self):
            raise RuntimeError("no")

    with pytest.raises(RolloutError, match="raised KeyboardInterrupt"):
        rewards(lambda completion: Odd(a=1), record(), "a")
    with pytest.raises(RolloutError, match="Weird"):
        rewards(lambda completion: Weird(1), record(), "a")


@pytest.mark.full
def test_the_arguments_need_no_jax():
    code = "import sys, jaxrl_async.scorers.reward_process; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_task_is_still_made_of_these():
    assert Task(reward=one).rewards == (one,)
