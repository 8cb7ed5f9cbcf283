"""Rewards in processes: the same numbers as in threads, and an end at the time limit that holds."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from lettered import answer, record, spell

from jaxrl_async.config.schema import RewardSection
from jaxrl_async.errors import ConfigError, RolloutError, RolloutTimeout
from jaxrl_async.run.watchdog import Reading, Watchdog
from jaxrl_async.scorers.reward_process import RewardProcesses
from jaxrl_async.scorers.rewards import Judge, RewardScorer, make_scorer
from jaxrl_async.tasks.function_source import source_of
from jaxrl_async.types import Score
from jaxrl_async.unavailable import retry_wait_s, unavailable_cause

pytestmark = pytest.mark.full


def backtracks(completion):
    if completion == "slow":
        re.match(r"(a+)+$", "a" * 40 + "b")  # days; each further a doubles them
    return float(len(completion))


def noted_and_slow(completion, file):
    with open(file, "a") as calls:
        calls.write(completion + "\n")
    return backtracks(completion)


def kills_itself(completion):
    if completion == "exit":
        os._exit(0)
    if completion == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def with_all(completions, prompts, tests, spec, numbers, messages, step, trainer_state, log_metric):
    assert trainer_state.max_steps == 9 and step == trainer_state.global_step
    assert [m[-1]["content"] for m in messages] == completions and numbers[0].sum() == 3
    log_metric("count", len(completions))
    tests[0].clear()
    spec[0]["deep"] = None
    if any(tests[0]) or tests[1] != [1, 2]:
        return [None] * len(completions)
    return [{"correct": 1, "sum": sum(tests[1])}, None, Score(reward=step)]


def of_episode(completion, episode, token_ids):
    with pytest.raises(ValueError, match="read-only"):
        episode.token_ids[:] = 0
    return {"correct": 1, "token_rewards": [0.5] * len(token_ids)}


def raises(completion):
    return 1 / (len(completion) - 2)


def away(completion):
    error = ConnectionError("the grader is away")
    error.headers = {"Retry-After": "7"}
    raise error


def in_pid(completion):
    return float(os.getpid())


def odd(completion):
    return "good"


async def not_in_a_process(completion):
    return float(os.getpid())


def scorer_of(*functions, timeout_s=20.0, processes=2, **more):
    judges = [Judge(function=f, name=f.__name__) for f in functions]
    return RewardScorer(judges, spell, timeout_s=timeout_s, processes=processes, **more)


def scores_of(scorer, of, *texts):
    try:
        return asyncio.run(scorer(tuple(map(answer, texts)), of))
    finally:
        scorer.close()


def test_a_regular_expression_that_backtracks_is_ended_and_other_threads_go_on():
    scorer = scorer_of(backtracks, timeout_s=1.0)
    scores_of(scorer, record(), "warm")
    gaps, done = [], threading.Event()

    def beat():
        last = time.monotonic()
        while not done.wait(0.02):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(RolloutTimeout, match=r"took more than 1 s for one answer"):
        asyncio.run(scorer((answer("slow"),), record()))
    done.set()
    thread.join()
    assert len(gaps) > 10, "the other thread ran meanwhile"
    assert [s.reward for s in scores_of(scorer, record(), "ab")] == [2.0], "another one started"


@pytest.mark.parametrize("processes", [0, 1])
def test_a_service_that_is_unavailable_is_known_from_a_process_as_from_a_thread(processes):
    with pytest.raises(RolloutError, match=r"reward away on prompt .*the grader is away") as caught:
        scores_of(scorer_of(away, processes=processes), record(), "a")
    found = unavailable_cause(caught.value)
    assert found is not None and retry_wait_s(found) == 7


def test_calls_of_a_group_that_failed_are_not_made(tmp_path):
    """Not more than the one that began before the group was given up; none stays stuck."""
    scorer, file = scorer_of(noted_and_slow, timeout_s=0.5, processes=1), tmp_path / "calls"
    of = record(file=str(file))
    for _ in range(3):
        with pytest.raises(RolloutTimeout):
            asyncio.run(scorer((answer("slow"),) * 8, of))
    assert scores_of(scorer, of, "ab")[0].reward == 2.0
    assert 3 <= file.read_text().count("slow") <= 6, "of 24"
    assert not scorer._askers.stuck and not scorer._threads.stuck


def test_the_arguments_and_results_are_those_of_threads():
    columns = {"tests": [1, 2], "spec": {"deep": [1]}, "numbers": np.ones(3)}
    found = []
    for processes in (0, 1):
        scorer = scorer_of(with_all, processes=processes, max_steps=9, alone=False)
        scorer.version = lambda: 4
        found.append(scores_of(scorer, record("q?", **columns), "a", "b", "c"))
    assert [(s.reward, dict(s.parts), dict(s.logged), s.left_out) for s in found[1]] == [
        (4.0, {"correct": 1.0, "sum": 3.0}, {"count": 3.0}, False),
        (0.0, {}, {"count": 3.0}, True),
        (4.0, {}, {"count": 3.0}, False),
    ]
    assert found[0] == found[1]
    (score,) = scores_of(scorer_of(of_episode), record(), "ab")
    assert score.token_rewards.tolist() == [0, 0.5, 0.5, 0.5]


def test_where_they_run():
    (score,) = scores_of(scorer_of(in_pid), record(), "a")
    assert score.reward != os.getpid()
    for scorer in (scorer_of(in_pid, processes=0), scorer_of(not_in_a_process)):
        assert scores_of(scorer, record(), "a")[0].reward == os.getpid()


@pytest.mark.parametrize(
    ("function", "text", "words"),
    [
        (kills_itself, "exit", "ended its process, with code 0. Correct the function"),
        (kills_itself, "signal", "ended its process, by signal 11"),
        (raises, "ab", "raised ZeroDivisionError: division by zero .*line .*in raises"),
        (odd, "ab", "gave a reward of 'good'"),
    ],
)
def test_what_goes_wrong_is_reported_and_the_next_call_works(function, text, words):
    scorer = scorer_of(function, processes=1)
    with pytest.raises(RolloutError, match=rf"reward {function.__name__} on prompt 7.*{words}"):
        asyncio.run(scorer((answer(text),), record()))
    if function is not odd:
        assert scores_of(scorer, record(), "abc")[0].reward == 1.0
    scorer.close()


def test_functions_of_a_file_a_module_and_none_at_all(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import os\nclass F:\n    def __call__(self, completion):\n"
                    "        return float(os.getpid())\nf = F()\n")  # fmt: skip
    section = RewardSection(function=f"{path}:f", processes=1)
    (score,) = scores_of(make_scorer(section, spell), record(), "a")
    assert score.reward != os.getpid()

    def inner(completion):
        return 1.0

    for function in (inner, lambda completion: 1.0, partial(raises), record().text.strip):
        with pytest.raises(ConfigError, match=r"cannot run in a process.*FILE\.py:FUNCTION"):
            source_of(function, "f", "reward")


SCRIPT = """
import asyncio, os, sys, threading
from jaxrl_async.scorers.rewards import Judge, RewardScorer
from lettered import answer, record, spell

def reward(completion):
    return float(os.getpid())

threading.Thread(target=threading.Event().wait, daemon=True).start()
print("begins", file=sys.stderr)
scorer = RewardScorer(
    [Judge(function=reward, name="reward")], spell, timeout_s=20, processes=1
)
print("goes on")
(score,) = asyncio.run(scorer((answer("a"),), record()))
print(score.reward != os.getpid())
"""


def test_a_function_of_the_script_that_trains(tmp_path):
    """The script has no `if __name__ == "__main__"`: a process runs it up to where it trains."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parent.parent.parent
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": f"{root}:{root}/tests/helpers"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout.split("\n")[:2] == ["goes on", "True"], run.stderr
    assert run.stdout.count("goes on") == 1 and run.stderr.count("begins") == 2


def test_a_process_whose_run_was_killed_ends():
    processes = RewardProcesses(1)
    source = source_of(in_pid, "in_pid", "reward")
    scorer = scorer_of(in_pid, processes=1)
    (score,) = asyncio.run(scorer((answer("a"),), record()))
    del processes, source
    pid = int(score.reward)
    (process,) = scorer._processes._pool.free
    process._process._popen.stdin.close()  # as at the end of the run's process
    assert process._process._popen.wait(30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_stacks_are_written_where_pythons_lock_is_kept(tmp_path, caplog):
    """The watchdog's own thread cannot run then; before, there was no stack at all."""
    stacks = tmp_path / "stacks.txt"
    blocks = iter(range(10**9))
    dog = Watchdog(lambda: Reading(blocks=next(blocks)), limit_s=0.2, stacks=stacks)
    thread = threading.Thread(target=dog.run)
    thread.start()

    def keeps_the_lock_in_a_function_of_this_name():
        begun = time.monotonic()
        for length in range(18, 40):
            re.match(r"(a+)+$", "a" * length + "b")
            if time.monotonic() - begun > 1.5:
                return

    keeps_the_lock_in_a_function_of_this_name()
    time.sleep(0.1)
    dog.stop()
    thread.join(30)
    assert "keeps_the_lock_in_a_function_of_this_name" in stacks.read_text()
    assert "one of them held Python's lock" in caplog.text
    calm = tmp_path / "calm.txt"
    dog = Watchdog(lambda: Reading(blocks=next(blocks)), limit_s=100, stacks=calm)
    thread = threading.Thread(target=dog.run)
    thread.start()
    dog.stop()
    thread.join(30)
    assert not calm.exists()
