"""The controller of staleness: its rule, its bounds, and a loop closed around modelled data."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.algorithms.pacing import Bounds, Pace, next_limit, next_pace


@st.composite
def bounds(draw):
    lowest, highest = sorted((draw(st.integers(0, 9)), draw(st.integers(0, 9))))
    return Bounds(target=draw(st.floats(0, 1)), lowest=lowest, highest=highest)


@pytest.mark.parametrize(
    ("limit", "ess", "expected"),
    [
        (8, 0.79, 4),  # below the target: half
        (5, 0.1, 2),
        (1, 0.1, 0),
        (8, 0.80, 8),  # between the target and (1 + target) / 2 = 0.9: as it is
        (8, 0.90, 8),
        (8, 0.91, 9),  # well above: one more
        (9, 1.0, 9),
        (0, 1.0, 1),
        (4, math.nan, 4),
        (4, math.inf, 4),
    ],
)
def test_the_limit_halves_below_the_target_and_grows_by_one_well_above(limit, ess, expected):
    assert next_limit(limit, ess, Bounds(target=0.8, lowest=0, highest=9)) == expected


@pytest.mark.full
@given(bounds(), st.lists(st.floats(0, 1), max_size=30))
def test_the_limit_stays_within_its_bounds_and_rests_after_each_change(bound, measured):
    pace = Pace(limit=bound.highest)
    changed_at, previous = None, None
    for update, ess in enumerate(measured):
        following = next_pace(pace, ess, bound)
        assert bound.lowest <= following.limit <= bound.highest
        if following.limit != pace.limit:
            if changed_at is not None:
                assert update - changed_at > max(previous), "old groups are gone"
            changed_at, previous = update, (pace.limit, following.limit)
        pace = following


def settle(ess_of, target, highest=8, updates=200):
    """Limits over time where the sample size depends on the limit of `limit` updates ago."""
    bound, pace, limits = Bounds(target=target, lowest=0, highest=highest), Pace(limit=highest), []
    for _ in range(updates):
        limits.append(pace.limit)
        acting = max(limits[-1 - pace.limit :])  # the oldest data still comes from that limit
        pace = next_pace(pace, ess_of(acting), bound)
    return limits


def test_it_finds_a_limit_that_keeps_the_target_and_stays_there():
    limits = settle(lambda limit: 1 - 0.04 * limit, target=0.85)
    assert limits[0] == 8 and len(set(limits[40:])) == 1
    assert 1 - 0.04 * limits[-1] >= 0.85
    assert settle(lambda limit: 1.0, target=0.85)[-1] == 8, "on-policy data costs nothing"
    assert max(settle(lambda limit: 0.2 if limit else 0.9, target=0.85)[40:]) == 0
