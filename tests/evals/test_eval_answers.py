"""The answers of an evaluation: what they measure, by hand, and their files."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_async.evals.eval_answers import (
    EvalAnswer,
    changes,
    estimates,
    facts,
    flat,
    grades,
    has_correct,
    read_answers_of,
    write_answers,
)
from jaxrl_async.evals.run_evals import NamedEvaluation
from jaxrl_async.metrics.metric import metric_of, names_a_known_metric
from jaxrl_async.scorers.graders import exact, gsm8k, read_answer
from jaxrl_async.scorers.graders import math as same_math
from jaxrl_async.scorers.rewards import Judge, RewardScorer


def answer(index=0, sample=0, **change):
    usual = {
        "seat": "", "prompt": f"p{index}", "reference": "r", "completion": "c", "answer": None,
        "reward": 0.0, "parts": {}, "left_out": False, "length": 3, "stop": "eos", "turns": 1,
        "version": 7,
    }  # fmt: skip
    return EvalAnswer(index=index, sample=sample, **{**usual, **change})


def graded(index, *correct, **change):
    return [
        answer(index, m, reward=2.0 * c, parts={"correct": float(c)}, **change)
        for m, c in enumerate(correct)
    ]


def measured(answers, samples, **change):
    settings = {"samples": samples, "pass_reward": 1.0, "is_graded": has_correct(answers)}
    return estimates(answers, **{**settings, **change})


def test_the_measures_of_two_prompts_by_hand():
    answers = [*graded(0, 1, 1, 0, 0), *graded(1, 0, 0, 0, 1)]
    votes = ["7", "7", "8", "9", "1", "1", "1", "2"]
    answers = [replace(a, answer=v) for a, v in zip(answers, votes, strict=True)]
    found = measured(answers, 4)
    assert list(found) == [
        "reward", "accuracy", "avg_at_4", "pass_at_1", "pass_at_2", "pass_at_4", "maj_at_4",
    ]  # fmt: skip
    assert found["reward"].mean == 2 * 3 / 8 and found["accuracy"].mean == 3 / 8
    assert found["avg_at_4"] == found["accuracy"]
    assert found["pass_at_1"].mean == pytest.approx(3 / 8)
    assert found["pass_at_2"].mean == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert found["pass_at_4"].mean == 1.0 and found["pass_at_4"].stderr == 0.0
    assert found["maj_at_4"].mean == 0.5, "7 passes, 1 does not"
    assert found["accuracy"].stderr == pytest.approx(np.std([0.5, 0.25], ddof=1) / math.sqrt(2))


def test_without_the_part_correct_the_reward_counts_and_a_threshold_passes():
    answers = [answer(0, 0, reward=1.0), answer(0, 1, reward=0.9), answer(1, 0), answer(1, 1)]
    found = measured(answers, 2)
    assert "accuracy" not in found and found["avg_at_2"].mean == pytest.approx(1.9 / 4)
    assert found["pass_at_1"].mean == 0.25 and found["pass_at_2"].mean == 0.5
    assert measured(answers, 2, pass_reward=0.9)["pass_at_1"].mean == 0.5
    assert "maj_at_2" not in found, "no final answer was read"


def test_a_part_that_is_not_whole_does_not_pass():
    found = measured(graded(0, 0.5, 1.0), 2)
    assert found["accuracy"].mean == 0.75 and found["pass_at_1"].mean == 0.5


def test_an_answer_that_was_cut_off_is_wrong_and_one_without_a_function_does_not_count():
    answers = [*graded(0, 1), answer(0, 1), answer(0, 2, left_out=True)]
    assert measured(answers, 3)["accuracy"].mean == 0.5
    counts = grades(answers, is_graded=True)
    assert [grade for _, grade in counts[0]] == [1.0, 0.0]
    assert "pass_at_3" not in measured(answers, 3), "two samples count"
    assert measured([answer()], 1, is_graded=True)["accuracy"].mean == 0.0, "known from before"
    none = [answer(left_out=True)]
    assert list(measured(none, 1, is_graded=True)) == ["reward"]


def test_the_seats_of_a_game_are_no_samples():
    answers = [answer(0, 0, seat="a", reward=1.0), answer(0, 0, seat="b", reward=-1.0)]
    assert list(measured(answers, 1)) == ["reward"]
    assert facts(answers) == {
        "length_mean": 3.0, "truncated_share": 0.0, "seat_a": 1.0, "seat_b": -1.0,
    }  # fmt: skip


def test_changes_are_paired_by_the_prompts_text_and_index():
    before = [*graded(0, 0, 1), *graded(1, 1, 1), *graded(2, 0, 0)]
    after = [*graded(0, 1, 1), *graded(1, 1, 1), *graded(2, 0, 0, prompt="another")]
    found = changes(before, after, is_graded=True)
    assert found["accuracy"].mean == 0.25 and found["reward"].mean == 0.5
    assert found["accuracy"].stderr == pytest.approx(0.25)
    assert list(changes(before, after, is_graded=False)) == ["reward"]
    assert changes([], after, is_graded=True) == {}


def test_each_estimate_is_a_declared_metric():
    answers = [replace(a, answer="1") for a in [*graded(0, 1, 0, 1), *graded(1, 0, 0, 1)]]
    values = flat(measured(answers, 3)) | facts(answers)
    values |= flat(changes(answers, answers, is_graded=True), "_change")
    assert "pass_at_2_stderr" in values and "accuracy_change_stderr" in values
    for key in (*values, "time_s", "prompts"):
        assert names_a_known_metric(f"eval/math-500/{key}")
    assert metric_of("eval/x/pass_at_8_stderr").key == "eval/<name>/pass_at_<k>_stderr"
    assert metric_of("eval/x/time_s").timing and not metric_of("eval/x/reward").timing


def test_a_file_gives_back_its_answers_and_passes_over_others(tmp_path, caplog):
    answers = [*graded(0, 1, 0), answer(1, completion="\ud800 ünï\n", answer="½", reward=0.1 + 0.2)]
    file = tmp_path / "3.jsonl"
    write_answers(file, answers)
    assert [path.name for path in tmp_path.iterdir()] == ["3.jsonl"]
    read = read_answers_of(file)
    assert read[:2] == answers[:2] and read[2].reward == 0.1 + 0.2 and read[2].answer == "½"
    infinite = json.dumps({**vars_of(answers[0]), "reward": "nan"})
    with file.open("a") as stream:
        stream.write('{"index": 0}\n[]\nnonsense\n' + infinite + "\n{to")
    assert read_answers_of(file) == read
    assert "4 lines are no answers" in caplog.text


def vars_of(one):
    return {name: getattr(one, name) for name in EvalAnswer.__dataclass_fields__}


@pytest.mark.parametrize(
    ("grader", "completion", "read"),
    [
        (exact, "47 #47", "47"),
        (exact, "<think>9</think> 12 ", "12"),
        (exact, " seven ", "seven"),
        (exact, "", None),
        (gsm8k, "9*2 = 18\n#### 18.0", "18"),
        (gsm8k, "So it is $1,018.", "1018"),
        (same_math, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (same_math, r"\boxed{\frac{1}{2}", None),
        (same_math, "<think>it is 3", None),
    ],
)
def test_built_in_graders_read_final_answers(grader, completion, read):
    assert read_answer(grader, completion) == read


class Halves:
    """One of two processes that answer every second prompt; the other one's answers are given."""

    count = players = 2
    player = 1

    def __init__(self, others):
        self.others = [vars_of(one) for one in others]

    def gather_json(self, value):
        return [self.others, json.loads(json.dumps(value))]


def test_the_answers_of_all_processes_are_in_the_order_of_the_prompts(tmp_path):
    others = [answer(0, 0), answer(0, 1), answer(2, 0), answer(2, 1)]
    own = [answer(1, 0), answer(1, 1), answer(3, 0, parts={"correct": 1.0}), answer(3, 1)]
    named = NamedEvaluation(
        name="x",
        inputs=None,
        evaluation=SimpleNamespace(lockstep=Halves(others)),
        folder=tmp_path,
    )
    assert named._gather(own) == sorted(others + own, key=lambda a: (a.index, a.sample))


def test_a_users_reward_says_which_answer_it_reads(caplog):
    texts = {3: "It is <b>7</b> seven", 4: ""}
    episode = SimpleNamespace(
        token_ids=np.array([3], np.int32), drawn=np.array([True]), num_turns=1, messages=()
    )
    empty = SimpleNamespace(
        token_ids=np.array([4], np.int32), drawn=np.array([True]), num_turns=1, messages=()
    )

    def scorer(function):
        judge = Judge(function=function, name="own.py:f")
        return RewardScorer([judge], lambda ids: "".join(texts[int(i)] for i in ids), timeout_s=5)

    def own(completion, reference):
        return 0.0

    assert scorer(own).final_answer(episode) is None
    own.final_answer = lambda completion: completion.split()[-1]
    assert scorer(own).final_answer(episode) == "seven"
    assert scorer(own).final_answer(empty) is None
    assert "reward.function = 'own.py:f': final_answer raised IndexError" in caplog.text
    assert scorer(exact).final_answer(episode) == "It is <b>7</b> seven"
