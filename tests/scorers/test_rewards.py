"""Rewards: what a function is called with, what it may give, and what happens when it fails."""

import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from threading import Lock

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lettered import episode
from tokenizers import AddedToken

from jaxrl_async.config.rules import check_rules
from jaxrl_async.config.schema import Config, RewardSection
from jaxrl_async.data.tokenizer import PRINTABLE, Tokenizer, character_tokenizer
from jaxrl_async.errors import ConfigError, RolloutError, RolloutTimeout
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.run.builders.scoring import make_scorers
from jaxrl_async.scorers.guard import checked, try_once
from jaxrl_async.scorers.rewards import Judge, RewardScorer, find_reward, make_scorer
from jaxrl_async.tasks import usercode
from jaxrl_async.tasks.task import Task
from jaxrl_async.types import Episode, Prompt, Score, StopReason


def spell(ids):
    """Decode for these tests: a token is a character's code."""
    return "".join(chr(i) for i in ids)


def prompt(text="1+1=", reference="2", **columns):
    ids = np.array([ord(c) for c in text], np.int32)
    return Prompt(
        prompt_id=7, position=3, token_ids=ids, text=text, reference=reference, columns=columns
    )


def scorer_of(*functions, timeout_s=20.0, threads=4):
    """Of functions, or of pairs of one and its weight."""
    pairs = [f if isinstance(f, tuple) else (f, 1.0) for f in functions]
    judges = [Judge(function=f, name=f"mine{i}", weight=w) for i, (f, w) in enumerate(pairs)]
    return RewardScorer(judges, spell, timeout_s=timeout_s, threads=threads)


def score(scorer, *episodes, of=None):
    scorer = scorer if isinstance(scorer, RewardScorer) else scorer_of(scorer)
    return asyncio.run(scorer(episodes, of or prompt()))


def test_a_scorer_gives_one_score_per_episode_in_order():
    scores = score(
        make_scorer(RewardSection(), spell), episode(b"1+1=", "#2"), episode(b"1+1=", "#3")
    )
    assert [(s.reward, s.parts) for s in scores] == [(1, {"correct": 1}), (0, {"correct": 0})]


# ---- what a function is called with


def test_three_texts_in_order_whatever_they_are_called():
    for function in (
        lambda p, c, r: [p, c, r] == ["1+1=", "abc", "2"],
        lambda *texts: texts == ("1+1=", "abc", "2"),
        lambda prompt, completion, reference: (
            (prompt, completion, reference) == ("1+1=", "abc", "2")
        ),
        lambda reference, completion, prompt: (
            (prompt, completion, reference) == ("1+1=", "abc", "2")
        ),  # by name
        lambda p, c, r, *, tests, most=3: (p, c, r, tests, most) == ("1+1=", "abc", "2", "t", 3),
    ):
        (got,) = score(function, episode(b"1+1=", "ab", b"tool", "c"), of=prompt(tests="t"))
        assert got.reward == 1


def test_what_it_asks_for_by_name():
    seen = {}

    def by_name(completion, token_ids, stop, versions, logprobs, episode, columns, tests, other=5):
        seen.update(locals())
        return 0

    sampled = episode(b"x", "ab", b"tool", "c", stop=StopReason.LENGTH)
    score(by_name, sampled, of=prompt(tests=["t"], b=2))
    assert seen["completion"] == spell(seen["token_ids"]) == "abc" and seen["stop"] == "length"
    assert seen["versions"].tolist() == [4] * 3 and seen["logprobs"].tolist() == [-0.5] * 3
    assert seen["episode"].token_ids.tolist() == sampled.token_ids.tolist()
    assert dict(seen["columns"]) == {"tests": ["t"], "b": 2}
    assert (seen["tests"], seen["other"]) == (["t"], 5)


def test_everything_and_a_column_never_hides_what_is_ours():
    (got,) = score(
        lambda **all: float(all["completion"] == "a" and all["b"] == 2 and "episode" in all),
        episode("a"),
        of=prompt(b=2, completion="of the record"),
    )
    assert got.reward == 1
    (got,) = score(lambda p, c, r, **rest: len(rest["tests"]), episode("a"), of=prompt(tests="tt"))
    assert got.reward == 2


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("answer, reference, prompt", "reference"),
        ("reference, answer, prompt", "reference"),
        ("prompt, reference, answer", "reference"),
        ("answer, prompt, r", "prompt"),
        ("p, answer, columns", "columns"),
        ("completion, prompt, reference, /", "completion"),
        ("p, answer, tests", "tests"),
        ("prompt, tests, reference", "tests"),
        ("response, ground_truth, extra", "response"),
        ("text, ground_truth, method", "ground_truth"),
        ("text, question, r", "question"),
        ("p, solution, r", "solution"),
        ("label, output, p=1", "label"),
        ("data_source, text, truth", "data_source"),
        ("p, c, solution_str, /", "solution_str"),
        ("solution_strs, truths, extra_infos", "solution_strs"),
    ],
)
def test_no_parameter_is_given_something_else_than_its_name_says(user_file, signature, name):
    path = user_file(f"def r({signature}): return 1")
    with pytest.raises(
        ConfigError, match=f"parameter '{name}' that would receive.*Name the one .* `completion`"
    ):
        make_scorer(
            RewardSection(function=f"{path}:r"), spell, [prompt(tests=1, prompt="of the record")]
        )


@pytest.mark.parametrize("names", ["question, response, label", "query, output, ground_truth"])
def test_other_usual_names_fit_in_their_own_positions(names):
    made = eval(f"lambda {names}: [{names}] == ['1+1=', 'ab', '2']")
    assert score(made, episode("ab"))[0].reward == 1


def test_three_in_order_may_have_the_names_of_their_own_positions(user_file):
    path = user_file("def r(prompt, answer, reference, *, tests): return float(answer == 'a')")
    section = RewardSection(function=f"{path}:r")
    records = [prompt(tests=1, prompt="of the record", reference="too")]
    assert score(make_scorer(section, spell, records), episode("a"), of=records[0])[0].reward == 1


def test_one_call_for_a_whole_group():
    calls = []

    def ranked(prompt, completions, group):
        calls.append(len(group))
        return [{"correct": c == "b", "rank": i} for i, c in enumerate(completions)]

    scores = score(ranked, episode("a"), episode("b"))
    assert calls == [2] and [s.parts for s in scores] == [
        {"correct": 0, "rank": 0},
        {"correct": 1, "rank": 1},
    ]
    for wrong in ([1.0], 1.0, "ab", {"a": 1, "b": 2}, None, {1.0, 0.0}, frozenset({1.0, 0.0})):
        with pytest.raises(RolloutError, match="must give one result for each"):
            score(lambda completions, w=wrong: w, episode("a"), episode("b"))


def test_what_no_record_has_is_refused_before_anything_runs(user_file):
    path = user_file("def f(completion, tets): pass")
    records = [prompt(tests=1), prompt(other=2)]
    with pytest.raises(ConfigError, match=r"asks for 'tets'.*other, tests.*Did you mean 'tests'"):
        make_scorer(RewardSection(function=f"{path}:f"), spell, records)
    path = user_file("def f(completion, tests): return 1")
    assert make_scorer(RewardSection(function=f"{path}:f"), spell, records)
    with pytest.raises(RolloutError, match="asks for 'tests', and the record has no such column"):
        score(lambda completion, tests: 1, episode("a"))
    with pytest.raises(ConfigError, match="'completion', which belongs to one answer"):
        scorer_of(lambda completion, completions: 1)


# ---- several functions


def test_several_functions_are_added_by_weight_and_named(user_file):
    path = user_file("def short(completion):\n    return -len(completion)\n")
    section = RewardSection(function=["exact", {f"{path}:short": {"weight": 0.5}}])
    first, second = score(make_scorer(section, spell), episode("#2"), episode("#3"))
    assert (first.reward, dict(first.parts)) == (0.0, {"correct": 1.0, "short": -2.0})
    assert second.reward == -1.0


def test_the_first_function_says_what_is_correct_and_a_later_one_under_its_name(user_file):
    path = user_file("def f(completion): return {'correct': 0.5, 'short': 1}\n")
    section = RewardSection(function=["exact", {f"{path}:f": {"weight": 0.1}}, "gsm8k"])
    (got,) = score(make_scorer(section, spell), episode("so 2"))
    parts = {"correct": 0, "f.correct": 0.5, "short": 1, "gsm8k.correct": 1}
    assert got.parts == parts and got.reward == pytest.approx(0.15 + 1)
    assert checked((got,), (episode("so 2"),), prompt())
    assert all(metric_of(f"reward/{part}").key == "reward/<part>" for part in parts)
    (got,) = score(make_scorer(RewardSection(function=["gsm8k", "exact"]), spell), episode("so 2"))
    assert got.parts == {"correct": 1, "exact.correct": 0}


def test_a_part_has_one_meaning_in_all_answers_of_a_group():
    def sometimes(completion):
        return {"correct": 1} if completion == "a" else {"other": 1}

    scores = score(scorer_of(sometimes, lambda p, c, r: {"correct": 0}), *map(episode, "ab"))
    assert [s.parts for s in scores] == [
        {"correct": 1, "mine1.correct": 0},
        {"other": 1, "mine1.correct": 0},
    ]


def test_parts_that_cannot_be_distinct_parts_are_refused():
    first = lambda p, c, r: {"correct": 1, "mine1.correct": 1}  # noqa: E731
    with pytest.raises(RolloutError, match=r"parts of mine1, 'correct', that clash with"):
        score(scorer_of(first, lambda p, c, r: {"correct": 0}), episode("a"))


def test_a_part_named_model_is_distinguished_from_the_reward_models(user_file):
    path = user_file("def f(completion): return {'model': 1, 'b': 2}\n")
    with_model = RewardSection(function=f"{path}:f", model="a_folder")
    (got,) = score(make_scorer(with_model, spell), episode("a"))
    assert got.parts == {"f.model": 1, "b": 2}
    (got,) = score(make_scorer(RewardSection(function=f"{path}:f"), spell), episode("a"))
    assert got.parts == {"model": 1, "b": 2}


def test_two_functions_of_one_name_are_refused(user_file):
    (path, other) = (user_file("def f(p, c, r): return 1", f"{n}.py") for n in "ab")
    with pytest.raises(ConfigError, match="two functions named 'f'"):
        make_scorer(RewardSection(function=[f"{path}:f", f"{other}:f"]), spell)


@pytest.mark.parametrize(
    "function",
    [
        ["exact", "exact"],
        ["exact", "none"],
        [],
        {"exact": {"wieght": 1}},
        {"exact": {"weight": "1"}},
        {"exact": {"weight": float("nan")}},
        {"exact": {"weight": 10**400}},
        {"exact": {"weight": -(10**400)}},
    ],
)
def test_a_list_of_functions_that_cannot_be_meant_is_refused(function):
    with pytest.raises(ConfigError, match=r"reward\.function"):
        check_rules(Config(reward=RewardSection(function=function)))


# ---- what may come back


@pytest.fixture
def user_file(tmp_path):
    def write(code, name="mine.py"):
        path = tmp_path / name
        path.write_text(code)
        return path

    return write


def test_a_users_function_is_loaded_and_its_parts_are_summed(user_file):
    path = user_file(
        "def f(prompt, completion, reference):\n    return {'a': 1, 'b': len(completion) / 2}\n"
    )
    (got,) = score(make_scorer(RewardSection(function=f"{path}:f"), spell), episode("abc"))
    assert (got.reward, dict(got.parts)) == (2.5, {"a": 1.0, "b": 1.5})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1/0", "fails to load: ZeroDivisionError"),
        ("def f(", "fails to load: SyntaxError"),
        ("g = 1", "has no function f"),
        ("f = 1", "has no function f"),
        ("def f(a): pass", "cannot be called as reward"),
        ("def f(a, b, /, completion): pass", "cannot be called as reward"),
        ("def f(a, b, c, d, /): pass", "cannot be called as reward"),
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


class Unshowable:
    def __repr__(self):
        raise ValueError("no")


@pytest.mark.parametrize(
    "value",
    [
        "1",
        float("nan"),
        float("inf"),
        1j,
        np.complex64(1),
        [1],
        np.zeros(2),
        10**400,
        10**5000,
        Decimal("nan"),
        Decimal("sNaN"),
        Unshowable(),
        {},
        {"a": None},
        {"a": float("nan")},
        {"a": {}},
        1e300,
        {"a": -1e31},
        {"a": 1e308, "b": 1e308},
        {"a b": 1, "a_b": 2},
        {"token_rewards": [1.0, 2.0]},
        {"token_rewards": [float("nan")]},
        {"token_rewards": "x"},
        Score(reward=float("nan")),
        Score(reward=0.0, token_rewards=np.zeros(9, np.float32)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_reward_is_an_error_naming_the_prompt(value):
    scorer = RewardScorer([Judge(function=lambda p, c, r: value, name="mine")], spell, timeout_s=5)
    with pytest.raises(RolloutError, match=r"reward mine on prompt 7 \('1\+1='\) gave"):
        score(scorer, episode("a"))


@pytest.mark.parametrize(
    "value",
    [
        1,
        True,
        np.float32(1),
        np.int64(1),
        np.all([True]),
        np.array(1.0),
        jnp.ones(()),
        jnp.array(True),
        Decimal(1),
        Fraction(2, 2),
        {"a": 0.5, "b": np.float64(0.5)},
        Score(reward=1, parts={"a": np.True_}),
    ],
)
def test_any_real_number_is_a_reward(value):
    (got,) = score(lambda p, c, r: value, episode("a"))
    assert got.reward == 1.0 and type(got.reward) is float
    assert all(type(part) is float for part in got.parts.values())


def test_rewards_of_tokens_lie_where_the_tokens_lie():
    sampled = episode(b"xx", "ab", b"tool", "c")
    spread = [0, 0, 0.5, 0, 0, 0, 0, 0, -1]
    for rewards_given in ([0.5, 0, -1], np.array([0.5, 0, -1]), jnp.array([0.5, 0, -1])):
        (got,) = score(lambda p, c, r, g=rewards_given: {"correct": 1, "token_rewards": g}, sampled)
        assert (got.reward, dict(got.parts)) == (1.0, {"correct": 1.0})
        assert got.token_rewards.tolist() == spread and got.token_rewards.dtype == np.float32
    whole = Score(reward=0.0, token_rewards=np.array(spread, np.float32))
    half = (lambda p, c, r: {"token_rewards": [0.5, 0, -1]}, 0.5)
    (got,) = score(scorer_of(lambda p, c, r: whole, half), sampled)
    assert got.token_rewards.tolist() == [1.5 * value for value in spread]


@pytest.mark.full
@given(name=st.text() | st.sampled_from(["format ok", "a/b", "x > 1", "é", "!", "", "\ud800"]))
def test_a_part_of_any_name_is_a_metric_or_refused_at_once(name):
    scores = score(lambda p, c, r: {name: 1.0}, episode("a"))
    try:
        (got,) = checked(scores, (episode("a"),), prompt())
    except RolloutError as error:
        assert "is another metric" in str(error)
        return
    (part,) = got.parts
    assert metric_of(f"reward/{part}").key == "reward/<part>" and len(part.encode()) < 400


@pytest.mark.parametrize("name", ["mean", "std", "kl", "zero_variance_share"])
def test_a_part_never_replaces_a_metric_of_ours(name):
    scores = score(lambda p, c, r: {name: 1.0}, episode("a"))
    with pytest.raises(RolloutError, match=f"reward/{name} is another metric. Rename"):
        checked(scores, (episode("a"),), prompt())


def test_correct_is_from_0_to_1():
    scores = score(lambda p, c, r: {"correct": 1.5}, episode("a"))
    with pytest.raises(RolloutError, match=r"'correct' of 1.5.*from 0 to 1"):
        checked(scores, (episode("a"),), prompt())


def test_correct_that_rounding_brought_over_its_bounds_is_within_them():
    for number, value in ((sum([1 / 9] * 9), 1), (-1e-17, 0), (1 + 1e-7, 1), (0.25, 0.25)):
        scores = score(lambda p, c, r, n=number: {"correct": n}, episode("a"))
        (got,) = checked(scores, (episode("a"),), prompt())
        assert got.parts == {"correct": value} and got.reward == scores[0].reward
    scores = score(lambda p, c, r: {"correct": 1.000002}, episode("a"))
    with pytest.raises(RolloutError, match=r"'correct' of 1\.000002\..*from 0 to 1"):
        checked(scores, (episode("a"),), prompt())


# ---- a trial before the run


def test_a_trial_warns_of_a_right_answer_that_is_not_right_and_not_where_there_is_none(caplog):
    scorer = scorer_of(lambda p, c, r: {"correct": 0})
    for reference, warned in (("", False), ("2", True)):
        found = try_once(
            scorer,
            prompt(reference=reference),
            lambda text: np.array([ord(c) for c in text], np.int32),
            "reward.function = mine",
        )
        assert found.parts == {"correct": 0}
        assert ("own correct answer, '2', a part `correct` of 0" in caplog.text) == warned
        assert bool(caplog.records) == warned


def test_a_trial_without_a_right_answer_has_a_token_all_the_same():
    """`completion_ids[0][-1] == eos` is a usual way to ask whether an answer ended."""
    scorer = scorer_of(lambda completion_ids, completions: [float(completion_ids[0][-1] == 61)])
    encode = lambda text: np.array([ord(c) for c in text], np.int32)  # noqa: E731
    assert try_once(scorer, prompt(reference=""), encode, "reward").reward == 1.0


# ---- where it runs, and what it raises


FAILURES = (
    KeyError("x"),
    SystemExit(0),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(1),
    StopAsyncIteration(),
    MemoryError(),
    RecursionError("deep"),
    asyncio.CancelledError("mine"),
    TimeoutError("of a judge"),
    BaseException("base"),
)


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
def test_whatever_a_reward_raises_is_reported_with_its_cause(failure, is_async):
    async def broken(p, c, r):
        raise failure

    def plain(p, c, r):
        raise failure

    wrapped = is_async and isinstance(failure, StopIteration | StopAsyncIteration)
    kind = (
        "RuntimeError"
        if wrapped and isinstance(failure, StopIteration)
        else (type(failure).__name__)
    )
    with pytest.raises(RolloutError, match=f"raised {kind}: ") as caught:
        score(broken if is_async else plain, episode("a"))
    assert type(caught.value.__cause__).__name__ == kind
    assert score(lambda p, c, r: 1.0, episode("a"))[0].reward == 1.0, "nothing else broke"


def test_async_functions_wait_side_by_side_each_with_its_own_time():
    waiting, most = 0, 0

    async def judge(completion):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.3)
        waiting -= 1
        return float(completion == "a")

    started = time.monotonic()
    scores = score(scorer_of(judge, timeout_s=5), *[episode("ab"[i % 2]) for i in range(50)])
    assert most == 50 and time.monotonic() - started < 4
    assert [s.reward for s in scores] == [1.0, 0.0] * 25


@pytest.mark.full
def test_an_async_function_inside_of_a_plain_one_is_awaited_with_its_limit():
    async def judge(completion):
        await asyncio.sleep(60 if completion == "slow" else 0)
        return {"correct": 1}

    wrapped = scorer_of(lambda completion: judge(completion), timeout_s=0.5)
    assert score(wrapped, episode("a"))[0].parts == {"correct": 1}
    with pytest.raises(RolloutTimeout, match=r"took more than 0.5 s for one answer"):
        score(wrapped, episode("slow"))

    async def ranked(completions):
        return [1.0] * len(completions)

    assert score(lambda completions: ranked(completions), episode("a"))[0].reward == 1


def test_all_async_functions_are_on_one_loop_so_that_they_may_share_a_session():
    loops = set()

    async def judge(completion):
        loops.add(asyncio.get_running_loop())
        return 1.0

    for _ in range(2):  # asyncio.run: another loop for the scorer each time
        score(judge, episode("a"))
    assert len(loops) == 1


def test_an_async_reward_that_hangs_is_cancelled_at_its_limit():
    over = threading.Event()

    async def judge(completion):
        try:
            await asyncio.sleep(60)
        finally:
            over.set()

    with pytest.raises(RolloutTimeout, match=r"took more than 0.1 s for one answer"):
        score(scorer_of(judge, timeout_s=0.1), episode("a"))
    assert over.wait(10)


@pytest.mark.full
def test_plain_functions_run_on_a_few_threads_each_with_its_own_time():
    running, most, lock = 0, 0, threading.Lock()

    def judge(completion):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.2)
        with lock:
            running -= 1
        return 1.0

    scorer = scorer_of(judge, timeout_s=0.6, threads=3)  # 12 answers: 0.8 s in all

    async def two_groups():
        return await asyncio.gather(*(scorer((episode("a"),) * 6, prompt()) for _ in range(2)))

    assert [s.reward for scores in asyncio.run(two_groups()) for s in scores] == [1.0] * 12
    assert most == 3


@pytest.mark.full
def test_a_reward_that_hangs_costs_its_time_limit_and_no_more():
    code = """
import asyncio, time, numpy as np
from jaxrl_async.errors import RolloutError
from jaxrl_async.scorers.rewards import Judge, RewardScorer
from jaxrl_async.types import Prompt, Episode, StopReason
p = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")
z = np.zeros(1, np.int32)
e = Episode(token_ids=z, drawn=z == 0, logprobs=z, versions=z, stop=StopReason.EOS)
judge = Judge(function=lambda *a: time.sleep(60), name="mine")
try:
    asyncio.run(RewardScorer([judge], lambda ids: "", timeout_s=0.1)((e,), p))
except RolloutError as error:
    print(error)
"""
    started = time.monotonic()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert "took more than 0.1 s" in out.stdout
    assert time.monotonic() - started < 30  # it did not wait for the thread at exit


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_slow_reward_does_not_stop_the_loop(kind):
    async def blocks(p, c, r):
        return time.sleep(0.3) or 1.0

    def plain(p, c, r):
        return time.sleep(0.3) or 1.0

    async def both():
        ticks, scorer = 0, scorer_of(blocks if kind == "async" else plain)
        task = asyncio.ensure_future(scorer((episode("a"),), prompt()))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return ticks, task.result()

    ticks, (got,) = asyncio.run(both())
    assert ticks > 3 and got.reward == 1.0


def test_calls_that_never_come_back_do_not_pile_up_without_end(monkeypatch):
    monkeypatch.setattr(usercode, "MAX_STUCK", 2)
    release = threading.Event()
    scorer = scorer_of(lambda *a: release.wait(60) and 1.0, timeout_s=0.05, threads=1)
    for _ in range(2):
        with pytest.raises(RolloutTimeout, match="took more than"):
            score(scorer, episode("a"))
    with pytest.raises(RolloutError, match="2 earlier calls have not returned"):
        score(scorer, episode("a"))
    release.set()
    deadline = time.monotonic() + 30
    while scorer._threads.stuck and time.monotonic() < deadline:
        time.sleep(0.01)
    assert score(scorer, episode("a"))[0].reward == 1.0


@pytest.mark.full
@given(
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.002, 0.05]), min_size=1, max_size=12),
    threads=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_calls_that_are_done_late_or_given_up_never_mix_or_lose_a_thread(delays, threads):
    pool = usercode.Threads(threads)

    async def one(number):
        try:
            outcome = await pool.run(
                lambda: time.sleep(delays[number]) or number, 0.02 if number % 2 else 5.0
            )
        except usercode.TooLate:
            return None
        return outcome.get()

    async def all_of_them():
        return await asyncio.gather(*(one(n) for n in range(len(delays))))

    found = asyncio.run(all_of_them())
    assert all(got in (None, n) for n, got in enumerate(found))
    assert all(got == n for n, got in enumerate(found) if n % 2 == 0 or not delays[n])
    deadline = time.monotonic() + 10
    while (pool.stuck or pool._serving) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert (len(pool.stuck), pool._serving, len(pool._waiting)) == (0, 0, 0)


@pytest.mark.full
def test_scorers_need_no_jax():
    code = "import sys, jaxrl_async.scorers.rewards; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_built_in_functions_judge_the_last_turn_of_several():
    """Before, `exact` compared all turns in one: right answers after a tool call were wrong."""
    called = replace(episode(b"q", "call(1+1)", b"tool", "2"), num_turns=2)
    ends = replace(episode(b"q", "2", b"tool", "call(1+1)"), num_turns=2)
    for name in ("exact", "gsm8k"):
        right, wrong = score(scorer_of(find_reward(name)), called, ends)
        assert (right.reward, wrong.reward) == (1.0, 0.0), name
    seen = []
    score(scorer_of(lambda completion: float(seen.append(completion) is None)), called)
    assert seen == ["call(1+1)2"]


def test_a_tasks_teacher_without_teachers_is_warned_about(caplog):
    task = Task(teacher=lambda record: record["kind"])
    config = Config(reward=RewardSection(function="gsm8k"))
    make_scorers(config, character_tokenizer(PRINTABLE), [], None, Lock(), FaultCounts(), task)
    assert "Task.teacher has no effect without teachers (teacher.source=teachers)" in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("opening, closing", [("[THINK]", "[/THINK]"), ("<think>", "</think>")])
@pytest.mark.parametrize("special", [True, False])
def test_thinking_is_seen_where_its_marks_are_special_tokens(opening, closing, special):
    """Before, what decode leaves out was not seen: a guess in thinking was paid."""
    tokenizer = character_tokenizer(PRINTABLE)
    marks = [AddedToken(mark, special=special, normalized=False) for mark in (opening, closing)]
    tokenizer.hf.add_tokens(marks, special_tokens=special)
    tokenizer = Tokenizer(tokenizer.hf)
    config = Config(reward=RewardSection(function="gsm8k"))
    scorers = make_scorers(config, tokenizer, [], None, Lock(), FaultCounts(), Task())

    def paid(text, before="q"):
        before, answer = tokenizer.encode(before), tokenizer.encode(text)
        assert (opening in tokenizer.decode(before) + tokenizer.decode(answer)) <= (not special)
        ids = np.concatenate([before, answer, [tokenizer.eos_ids[0]]]).astype(np.int32)
        sampled = np.arange(len(ids)) >= len(before)
        zeros = np.zeros(len(ids), np.float32)
        of = Episode(
            token_ids=ids,
            drawn=sampled,
            logprobs=zeros,
            versions=zeros.astype(np.int32),
            stop=StopReason.EOS,
        )
        (got,) = asyncio.run(scorers.training((of,), prompt("q", "5")))
        return got.reward

    assert paid(f"{opening}maybe \\boxed{{5}}{closing}The answer is 7") == 0
    assert paid(f"{opening}it may be 5") == 0, "thinking never ends"
    assert paid("so 5", before=f"q{opening}") == 0, "the prompt opened it"
    assert paid(f"or 7 {closing}it is 5", before=f"q{opening}") == 1
    assert paid(f"{opening}7{closing}so 7{opening}8{closing}The answer is 5") == 1
    assert paid("so 5") == 1
