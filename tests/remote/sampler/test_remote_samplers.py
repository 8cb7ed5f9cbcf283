"""Real samplers behind sessions: whichever samples a request, leaves or is lost, its tokens are
those of one undisturbed sampler."""

import random
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest
from remotes import SETTINGS, Remotes, until
from tiny import PARAMS, SECTION, SPEC, make_sampler, request

from jaxrl_async.errors import RolloutError
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.sampler import Sampler

pytestmark = pytest.mark.full

GROUPS, MEMBERS = 10, 3


@pytest.fixture(scope="module")
def requests():
    return [
        request(g, request_id=f"g{g}/m{m}", key=(g, m), max_new_tokens=24, stop_token_ids=())
        for g in range(GROUPS)
        for m in range(MEMBERS)
    ]


@pytest.fixture(scope="module")
def expected(requests):
    with make_sampler() as sampler:
        return sampler.generate(requests)


def same(done, expected):
    for a, b in zip(done, expected, strict=True):
        assert a.request_id == b.request_id and a.stop == b.stop
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.versions.tolist() == b.versions.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, 3])
def test_the_choice_of_the_sampler_changes_no_token(requests, expected, count):
    with Remotes(count) as remotes:
        same(remotes.router.generate(requests), expected)
        done = [sampler.stats().requests_done for _, _, sampler, _ in remotes.all]
        assert sum(done) == len(requests) and all(n % MEMBERS == 0 and n for n in done), "groups"
        until(lambda: remotes.router.stats().requests_done == len(requests))
        assert remotes.counted() == {"samplers_joined": count}


@pytest.mark.exhaustive  # test_joined_runs compares whole runs
def test_two_processes_sample_bit_by_bit_what_two_threads_sample(requests) -> None:
    """More than a sampler is sent at a time, so that what waits here must not change its
    schedule."""
    many = [replace(w, request_id=f"{w.request_id}/{n}") for n in range(2) for w in requests]
    local = [Sampler((SPEC, PARAMS), section=SECTION, settings=SETTINGS) for _ in range(2)]
    with Router(local) as router:
        expected = router.generate(many)
    with Remotes(2) as remotes:
        for a, b in zip(remotes.router.generate(many), expected, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_tokens_of_a_leaving_sampler_are_not_sampled_again(requests, expected):
    with Remotes(1) as remotes:
        futures = remotes.router.start_many(requests)
        wait(futures[:2], 60)
        remotes.leave(0)
        left = remotes.all[0][2]
        until(lambda: remotes.router.living == 0)
        begun = remotes.router.progress()
        assert remotes.counted()["moved_requests"] == len(begun) > 0
        remotes.join()
        same([f.result(60) for f in futures], expected)
        assert remotes.counted() == {
            "samplers_joined": 2, "samplers_left": 1, "moved_requests": len(begun)
        }  # fmt: skip
        # tokens sampled there and not handed on: only those sampled between the report and the end
        sampled = left.stats().generated_tokens + remotes.all[1][2].stats().generated_tokens
        assert sampled - len(requests) * 24 <= len(begun) * 2 * 4


@pytest.mark.parametrize("seed", range(3))
def test_whoever_joins_leaves_or_is_lost_in_mid_flight(requests, expected, seed):
    chance = random.Random(seed)
    with Remotes(2) as remotes:
        futures = remotes.router.start_many(requests)
        living = [0, 1]
        for number in range(6):
            until(lambda n=number: sum(f.done() for f in futures) >= 4 * n)
            event = chance.choice(["join", "leave", "cut"])
            if event == "join" or len(living) == 1:
                living.append(remotes.join())
            elif event == "leave":
                remotes.leave(living.pop(chance.randrange(len(living))))
            else:
                remotes.cut(living.pop(chance.randrange(len(living))))
        same([f.result(60) for f in futures], expected)
        assert remotes.router.num_waiting == 0


def test_cancelled_requests_leave_the_sampler(requests):
    with Remotes(1) as remotes:
        futures = remotes.router.start_many(requests)
        for future in futures[1:]:
            future.cancel()
        futures[0].result(60)
        sampler = remotes.all[0][2]
        until(lambda: not sampler.progress() and not sampler.loop.busy)
        assert not remotes.all[0][1]._held and not remotes.all[0][3]._outstanding


def test_running_requests_are_reported_and_saved(requests, expected):
    with Remotes(2) as remotes:
        futures = remotes.router.start_many(requests)
        until(lambda: remotes.router.progress() or all(f.done() for f in futures))
        partials = remotes.router.progress()
        by_id = {c.request_id: c for c in expected}
        for partial in partials:
            n = len(partial.token_ids)
            whole = by_id[partial.request.request_id].token_ids
            assert n and partial.token_ids.tolist() == whole[:n].tolist()
        same([f.result(60) for f in futures], expected)
        with pytest.raises(RolloutError, match="is not running"):
            remotes.router.save("g0/m0")
        if partials:
            again = remotes.router.resume(partials)
            same(again, [by_id[p.request.request_id] for p in partials])


def test_a_dead_sampler_names_what_was_on_its_device(requests, expected):
    with Remotes(2) as remotes:
        engine = remotes.all[0][2].engine
        engine.generate = lambda *a, **k: 1 / 0
        same(remotes.router.generate(requests), expected)
        assert remotes.counted()["sampler_deaths"] == 1
        assert "ZeroDivisionError" in str(remotes.all[0][3].error)
        assert remotes.all[0][3].blamed
