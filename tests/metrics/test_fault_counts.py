"""Counts of faults, by declared names only, and the time that limits are measured in."""

import pytest

from jaxrl_async.metrics.fault_counts import NAMES, AwakeClock, FaultCounts, backoff_s
from jaxrl_async.testing.clock import VirtualClock


def test_what_is_added_is_read_and_every_name_is_there():
    faults = FaultCounts()
    faults.add("scorer_retries")
    faults.add("redone_requests", 3)
    assert faults.read() == {**dict.fromkeys(NAMES, 0), "scorer_retries": 1, "redone_requests": 3}


def test_a_name_that_is_not_declared_is_a_programmers_error():
    with pytest.raises(AssertionError, match="faults/typo"):
        FaultCounts().add("typo")


def test_time_in_which_the_process_was_suspended_does_not_count():
    clock = VirtualClock()
    awake = AwakeClock(clock, most_s=5.0)
    for seconds, counted in ((3.0, 3.0), (600.0, 8.0), (5.0, 13.0)):
        clock.advance(seconds)
        assert awake() == counted


def test_waits_double_and_none_is_longer_than_a_minute():
    assert [backoff_s(1.0, n) for n in (0, 1, 5, 6, 10**6)] == [1, 2, 32, 60, 60]
