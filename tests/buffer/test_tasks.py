"""Groups of several tasks in the buffer: bounds of their own, drops that are reported, and groups
that the trainer does not wait for."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.buffer.contents import BufferState
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.buffer.select import own_rank
from jaxrl_async.errors import TrainingError
from jaxrl_async.testing.fakes import make_group, make_prompt
from jaxrl_async.types import CancelledGroup, Drop


def buffer(per_step=2, max_staleness=1, dropped=None, ledger=None, **more):
    made = ReplayBuffer(
        BufferSettings(groups_per_step=per_step, max_staleness=max_staleness, **more),
        ledger=ledger,
        dropped=(lambda *event: None) if dropped is None else lambda *e: dropped.append(e),
    )
    made.restore(BufferState(next_group=0, next_untaken=0), 0)
    return made


def prompt(task):
    return replace(make_prompt(7), task=task)


def group(ticket, task, *versions):
    return replace(make_group(ticket, *versions), prompt=prompt(task))


def numbers(draw):
    return [g.ticket.group for g in draw.groups]


def test_a_task_has_a_lower_bound_on_staleness():
    events = []
    b = buffer(max_staleness=2, dropped=events, task_bounds={"fresh": 0})
    tickets = b.admit(0)
    tasks = ["fresh", "other", "fresh", "other", "other", "other"]
    for ticket, task in zip(tickets, tasks, strict=True):
        b.put(group(ticket, task))
    assert numbers(b.draw(0, 0)) == [0, 1]
    b.set_live(1)
    draw = b.draw(1, 0)
    assert numbers(draw) == [3, 4]
    assert [(g.ticket.group, why) for g, why in draw.dropped] == [(2, Drop.STALE)]
    assert events == [("fresh", 2, Drop.STALE)]


def test_every_way_out_of_the_buffer_is_reported_with_its_task():
    events = []
    flat = {"has_signal": lambda group: group.prompt.task != "flat"}
    b = buffer(per_step=4, dropped=events, **flat)
    tickets = b.admit(0)
    b.fail(tickets[0], prompt("a"), Drop.FAILED)
    b.fail(tickets[0], prompt("a"), Drop.FAILED)  # again: it is gone
    cancelled = CancelledGroup(ticket=tickets[1], prompt_id=7, oldest=0, lengths=(), task="b")
    b.cancel(cancelled)
    b.put(group(tickets[2], "flat"))
    b.put(group(tickets[3], "c"))
    assert events == [("a", 0, Drop.FAILED), ("b", 1, Drop.STALE), ("flat", 2, Drop.NO_SIGNAL)]


def test_the_ledger_names_tasks_only_where_there_are_several():
    ledger = Ledger(keep=True)
    b = buffer(ledger=ledger)
    tickets = b.admit(0)
    b.put(group(tickets[0], "a"))
    b.put(make_group(tickets[1]))
    b.fail(tickets[2], prompt("c"), Drop.FAILED)
    b.draw(0, 0)
    lines = [line for line in ledger.take() if line["fate"] != "admitted"]
    assert [line.get("task") for line in lines] == ["c", "a", None]


# ---- groups that the trainer does not wait for


def test_a_group_that_hangs_is_overtaken_and_trained_on_once_it_ends():
    b = buffer(max_staleness=2, overtaken_tasks=frozenset({"slow"}))
    tickets = b.admit(0)
    b.began(tickets[0], prompt("slow"))
    for ticket in tickets[1:]:
        b.began(ticket, prompt("quick"))
        b.put(group(ticket, "quick"))
    assert numbers(b.draw(0, 0)) == [1, 2]
    b.set_live(1)
    b.put(group(tickets[0], "slow"))
    assert numbers(b.draw(1, 0)) == [0, 3], "the oldest comes first again"


def test_without_it_the_trainer_waits_for_the_oldest():
    b = buffer(max_staleness=2)
    tickets = b.admit(0)
    b.began(tickets[0], prompt("slow"))
    for ticket in tickets[1:]:
        b.put(group(ticket, "quick"))
    with pytest.raises(TimeoutError):
        b.draw(0, 0)


def test_a_trainer_that_waits_is_woken_by_a_task_that_it_does_not_wait_for():
    """The oldest group's task becomes known only after the others are ready."""
    b = buffer(max_staleness=2, overtaken_tasks=frozenset({"slow"}))
    tickets = b.admit(0)
    for ticket in tickets[1:3]:
        b.put(group(ticket, "quick"))
    with ThreadPoolExecutor(1) as thread:
        draw = thread.submit(b.draw, 0, 2.0)
        time.sleep(0.05)  # it waits by now
        b.began(tickets[0], prompt("slow"))
        assert numbers(draw.result(5)) == [1, 2]


def test_an_overtaken_group_that_ends_too_old_is_dropped():
    b = buffer(per_step=1, max_staleness=1, overtaken_tasks=frozenset({"slow"}))
    first = b.admit(0)
    b.began(first[0], prompt("slow"))
    version = 0
    running = list(first[1:])
    while version < 3:
        for ticket in running:
            b.put(group(ticket, "quick", [version]))
        assert len(b.draw(version, 0).groups) == 1
        version += 1
        b.set_live(version)
        running = list(b.admit(0))
    b.put(group(first[0], "slow", [0]))
    for ticket in running:
        b.put(group(ticket, "quick", [version]))
    draw = b.draw(version, 0)
    assert [(g.prompt.task, why) for g, why in draw.dropped] == [("slow", Drop.STALE)]


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ({"overtaken_tasks": frozenset({"slow"})}, True),
        ({"when_too_old": "drop"}, True),
        ({}, False),
    ],
    ids=["overtaken", "drop", "wait"],
)
def test_running_groups_get_their_age_if_one_may_become_too_old(how, reported):
    ages = []
    b = buffer(per_step=1, max_staleness=1, **how)
    b.watch(ages.append, lambda number: None)
    for version in range(3):
        for ticket in b.admit(0):
            b.put(group(ticket, "quick", [version]))
        b.draw(version, 0)
        b.set_live(version + 1)
    assert (ages[-1] == 1) == reported, "version 2 takes tokens from version 1 on"


@pytest.mark.full
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 2))
def test_steps_continue_while_groups_hang_and_none_is_older_than_the_bound(
    slow, per_step, staleness
):
    """As many as may hang never end; every step is made of the others."""
    most = staleness * per_step
    b = buffer(per_step, staleness, overtaken_tasks=frozenset({"slow"}))
    hanging, taken = 0, set()
    for version in range(6):
        for index, ticket in enumerate(b.admit(0)):
            hangs = slow[(ticket.group + index) % len(slow)] and hanging < most
            b.began(ticket, prompt("slow" if hangs else "quick"))
            if hangs:
                hanging += 1
            else:
                b.put(group(ticket, "quick", [version]))
        draw = b.draw(version, 0)
        assert len(draw.groups) == per_step and not draw.dropped
        assert all(version - g.oldest_version <= staleness for g in draw.groups)
        assert not taken & set(numbers(draw))
        taken |= set(numbers(draw))
        b.set_live(version + 1)


# ---- a user's order


def test_a_users_order_chooses_among_those_that_may_be_taken():
    def first(group, version):
        return group.prompt.task != "tools"

    b = buffer(max_staleness=3, lookahead=3, rank=own_rank(first, "mine.py:first"))
    tickets = b.admit(0)
    for ticket, task in zip(tickets, ["sums", "sums", "tools", "tools", "tools"], strict=True):
        b.put(group(ticket, task))
    assert numbers(b.draw(0, 0)) == [2, 3]


@pytest.mark.parametrize("given", ["text", None, float("nan")])
def test_a_users_order_that_is_no_number_is_refused(given):
    rank = own_rank(lambda group, version: given, "mine.py:order")
    with pytest.raises(TrainingError, match=r"mine\.py:order"):
        rank(make_group(buffer().admit(0)[0]), 0)
