"""The digests by which a resumed run knows other rewards and other held-out records."""

import functools
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jaxrl_async.config.schema import Config
from jaxrl_async.run.checkpoint.inputs_digest import (
    HELD_OUT,
    REWARD,
    code_of,
    inputs_digest,
    warn_of_changes,
)
from jaxrl_async.tasks.task import NO_TASK, Task
from jaxrl_async.types import Prompt


def prompt(answer):
    ids = np.array([1], np.int32)
    return Prompt(
        prompt_id=0,
        position=0,
        token_ids=ids,
        text="q",
        reference=answer,
        columns={"answer": answer},
    )


def longer_than(number):
    def reward(completion):
        return float(len(completion) > number)

    return reward


def module_of(source):
    module = types.ModuleType("rewards")
    exec(source, vars(module))
    return module


SOURCE = "W = {}\ndef helper(x):\n    return x * W\ndef reward(completion):\n    return helper(1)\n"


DECORATED = """
import functools
def times(k):
    def made(g):
        @functools.wraps(g)
        def scaled(*a, **b):
            return k * g(*a, **b)
        return scaled
    return made
@times({})
def reward(completion):
    return {}
"""


def with_keyword(number):
    def reward(completion, *, least=number):
        return float(len(completion) > least)

    return reward


def documented(words):
    def inner():
        return 1.0

    inner.__code__ = module_of(f"def f():\n    {words}return 1.0\n").f.__code__

    def reward(completion):
        return inner()

    return reward


class Counts:
    least = 1

    def __call__(self, completion):
        return float(len(completion) > self.least)


def test_code_differs_where_the_reward_does():
    def text(thing):
        return "\n".join(code_of(thing))

    same = [
        (longer_than(1), longer_than(1)),
        (Counts(), Counts()),
        (documented("'one'\n    "), documented("'another'\n    ")),
        (documented("'one'\n    "), documented("")),
        (with_keyword(1), with_keyword(1)),
        (module_of(DECORATED.format(1, 5)).reward, module_of(DECORATED.format(1, 5)).reward),
        (longer_than(np.arange(3)), longer_than(np.arange(3))),
        (module_of(SOURCE.format(2)).reward, module_of("\n\n# more\n" + SOURCE.format(2)).reward),
    ]
    other = [
        (longer_than(1), longer_than(2)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (module_of(SOURCE.format(2)).reward, module_of(SOURCE.format(3)).reward),
        (lambda completion: 1.0, lambda completion: 2.0),
        (lambda completion: "a", lambda completion: "b"),
        (with_keyword(1), with_keyword(2)),
        (module_of(DECORATED.format(1, 5)).reward, module_of(DECORATED.format(2, 5)).reward),
        (module_of(DECORATED.format(1, 5)).reward, module_of(DECORATED.format(1, 6)).reward),
        (functools.cache(longer_than(1)), functools.cache(longer_than(2))),
        (longer_than({"a", "b"}), longer_than({"a", "c"})),
        (longer_than([frozenset({1})]), longer_than([frozenset({2})])),
        (longer_than(np.array([1, 2])), longer_than(np.array([1, 3]))),
        (longer_than(np.zeros(5000)), longer_than(np.eye(1, 5000, 2500)[0])),
        (longer_than(np.zeros(2)), longer_than(np.zeros(2, np.float32))),
        (longer_than(re.compile("a" * 300 + "b")), longer_than(re.compile("a" * 300 + "c"))),
    ]
    assert all(text(a) == text(b) for a, b in same)
    assert all(text(a) != text(b) for a, b in other)


@pytest.mark.full
def test_a_set_says_the_same_in_each_process():
    code = (
        "from jaxrl_async.run.checkpoint.inputs_digest import code_of\n"
        "K = {'a', 'b', 'c', ('d', 1)}\n"
        "def f(completion): return completion in K or completion in {'x', 'y', 'z'}\n"
        "print(list(code_of(f)))"
    )
    one, two = (
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    )
    assert one == two and "'set [" in one and "'frozenset [" in one


def test_the_digests_follow_rewards_files_and_held_out_records(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def reward(p, c, r): return 1.0\n")
    own = Config.model_validate({"reward": {"function": f"{file}:reward"}})
    graded = Config.model_validate({"reward": {"function": "gsm8k"}})
    held_out = (prompt("1"), prompt("2"))
    before = inputs_digest(own, NO_TASK, held_out)
    assert before == inputs_digest(own, NO_TASK, held_out)
    file.write_text("def reward(p, c, r): return 2.0\n")
    assert inputs_digest(own, NO_TASK, held_out)[REWARD] != before[REWARD]
    assert inputs_digest(graded, NO_TASK, held_out)[REWARD] != before[REWARD]
    changed = inputs_digest(own, NO_TASK, (prompt("1"), prompt("3")))
    assert changed[HELD_OUT] != before[HELD_OUT]
    light, heavy = (
        Config.model_validate({"reward": {"function": ["gsm8k", {"math": {"weight": w}}]}})
        for w in (0.1, 0.9)
    )
    light, heavy = (inputs_digest(config, NO_TASK, held_out) for config in (light, heavy))
    assert light[REWARD] != heavy[REWARD]
    tasks = [Task(reward=longer_than(n)) for n in (1, 2)]
    one, two = (inputs_digest(Config(), task, held_out) for task in tasks)
    assert one[REWARD] != two[REWARD] and one[HELD_OUT] == two[HELD_OUT] == before[HELD_OUT]


def test_a_change_is_logged_and_an_older_checkpoint_has_none(caplog):
    now = {REWARD: "a", HELD_OUT: "b"}
    for before in (None, {}, now):
        warn_of_changes(before, now, Path("runs/r"))
    assert not caplog.messages
    warn_of_changes({REWARD: "c", HELD_OUT: "b"}, now, Path("runs/r"))
    (message,) = caplog.messages
    assert "resumed with another reward than before" in message
