"""The replay buffer, one rule at a time. Interleavings are in tests/schedule."""

import contextlib
import json
import random
import threading
import time

import pytest

from jaxrl_async.buffer.contents import BufferState
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.buffer.select import reward_variance, select
from jaxrl_async.codec import dumps, loads
from jaxrl_async.errors import Closed, ConfigError, TrainingError
from jaxrl_async.testing.clock import VirtualClock
from jaxrl_async.testing.fakes import make_group, make_prompt
from jaxrl_async.types import CancelledGroup, Drop, Ticket

JOIN_S = 10.0


EMPTY = BufferState(next_group=0, next_untaken=0)


def buffer(per_step=2, max_staleness=0, version=0, ledger=None, clock=time.perf_counter, **more):
    settings = BufferSettings(groups_per_step=per_step, max_staleness=max_staleness, **more)
    made = ReplayBuffer(settings, ledger=ledger, clock=clock)
    made.restore(EMPTY, version)
    return made


def numbers(groups):
    return [g.ticket.group for g in groups]


def in_thread(work):
    """Start work in a thread; the function returned joins and gives its result or exception."""
    result = []

    def run():
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(JOIN_S)
        assert not thread.is_alive(), "still blocked"
        return result[0]

    return join


def put_all(b, tickets):
    for ticket in tickets:
        b.put(make_group(ticket))


@pytest.mark.parametrize("per_step", [1, 3])
def test_at_staleness_zero_every_burst_is_one_whole_step(per_step):
    b = buffer(per_step)
    for version in range(3):
        tickets = b.admit(0)
        assert [t.version for t in tickets] == [version] * per_step
        assert b.admit(0) == ()
        put_all(b, tickets)
        assert numbers(b.draw(version, 0).groups) == [t.group for t in tickets]
        assert b.admit(0) == (), "the slots are free only once the weights are live"
        b.set_live(version + 1)


def test_staleness_one_lets_one_step_run_ahead():
    b = buffer(2, 1)
    put_all(b, b.admit(0))
    b.draw(0, 0)
    b.set_live(1)
    assert [(t.group, t.version) for t in b.admit(0)] == [(4, 1), (5, 1)]


def test_a_step_that_is_not_live_keeps_its_slots_while_an_older_one_is_freed():
    b = buffer(1, 1)
    put_all(b, b.admit(0))
    b.draw(0, 0)
    b.draw(1, 0)
    b.set_live(1)
    assert len(b.admit(0)) == 1 and b.stats().active == 2


def test_groups_are_drawn_in_order_of_admission_whatever_order_they_finish_in():
    b = buffer(3)
    tickets = b.admit(0)
    put_all(b, (tickets[2], tickets[0]))
    with pytest.raises(TimeoutError):
        b.draw(0, 0)
    put_all(b, (tickets[1],))
    assert numbers(b.draw(0, 0).groups) == [0, 1, 2]


def test_with_lookahead_a_slow_group_is_overtaken_and_then_comes_first():
    b = buffer(1, 2, lookahead=1)
    tickets = b.admit(0)
    put_all(b, tickets[1:])
    assert numbers(b.draw(0, 0).groups) == [1]
    with pytest.raises(TimeoutError):
        b.draw(1, 0)
    put_all(b, tickets[:1])
    assert numbers(b.draw(1, 0).groups) == [0]


def test_a_failed_groups_slot_goes_to_a_fresh_one_at_once():
    b = buffer(2)
    first, second = b.admit(0)
    b.fail(first, make_prompt(), Drop.FAILED)
    (third,) = b.admit(0)
    put_all(b, (second, third))
    assert numbers(b.draw(0, 0).groups) == [1, 2]
    assert b.stats().dropped == {"failed": 1}


def test_failing_twice_or_after_close_changes_nothing():
    b = buffer(2)
    first, second = b.admit(0)
    for _ in range(2):
        b.fail(first, make_prompt(), Drop.FAILED)
    b.close()
    b.fail(second, make_prompt(), Drop.FAILED)
    assert b.stats().dropped == {"failed": 2} and b.stats().active == 0


def test_what_is_too_old_is_dropped_reported_counted_and_replaced():
    b = buffer(1, 1, version=5)
    old, other = b.admit(0)
    b.put(make_group(old, [3, 5, 5, 5]))
    with pytest.raises(TimeoutError):
        b.draw(5, 0)
    assert b.stats().dropped == {"stale": 1}
    (fresh,) = b.admit(0)
    b.fail(other, make_prompt(), Drop.FAILED)
    b.put(make_group(fresh, [5, 5]))
    draw = b.draw(5, 0)
    assert numbers(draw.groups) == [2]
    assert [(g.ticket.group, why) for g, why in draw.dropped] == [(0, Drop.STALE)]
    assert (b.stats().mean_kept_tokens, b.stats().mean_dropped_tokens) == (2.0, 4.0)


def test_what_newer_weights_sampled_is_never_trained_on():
    b = buffer(1, version=3)
    (ticket,) = b.admit(0)
    b.put(make_group(ticket, [3, 4]))
    with pytest.raises(TimeoutError):
        b.draw(3, 0)
    assert b.stats().dropped == {"from_the_future": 1}
    assert [t.version for t in b.admit(0)] == [3], "no livelock: its slot is free again"


def test_a_dropped_groups_slot_wakes_a_blocked_admit_while_the_trainer_waits():
    b = buffer(1, version=3)
    (ticket,) = b.admit(0)
    admitted, draw = in_thread(b.admit), in_thread(lambda: b.draw(3))
    b.put(make_group(ticket, [4]))
    (fresh,) = admitted()
    b.put(make_group(fresh))
    assert numbers(draw().groups) == [1]


def test_nothing_is_admitted_while_paused():
    b = buffer(2)
    b.pause()
    assert b.admit(0) == ()
    waiting = in_thread(b.admit)
    b.resume()
    assert len(waiting()) == 2


def test_close_wakes_every_waiter_and_refuses_what_comes_later():
    b = buffer(1)
    (ticket,) = b.admit(0)
    waiting = [in_thread(b.admit), in_thread(b.admit), in_thread(lambda: b.draw(0))]
    b.close()
    b.close()
    assert all(isinstance(join(), Closed) for join in waiting)
    for call in (b.admit, lambda: b.draw(0), lambda: b.put(make_group(ticket))):
        with pytest.raises(Closed):
            call()


def test_a_group_without_a_ticket_in_flight_is_a_programming_error():
    b = buffer(1)
    (ticket,) = b.admit(0)
    b.put(make_group(ticket))
    with pytest.raises(AssertionError):
        b.put(make_group(ticket))
    with pytest.raises(AssertionError):
        b.fail(ticket, make_prompt(), Drop.FAILED)


def test_live_versions_never_fall():
    b = buffer(1, version=2)
    b.set_live(1)
    assert [t.version for t in b.admit(0)] == [2]


def test_a_lookahead_that_could_never_fill_a_step_is_refused():
    with pytest.raises(ConfigError, match=r"staleness\.lookahead \(3\).*\(2\)"):
        buffer(2, 1, lookahead=3)


def test_waits_are_reported_in_seconds():
    b = buffer(1, clock=VirtualClock(tick_s=0.5))
    put_all(b, b.admit(0))
    assert b.draw(0, 0).waited_s == 0.5
    stats = b.stats()
    assert (stats.admit_wait_s, stats.draw_wait_s) == (0.5, 0.5)


def test_the_statistics_count_every_slot():
    b = buffer(2, 1)
    tickets = b.admit(0)
    put_all(b, tickets[:3])
    b.draw(0, 0)
    s = b.stats()
    assert (s.capacity, s.active, s.in_flight, s.ready) == (4, 4, 1, 1)
    assert (s.admitted, s.trained) == (4, 2)


def test_after_a_restore_tickets_continue_with_the_trainers_version():
    b = buffer(2, 1)
    tickets = b.admit(0)
    b.fail(tickets[0], make_prompt(), Drop.FAILED)
    put_all(b, tickets[1:3])
    b.draw(0, 0)
    resumed = buffer(2, 1)
    resumed.restore(b.state(active=False), 1)
    assert [(t.group, t.version) for t in resumed.admit(0)] == [(n, 1) for n in range(3, 7)]
    assert resumed.stats().trained == 2 and resumed.stats().dropped == {"failed": 1}
    with pytest.raises(AssertionError):
        resumed.restore(b.state(), 1)


def test_everything_that_is_active_comes_back_where_it_was():
    b = buffer(2, 3, reuse=2)
    tickets = b.admit(0)
    put_all(b, tickets[:3])
    assert numbers(b.draw(0, 0).groups) == [0, 1]
    state = loads(dumps(b.state()), [BufferState])
    resumed = buffer(2, 3, reuse=2)
    resumed.restore(state, 1)
    was, now = b.stats(), resumed.stats()
    assert (now.in_flight, now.ready, now.kept) == (was.in_flight, was.ready, was.kept) == (1, 1, 2)
    assert (now.admitted, now.trained) == (was.admitted, was.trained)
    assert now.mean_kept_tokens == was.mean_kept_tokens
    assert [t.group for t in resumed.admit(0)] == [4]  # the slots of the step are free
    put_all(resumed, tickets[3:])
    assert numbers(resumed.draw(1, 0).groups) == [2, 3]
    assert numbers(resumed.draw(2, 0).groups) == [0, 1], "each for its second and last time"


def test_without_what_is_active_numbers_start_after_the_highest_that_was_used():
    b = buffer(1, 3, lookahead=2)
    tickets = b.admit(0)
    put_all(b, tickets[1:2])
    assert numbers(b.draw(0, 0).groups) == [1]
    put_all(b, tickets[:1])
    assert numbers(b.draw(1, 0).groups) == [0]
    resumed = buffer(1, 3, lookahead=2)
    resumed.restore(b.state(active=False), 2)
    assert [t.group for t in resumed.admit(0)] == [2, 3]


def test_a_restored_limit_holds_within_the_new_bound():
    b = buffer(1, 4)
    b.set_limit(2)
    resumed, narrower = buffer(1, 4), buffer(1, 1)
    resumed.restore(b.state(), 0)
    narrower.restore(b.state(), 0)
    assert (resumed.stats().capacity, narrower.stats().capacity) == (3, 2)


def test_the_ledger_has_every_outcome_with_its_facts(tmp_path):
    path = tmp_path / "ledger.jsonl"
    b = buffer(1, 2, version=4, ledger=Ledger(path))
    first, second, third = b.admit(0)
    b.fail(first, make_prompt(7), Drop.FAILED)
    b.put(make_group(second, [1, 4], [4]))
    b.put(make_group(third, [4, 4, 4]))
    b.draw(4, 0)
    b.close()
    written = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert written == [
        *({"fate": "admitted", "group": n, "version": 4} for n in range(3)),
        {"fate": "dropped", "group": 0, "prompt": 7, "reason": "failed"},
        {
            **{"fate": "dropped", "reason": "stale", "group": 1, "prompt": 1},
            **{"version": 4, "oldest": 1, "lengths": [2, 1]},
        },
        {
            **{"fate": "trained", "group": 2, "prompt": 2, "version": 4},
            **{"oldest": 4, "lengths": [3], "use": 1},
        },
    ]


def differs(group):
    """Groups of one episode have no signal."""
    return len(group.episodes) > 1


def test_a_group_without_a_signal_is_dropped_when_put_and_replaced_at_once():
    b = buffer(1, version=3, has_signal=differs)
    (ticket,) = b.admit(0)
    assert b.put(make_group(ticket, [3, 3, 3])) is Drop.NO_SIGNAL
    (fresh,) = b.admit(0)
    assert (fresh.group, fresh.version) == (1, 3)
    assert b.put(make_group(fresh, [3], [3])) is None
    draw = b.draw(3, 0)
    assert numbers(draw.groups) == [1]
    assert [(g.ticket.group, why) for g, why in draw.dropped] == [(0, Drop.NO_SIGNAL)]
    stats = b.stats()
    assert stats.dropped == {"no_signal": 1} and stats.mean_dropped_tokens == 3.0


def test_a_group_without_a_signal_wakes_a_blocked_admit():
    b = buffer(1, has_signal=differs)
    (ticket,) = b.admit(0)
    admitted = in_thread(b.admit)
    b.put(make_group(ticket, [0]))
    assert [t.group for t in admitted()] == [1]


def test_too_many_groups_without_a_signal_end_the_run_where_the_trainer_waits():
    b = buffer(1, has_signal=differs, max_resampled=2)
    draw = in_thread(lambda: b.draw(0))
    for _ in range(3):
        (ticket,) = b.admit(0)
        b.put(make_group(ticket, [0]))
    error = draw()
    assert isinstance(error, TrainingError)
    assert "3 groups since the last step" in str(error) and "max_resampled (2)" in str(error)


def test_the_limit_counts_anew_for_each_step_and_a_full_step_is_not_refused():
    b = buffer(1, has_signal=differs, max_resampled=2)
    for version in range(3):
        for _ in range(2 + (version == 2)):
            (ticket,) = b.admit(0)
            b.put(make_group(ticket, [version]))
        (ticket,) = b.admit(0)
        b.put(make_group(ticket, [version], [version]))
        assert len(b.draw(version, 0).groups) == 1
        b.set_live(version + 1)


def test_groups_without_a_signal_of_an_earlier_step_do_not_count():
    b = buffer(1, has_signal=differs, max_resampled=2)
    for version, count in enumerate((2, 1)):
        for _ in range(count):
            (ticket,) = b.admit(0)
            b.put(make_group(ticket, [version]))
        if version:
            break
        (ticket,) = b.admit(0)
        b.put(make_group(ticket, [version], [version]))
        b.draw(version, 0)
        b.set_live(1)
    with pytest.raises(TimeoutError):
        b.draw(1, 0)


def test_a_lower_limit_drops_what_is_older_where_the_too_old_are_dropped():
    b = buffer(1, 2, when_too_old="drop", overcommit=2.0)
    put_all(b, b.admit(0)[:2])
    assert numbers(b.draw(0, 0).groups) == [0]
    b.set_limit(0)
    with pytest.raises(TimeoutError):
        b.draw(1, 0)
    assert b.stats().dropped == {"stale": 1}


def test_drops_of_every_reason_survive_a_restore():
    b = buffer(1, has_signal=differs)
    (ticket,) = b.admit(0)
    b.put(make_group(ticket, [0]))
    resumed = buffer(1)
    resumed.restore(b.state(), 0)
    assert resumed.stats().dropped == {"no_signal": 1}


def test_a_group_is_used_again_until_its_uses_are_spent_and_its_slots_are_freed_use_by_use():
    b = buffer(1, 1, reuse=2)
    (first,) = b.admit(0)
    assert b.stats().capacity == 2 and b.admit(0) == ()
    put_all(b, (first,))
    assert numbers(b.draw(0, 0).groups) == [0]
    assert numbers(b.draw(1, 0).groups) == [0]
    with pytest.raises(TimeoutError):
        b.draw(2, 0)
    b.set_live(1)
    assert b.admit(0) == (), "one slot is free, and a group needs two"
    b.set_live(2)
    assert [t.group for t in b.admit(0)] == [1]
    assert (b.stats().trained, b.stats().reused, b.stats().kept) == (1, 1, 0)


def test_a_kept_group_that_grows_too_old_is_retired_and_not_counted_as_dropped(tmp_path):
    path = tmp_path / "ledger.jsonl"
    b = buffer(1, 2, reuse=3, version=2, ledger=Ledger(path))
    (ticket,) = b.admit(0)
    b.put(make_group(ticket, [1, 2]))
    assert numbers(b.draw(2, 0).groups) == numbers(b.draw(3, 0).groups) == [0]
    b.set_live(4)
    with pytest.raises(TimeoutError):
        b.draw(4, 0)
    assert [t.group for t in b.admit(0)] == [1]
    assert b.stats().dropped == {} and b.stats().kept == 0
    b.close()
    written = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    uses = [(x["version"], x["use"]) for x in written if x["fate"] == "trained"]
    assert uses == [(2, 1), (3, 2)]
    (retired,) = [x for x in written if x["fate"] == "retired"]
    assert retired == {"fate": "retired", "group": 0, "version": 4, "uses": 2}


def test_fresh_groups_come_before_those_used_before():
    b = buffer(2, 3, reuse=2)
    tickets = b.admit(0)
    assert len(tickets) == 4
    put_all(b, tickets[:2])
    b.draw(0, 0)
    put_all(b, tickets[2:3])
    assert numbers(b.draw(1, 0).groups) == [2, 0]


def test_a_rank_chooses_within_the_lookahead():
    b = buffer(1, 2, lookahead=2, rank=reward_variance)
    tickets = b.admit(0)
    b.put(make_group(tickets[0], [0]))
    assert len(tickets) == 1
    b = buffer(2, 2, lookahead=2, rank=reward_variance)
    tickets = b.admit(0)
    for ticket, size in zip(tickets, (1, 2, 3, 9), strict=True):
        b.put(make_group(ticket, *[[0]] * size))  # rewards 0, 1, 2, ...
    assert numbers(b.draw(0, 0).groups) == [2, 1], "the last is out of reach of the first"


def test_a_reuse_that_could_never_fill_a_step_is_refused():
    with pytest.raises(ConfigError, match=r"buffer\.reuse \(2\).*room for 1 .*max_staleness to 1"):
        buffer(2, 0, reuse=2)
    with pytest.raises(ConfigError, match=r"lookahead \(1\).*lookahead=0 or .*max_staleness to 2"):
        buffer(2, 1, reuse=2, lookahead=1)
    buffer(2, 1, reuse=2, lookahead=0)


def test_where_the_too_old_are_dropped_rollouts_run_ahead_and_the_trainer_skips_them(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    b = buffer(2, 1, when_too_old="drop", overcommit=2.0, ledger=ledger)
    put_all(b, b.admit(0))
    assert b.stats().active == b.stats().capacity == 8
    assert numbers(b.draw(0, 0).groups) == [0, 1]
    assert [t.group for t in b.admit(0)] == [8, 9], "free as soon as they are taken"
    put_all(b, [Ticket(group=n, version=1) for n in (8, 9)])
    b.draw(1, 0)
    draw = b.draw(2, 0)
    assert numbers(draw.groups) == [8, 9]
    assert [(g.ticket.group, why) for g, why in draw.dropped] == [
        (n, Drop.STALE) for n in (4, 5, 6, 7)
    ]
    assert b.stats().dropped == {"stale": 4} and b.stats().active == 0
    b.close()
    lines = [json.loads(x) for x in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    dropped = [(x["prompt"], x["reason"], x["oldest"]) for x in lines if x["fate"] == "dropped"]
    assert dropped == [(n, "stale", 0) for n in (4, 5, 6, 7)]


def test_what_is_too_old_is_reported_when_its_version_is_drawn_and_its_ticket_is_reused(tmp_path):
    ledger, noted, aged = Ledger(tmp_path / "ledger.jsonl"), [], []
    settings = BufferSettings(
        groups_per_step=1, max_staleness=1, when_too_old="drop", overcommit=2.0
    )
    b = ReplayBuffer(settings, ledger=ledger, note=lambda **event: noted.append(event))
    b.watch(aged.append, aged.append)
    slow, *others = b.admit(0)
    put_all(b, others)
    with pytest.raises(TimeoutError):
        b.draw(0, 0)  # the window is one group
    b.fail(slow, make_prompt(), Drop.FAILED)
    (second, *_) = b.admit(0)
    for version in (0, 1):
        b.draw(version, 0)
        assert aged == [0], "a token of version 0 may be trained on at 0 and at 1"
    b.set_live(2)
    with contextlib.suppress(TimeoutError):
        b.draw(2, 0)
    assert aged == [0, 1]
    cancelled = CancelledGroup(ticket=second, prompt_id=7, oldest=0, lengths=(3, 0))
    before = b.stats()
    for _ in range(2):  # once is as good as twice
        b.cancel(cancelled)
    after = b.stats()
    assert after.active == before.active - 1 and after.dropped["stale"] >= 1
    assert after.mean_dropped_tokens == before.mean_dropped_tokens, "of finished ones alone"
    put_all(b, b.admit(0))
    draw = b.draw(2, 0)
    assert draw.cancelled == (cancelled,) and b.draw(2, 0).cancelled == ()
    events = [e for e in noted if e.get("fail") == second.group]
    assert events == [{"fail": second.group, "reason": "stale", "oldest": 0, "lengths": [3, 0]}]
    b.close()
    lines = [json.loads(x) for x in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    (line,) = [x for x in lines if x["group"] == second.group and x["fate"] == "dropped"]
    assert (line["reason"], line["prompt"], line["oldest"], line["version"]) == ("stale", 7, 0, 2)
    assert line["lengths"] == [3, 0]


def test_where_rollouts_wait_nothing_is_reported_as_too_old():
    b, aged = buffer(1, 0), []
    b.watch(aged.append, aged.append)
    for version in range(3):
        put_all(b, b.admit(0))
        b.draw(version, 0)
        b.set_live(version + 1)
    assert aged == [0]


def test_a_draw_wakes_a_blocked_admit_where_the_too_old_are_dropped():
    b = buffer(1, 0, when_too_old="drop")
    put_all(b, b.admit(0))
    join = in_thread(lambda: b.admit(JOIN_S))
    b.draw(0, 0)
    assert [t.group for t in join()] == [1]


def test_with_reuse_kept_groups_take_slots_until_they_are_used_up():
    b = buffer(1, 3, when_too_old="drop", reuse=2)
    tickets = b.admit(0)
    assert len(tickets) == 4
    b.put(make_group(tickets[0]))
    assert numbers(b.draw(0, 0).groups) == [0]
    assert b.stats().kept == 1 and b.admit(0) == ()
    assert numbers(b.draw(1, 0).groups) == [0], "no fresh one is ready"
    assert len(b.admit(0)) == 1


def test_a_lower_limit_admits_fewer_and_drops_no_active_group():
    b = buffer(1, 3)
    tickets = b.admit(0)
    b.set_limit(1)
    assert (len(tickets), b.stats().capacity, b.stats().active) == (4, 2, 4)
    put_all(b, tickets)
    for version in range(2):
        b.draw(version, 0)
        b.set_live(version + 1)
        assert b.admit(0) == (), "too many are active still"
    b.draw(2, 0)
    b.set_live(3)
    assert [t.group for t in b.admit(0)] == [4]
    assert numbers(b.draw(3, 0).groups) == [3], "within max_staleness, though above the limit"
    b.set_limit(3)
    assert len(b.admit(0)) == 2, "the step at 3 is not live yet"


def test_a_higher_limit_wakes_a_blocked_admit():
    b = buffer(1, 1)
    b.set_limit(0)
    assert len(b.admit(0)) == 1
    join = in_thread(lambda: b.admit(JOIN_S))
    b.set_limit(1)
    assert [t.group for t in join()] == [1]


@pytest.mark.parametrize("limit", [-1, 3])
def test_a_limit_beyond_the_bound_is_a_programming_error(limit):
    with pytest.raises(AssertionError, match="not within"):
        buffer(1, 2).set_limit(limit)


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_waiting_draw_ends_at_the_put_or_failure_that_fills_its_step(lookahead, seed):
    """A draw that waits looks again only for what can help it, and misses none of that."""
    draw = random.Random(seed)
    b = buffer(per_step=4, max_staleness=3, lookahead=lookahead)
    tickets = {t.group: t for t in b.admit(0)}
    draws, done = [], threading.Event()
    join = in_thread(lambda: (draws.append(b.draw(0)), done.set()))
    order, ready = draw.sample(sorted(tickets), len(tickets)), {}
    pending = sorted(tickets)
    for number in order:
        if draw.random() < 0.2:
            b.fail(tickets[number], make_prompt(), Drop.FAILED)
            pending.remove(number)
        else:
            ready[number] = make_group(tickets[number])
            b.put(ready[number])
        expected = select(pending, ready, 4, lookahead)
        if len(expected) == 4:
            assert done.wait(30), "nothing more will come that it could wait for"
            assert tuple(numbers(draws[0].groups)) == expected
            break
        assert not done.wait(0.002)
    b.close()
    join()


def test_a_waiting_draw_looks_only_for_what_can_fill_its_step(monkeypatch):
    looked = []
    monkeypatch.setattr(
        "jaxrl_async.buffer.select.select", lambda *a, **k: looked.append(1) or select(*a, **k)
    )
    b = buffer(per_step=50, max_staleness=3)
    tickets = b.admit(0)
    join = in_thread(lambda: b.draw(0))
    for ticket in tickets[:0:-1]:
        b.put(make_group(ticket))
    time.sleep(0.1)
    assert len(looked) <= 2, "the oldest is missing: no other helps"
    b.put(make_group(tickets[0]))
    assert len(join().groups) == 50 and len(looked) <= 4
