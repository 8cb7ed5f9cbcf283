"""Rewards: right and wrong answers, and what happens when a user's function misbehaves."""

import asyncio
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.config.schema import Reward
from jaxrl_async.errors import ConfigError, RolloutError, RolloutTimeout
from jaxrl_async.scorers import rewards
from jaxrl_async.scorers.rewards import RewardScorer, exact, find_reward, gsm8k, make_scorer
from jaxrl_async.types import Episode, Prompt, StopReason


def spell(ids):
    """Decode for these tests: a token is a character's code."""
    return "".join(chr(i) for i in ids)


def prompt(text="1+1=", reference="2"):
    ids = np.array([ord(c) for c in text], np.int32)
    return Prompt(prompt_id=7, position=3, token_ids=ids, text=text, reference=reference)


def episode(*parts):
    """Strings are drawn, bytes are not."""
    ids = [ord(c) if isinstance(c, str) else c for part in parts for c in part]
    drawn = np.array([isinstance(part, str) for part in parts for _ in part])
    return Episode(
        token_ids=np.array(ids, np.int32),
        drawn=drawn,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.where(drawn, 0, -1).astype(np.int32),
        stop=StopReason.EOS,
    )


def score(scorer, *episodes, of=None):
    return asyncio.run(scorer(episodes, of or prompt()))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("7+5=12 #132", 1),
        ("#1 #132 ", 1),
        ("132", 1),
        ("#131", 0),
        ("#132 #", 0),
        ("#1320", 0),
        ("", 0),
    ],
)
def test_exact_compares_what_follows_the_last_mark(completion, reward):
    assert exact("", completion, "132") == reward


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        ("so 9 * 2 = $18 every day\n#### 18", "18", 1),
        ("#### $1,234.50", "1234.5", 1),
        ("the answer is 18.", "18", 1),
        ("18 and then 19", "18", 0),
        ("#### 18 dollars of 20", "18", 1),
        ("#### none, 18", "18", 1),
        ("18 ####", "18", 0),
        ("18", "-18", 0),
        ("#### -$3", "-3", 1),
        ("nothing", "18", 0),
        ("nothing", "nothing", 0),
        ("0.50", ".5", 1),
        ("9" * 5000, "18", 0),
    ],
)
def test_gsm8k_compares_final_numbers(completion, reference, reward):
    assert gsm8k("", completion, reference) == reward


@given(completion=st.text(), reference=st.text())
def test_built_in_rewards_judge_any_text(completion, reference):
    assert exact("", completion, reference) in (0, 1)
    assert gsm8k("", completion, reference) in (0, 1)


@given(number=st.integers(-(10**9), 10**9))
def test_gsm8k_takes_every_way_to_write_a_whole_number(number):
    for written in (f"{number}", f"{number:,}", f"{number}.0", f"${number}"):
        assert gsm8k("", f"#### {written}", str(number)) == 1


def test_a_scorer_gives_one_score_per_episode_in_order():
    scores = score(make_scorer(Reward(), spell), episode(b"1+1=", "#2"), episode(b"1+1=", "#3"))
    assert [s.reward for s in scores] == [1.0, 0.0]


def test_only_what_the_policy_drew_is_judged():
    seen = []
    scorer = RewardScorer(lambda p, c, r: seen.append((p, c, r)) or 0.0, spell, timeout_s=5)
    score(scorer, episode(b"1+1=", "ab", b"tool", "c"))
    assert seen == [("1+1=", "abc", "2")]


@pytest.fixture
def user_file(tmp_path):
    def write(code):
        path = tmp_path / "mine.py"
        path.write_text(code)
        return path

    return write


def test_a_users_function_is_loaded_and_its_parts_are_summed(user_file):
    path = user_file(
        "def f(prompt, completion, reference):\n    return {'a': 1, 'b': len(completion) / 2}\n"
    )
    (got,) = score(make_scorer(Reward(function=f"{path}:f"), spell), episode("abc"))
    assert (got.reward, dict(got.parts)) == (2.5, {"a": 1.0, "b": 1.5})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1/0", "fails to load: ZeroDivisionError"),
        ("def f(", "fails to load: SyntaxError"),
        ("g = 1", "has no function f"),
        ("f = 1", "has no function f"),
        ("def f(a): pass", "cannot be called as reward"),
        ("async def f(a, b, c): pass", "is async"),
    ],
)
def test_a_users_file_that_cannot_work_is_refused_at_load(user_file, code, expected):
    with pytest.raises(ConfigError, match=expected):
        find_reward(f"{user_file(code)}:f")


def test_unknown_rewards_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'exact'"):
        find_reward("exct")
    with pytest.raises(ConfigError, match="there is no file"):
        find_reward("none.py:f")


@pytest.mark.parametrize(
    "value", [None, "1", float("nan"), float("inf"), [1], {"a": None}, {"a": float("nan")}]
)
def test_a_reward_that_is_no_finite_number_is_an_error_naming_the_prompt(value):
    scorer = RewardScorer(lambda p, c, r: value, spell, timeout_s=5, name="mine")
    with pytest.raises(RolloutError, match=r"reward mine on prompt 7 \('1\+1='\) gave"):
        score(scorer, episode("a"))


@pytest.mark.parametrize(
    "value", [1, True, np.float32(1), np.int64(1), {"a": 0.5, "b": np.float64(0.5)}]
)
def test_any_real_number_is_a_reward(value):
    (got,) = score(RewardScorer(lambda p, c, r: value, spell, timeout_s=5), episode("a"))
    assert got.reward == 1.0 and type(got.reward) is float


def test_an_exception_in_a_reward_is_told_with_its_cause():
    def broken(p, c, r):
        raise KeyError("x")

    with pytest.raises(RolloutError, match="raised KeyError: 'x'") as caught:
        score(RewardScorer(broken, spell, timeout_s=5), episode("a"))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_reward_that_hangs_costs_its_time_limit_and_no_more():
    code = """
import asyncio, time, numpy as np
from jaxrl_async.errors import RolloutError
from jaxrl_async.scorers.rewards import RewardScorer
from jaxrl_async.types import Prompt, Episode, StopReason
p = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")
z = np.zeros(1, np.int32)
e = Episode(token_ids=z, drawn=z == 0, logprobs=z, versions=z, stop=StopReason.EOS)
try:
    asyncio.run(RewardScorer(lambda *a: time.sleep(60), lambda ids: "", timeout_s=0.1)((e,), p))
except RolloutError as error:
    print(error)
"""
    started = time.monotonic()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert "took more than 0.1 s" in out.stdout
    assert time.monotonic() - started < 30  # it did not wait for the thread at exit


def test_a_slow_reward_does_not_stop_the_loop():
    async def both():
        ticks = 0
        scorer = RewardScorer(lambda *a: time.sleep(0.3) or 1.0, spell, timeout_s=5)
        task = asyncio.ensure_future(scorer((episode("a"),), prompt()))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return ticks, task.result()

    ticks, (got,) = asyncio.run(both())
    assert ticks > 3 and got.reward == 1.0


def test_calls_that_never_come_back_do_not_pile_up_without_end(monkeypatch):
    monkeypatch.setattr(rewards, "MAX_STUCK", 2)
    release = threading.Event()
    scorer = RewardScorer(lambda *a: release.wait(60) and 1.0, spell, timeout_s=0.05)
    for _ in range(2):
        with pytest.raises(RolloutTimeout, match="took more than"):
            score(scorer, episode("a"))
    with pytest.raises(RolloutError, match="2 earlier calls have not come back"):
        score(scorer, episode("a"))
    release.set()
    for thread in scorer._stuck:
        thread.join(30)
    assert score(scorer, episode("a"))[0].reward == 1.0


def test_scorers_need_no_jax():
    code = "import sys, jaxrl_async.scorers.rewards; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
