"""What a buffer holds, without its lock: what is taken and given back is as it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.buffer.contents import BufferState, Contents, RunningMean
from jaxrl_async.testing.fakes import make_group
from jaxrl_async.types import Drop


def filled(reuse, count):
    contents = Contents(reuse)
    for ticket in contents.admit(count, 0):
        contents.put(make_group(ticket, [0]))
    return contents


def snapshot(contents):
    return contents.state(active=True, limit=1, ledger_lines=0)


@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 6), st.integers(0, 3))
def test_a_draw_that_is_given_back_leaves_no_trace(reuse, count, fresh, again):
    contents = filled(reuse, count)
    for number in range(count // 2):  # kept ones, if a group may be used again
        contents.take(number)
    kept = tuple(contents.kept)[:again]
    before, slots = snapshot(contents), contents.slots
    numbers = tuple(contents.ready)[:fresh]
    draw = contents.before_draw(0, numbers, kept)
    for number in numbers:
        contents.take(number)
    for number in kept:
        contents.take_again(number)
    contents.hold(0, len(numbers) + len(kept))
    contents.give_back(draw)
    assert snapshot(contents) == before and contents.slots == slots


def test_what_is_restored_is_what_was_saved():
    contents = filled(2, 4)
    contents.take(0)
    contents.drop(contents.ready[1], Drop.STALE)
    (ticket,) = contents.admit(1, 0)
    assert contents.fail(ticket.group, Drop.FAILED) and not contents.fail(ticket.group, Drop.FAILED)
    saved = snapshot(contents)
    fresh = Contents(2)
    fresh.restore(saved)
    assert snapshot(fresh) == saved
    with pytest.raises(AssertionError, match="before anything is admitted"):
        fresh.restore(BufferState(next_group=0, next_untaken=0))


def test_slots_are_held_until_their_step_is_live():
    contents = filled(1, 2)
    assert contents.slots == 2
    contents.take(0)
    contents.hold(0, 1)
    assert contents.slots == 2
    contents.release(0)
    assert contents.slots == 2
    contents.release(1)
    assert contents.slots == 1


def test_the_mean_of_nothing_is_zero():
    mean = RunningMean()
    assert mean.mean == 0.0
    mean.add([1, 4])
    assert (mean.mean, mean.pair) == (2.5, (5, 2))


def test_what_is_given_back_is_pending_in_the_order_of_its_numbers():
    contents = filled(1, 4)
    draw = contents.before_draw(0, (0, 2), ())
    for number in (0, 2):
        contents.take(number)
    contents.hold(0, 2)
    contents.give_back(draw)
    assert list(contents.pending) == list(contents.ready) == [0, 1, 2, 3]
