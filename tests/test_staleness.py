"""The bound on staleness: the formula against every schedule, and what breaks it."""

import random
import re
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.staleness import (
    capacity,
    drop_reason,
    least_limit,
    may_admit,
    memory_bound,
    never_fills_a_step,
)
from jaxrl_async.testing.fakes import make_group
from jaxrl_async.types import Drop, Ticket


def group(number: int = 0, *versions: int):
    return make_group(Ticket(group=number, version=min(versions, default=0)), versions or (0,))


def worst_staleness(slots, lookahead, per_step, reuse=1):
    """Return the worst staleness of any first use, by the count in `capacity`."""
    return (slots - reuse + reuse * lookahead) // per_step


def simulate(per_step, slots, lookahead, seed, *, freed_when_taken=False, steps=25):
    """(worst staleness seen, steps done) of one random schedule; written apart from the buffer."""
    r = random.Random(seed)
    live = active = number = done = worst = 0
    work: OrderedDict[int, list] = OrderedDict()  # number -> [version at admission, finished]
    taken: list[int] = []
    unpublished: list[int] = []  # group counts of steps that are not live
    for _ in range(8_000):
        if done >= steps:
            break
        event = r.choice(["admit", "admit", "finish", "finish", "fail", "take", "train", "live"])
        if event == "admit" and active < slots:
            work[number] = [live, False]
            number, active = number + 1, active + 1
        elif event == "finish" and work:
            r.choice(list(work.values()))[1] = True
        elif event == "fail" and work and r.random() < 0.1:
            del work[r.choice(list(work))]
            active -= 1
        elif event == "take" and work and len(taken) < per_step:
            head = next(iter(work))
            ready = [n for n in work if n <= head + lookahead and work[n][1]]
            if ready:
                taken.append(work.pop(ready[0])[0])
                active -= freed_when_taken
        elif event == "train" and len(taken) == per_step:
            worst = max(worst, *(done - v for v in taken))
            taken, done = [], done + 1
            unpublished.append(per_step)
        elif event == "live" and unpublished:
            live = done
            active -= 0 if freed_when_taken else sum(unpublished)
            unpublished = []
    return worst, done


@given(st.integers(0, 3), st.integers(1, 4), st.data())
def test_capacity_keeps_the_bound_at_max_staleness(max_staleness, per_step, data):
    lookahead = data.draw(st.integers(0, max_staleness * per_step))
    slots = capacity(max_staleness, per_step, lookahead)
    assert slots >= per_step, "a step can always be filled"
    assert worst_staleness(slots, lookahead, per_step) == max_staleness


@given(st.integers(0, 2), st.integers(1, 3), st.integers(0, 10**6), st.data())
def test_no_schedule_is_staler_than_the_bound_and_none_gets_stuck(s, p, seed, data):
    lookahead = data.draw(st.integers(0, s * p))
    slots = capacity(s, p, lookahead)
    worst, done = simulate(p, slots, lookahead, seed)
    assert worst <= worst_staleness(slots, lookahead, p)
    assert done == 25


@pytest.mark.parametrize(("s", "p"), [(0, 2), (1, 1), (1, 2), (2, 2), (3, 1)])
def test_in_strict_order_the_bound_is_reached_so_it_cannot_be_smaller(s, p):
    assert max(simulate(p, capacity(s, p, 0), 0, seed)[0] for seed in range(40)) == s


@pytest.mark.parametrize(("s", "p"), [(0, 2), (1, 2), (2, 1)])
def test_slots_freed_when_a_group_is_taken_break_the_bound(s, p):
    worst = max(
        simulate(p, capacity(s, p, 0), 0, seed, freed_when_taken=True)[0] for seed in range(40)
    )
    assert worst > s


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 5), st.data())
def test_with_reuse_the_first_use_stays_within_the_bound_too(max_staleness, per_step, reuse, data):
    lookahead = data.draw(st.integers(0, max_staleness * per_step))
    slots = capacity(max_staleness, per_step, lookahead, reuse)
    worst = worst_staleness(slots, lookahead, per_step, reuse)
    assert worst <= max_staleness and (worst == max_staleness or reuse > per_step)
    if slots >= reuse * per_step:
        assert may_admit(0, slots, reuse) >= per_step, "a step can always be filled"


@given(st.integers(1, 5), st.integers(0, 9), st.integers(1, 4))
def test_the_least_limit_is_the_smallest_staleness_that_fills_a_step(per_step, lookahead, reuse):
    fills = [s for s in range(60) if capacity(s, per_step, lookahead, reuse) >= reuse * per_step]
    assert least_limit(per_step, lookahead, reuse) == fills[0]


@given(st.integers(0, 4), st.integers(1, 5), st.floats(1, 8))
def test_a_memory_bound_holds_a_step_and_no_more_than_was_allowed(s, p, overcommit):
    assert p <= memory_bound(s, p, overcommit) <= overcommit * (s + 1) * p


def test_admission_is_what_is_left_and_never_negative():
    assert [may_admit(active, 4) for active in (0, 3, 4, 6)] == [4, 1, 0, 0]
    assert [may_admit(active, 6, 2) for active in (0, 1, 3, 5, 9)] == [3, 2, 1, 0, 0]


def test_the_oldest_token_decides_not_the_newest():
    mixed = group(0, 3, 5, 6)
    assert mixed.oldest_version == 3 and mixed.newest_version == 6
    assert drop_reason(mixed, 6, 2) is Drop.STALE
    assert drop_reason(mixed, 6, 3) is None


def test_a_single_token_from_the_future_condemns_a_group():
    assert drop_reason(group(0, 4, 5), 4, 9) is Drop.FROM_THE_FUTURE


@given(st.integers(0, 4), st.integers(1, 6), st.integers(0, 20), st.integers(1, 3))
def test_why_a_step_is_never_filled_is_said_exactly_where_it_is(s, p, lookahead, reuse):
    """With all slots free, a step's groups must be admitted; the way out that is named works."""
    slots = capacity(s, p, lookahead, reuse)
    problem = never_fills_a_step(s, p, lookahead, reuse)
    assert (problem is None) == (may_admit(0, slots, reuse) >= p)
    if problem is not None:
        least = int(problem.removesuffix(".").rpartition(" ")[2])
        assert never_fills_a_step(least, p, lookahead, reuse) is None
        if advised := re.search(r"Set staleness.lookahead=(\d+)", problem):
            assert never_fills_a_step(s, p, int(advised[1]), reuse) is None
            assert never_fills_a_step(s, p, int(advised[1]) + 1, reuse) is not None
        assert least == s + 1 or never_fills_a_step(least - 1, p, lookahead, reuse) is not None
