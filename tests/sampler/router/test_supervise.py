"""When a sampler is taken out, started again, or given up."""

import pytest

from jaxrl_async.errors import Disconnected
from jaxrl_async.sampler.router.supervise import (
    REMIND_S,
    Act,
    Health,
    RestartLimits,
    Trouble,
    decide,
    messages_due,
    trouble,
)

LIMITS = RestartLimits(restarts=2, backoff_s=1.0, hang_s=10.0, nonfinite_in_a_row=3)


@pytest.mark.parametrize(
    ("health", "found"),
    [
        (Health(), None),
        (Health(error=ValueError("x")), Trouble.DEAD),
        (Health(error=Disconnected("x")), Trouble.CUT_OFF),
        (Health(error=Disconnected("x"), left=True), Trouble.LEFT),
        (Health(working=True, quiet_s=10.1), Trouble.HANGS),
        (Health(working=True, quiet_s=9.9), None),
        (Health(working=False, quiet_s=1e6), None),
        (Health(nonfinite=2), None),
        (Health(nonfinite=3), Trouble.NONFINITE),
    ],
)
def test_what_is_wrong_with_a_sampler(health, found):
    assert trouble(health, LIMITS) is found
    assert decide(health, LIMITS) is (Act.NOTHING if found is None else Act.TAKE_OUT)


@pytest.mark.parametrize(
    ("restarts", "out_s", "act"),
    [
        (0, 0.9, Act.NOTHING),
        (0, 1.0, Act.START),
        (1, 1.9, Act.NOTHING),
        (1, 2.0, Act.START),
        (2, 0.0, Act.GIVE_UP),
    ],
)
def test_one_that_is_out_waits_longer_each_time_and_is_given_up_in_the_end(restarts, out_s, act):
    assert decide(Health(restarts=restarts, out_s=out_s), LIMITS) is act


@pytest.mark.parametrize("restarts", [0, 2])
def test_one_that_nobody_can_replace_is_removed_at_once(restarts):
    health = Health(restarts=restarts, out_s=0.0, replaceable=False)
    assert decide(health, LIMITS) is Act.REMOVE


@pytest.mark.full
def test_that_nobody_is_there_is_said_at_once_and_from_time_to_time():
    counts = [messages_due(t) for t in (0.0, REMIND_S - 1, REMIND_S, 3 * REMIND_S)]
    assert counts == [1, 1, 2, 4]
