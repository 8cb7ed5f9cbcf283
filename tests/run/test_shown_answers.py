"""Answers to held-out prompts at each evaluation, and those that the end of a run shows."""

from dataclasses import replace

import pytest

from jaxrl_async.rollout.evaluate import EvalSample
from jaxrl_async.run.shown_answers import (
    MOST_CHARACTERS,
    NUM_SHOWN,
    answers_writer,
    before_and_after,
)

pytestmark = pytest.mark.full


def sample(number, version, completion="x", reward=0.0):
    return EvalSample(
        index=number,
        seat="",
        prompt=f"a system's words\nquestion {number}",
        completion=completion,
        reference="y",
        reward=reward,
        version=version,
    )


def test_the_first_and_the_last_answers_are_shown_beside_each_other(tmp_path):
    file = tmp_path / "answers.jsonl"
    write = answers_writer(file)
    for version in (0, 5, 10):
        write([sample(n, version, f"says\n  {n}  at {version}", version / 10) for n in range(8)])
    lines = before_and_after(file)
    assert len(lines) == 3 * NUM_SHOWN
    assert lines[:3] == [
        "question 0",
        "  step 0     reward 0.0   says 0 at 0",
        "  step 10    reward 1.0   says 0 at 10",
    ]


def test_a_reward_is_shown_with_three_decimals_and_one_without_a_number_as_it_is(tmp_path):
    file = tmp_path / "answers.jsonl"
    write = answers_writer(file)
    write([sample(0, 0, reward=0.3 - 0.2)])
    write([sample(0, 1, reward=None)])
    shown = [line.split() for line in before_and_after(file)[1:]]
    assert [words[2:4] for words in shown] == [["reward", "0.1"], ["reward", "None"]]


def test_a_long_answer_is_cut_and_a_prompt_that_is_gone_is_left_out(tmp_path):
    file = tmp_path / "answers.jsonl"
    write = answers_writer(file)
    write([sample(0, 0), sample(1, 0)])
    write([sample(1, 2, "9" * 1000)])
    lines = before_and_after(file)
    assert lines[0] == "question 1" and len(lines) == 3
    assert lines[2].endswith("...") and lines[2].count("9") == MOST_CHARACTERS - 3


def test_nothing_is_shown_of_a_run_that_was_evaluated_once_or_never(tmp_path):
    file = tmp_path / "answers.jsonl"
    assert before_and_after(file) == []
    answers_writer(file)([sample(0, 0)])
    assert before_and_after(file) == []


def test_any_answer_is_shown_whatever_it_reads_like(tmp_path):
    """ "inf" is a text, not a number; and a terminal takes no command from an answer."""
    file = tmp_path / "answers.jsonl"
    write = answers_writer(file)
    write([sample(0, 0, "inf", float("nan"))])
    write([sample(0, 3, "\x1b]0;owned\x07 nan \ud800")])
    with file.open("a") as torn:
        torn.write('{"version": 9, "pro')
    lines = before_and_after(file)
    assert lines[1:] == [
        "  step 0     reward nan   inf",
        "  step 3     reward 0.0   \ufffd]0;owned\ufffd nan ?",
    ]


def test_answers_to_prompts_of_the_same_text_are_not_mixed_up(tmp_path):
    file = tmp_path / "answers.jsonl"
    write = answers_writer(file)
    for version in (0, 2):
        write([replace(sample(n, version, f"{n} at {version}"), prompt="the same") for n in (0, 1)])
    assert [line.split()[-3:] for line in before_and_after(file) if "at" in line] == [
        ["0", "at", "0"], ["0", "at", "2"], ["1", "at", "0"], ["1", "at", "2"],
    ]  # fmt: skip
