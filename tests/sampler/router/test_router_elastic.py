"""Replicas that join and leave while the router serves: nobody waits for ever, every caller gets
exactly one answer, and what was handed back is not begun again."""

import itertools
import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import request

from jaxrl_async.errors import Closed, Disconnected, RolloutError
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.sampler.request_checks import RequestCheck, RequestLimits
from jaxrl_async.sampler.router import router as router_module
from jaxrl_async.sampler.router.job import SUSPECT_AFTER_CUTS, job_for_thread
from jaxrl_async.sampler.router.router import Elastic, Router
from jaxrl_async.sampler.router.supervise import REMIND_S, RestartLimits
from jaxrl_async.sampler.stats import RouterTotals, SamplerStats
from jaxrl_async.testing.clock import VirtualClock
from jaxrl_async.testing.scripted_replica import ScriptedReplica
from jaxrl_async.types import Partial

WAIT_S = 300.0


def elastic(count=0, **limits):
    """A router whose replicas come and go, and which looks after them when the test says so."""
    clock, faults = VirtualClock(), FaultCounts()
    check = RequestCheck(RequestLimits(max_length=64, seed=7), itertools.count())
    router = Router(
        [],
        limits=replace(RestartLimits(hang_s=10.0, nonfinite_in_a_row=2), **limits),
        count=faults.add,
        clock=clock,
        elastic=Elastic(check=check, wait_s=WAIT_S),
    )
    router.start(own_thread=False)
    for number in range(count):
        assert router.join(remote(f"s{number}")) == number
    return router, clock, faults


def remote(name="remote"):
    return ScriptedReplica(name, replaceable=False)


def numbered(number):
    return request(number % 5, request_id=f"r{number}", key=(number, 0))


def sampled_partial(req, count=2):
    """A request under way."""
    return Partial(
        request=req,
        token_ids=np.ones(count, np.int32),
        logprobs=np.full(count, -1.0, np.float32),
        versions=np.zeros(count, np.int32),
        seed=7,
    )


def counted(faults):
    return {k: n for k, n in faults.read().items() if n}


def test_requests_wait_for_the_first_sampler_and_are_checked_without_one():
    router, _, faults = elastic()
    assert router.seed == 7 and router.stats() == SamplerStats() and router.living == 0
    with pytest.raises(RolloutError, match="max_new_tokens"):
        router.start_many([replace(numbered(0), max_new_tokens=0)])
    futures = router.start_many([numbered(i) for i in range(3)])
    router.look()
    first = remote()
    assert router.join(first) == 0
    router.look()
    assert first.starts == 1 and first.held_ids == ("r0", "r1", "r2")
    first.answer_all()
    assert [f.result(0).request_id for f in futures] == ["r0", "r1", "r2"]
    assert counted(faults) == {"samplers_joined": 1}


def test_a_leaving_samplers_requests_continue_where_they_were():
    router, _, faults = elastic(2)
    reqs = [numbered(i) for i in range(4)]
    futures = router.start_many(reqs)
    first, second = router.samplers
    mine = list(first.held_ids)
    first.leave([sampled_partial(reqs[int(mine[0][1:])], count=1)])
    router.look()
    assert router.samplers == (second,) and first.abandoned
    moved = {getattr(g, "request", g).request_id: g for g, _ in second.held}
    assert isinstance(moved[mine[0]], Partial) and len(moved[mine[0]].token_ids) == 1
    assert not isinstance(moved[mine[1]], Partial), "it had drawn nothing"
    second.answer_all()
    assert all(f.result(0) for f in futures)
    assert counted(faults) == {"samplers_joined": 2, "samplers_left": 1, "moved_requests": 1}


def test_of_two_requests_with_one_id_each_gets_its_own_tokens_back():
    router, _, _ = elastic(1)
    req = numbered(1)
    router.start_many([req, replace(req, key=(9, 9))])
    leaving = router.samplers[0]
    futures = [future for _, future in leaving.held]
    leaving.leave()
    leaving.departure = replace(
        leaving.departure, partials={futures[1]: sampled_partial(replace(req, key=(9, 9)))}
    )
    router.look()
    last = remote()
    router.join(last)
    router.look()
    given = {getattr(g, "request", g).key: g for g, _ in last.held}
    assert isinstance(given[9, 9], Partial) and not isinstance(given[1, 0], Partial)


def test_a_lost_samplers_requests_begin_again_and_its_seat_is_never_used_again():
    router, _, faults = elastic(2)
    futures = router.start_many([numbered(i) for i in range(4)])
    first, second = router.samplers
    first.die(Disconnected("the line was cut"))
    router.look()
    assert len(second.held) == 4 and router.living == 1
    assert router.join(remote("s2")) == 2
    assert [slot.number for slot in router.fleet.slots] == [1, 2]
    second.answer_all()
    assert all(f.result(0) for f in futures)
    assert counted(faults) == {
        "samplers_joined": 3, "samplers_cut_off": 1, "redone_requests": 2
    }  # fmt: skip


def test_whoever_joins_gets_its_share_of_what_waits():
    router, _, _ = elastic(1)
    groups = [replace(numbered(i), request_id=f"g{i}/m{m}") for i in range(5) for m in range(3)]
    futures = router.start_many(groups)
    first, second = router.samplers[0], remote()
    assert first.held_ids == tuple(r.request_id for r in groups[:6]), "room for 5, groups whole"
    assert router.stats().waiting == 9 and router.num_waiting == 15
    router.join(second)
    router.look()
    assert len(first.held) == 6, "what it has stays"
    assert second.held_ids == tuple(r.request_id for r in groups[6:12])
    for sampler in (first, second):
        sampler.answer_all()
    assert [f.result(0).request_id for f in futures] == [r.request_id for r in groups]


@pytest.mark.parametrize("leaves", [True, False])
def test_requests_of_one_that_has_gone_overtake_those_that_nobody_has_begun(leaves):
    router, _, _ = elastic(2)
    futures = router.start_many([numbered(i) for i in range(20)])
    first, second = router.samplers
    under_way, returned = list(second.held_ids), list(first.held_ids)
    assert len(under_way) == len(returned) == 5, "as many as there is room for"
    if leaves:
        first.leave([sampled_partial(given) for given, _ in first.held[2:4]])
        at_once = [returned.pop(2), returned.pop(2)]
    else:
        first.die(Disconnected("the line was cut"))
        at_once, returned = returned, []
    router.look()
    assert list(second.held_ids) == under_way + at_once, "what may have begun goes on at once"
    order = [*under_way, *at_once, *returned, *(f"r{i}" for i in range(10, 20))]
    assert second.answer_all() == order, "in the order of asking"
    assert all(f.result(0) for f in futures)


def test_whoever_is_done_first_takes_the_next():
    """One replica gets answers that take long: it holds its share, and no more comes to it."""
    router, _, _ = elastic(2)
    futures = router.start_many([numbered(i) for i in range(40)])
    slow, quick = router.samplers
    most = 0
    while quick.held:
        quick.answer()
        most = max(most, len(quick.held))
    assert len(slow.held) == 5 and router.num_waiting == 5 and most == 5
    assert quick.blocks == 35
    slow.answer_all()
    assert [f.result(0).request_id for f in futures] == [f"r{i}" for i in range(40)]


def test_one_that_is_asked_later_but_is_more_urgent_is_dealt_first():
    router, _, _ = elastic(1)
    router.start_many([replace(numbered(2 * i), priority=(2, 0)) for i in range(12)])
    router.start_many([replace(numbered(21), priority=(1, 0))])
    (only,) = router.samplers
    assert "r21" not in only.held_ids
    only.answer()
    assert only.held_ids[-1] == "r21"
    router.start_many([replace(numbered(23), priority=(-1, 0))])
    assert only.held_ids[-1] == "r23", "the replica's own queue puts it first"


def test_one_that_has_died_and_is_not_taken_out_yet_is_dealt_nothing():
    router, _, faults = elastic(2)
    dead, well = router.samplers
    dead.die(Disconnected("cut"))
    futures = router.start_many([numbered(i) for i in range(30)])
    assert len(well.held) == 5 and not router.fleet.waiting
    well.answer_all()
    assert all(f.result(0) for f in futures), "before the router has looked after it"
    router.look()
    assert router.samplers == (well,) and "redone_requests" not in counted(faults)


def test_a_later_turn_goes_to_whoever_had_the_one_before_at_once():
    """Under one system prompt: what it begins with says nothing about who has its prefix."""
    router, _, _ = elastic(2)
    shared = np.arange(40, dtype=np.int32)
    first = [
        replace(numbered(i), token_ids=np.append(shared, np.int32(i)), max_new_tokens=4)
        for i in range(24)
    ]
    router.start_many(first)
    sampler, other = router.samplers
    for holder in (other, sampler):
        request_id = holder.held_ids[0]
        holder.answer()
        (asked,) = (r for r in first if r.request_id == request_id)
        turn = replace(
            asked,
            request_id=request_id + "/t1",
            token_ids=np.append(asked.token_ids, np.arange(8, dtype=np.int32)),
        )
        router.start_many([turn])
        assert turn.request_id in holder.held_ids, "though others wait for room"
        router.start_many([replace(asked, request_id=request_id + "/again")])
        assert request_id + "/again" not in (*sampler.held_ids, *other.held_ids), "no later turn"
    assert router.stats().waiting > 0


def test_the_time_in_the_queue_is_part_of_a_completions_times():
    router, clock, _ = elastic(1)
    futures = router.start_many([numbered(i) for i in range(6)])
    (only,) = router.samplers
    clock.advance(2.5)
    only.answer_all()
    first, last = futures[0].result(0), futures[5].result(0)
    assert (first.queued_s, first.first_token_s, first.latency_s) == (0.0, 0.0, 0.0)
    assert (last.queued_s, last.first_token_s, last.latency_s) == (2.5, 2.5, 2.5)


class Picky(ScriptedReplica):
    """It refuses some requests when it gets them, though it had nothing against them before."""

    def start_many(self, requests):
        if any(getattr(r, "request", r).request_id == "r9" for r in requests):
            raise RolloutError("not r9")
        return super().start_many(requests)


def test_what_a_replica_refuses_when_there_is_room_fails_alone():
    router, _, _ = elastic()
    only = Picky("picky", replaceable=False)
    router.join(only)
    futures = router.start_many([numbered(i) for i in range(12)])
    only.answer_all()
    assert str(futures[9].exception(0)) == "not r9" and router.num_waiting == 0
    assert sum(f.exception(0) is None for f in futures) == 11


class Instant(ScriptedReplica):
    """It has the answer at once."""

    def start_many(self, requests):
        futures = super().start_many(requests)
        for _ in requests:
            self.answer()
        return futures


@pytest.mark.full
def test_answers_that_are_there_at_once_do_not_pile_up_calls():
    router, _, _ = elastic()
    router.join(Instant("instant", replaceable=False))
    futures = router.start_many([numbered(i) for i in range(5000)])
    assert all(f.result(0) for f in futures) and router.num_waiting == 0


def test_without_a_sampler_it_says_so_waits_and_ends_with_what_to_do(caplog):
    caplog.set_level(logging.WARNING)
    router, clock, _ = elastic(1)
    futures = router.start_many([numbered(0)])
    router.samplers[0].die(Disconnected("cut"))
    for _ in range(10):
        router.look()
    messages = [r.message for r in caplog.records if "no sampler is available" in r.message]
    assert len(messages) == 1 and "1 requests wait" in messages[0] and "300 s" in messages[0]
    clock.advance(REMIND_S)
    router.look()
    router.look()
    assert sum("no sampler is available" in r.message for r in caplog.records) == 2
    second = remote()
    router.join(second)
    router.look()
    clock.advance(10 * WAIT_S)
    router.look()
    assert router.error is None and "a sampler is available again" in caplog.text
    second.die(Disconnected("cut"))
    router.look()
    clock.advance(WAIT_S - 1)
    router.look()
    clock.advance(1)
    assert router.look_after() is None
    with pytest.raises(RolloutError, match=r"none joined within 300 s .*--join.*resume"):
        futures[0].result(0)
    with pytest.raises(RolloutError, match="none joined"):
        router.join(remote())


def test_a_closed_router_takes_nobody_in():
    router, _, _ = elastic(1)
    router.close()
    with pytest.raises(Closed):
        router.join(remote())


class SlowToClose(ScriptedReplica):
    """Its `close` waits for something."""

    def __init__(self, wait):
        super().__init__("slow", replaceable=False)
        self.wait, self.closed = wait, False

    def close(self):
        self.wait()
        self.closed = True
        super().close()


def test_samplers_elsewhere_are_closed_side_by_side():
    together = threading.Barrier(3)
    router, _, _ = elastic()
    replicas = [SlowToClose(lambda: together.wait(20)) for _ in range(3)]
    for replica in replicas:
        router.join(replica)
    router.close()
    assert all(replica.closed for replica in replicas), "one waited for another"


def test_samplers_that_never_close_keep_the_router_for_one_limit_in_all(monkeypatch, caplog):
    monkeypatch.setattr(router_module, "CLOSE_S", 0.05)
    over = threading.Event()
    router, _, _ = elastic()
    for wait in (over.wait, over.wait, lambda: None):
        router.join(SlowToClose(wait))
    (future,) = router.start_many([numbered(0)])
    closing = threading.Thread(target=router.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive() and "2 of 3 were not closed within 0.05 s" in caplog.text
    with pytest.raises(Closed):
        future.result(0)
    over.set()


def test_one_that_hangs_or_draws_nan_is_removed_for_good():
    router, clock, faults = elastic(3)
    futures = router.start_many([numbered(i) for i in range(6)])
    hung, nan, well = router.samplers
    nan.answer(nan=True)
    nan.answer(nan=True)
    router.look()
    clock.advance(11)
    well.blocks += 1
    router.look()
    assert router.samplers == (well,) and hung.abandoned and nan.abandoned
    well.answer_all()
    assert all(f.result(0) for f in futures)
    assert counted(faults)["sampler_hangs"] == 1


# ---- whose fault it is


def test_losses_make_a_suspect_only_if_there_are_many_in_a_row():
    job = job_for_thread(numbered(1))
    for _ in range(SUSPECT_AFTER_CUTS):
        assert not job.suspect
        job.cut_off += 1
    assert job.suspect and not job.to_blame
    job.moved(None)
    assert not job.suspect, "a sampler had it and left in peace"
    job.died = [0, 1]
    assert job.suspect and not job.to_blame
    job.died.append(2)
    assert job.to_blame


def test_a_request_that_kills_processes_is_refused_in_the_end_and_alone():
    router, clock, faults = elastic(2)
    futures = router.start_many([numbered(i) for i in range(6)])
    for _ in range(40):
        for sampler in router.samplers:
            if "r3" in sampler.held_ids:
                sampler.die(Disconnected("killed"))  # with all that it had
            else:
                sampler.answer_all()
        router.look()
        while router.living < 2:
            router.join(remote())
        router.look()
        clock.advance(1)
    errors = [f.exception(0) for f in futures]
    assert [n for n, e in enumerate(errors) if e is not None] == [3]
    assert "connections to 6 samplers in a row" in str(errors[3])
    assert counted(faults)["samplers_cut_off"] == SUSPECT_AFTER_CUTS + 1


def test_a_few_preemptions_are_no_requests_fault():
    router, _, _ = elastic(1)
    future = router.start_many([numbered(0)])[0]
    for _ in range(SUSPECT_AFTER_CUTS):
        router.samplers[0].die(Disconnected("preempted"))
        router.look()
        router.join(remote())
        router.look()
    router.samplers[0].answer()
    assert future.result(0).request_id == "r0"


# ---- statistics


def test_counters_never_fall_and_times_are_means_over_those_that_were_there():
    totals = RouterTotals()
    a = SamplerStats(requests_done=5, busy_s=10.0, in_flight=3, compiled_programs=4)
    assert totals.read({0: a}) == a
    totals.change({0: a})  # one joins
    assert totals.read({0: a, 1: SamplerStats()}).busy_s == 10.0
    a = replace(a, requests_done=7, busy_s=14.0)
    b = SamplerStats(requests_done=1, busy_s=2.0, in_flight=2, compiled_programs=4)
    both = totals.read({0: a, 1: b})
    assert (both.requests_done, both.busy_s, both.in_flight) == (8, 13.0, 5)
    totals.change({0: a, 1: b})  # the first leaves
    left = totals.read({1: b})
    assert (left.requests_done, left.busy_s, left.in_flight) == (8, 13.0, 2)
    totals.change({1: b})  # and the other
    assert (totals.read({}).requests_done, totals.read({}).in_flight) == (8, 0)
    assert totals.read({2: SamplerStats(requests_done=1)}).requests_done == 9


# ---- whatever happens

EVENTS = [
    *["ask"] * 4, *["answer"] * 8, *["join"] * 3, *["leave"] * 3, *["cut"] * 2, "die", "hang",
    "nan", *["cancel"] * 2, *["look"] * 4, *["pass"] * 2,
]  # fmt: skip


@pytest.mark.full
@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=60),
)
def test_whoever_comes_and_goes_each_request_has_exactly_one_answer(count, schedule):
    router, clock, _ = elastic(count)
    asked, hung, moved, done_before = [], set(), set(), 0
    for event, pick in schedule:
        present = router.samplers
        sampler = present[pick % len(present)] if present else None
        if event == "ask":
            asked += router.start_many([numbered(len(asked) + i) for i in range(1 + pick % 3)])
        elif event == "join":
            router.join(remote())
        elif event == "cancel" and asked:
            asked[pick % len(asked)].cancel()
        elif event == "look":
            router.look()
        elif event == "pass":
            clock.advance(1 + pick)
        elif sampler is None or sampler.error is not None:
            continue
        elif event in ("answer", "nan") and sampler.held and sampler not in hung:
            sampler.answer(nan=event == "nan")
        elif event == "leave":
            running = [getattr(g, "request", g) for g, f in sampler.held if not f.done()]
            handed = [sampled_partial(r) for r in running[: pick + 1] if r.max_new_tokens > 2]
            moved |= {p.request.request_id for p in handed}
            sampler.leave(handed)
        elif event == "cut":
            sampler.die(Disconnected("cut"))
        elif event == "die":
            sampler.die()
        elif event == "hang":
            hung.add(sampler)
        done = router.stats().requests_done
        assert done >= done_before, "a counter fell"
        done_before = done
    for _ in range(60):  # a fair world: samplers are there, and answer
        if router.living < 2:
            router.join(remote())
        router.look()
        for sampler in router.samplers:
            while sampler.held and sampler not in hung and sampler.error is None:
                given, future = sampler.held[0]
                req = getattr(given, "request", given)
                if not future.cancelled() and req.request_id in moved:
                    assert isinstance(given, Partial), "what was drawn is drawn again"
                sampler.answer()
        clock.advance(11)
        router.look()
    assert router.error is None
    assert all(f.done() for f in asked) and router.num_waiting == 0
    for number, future in enumerate(asked):
        if not future.cancelled() and future.exception() is None:
            assert future.result().request_id == f"r{number}"
