"""Whether a turn does what a given one does, case by case."""

import itertools
import json
from collections import Counter

import pytest

from jaxrl_async.tasks.turn_match import (
    REASONS,
    MatchRules,
    TurnReward,
    can_pair,
    mismatch_of,
    same_value,
    similar,
)


def call(name: str, **arguments: object) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def calls(*given: dict) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": list(given)}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


BROKEN = {"tool_call_errors": [{"text": "{", "reason": "JSON"}]}
FIND = call("find", city="Paris", days=2)
CASES = [
    (calls(FIND), calls(FIND), {}, ""),
    (calls(FIND), calls(call("find", days=2.0, city="  PARIS ")), {}, ""),
    (calls(FIND), calls(call("find", city="Paris", days=3)), {}, "arguments"),
    (calls(FIND), calls(call("find", city="Paris")), {}, "arguments"),
    (calls(FIND), calls(call("find", city="Paris", days=2, more=1)), {}, "arguments"),
    (calls(FIND), calls(call("find", city="Paris", days=9)), {"ignored": frozenset({"days"})}, ""),
    (calls(FIND), calls(call("find", city="Rome", days=9)), {"calls": "names"}, ""),
    (calls(FIND), calls(call("book", city="Paris", days=2)), {}, "tool"),
    (calls(FIND), calls(call("book", city="Paris", days=2)), {"calls": "names"}, "tool"),
    (calls(FIND), calls(FIND, FIND), {}, "number_of_calls"),
    (calls(FIND), answer("Paris"), {}, "no_call"),
    (calls(FIND), {**answer(""), **BROKEN}, {}, "malformed"),
    (calls(FIND), {**calls(FIND), **BROKEN}, {}, "malformed"),
    (calls(FIND, call("book")), calls(call("book"), FIND), {}, ""),
    (calls(FIND, call("book")), calls(FIND, FIND), {}, "tool"),
    (answer("It rains."), answer("No idea"), {}, ""),
    (answer("It rains."), answer("No idea"), {"text": "same"}, "text"),
    (answer("It  rains."), answer("it rains."), {"text": "same"}, ""),
    (answer("It rains now."), answer("it rains"), {"text": "same", "similarity": 0.4}, ""),
    (answer("It rains."), calls(FIND), {}, "call"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "turn", "rules", "why"), CASES)
def test_a_turn_matches_or_misses_for_its_reason(given, turn, rules, why):
    assert mismatch_of(given, turn, MatchRules(**rules)) == why
    assert not why or why in REASONS


def test_several_calls_are_paired_where_a_pairing_exists():
    """By trying all orders; a greedy pairing fails on some of these."""
    tables = itertools.product([0, 1], repeat=9)
    for table in tables:
        fits = lambda a, b, t=table: bool(t[3 * a + b])  # noqa: E731
        expected = any(
            all(fits(i, other) for i, other in enumerate(order))
            for order in itertools.permutations(range(3))
        )
        assert can_pair(range(3), range(3), fits) == expected


@pytest.mark.parametrize(
    ("given", "value", "same"),
    [
        (1, 1.0, True),
        (1, 1 + 5e-7, True),
        (1, 1 + 5e-6, False),
        (1e9, 1e9 + 0.5, True),
        (1e9, 1e9 + 100, False),
        (4915112345678, 4915112345679, False),
        (4915112345678, 4915112345678.0, True),
        (10**400, 10**400, True),
        (10**400, 1.5, False),
        (1, True, False),
        (False, 0, False),
        (None, None, True),
        (None, "", False),
        ("1", 1, False),
        ([1, [2]], [1, [2]], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ({"a": {"b": "X y"}}, {"a": {"b": "x  Y"}}, True),
        ({"a": 1}, {"b": 1}, False),
    ],
)
def test_values_are_the_same_by_what_they_are(given, value, same):
    assert same_value(given, value) is same


def test_the_similarity_of_texts_is_the_f1_of_their_words():
    first, second = "the red red fox", "a red fox"
    a, b = Counter(first.split()), Counter(second.split())
    common = sum(min(a[word], b[word]) for word in a)
    f1 = 2 * common / (a.total() + b.total())
    assert f1 == pytest.approx(4 / 7)
    assert similar(first, second, f1 - 1e-9) and not similar(first, second, f1 + 1e-6)
    assert not similar("red fox", "fox red") and similar("red fox", "fox red", 0.99)
    assert similar("", " ") and not similar("", "a", 0.1)


@pytest.mark.full
def test_the_reward_is_of_the_last_message_and_says_why_it_is_0():
    reward, logged = TurnReward(MatchRules()), dict[str, float]()
    messages = [{"role": "user", "content": "weather?"}, calls(FIND)]
    assert reward(messages, calls(FIND), "eos", logged.__setitem__) == {"correct": 1.0}
    assert set(logged.values()) == {0.0} and len(logged) == len(REASONS)
    assert reward(messages, answer("x"), "eos", logged.__setitem__) == {"correct": 0.0}
    assert logged["missed_call"] == 1.0
    assert reward(messages, calls(FIND), "length", logged.__setitem__) == {"correct": 0.0}
    assert logged["missed_cut_off"] == 1.0 and logged["missed_call"] == 0.0
