"""A replica that dies, hangs or draws NaN: every caller gets exactly one answer, and the rest
continues. Scripted replicas for the order of events, real samplers for the tokens."""

import asyncio
import gc
import threading
import time
import weakref
from collections import deque
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import OTHER, PARAMS, SECTION, SPEC, make_sampler, request

from jaxrl_async.errors import Closed, RolloutError, WeightsError
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.router.supervise import RestartLimits
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.testing.clock import VirtualClock
from jaxrl_async.testing.scripted_replica import ScriptedReplica
from jaxrl_async.types import Partial
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.delivery import FunctionLink

LIMITS = RestartLimits(restarts=2, backoff_s=1.0, hang_s=10.0, nonfinite_in_a_row=2)


def attended(count, **changes):
    """A router of scripted replicas, which looks after them only when the test says so."""
    clock, faults = VirtualClock(), FaultCounts()
    router = Router(
        [ScriptedReplica(f"s{i}") for i in range(count)],
        limits=replace(LIMITS, **changes),
        count=faults.add,
        clock=clock,
    )
    router.start(own_thread=False)
    return router, clock, faults


def ask(router, number=1):
    """Futures of so many requests of one group."""
    loop = asyncio.new_event_loop()

    async def submit():
        return router.submit_many([request(7, request_id=f"g7/m{m}") for m in range(number)])

    return loop, loop.run_until_complete(submit())


def settled(loop, futures):
    """What they hold, once the loop has heard of it."""
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    answers = [(f.exception() or f.result().request_id) if f.done() else None for f in futures]
    loop.close()
    return answers


def test_requests_of_a_dead_sampler_go_to_another_and_it_comes_back_after_the_backoff():
    router, clock, faults = attended(2)
    loop, futures = ask(router, 3)
    first, second = router.samplers
    first.answer()
    first.die()
    router.look()
    assert first.abandoned and router.living == 1 and len(second.held) == 2
    clock.advance(1.0)
    router.look()
    assert router.living == 2 and router.samplers[0].name == "s0'"
    for _ in range(2):
        second.answer()
    assert settled(loop, futures) == ["g7/m0", "g7/m1", "g7/m2"]
    assert {k: n for k, n in faults.read().items() if n} == {
        "sampler_deaths": 1, "sampler_restarts": 1, "redone_requests": 2
    }  # fmt: skip


def test_older_groups_come_first_also_where_a_dead_samplers_requests_come_back():
    router, _, _ = attended(1)
    first = router.samplers[0]
    wanted = [f"g{g}/m{m}/t0" for g in range(4) for m in range(2)]
    futures = router.start_many(
        [request(int(name[1]), request_id=name, key=(int(name[1]), 0)) for name in wanted[:6]]
    )
    futures += router.start_many([request(3, request_id=name) for name in wanted[6:]])
    assert first.answer_all() == wanted, "in order of admission"
    assert all(f.result(0) for f in futures)


def begun(number, sampled):
    """A request under way that has drawn so much."""
    zeros = np.zeros(sampled, np.int32)
    req = request(number, request_id=f"g{number}/m0")
    return Partial(
        request=req, token_ids=zeros, logprobs=zeros.astype(np.float32), versions=zeros, seed=0
    )


def test_a_dying_replica_takes_nothing_from_the_progress_of_the_others():
    router, _, _ = attended(2)
    futures = router.start_many([begun(1, 1)]) + router.start_many([begun(2, 1)])
    ids = [replica.held_ids[0] for replica in router.samplers]
    dying, well = router.samplers
    dying.error = Closed("it has just died")
    well.partials = (replace(well.held[0][0], token_ids=np.zeros(5, np.int32)),)
    sampled = {p.request.request_id: len(p.token_ids) for p in router.progress()}
    assert sampled == {ids[0]: 1, ids[1]: 5}, "as it was handed over, and as the replica reports"
    assert router.save(ids[1]) is well.partials[0]
    with pytest.raises(RolloutError, match="'r9' is not running"):
        router.save("r9")
    for future in futures:
        future.cancel()


def test_requests_of_the_only_sampler_wait_for_its_successor():
    router, clock, _ = attended(1)
    loop, futures = ask(router, 2)
    router.samplers[0].die()
    router.look()
    assert router.living == 0 and router.num_waiting == 2
    clock.advance(1.0)
    router.look()
    for _ in range(2):
        router.samplers[0].answer()
    assert settled(loop, futures) == ["g7/m0", "g7/m1"]


def test_what_a_sampler_that_hung_says_later_is_ignored():
    router, clock, faults = attended(2)
    loop, futures = ask(router)
    hung, other = router.samplers
    router.look()
    clock.advance(10.5)
    router.look()
    assert hung.abandoned and len(other.held) == 1
    hung.answer()
    loop.run_until_complete(asyncio.sleep(0))
    assert not futures[0].done(), "only the second answer counts"
    other.answer()
    assert settled(loop, futures) == ["g7/m0"]
    assert faults.read()["sampler_hangs"] == 1


def test_one_that_gets_on_slowly_does_not_hang():
    router, clock, _ = attended(1)
    loop, futures = ask(router)
    for _ in range(5):
        clock.advance(9)
        router.samplers[0].blocks += 1
        router.look()
    assert router.living == 1
    router.samplers[0].answer()
    assert settled(loop, futures) == ["g7/m0"]


def test_a_completion_that_is_not_finite_is_drawn_once_more_elsewhere_then_fails():
    router, _, faults = attended(2, nonfinite_in_a_row=5)
    loop, futures = ask(router, 2)
    first, second = router.samplers
    first.answer(nan=True)
    router.look()
    assert len(second.held) == 1
    second.answer(nan=True)
    first.answer()
    error, fine = settled(loop, futures)
    assert isinstance(error, RolloutError) and "not finite, twice" in str(error)
    assert fine == "g7/m1" and faults.read()["nonfinite_completions"] == 2


def test_several_of_them_in_a_row_take_the_sampler_out():
    router, _, faults = attended(2)
    loop, futures = ask(router, 3)
    first = router.samplers[0]
    first.answer(nan=True)
    first.answer(nan=True)
    router.look()
    assert first.abandoned
    for _ in range(3):
        router.samplers[1].answer()
    assert settled(loop, futures) == ["g7/m0", "g7/m1", "g7/m2"]
    assert faults.read()["redone_requests"] == 1


def test_after_its_restarts_a_sampler_is_given_up_and_the_run_only_with_the_last_one():
    router, _, faults = attended(2, restarts=0)
    loop, futures = ask(router)
    router.samplers[0].die()
    router.look()
    assert router.error is None and router.living == 1
    router.samplers[1].die(OSError("the last"))
    assert router.look_after() is None, "the thread ends"
    assert "no sampler is left" in str(router.error) and "the last" in str(router.error)
    assert settled(loop, futures) == [router.error]
    assert faults.read()["samplers_lost"] == 2
    with pytest.raises(RolloutError, match="no sampler is left"):
        router.generate([request(1)])


def test_wrong_weights_are_no_samplers_fault():
    router, _, faults = attended(1)
    router.samplers[0].die(WeightsError("torn"))
    with pytest.raises(WeightsError, match="torn"):
        router.look()
    assert faults.read()["sampler_restarts"] == 0


def test_an_hour_without_trouble_clears_the_count():
    router, clock, _ = attended(1, restarts=1)
    for _ in range(3):
        router.samplers[0].die()
        router.look()
        clock.advance(1)
        router.look()
        assert router.living == 1
        clock.advance(3601)
        router.look()


def test_counters_go_on_where_a_sampler_was_replaced():
    router, clock, _ = attended(1)
    router.samplers[0].blocks = 5
    router.samplers[0].die()
    router.look()
    clock.advance(1)
    router.look()
    router.samplers[0].blocks = 2
    assert router.stats().blocks == 7


def test_a_request_that_kills_every_sampler_is_tried_alone_then_refused():
    """And takes none of its neighbours along, though all samplers begin it again and again."""
    for count in (1, 2, 3):
        router, clock, faults = attended(count, restarts=2)
        futures = router.start_many([numbered(i) for i in range(9)])
        poison = "r4"
        for _ in range(30):
            for sampler in router.samplers:
                if sampler.error is None and poison in sampler.held_ids:
                    sampler.die()
                while sampler.held and sampler.error is None and clock() > 3:
                    sampler.answer()
            router.look()
            clock.advance(2)
        assert router.error is None and router.living == count
        for number, future in enumerate(futures):
            if number == 4:
                with pytest.raises(RolloutError, match=r"r4: 3 samplers died .*broken"):
                    future.result(0)
            else:
                assert future.result(0).request_id == f"r{number}"
        assert faults.read()["sampler_deaths"] == 3


def test_many_such_requests_at_once_end_no_run():
    router, clock, _ = attended(2, restarts=3)
    futures = router.start_many([numbered(i) for i in range(12)])
    for _ in range(200):
        for sampler in router.samplers:
            if {"r1", "r5", "r6", "r9", "r11"} & {*sampler.held_ids}:
                sampler.die()
            while sampler.held and sampler.error is None:
                sampler.answer()
        router.look()
        clock.advance(5)
    errors = [f.exception(0) for f in futures]
    assert [n for n, e in enumerate(errors) if e is not None] == [1, 5, 6, 9, 11]
    assert router.living == 2 and router.error is None


EVENTS = (
    ["ask"] * 4 + ["answer"] * 8 + ["nan", "die", "hang", "cancel"] + ["look"] * 4 + ["pass"] * 3
)


@pytest.mark.full
@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=60),
)
def test_whatever_fails_when_each_request_has_exactly_one_answer(count, schedule):
    router, clock, _ = attended(count, restarts=10**6, nonfinite_in_a_row=3)
    asked, hung = [], set()

    def submit(n):
        asked.extend(router.start_many([numbered(len(asked) + i) for i in range(n)]))

    for event, pick in schedule:
        sampler = router.samplers[pick % count]
        if event == "ask":
            submit(1 + pick % 3)
        elif event in ("answer", "nan") and sampler.held and sampler not in hung:
            sampler.answer(nan=event == "nan")
        elif event == "die":
            sampler.die()
        elif event == "hang":
            hung.add(sampler)
        elif event == "cancel" and asked:
            asked[pick % len(asked)].cancel()
        elif event == "look":
            router.look()
        elif event == "pass":
            clock.advance(1 + pick)
    for _ in range(40):  # a fair world: a replica that hangs is noticed, one that is well answers
        router.look()
        clock.advance(11)
        router.look()
        for sampler in router.samplers:
            while sampler.held and sampler not in hung and sampler.error is None:
                sampler.answer()
    assert all(f.done() for f in asked) and router.num_waiting == 0
    for number, future in enumerate(asked):
        if not future.cancelled() and future.exception() is None:
            assert future.result().request_id == f"r{number}"


def numbered(number):
    return request(number % 5, request_id=f"r{number}")


# ---- real samplers


def strikes_once(engine, strike):
    """The engine's next block calls `strike` first."""
    generate = engine.generate

    def struck(*args, **kwargs):
        engine.generate = generate
        strike()
        return generate(*args, **kwargs)

    engine.generate = struck


def injected():
    raise RuntimeError("injected")


@pytest.fixture
def requests():
    return [request(i, sampling=request(0).sampling, stop_token_ids=()) for i in range(8)]


@pytest.mark.full
def test_a_successor_draws_the_same_tokens_with_the_same_programs(requests):
    expected = make_sampler().generate(requests)
    faults = FaultCounts()
    router = Router([make_sampler()], limits=RestartLimits(backoff_s=0.0), count=faults.add)
    router.generate(requests)
    old = router.samplers[0]
    strikes_once(old.engine, injected)
    completions = router.generate(requests)
    for a, b in zip(completions, expected, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
    assert faults.read()["sampler_restarts"] == 1
    assert router.samplers[0] is not old and router.samplers[0].engine is old.engine
    assert old.loop.batch is None, "its KV is gone"
    router.close()


@pytest.mark.full
def test_a_sampler_that_died_goes_with_its_weights_without_pythons_collector(requests):
    def strike():
        try:
            injected()
        except RuntimeError as error:
            raise ValueError("while it dealt with the first") from error

    router = Router([make_sampler()], limits=RestartLimits(backoff_s=0.0))
    router.generate(requests)
    gone = weakref.ref(router.samplers[0])
    gc.collect()
    gc.disable()
    try:
        strikes_once(gone().engine, strike)
        router.generate(requests)
        until = time.monotonic() + 20
        while gone() is not None and time.monotonic() < until:
            time.sleep(0.02)
        assert gone() is None
    finally:
        gc.enable()
    router.close()


@pytest.mark.full
def test_a_sampler_that_hangs_is_left_behind_and_ends_when_it_wakes(requests):
    clock = VirtualClock()
    router = Router(
        [make_sampler()], limits=RestartLimits(backoff_s=0.0, hang_s=100.0), clock=clock
    )
    expected = router.generate(requests)
    old = router.samplers[0]
    entered, wake, hung = threading.Event(), threading.Event(), []

    def stuck():
        hung.append(threading.current_thread())
        entered.set()
        wake.wait(60)

    strikes_once(old.engine, stuck)

    def pass_time():
        entered.wait(60)
        while router.samplers[0] is old:
            clock.advance(101)
            wake.wait(0.05)

    threading.Thread(target=pass_time, daemon=True).start()
    completions = router.generate(requests)
    assert [c.token_ids.tolist() for c in completions] == [c.token_ids.tolist() for c in expected]
    assert router.samplers[0] is not old and hung[0].is_alive()
    wake.set()
    hung[0].join(60)
    assert not hung[0].is_alive() and old.error is None
    router.close()


@pytest.mark.full
def test_a_successor_has_the_newest_weights_and_publishing_never_waits_for_the_dead(requests):
    devices = jax.devices()[:2]
    channel = WeightChannel([FunctionLink(lambda p, d=d: jax.device_put(p, d)) for d in devices])

    def sampler():
        return Sampler((SPEC, PARAMS), section=SECTION, weights=channel.subscribe())

    clock = VirtualClock()
    router = Router([sampler(), sampler()], limits=RestartLimits(backoff_s=50.0), clock=clock)
    router.generate(requests)
    engine = router.samplers[1].engine
    strikes_once(engine, injected)
    router.generate(requests)
    assert router.living == 1
    for version, params in ((1, OTHER), (2, PARAMS), (3, OTHER)):
        channel.publish(version, params)
        channel.wait_live(version, 60)  # of the one that lives
    tried, prepare = threading.Event(), engine.prepare

    def unprepared(params, before=None):
        tried.set()
        raise RuntimeError("no memory")

    engine.prepare = unprepared
    clock.advance(51)
    assert tried.wait(60)
    channel.publish(4, PARAMS)  # nor for one that could not be started again
    channel.wait_live(4, 60)
    channel.publish(5, OTHER)
    channel.wait_live(5, 60)
    engine.prepare = prepare
    clock.advance(101)
    while router.living < 2:
        clock.advance(1)
        time.sleep(0.01)
    assert router.samplers[1].version == 5 and channel.live_version == 5
    for done in router.generate(requests):
        assert set(done.versions.tolist()) == {5}
    channel.publish(6, PARAMS)
    channel.wait_live(6, 60)
    assert {s.version for s in router.samplers} == {6}
    channel.close()
    router.close()


def test_in_a_replay_each_request_goes_where_it_was_each_time_that_it_was_dealt():
    """Whatever room there is, and members of one group to several, as when a group was split."""
    homes = {f"r{i}": deque([1 if i < 8 else 0, 0]) for i in range(12)}

    def recorded(request_id):
        return homes[request_id].popleft() if homes[request_id] else None

    router = Router([ScriptedReplica("s0"), ScriptedReplica("s1")], recorded=recorded)
    router.start(own_thread=False)
    futures = router.start_many([request(7, request_id=f"r{i}") for i in range(12)])
    first, second = router.samplers
    assert second.held_ids == tuple(f"r{i}" for i in range(8))
    assert first.held_ids == tuple(f"r{i}" for i in range(8, 12))
    second.die()
    router.look()
    assert set(first.held_ids) == {f"r{i}" for i in range(12)}, "the second time"
    first.answer_all()
    assert all(f.result(0) for f in futures)
