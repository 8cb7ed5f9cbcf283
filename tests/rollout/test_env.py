"""Environments that hang, or whose reply is none."""

import asyncio

import numpy as np
import pytest

from jaxrl_async.errors import RolloutError, RolloutTimeout
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.ports.rollout import Reply
from jaxrl_async.ports.run import SavesState
from jaxrl_async.rollout.env import GuardedEnvs, SingleTurn, snapshot
from jaxrl_async.testing.fakes import make_prompt


class Scripted:
    """An environment with one reply."""

    def __init__(self, reply):
        self.reply = reply

    async def step(self, prompt, completion):
        if self.reply == "hang":
            await asyncio.sleep(3600)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


def step(make_env, timeout_s=0.05):
    faults = FaultCounts()
    guard = GuardedEnvs(make_env, timeout_s=timeout_s, vocab_size=100, count=faults.add)
    try:
        found = asyncio.run(guard(make_prompt(3)).step(make_prompt(3), None))
    except Exception as error:
        found = error
    assert guard.oldest_s() == 0
    return found, {k: n for k, n in faults.read().items() if n}


def test_a_sound_reply_passes():
    reply = Reply(token_ids=np.array([4, 5], np.int32), done=False)
    assert step(lambda p: Scripted(reply)) == (reply, {})
    found, faults = step(SingleTurn)
    assert found.done and not faults


def test_one_that_hangs_is_late():
    error, faults = step(lambda p: Scripted("hang"))
    assert isinstance(error, RolloutTimeout) and faults == {"env_timeouts": 1}
    assert "prompt 3" in str(error) and "faults.env_timeout_s" in str(error)


def test_its_own_exception_is_told_with_its_prompt_and_cause():
    error, faults = step(lambda p: Scripted(KeyError("mine")))
    assert isinstance(error, RolloutError) and not faults
    assert str(error) == "prompt 3: the environment raised KeyError: 'mine'. Correct it."
    assert isinstance(error.__cause__, KeyError)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (None, "None"),
        (Reply(token_ids=np.array([[1]]), done=True), r"\(1, 1\)"),
        (Reply(token_ids=np.array([1.5]), done=True), "float64"),
        (Reply(token_ids=np.array([float("nan")]), done=True), "float64"),
        (Reply(token_ids="text", done=True), "shape"),
        (Reply(token_ids=np.array([1]), done="yes"), "done='yes'"),
        (Reply(token_ids=np.array([5, 1000, -7, 100]), done=True), r"\[1000, -7, 100\], 3 of 4"),
        (Reply(token_ids=np.array([2**40]), done=True), "1099511627776"),
        (Reply(token_ids=np.array([True]), done=True), "bool"),
        (Reply(token_ids=[[1], [2, 3]], done=True), "different lengths"),
    ],
)
def test_what_is_no_reply_is_refused(reply, words):
    error, faults = step(lambda p: Scripted(reply))
    assert isinstance(error, RolloutError) and faults == {"refused_replies": 1}
    with pytest.raises(RolloutError, match=words):
        raise error


class Remembers(Scripted):
    """One that can be saved."""

    def state(self):
        return {"at": 3}

    def restore(self, state):
        self.at = state["at"]


def test_an_environment_can_be_saved_through_its_guard_where_it_can_be_without():
    made = []

    def make(kind):
        made.append(kind(Reply(token_ids=np.zeros(0, np.int32), done=True)))
        return made[-1]

    limits = {"timeout_s": 1.0, "vocab_size": 9}
    plain = GuardedEnvs(lambda p: make(Scripted), **limits)(make_prompt())
    saves = GuardedEnvs(lambda p: make(Remembers), **limits)(make_prompt())
    assert not isinstance(plain, SavesState) and isinstance(saves, SavesState)
    saves.restore(saves.state())
    assert made[-1].at == 3


class Grows(Scripted):
    """Its state is one list that it goes on to change."""

    def __init__(self, kept=None):
        self.kept = [] if kept is None else kept

    def state(self):
        return {"kept": self.kept, "at": (1, np.arange(3))}

    def restore(self, state):
        raise ValueError("cannot")


def test_a_state_is_kept_as_it_was_when_it_was_asked_for():
    env = Grows()
    state = snapshot(env)
    env.kept.append(5)
    assert state["kept"] == [] and state["at"][1].tolist() == [0, 1, 2]
    assert snapshot(Scripted(None)) is None


def test_a_state_that_no_checkpoint_can_hold_fails_when_it_is_asked_for():
    circle: list = []
    circle.append(circle)
    for strange in (object(), {1: 2}, np.array([object()]), circle):
        with pytest.raises(RolloutError, match="a value that cannot be saved in a checkpoint"):
            snapshot(Grows(strange))
    guarded = GuardedEnvs(lambda p: Grows(), timeout_s=1.0, vocab_size=9)(make_prompt(3))
    with pytest.raises(RolloutError, match=r"its restore\(\) raised ValueError: cannot"):
        guarded.restore({})
