"""A sampler that dies, hangs or draws NaN: every caller gets exactly one answer, and the rest
goes on. Scripted samplers for the order of events, real ones for the tokens."""

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import OTHER, PARAMS, SECTION, SPEC, make_sampler, request

from jaxrl_async.errors import Closed, RolloutError, WeightsError
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.sampler.router.router import Router, _Job
from jaxrl_async.sampler.router.supervise import RestartLimits
from jaxrl_async.sampler.sampler import Sampler, SamplerStats
from jaxrl_async.testing.clock import VirtualClock
from jaxrl_async.testing.fakes import make_completion
from jaxrl_async.types import Partial
from jaxrl_async.weights.channel import WeightChannel

LIMITS = RestartLimits(restarts=2, backoff_s=1.0, hang_s=10.0, nonfinite_in_a_row=2)


class Scripted:
    """A sampler that answers when the test says so."""

    def __init__(self, name="s"):
        self.name, self.error = name, None
        self.engine = SimpleNamespace(spec=SimpleNamespace(total_slots=4))
        self.held, self.abandoned, self.blocks, self.successors = [], False, 0, 0
        self.blamed = frozenset()

    def start(self):
        pass

    def close(self):
        self.fail(Closed("closed"))

    def abandon(self):
        self.abandoned = True

    def checked(self, requests):
        return list(requests)

    def check_waits(self):
        pass

    def successor(self):
        return Scripted(self.name + "'")

    def stats(self):
        return SamplerStats(blocks=self.blocks, requests_done=self.blocks)

    def start_many(self, requests):
        if self.error is not None:
            raise self.error
        futures = [Future() for _ in requests]
        self.held += zip(requests, futures, strict=True)
        return futures

    def answer(self, *, nan=False):
        """The oldest request."""
        asked, future = self.held.pop(0)
        self.blocks += 1
        done = make_completion(asked, [1, 2])
        if nan:
            done.logprobs[0] = np.nan
        if future.set_running_or_notify_cancel():
            future.set_result(done)

    def fail(self, error):
        """As Sampler: `error` first, then every future."""
        held, self.held = self.held, []
        for _, future in held:
            if not future.done():
                future.set_exception(error)

    def die(self, error=None):
        self.error = error or ValueError("broken")
        self.blamed = frozenset(asked.request_id for asked, _ in self.held)
        self.fail(self.error)


class Still(Router):
    """Looks after its samplers only when the test says so."""

    def start(self):
        pass


def still(count, **limits):
    clock, faults = VirtualClock(), FaultCounts()
    limits = RestartLimits(
        **{**{k: getattr(LIMITS, k) for k in LIMITS.__dataclass_fields__}, **limits}
    )
    router = Still([Scripted(f"s{i}") for i in range(count)], limits=limits, count=faults.add)
    router._clock = clock
    for seat in router._seats:
        seat.up_at = seat.moved_at = clock()
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
    router, clock, faults = still(2)
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


def begun(number, drawn):
    """A request under way that has drawn so much."""
    zeros = np.zeros(drawn, np.int32)
    wish = request(number, request_id=f"g{number}/m0")
    return Partial(
        request=wish, token_ids=zeros, logprobs=zeros.astype(np.float32), versions=zeros, seed=0
    )


def test_a_dying_sampler_takes_nothing_from_the_progress_of_the_others():
    router, _, _ = still(2)
    loop = asyncio.new_event_loop()

    async def submit():
        return [f for i in (1, 2) for f in router.submit_many([begun(i, 1)])]

    futures = loop.run_until_complete(submit())
    held = [s.held[0][0].request.request_id for s in router.samplers]
    dying, well = router.samplers
    dying.progress = lambda: dying.start_many([])
    dying.error = Closed("it has just died")
    well.progress = lambda: (replace(well.held[0][0], token_ids=np.zeros(5, np.int32)),)
    told = {p.request.request_id: len(p.token_ids) for p in router.progress()}
    assert told == {held[0]: 1, held[1]: 5}, "what is known of the one, what the other says"
    well.fail(dying.error)
    dying.fail(dying.error)
    settled(loop, futures)


def test_requests_of_the_only_sampler_wait_for_its_successor():
    router, clock, _ = still(1)
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
    router, clock, faults = still(2)
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
    router, clock, _ = still(1)
    loop, futures = ask(router)
    for _ in range(5):
        clock.advance(9)
        router.samplers[0].blocks += 1
        router.look()
    assert router.living == 1
    router.samplers[0].answer()
    assert settled(loop, futures) == ["g7/m0"]


def test_a_completion_that_is_not_finite_is_drawn_once_more_elsewhere_then_fails():
    router, _, faults = still(2, nonfinite_in_a_row=5)
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
    router, _, faults = still(2)
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
    router, _, faults = still(2, restarts=0)
    loop, futures = ask(router)
    router.samplers[0].die()
    router.look()
    assert router.error is None and router.living == 1
    router.samplers[1].die(OSError("the last"))
    with pytest.raises(RolloutError, match=r"no sampler is left.*the last"):
        router.look()
    router._end(RolloutError("as the thread does"))
    assert isinstance(settled(loop, futures)[0], RolloutError)
    assert faults.read()["samplers_lost"] == 2
    with pytest.raises(RolloutError, match="as the thread does"):
        router.generate([request(1)])


def test_wrong_weights_are_no_samplers_fault():
    router, _, faults = still(1)
    router.samplers[0].die(WeightsError("torn"))
    with pytest.raises(WeightsError, match="torn"):
        router.look()
    assert faults.read()["sampler_restarts"] == 0


def test_an_hour_without_trouble_clears_the_count():
    router, clock, _ = still(1, restarts=1)
    for _ in range(3):
        router.samplers[0].die()
        router.look()
        clock.advance(1)
        router.look()
        assert router.living == 1
        clock.advance(3601)
        router.look()


def test_counters_go_on_where_a_sampler_was_replaced():
    router, clock, _ = still(1)
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
        router, clock, faults = still(count, restarts=2)
        futures = router._submit([_job(i) for i in range(9)])
        poison = "r4"
        for _ in range(30):
            for sampler in router.samplers:
                if sampler.error is None and any(a.request_id == poison for a, _ in sampler.held):
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
    router, clock, _ = still(2, restarts=2)
    futures = router._submit([_job(i) for i in range(12)])
    for _ in range(200):
        for sampler in router.samplers:
            if any(a.request_id in ("r1", "r5", "r6", "r9", "r11") for a, _ in sampler.held):
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


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=60),
)
def test_whatever_fails_when_each_request_has_exactly_one_answer(count, schedule):
    router, clock, _ = still(count, restarts=10**6, nonfinite_in_a_row=3)
    asked, hung = [], set()

    def submit(n):
        futures = router._submit([_job(len(asked) + i) for i in range(n)])
        asked.extend(futures)

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
    for _ in range(40):  # a fair world: whoever hangs is found, whoever is well answers
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


def _job(number):
    return _Job(request=request(number % 5, request_id=f"r{number}"), future=Future())


# ---- real samplers


def fail_once(sampler, name, error):
    """The batch's next call of `name` raises, once."""
    batch = sampler._batch
    real = getattr(batch, name)

    def broken(*args, **kwargs):
        setattr(batch, name, real)
        raise error

    setattr(batch, name, broken)


@pytest.fixture
def wishes():
    return [request(i, sampling=request(0).sampling, stop_token_ids=()) for i in range(8)]


@pytest.mark.slow
def test_a_successor_draws_the_same_tokens_with_the_same_programs(wishes):
    expected = make_sampler().generate(wishes)
    faults = FaultCounts()
    router = Router([make_sampler()], limits=RestartLimits(backoff_s=0.0), count=faults.add)
    router.generate(wishes)
    old = router.samplers[0]
    fail_once(router.samplers[0], "finish_block", RuntimeError("injected"))
    found = router.generate(wishes)
    for a, b in zip(found, expected, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
    assert faults.read()["sampler_restarts"] == 1
    assert router.samplers[0] is not old and router.samplers[0].engine is old.engine
    assert old._batch is None, "its KV is gone"
    router.close()


@pytest.mark.slow
def test_a_sampler_that_hangs_is_left_behind_and_ends_when_it_wakes(wishes):
    clock = VirtualClock()
    router = Router(
        [make_sampler()], limits=RestartLimits(backoff_s=0.0, hang_s=100.0), clock=clock
    )
    expected = router.generate(wishes)
    old = router.samplers[0]
    batch, entered, wake = old._batch, threading.Event(), threading.Event()
    wait_for_block = batch.wait_for_block

    def stuck():
        entered.set()
        wake.wait(60)
        return wait_for_block()

    batch.wait_for_block = stuck

    def pass_time():
        entered.wait(60)
        while router.samplers[0] is old:
            clock.advance(101)
            wake.wait(0.05)

    threading.Thread(target=pass_time, daemon=True).start()
    found = router.generate(wishes)
    assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in expected]
    assert router.samplers[0] is not old and old._thread.is_alive()
    wake.set()
    old._thread.join(60)
    assert not old._thread.is_alive() and old.error is None
    router.close()


@pytest.mark.slow
def test_a_successor_has_the_newest_weights_and_publishing_never_waits_for_the_dead(wishes):
    devices = jax.devices()[:2]
    channel = WeightChannel([lambda p, d=d: jax.device_put(p, d) for d in devices])

    def sampler():
        return Sampler((SPEC, PARAMS), section=SECTION, weights=channel.subscribe())

    clock = VirtualClock()
    router = Router([sampler(), sampler()], limits=RestartLimits(backoff_s=50.0), clock=clock)
    router.generate(wishes)
    fail_once(router.samplers[1], "admit", RuntimeError("injected"))
    router.generate(wishes)
    assert router.living == 1
    for version, params in ((1, OTHER), (2, PARAMS), (3, OTHER)):
        channel.publish(version, params)
        channel.wait_live(version, 60)  # of the one that lives
    engine = router.samplers[1].engine
    prepare, engine.prepare = engine.prepare, None
    clock.advance(51)
    while not router._seats[1].restarts:
        router._wake.set()
    channel.publish(4, PARAMS)  # nor for one that could not be started again
    channel.wait_live(4, 60)
    channel.publish(5, OTHER)
    channel.wait_live(5, 60)
    engine.prepare = prepare
    clock.advance(101)
    while router.living < 2:
        router._wake.set()
    assert router.samplers[1].version == 5 and channel.live_version == 5
    for done in router.generate(wishes):
        assert set(done.versions.tolist()) == {5}
    channel.publish(6, PARAMS)
    channel.wait_live(6, 60)
    assert {s.version for s in router.samplers} == {6}
    channel.close()
    router.close()
