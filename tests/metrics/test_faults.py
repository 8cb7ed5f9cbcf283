"""Counts of faults, by declared names only."""

import pytest

from jaxrl_async.metrics.faults import NAMES, FaultCounts


def test_what_is_added_is_read_and_every_name_is_there():
    faults = FaultCounts()
    faults.add("scorer_retries")
    faults.add("redone_requests", 3)
    assert faults.read() == {**dict.fromkeys(NAMES, 0), "scorer_retries": 1, "redone_requests": 3}


def test_a_name_that_is_not_declared_is_a_programmers_error():
    with pytest.raises(AssertionError, match="faults/typo"):
        FaultCounts().add("typo")
