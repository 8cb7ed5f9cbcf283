"""When a sampler is taken out, started again, or given up."""

import pytest

from jaxrl_async.sampler.router.supervise import (
    Act,
    Health,
    RestartLimits,
    Trouble,
    decide,
    trouble,
)

LIMITS = RestartLimits(restarts=2, backoff_s=1.0, hang_s=10.0, nonfinite_in_a_row=3)


@pytest.mark.parametrize(
    ("health", "found"),
    [
        (Health(), None),
        (Health(error=ValueError("x")), Trouble.DEAD),
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
