"""The doubles do what their scripts say: users test with them."""

import asyncio

import numpy as np
import pytest

from jaxrl_async.errors import RolloutError
from jaxrl_async.testing.clock import VirtualClock
from jaxrl_async.testing.fakes import (
    ScriptedGenerate,
    ScriptedScorer,
    ScriptedWeights,
    make_episode,
    make_group,
    make_prompt,
)
from jaxrl_async.types import Request, StopReason, Ticket, VersionedParams


def request(name, **more):
    ids = np.array([1, 2], np.int32)
    return Request(request_id=name, token_ids=ids, max_new_tokens=4, stop_token_ids=(0,), **more)


async def test_each_request_gets_the_tokens_written_for_it_in_order():
    generate = ScriptedGenerate({"a": [5, 0], "b": [6, 7, 8, 9, 9]}, version=3)
    b, a = await asyncio.gather(*generate.submit_many([request("b"), request("a")]))
    assert (a.token_ids.tolist(), a.stop) == ([5, 0], StopReason.EOS)
    assert (b.token_ids.tolist(), b.stop) == ([6, 7, 8, 9], StopReason.LENGTH)
    assert a.versions.tolist() == [3, 3] and a.logprobs.dtype == np.float32
    assert [[r.request_id for r in call] for call in generate.requests] == [["b", "a"]]


async def test_held_requests_finish_when_the_test_says_so_and_cancelled_ones_never():
    generate = ScriptedGenerate({"a": [1], "b": [2]}, hold=True)
    a, b = generate.submit_many([request("a"), request("b")])
    await asyncio.sleep(0)
    assert not a.done() and generate.waiting == ("a", "b")
    b.cancel()
    generate.finish("b")
    generate.finish("a")
    assert (await a).token_ids.tolist() == [1] and b.cancelled()


async def test_scripted_failures_are_raised_and_unknown_requests_named():
    generate = ScriptedGenerate({"a": RolloutError("no answer")})
    with pytest.raises(RolloutError, match="no answer"):
        await generate.submit_many([request("a")])[0]
    with pytest.raises(RolloutError, match="'z'"):
        generate.submit_many([request("z")])


async def test_the_scorer_gives_the_rewards_written_for_a_prompt():
    scorer = ScriptedScorer({1: [0.5, 1.0], 2: ValueError("bad")})
    episodes = (make_episode([0]), make_episode([0, 0]))
    assert [s.reward for s in await scorer(episodes, make_prompt(1))] == [0.5, 1.0]
    assert [s.reward for s in await scorer(episodes, make_prompt(9))] == [0.0, 0.0]
    with pytest.raises(ValueError, match="bad"):
        await scorer(episodes, make_prompt(2))
    assert scorer.scored == [1, 9, 2]


def test_weights_come_one_step_at_a_time_and_once():
    weights = ScriptedWeights([VersionedParams(version=v, params=None) for v in (1, 2)])
    assert weights.poll() is None
    weights.step()
    assert weights.poll().version == 1 and weights.poll() is None
    weights.live(1)
    assert weights.live_versions == [1]


def test_a_made_group_has_the_given_versions():
    group = make_group(Ticket(group=4, version=2), [2, 3], [5])
    assert (group.oldest_version, group.newest_version) == (2, 5)
    assert [e.num_drawn for e in group.episodes] == [2, 1]
    assert make_group(Ticket(group=4, version=2)).oldest_version == 2


async def test_sleepers_wake_in_the_order_of_their_hours():
    clock, woken = VirtualClock(), []

    async def sleeper(name, seconds):
        await clock.sleep(seconds)
        woken.append((name, clock()))

    tasks = [asyncio.create_task(sleeper(n, s)) for n, s in (("late", 5), ("soon", 1), ("now", 0))]
    for seconds in (0, 1, 4):
        await asyncio.sleep(0)
        clock.advance(seconds)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert woken == [("now", 0.0), ("soon", 1.0), ("late", 5.0)]


def test_a_ticking_clock_moves_at_each_reading():
    clock = VirtualClock(start_s=1.0, tick_s=0.5)
    assert [clock(), clock()] == [1.0, 1.5]
