"""The embedded task: right answers, determinism, and no held-out problem in any training stream."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.config.schema import AdditionSection
from jaxrl_async.data.addition import (
    ALPHABET,
    AdditionStream,
    Problem,
    addition_tokenizer,
    held_out,
    worked_answer,
)
from jaxrl_async.errors import ConfigError

NUMBERS = st.integers(0, 9999)


@given(a=NUMBERS, b=NUMBERS)
def test_the_worked_answer_is_right_column_by_column(a, b):
    work, _, total = worked_answer(a, b).rpartition("#")
    assert int(total) == a + b == int(Problem(a=a, b=b).reference)
    carry, digits = 0, []
    for column, step in enumerate(work.split()):
        left, right = step.split("=")
        summands = [int(x) for x in left.split("+")]
        assert summands == [a // 10**column % 10, b // 10**column % 10, *([1] if carry else [])]
        assert sum(summands) == int(right)
        carry = int(right) // 10
        digits.append(int(right) % 10)
    written = f"{carry or ''}" + "".join(str(d) for d in reversed(digits))
    assert int(written) == a + b


@given(a=NUMBERS, b=NUMBERS)
def test_answers_with_four_digits_have_at_most_40_characters_of_the_alphabet(a, b):
    answer = worked_answer(a, b)
    assert len(answer) <= 40
    assert set(answer + Problem(a=a, b=b).prompt) <= set(ALPHABET)


def test_a_problem_depends_on_seed_and_index_alone():
    one, two = AdditionStream(AdditionSection(), 7), AdditionStream(AdditionSection(), 7)
    forward = [one[i] for i in range(50)]
    assert forward == [two[i] for i in reversed(range(50))][::-1]
    assert forward != [AdditionStream(AdditionSection(), 8)[i] for i in range(50)]


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_the_stream_never_holds_a_held_out_problem_in_either_order(digits):
    section = AdditionSection(digits=digits, eval_size=20)
    held = {frozenset((p.a, p.b)) for p in held_out(digits, 20)}
    assert len(held) == 20
    stream = AdditionStream(section, 0)
    assert not [p for p in map(stream.__getitem__, range(2000)) if frozenset((p.a, p.b)) in held]


def test_held_out_and_training_problems_have_the_same_lengths():
    def mean_length(problems):
        return np.mean([len(p.prompt) for p in problems])

    stream = AdditionStream(AdditionSection(), 0)
    # both are 2 * 2.5 + 2 characters on average; the standard error over 256 is below 0.1
    assert mean_length(held_out(4, 256)) == pytest.approx(7.0, abs=0.4)
    assert mean_length([stream[i] for i in range(2000)]) == pytest.approx(7.0, abs=0.2)


def test_more_held_out_problems_than_half_of_all_are_refused():
    assert len(held_out(1, 27)) == 27
    with pytest.raises(ConfigError, match=r"eval_size = 28 must be at most 27"):
        held_out(1, 28)


@settings(max_examples=50)
@given(text=st.text(alphabet=ALPHABET))
def test_the_tokenizer_gives_every_text_back_one_token_a_character(text):
    tokenizer = addition_tokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_the_doctests_hold():
    examples = re.findall(r">>> worked_answer\((\d+), (\d+)\)\n\s+'(.*)'", worked_answer.__doc__)
    assert len(examples) == 2
    assert all(worked_answer(int(a), int(b)) == shown for a, b, shown in examples)


def test_a_slip_shows_in_its_column_and_in_the_sum():
    assert worked_answer(47, 85, slip=(1, -1)) == "7+5=12 4+8+1=12 #122"
    assert worked_answer(47, 85, slip=(0, 1)) == "7+5=13 4+8+1=13 #133"
