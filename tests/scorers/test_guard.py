"""A scorer that raises, hangs, or gives what is no score."""

import asyncio
from decimal import Decimal

import numpy as np
import pytest

from jaxrl_async.errors import Closed, RefusedScore, RolloutError, RolloutTimeout
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.scorers.guard import GuardedScorer, checked
from jaxrl_async.scorers.rewards import Judge, RewardScorer
from jaxrl_async.testing.clock import VirtualClock
from jaxrl_async.testing.fakes import make_episode, make_prompt
from jaxrl_async.types import Score

EPISODES, PROMPT = (make_episode([0, 0]), make_episode([0])), make_prompt(5)
GOOD = (Score(reward=1.0), Score(reward=0.0, parts={"right": 0.0}))


class Script:
    """A scorer that does one thing of the list at each call."""

    def __init__(self, *steps):
        self.steps, self.calls = list(steps), 0

    async def __call__(self, episodes, prompt):
        self.calls += 1
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        if step == "hang":
            await asyncio.sleep(3600)
        return step


def guarded(scorer, **how):
    """The result or error of one call, the faults counted, and the waits."""
    faults, waits = FaultCounts(), []

    async def sleep(seconds):
        waits.append(seconds)

    fields = {"timeout_s": 0.05, "retries": 2, "backoff_s": 3.0, **how}
    guard = GuardedScorer(scorer, count=faults.add, sleep=sleep, **fields)
    try:
        result = asyncio.run(guard(EPISODES, PROMPT))
    except Exception as error:
        result = error
    assert guard.oldest_s() == 0, "nothing stays under way"
    return result, {k: n for k, n in faults.read().items() if n}, waits


def test_a_failure_and_a_hang_are_tried_again_after_a_growing_wait():
    found = guarded(Script(ValueError("once"), "hang", GOOD))
    assert found == (GOOD, {"scorer_retries": 2, "scorer_timeouts": 1}, [3.0, 6.0])


def test_the_last_failure_is_reported_with_its_cause():
    error, faults, _ = guarded(Script(*[ValueError(str(i)) for i in range(3)]))
    assert isinstance(error, RolloutError) and faults == {"scorer_retries": 2}
    assert str(error) == "prompt 5: the scorer raised ValueError: 2"
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize(
    "failure",
    [SystemExit(0), GeneratorExit(), asyncio.CancelledError(), MemoryError(), RecursionError()],
    ids=lambda error: type(error).__name__,
)
def test_no_exception_of_a_scorer_ends_the_run(failure):
    error, faults, _ = guarded(Script(failure, GOOD), retries=0)
    assert isinstance(error, RolloutError) and f"raised {type(failure).__name__}" in str(error)
    assert not faults
    assert guarded(Script(failure, GOOD))[0] == GOOD


def test_what_a_function_gave_that_is_no_reward_is_not_asked_for_again():
    async def gives_text(completion):
        return "good"

    judge = Judge(function=gives_text, name="mine")
    scorer = RewardScorer([judge], lambda ids: "", timeout_s=20)
    error, faults, waits = guarded(scorer, timeout_s=30)
    assert "gave a reward of 'good' (str)" in str(error)
    assert (faults, waits) == ({"refused_scores": 1}, [])


def test_a_run_that_is_cancelled_is_cancelled():
    async def cancelled():
        task = asyncio.create_task(GuardedScorer(Script("hang"), timeout_s=60)(EPISODES, PROMPT))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_hang_says_how_long_it_was_waited_for_and_what_to_do():
    error, faults, _ = guarded(Script("hang"), retries=0)
    assert isinstance(error, RolloutTimeout) and faults == {"scorer_timeouts": 1}
    assert "prompt 5" in str(error) and "faults.scorer_timeout_s" in str(error)


def test_a_scorers_own_time_limit_keeps_its_message_and_counts_too():
    error, faults, _ = guarded(Script(RolloutTimeout("reward mine took long")), retries=0)
    assert "mine" in str(error) and faults == {"scorer_timeouts": 1}


def test_a_run_that_ends_is_no_fault():
    scorer = Script(Closed("the run is stopping"))
    error, faults, _ = guarded(scorer)
    assert isinstance(error, Closed) and not faults and scorer.calls == 1


def token_rewards(*values, dtype=np.float32):
    return (Score(reward=0.0, token_rewards=np.array(values, dtype)), GOOD[1])


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (GOOD[:1], "1 scores for 2 episodes"),
        (None, "None"),
        ({"a": 1}, "dict"),
        ((1.0, 2.0), "1.0"),
        ((Score(reward=float("nan")), GOOD[1]), "reward of nan"),
        ((Score(reward=float("inf")), GOOD[1]), "reward of inf"),
        ((Score(reward=True), GOOD[1]), "reward of True"),
        ((Score(reward="1"), GOOD[1]), "reward of '1'"),
        ((Score(reward=None), GOOD[1]), "reward of None"),
        ((Score(reward=1j), GOOD[1]), "reward of 1j"),
        ((Score(reward=10**400), GOOD[1]), "reward of 1000"),
        ((Score(reward=10**5000), GOOD[1]), "a int that cannot be shown"),
        ((Score(reward=0.0, parts={"a b": 1.0}), GOOD[1]), "Name it 'a_b'"),
        ((Score(reward=0.0, parts={"mean": 1.0}), GOOD[1]), "reward/mean is another metric"),
        ((Score(reward=0.0, parts={"correct": 2.0}), GOOD[1]), "from 0 to 1"),
        ((Score(reward=Decimal(1)), GOOD[1]), "Decimal"),
        ((GOOD[0], Score(reward=0.0, parts={"right": float("nan")})), "part 'right'"),
        (token_rewards(1, 2), "4 tokens"),
        (token_rewards(1, 2, 3, float("nan")), r"token_rewards\[3\] is nan"),
        (token_rewards(1, 2, 3, 4, dtype=np.int32), "one float"),
        ((Score(reward=0.0, token_rewards=[0.0] * 4), GOOD[1]), "token_rewards"),
    ],
)
def test_what_is_no_score_is_refused_at_once(scores, words):
    error, faults, _ = guarded(Script(scores, GOOD))
    assert isinstance(error, RolloutError) and faults == {"refused_scores": 1}
    with pytest.raises(RolloutError, match=f"prompt 5.*{words}"):
        checked(scores, EPISODES, PROMPT)


@pytest.mark.parametrize("reward", [1, 0.5, np.float32(2), np.int64(3)])
def test_every_real_number_is_a_reward(reward):
    scores = [Score(reward=reward), GOOD[1]]
    assert checked(scores, EPISODES, PROMPT) == tuple(scores)


def test_what_is_under_way_says_for_how_long():
    clock = VirtualClock()
    guard = GuardedScorer(Script("hang"), timeout_s=60, clock=clock)

    async def look():
        task = asyncio.create_task(guard(EPISODES, PROMPT))
        await asyncio.sleep(0)
        clock.advance(7)
        seen = guard.oldest_s()
        task.cancel()
        return seen

    assert asyncio.run(look()) == 7


@pytest.mark.parametrize("number", [1e300, -1e300, 1.1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["reward", "part", "token"])
def test_a_reward_whose_square_is_infinite_is_an_error_and_no_advantage_of_0(number, where):
    episode = make_episode([0, 0])
    length = len(episode.token_ids)
    with np.errstate(over="ignore"):
        tokens = np.full(length, number).astype(np.float32)
    score = {
        "reward": Score(reward=number),
        "part": Score(reward=0.0, parts={"speed": number}),
        "token": Score(reward=0.0, token_rewards=tokens),
    }[where]
    with pytest.raises(RefusedScore, match="finite"):
        checked((score,), (episode,), PROMPT)
    largest = np.full(length, 1e30 / 1.001, np.float32)
    checked((Score(reward=1e30, token_rewards=largest),), (episode,), PROMPT)
