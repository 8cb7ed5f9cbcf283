"""A sampler that lies: values that no draw can have are refused, with the reason, and counted."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from remotes import until

from jaxrl_async.errors import Disconnected, RolloutError
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.remote.sampler.answer_checks import checked_completion, checked_remote_partial
from jaxrl_async.remote.sampler.remote_replica import RemoteReplica
from jaxrl_async.remote.wire.messages import Answers, Start
from jaxrl_async.sampler.request_checks import RequestCheck, RequestLimits
from jaxrl_async.testing.session_pair import session_pair
from jaxrl_async.types import (
    Completion,
    KeptTokens,
    Partial,
    Request,
    SamplingParams,
    StopReason,
)

NEWEST = 50
ROOM = RequestLimits(max_length=64, max_new_tokens=32, vocab=100, seed=0)
ASKED = Request(
    request_id="g1/m0/t0", token_ids=np.arange(5, dtype=np.int32), max_new_tokens=4, key=(1, 0)
)
TRUE = Completion(
    request_id="g1/m0/t0",
    token_ids=np.array([1, 2, 3, 4], np.int32),
    logprobs=np.array([-1, -2, -3, -4], np.float32),
    versions=np.full(4, NEWEST, np.int32),
    stop=StopReason.LENGTH,
)
BEGUN = Partial(
    request=ASKED,
    token_ids=np.array([1, 2], np.int32),
    logprobs=np.array([-1, -2], np.float32),
    versions=np.array([40, 41], np.int32),
    seed=0,
)


def answered(given=ASKED, *, oldest: int = 0, **changes: object) -> Completion:
    """Check an answer that is true but for these fields."""
    answer = replace(TRUE, **changes)
    return checked_completion(answer, given, ROOM, newest=NEWEST, stopped=False, oldest=oldest)


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def kept(*sets: tuple[int, ...]) -> KeptTokens:
    """Make the masks of drawn tokens."""
    starts = np.cumsum([0, *map(len, sets)])
    ids = [token for one in sets for token in one]
    return KeptTokens(ids=np.array(ids, np.int32), starts=starts.astype(np.int32))


@pytest.mark.parametrize(
    ("odd", "shown"),
    [
        (50, "50"),
        (0.01, "0.01"),
        (-1e30, "-1e"),
        (-300, "-300"),
        (np.inf, "inf"),
        (-np.inf, "-inf"),
    ],
)
def test_a_log_prob_that_no_draw_has_is_refused(odd: float, shown: str) -> None:
    with pytest.raises(RolloutError, match=f"logprobs have {shown}.*between -200 and 0"):
        answered(logprobs=row(-1, odd, -1, -1))
    saved = replace(BEGUN, logprobs=row(-1, odd))
    with pytest.raises(RolloutError, match=f"logprobs have {shown}"):
        checked_remote_partial(saved, ASKED, ROOM, newest=NEWEST)


def test_a_log_prob_of_certainty_of_rounding_and_nan_are_taken() -> None:
    """A NaN is a request that is drawn again, not a lie."""
    for values in ([0.0, -0.0, 1e-6, 9e-4], [-150.0, -40.0, -1.0, 0.0], [np.nan] * 4):
        assert np.array_equal(answered(logprobs=row(*values)).logprobs, row(*values), True)


def test_the_whole_distribution_may_give_less_where_the_temperature_is_high() -> None:
    """A token of 1e-100 at temperature 1 is drawn easily at temperature 10."""
    hot = replace(ASKED, sampling=SamplingParams(temperature=10.0))
    low = row(-230, -1, -1, -1)
    assert answered(hot, full_logprobs=low).full_logprobs is low
    for given, values in ((ASKED, low), (hot, row(-2001, -1, -1, -1)), (hot, row(1, -1, -1, -1))):
        with pytest.raises(RolloutError, match="full_logprobs have"):
            answered(given, full_logprobs=values)


def test_a_version_older_than_the_samplers_own_is_refused() -> None:
    assert answered(oldest=NEWEST) is not None
    versions = np.array([48, 49, 50, 50], np.int32)
    assert answered(versions=versions, oldest=48) is not None
    with pytest.raises(RolloutError, match=r"has version 48, but the sampler used version 49"):
        answered(versions=versions, oldest=49)
    with pytest.raises(RolloutError, match="lie between 0 and 50"):
        answered(versions=np.full(4, 51, np.int32))


def test_what_another_sampler_drew_keeps_its_versions_and_nobody_changes_it() -> None:
    versions = np.array([40, 41, 50, 50], np.int32)
    assert answered(BEGUN, versions=versions, oldest=50) is not None
    with pytest.raises(RolloutError, match="has version 49"):
        answered(BEGUN, versions=np.array([40, 41, 49, 50], np.int32), oldest=50)
    with pytest.raises(RolloutError, match="versions do not begin with the given ones"):
        answered(BEGUN, versions=np.array([41, 41, 50, 50], np.int32), oldest=50)
    with pytest.raises(RolloutError, match="token_ids do not begin with the given ones"):
        answered(BEGUN, versions=versions, token_ids=np.array([1, 3, 3, 4], np.int32))


def test_a_token_that_its_mask_leaves_out_is_refused() -> None:
    masked = replace(ASKED, sampling=SamplingParams(top_k=2))
    full = row(-1, -1, -1, -1)
    for mask in (kept((1, 2), (2,), (0, 3), (4,)), kept((), (2,), (), ())):
        assert answered(masked, kept=mask, full_logprobs=full) is not None
    with pytest.raises(RolloutError, match="token 2 is not among the tokens in kept"):
        answered(masked, kept=kept((1, 2), (2,), (2, 4), (4,)), full_logprobs=full)
    with pytest.raises(RolloutError, match="kept has ids outside the vocabulary"):
        answered(masked, kept=kept((1, 2), (2,), (3, 100), (4,)), full_logprobs=full)
    saved = replace(BEGUN, kept=kept((1,), (3,)), full_logprobs=row(-1, -1))
    with pytest.raises(RolloutError, match="token 1 is not among"):
        checked_remote_partial(saved, masked, ROOM, newest=NEWEST)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": np.array([1, 2, 3, 100], np.int32)},
        {"token_ids": np.array([1, 2, 3, -1], np.int32)},
        {"token_ids": np.arange(5, dtype=np.int32), "logprobs": -np.ones(5, np.float32),
         "versions": np.full(5, NEWEST, np.int32)},
        {"logprobs": row(-1, -1, -1)},
        {"latency_s": float("nan")},
    ],
)  # fmt: skip
def test_ids_outside_the_vocabulary_and_more_than_was_asked_for_are_refused(changes) -> None:
    with pytest.raises(RolloutError):
        answered(**changes)


def test_a_lie_in_a_session_is_counted_and_its_request_fails_over() -> None:
    """The sampler reports version 7 live, gets a request, and answers with a token of version 6."""
    pair, faults, live, got = session_pair(), FaultCounts(), [7], []
    check = RequestCheck(ROOM, itertools.count())
    replica = RemoteReplica(pair.trainer, check, capacity=2, newest=lambda: 9, count=faults.add)
    replica.track_version(lambda: live[0])
    pair.sampler.on(Start, got.append)

    def answer(number: int, *versions: int) -> None:
        wish = got[number].requests[0]
        told = replace(TRUE, request_id=wish.request_id, versions=np.array(versions, np.int32))
        pair.sampler.send(Answers(completions=(told,)))

    (first,) = replica.start_many([ASKED])
    until(lambda: len(got) == 1)
    live[0] = 8  # reported after the request was sent: its first tokens may be of version 7
    answer(0, 7, 7, 8, 8)
    assert first.result(10).versions.tolist() == [7, 7, 8, 8]
    (second,) = replica.start_many([ASKED])
    until(lambda: len(got) == 2)
    answer(1, 7, 8, 8, 8)
    with pytest.raises(Disconnected, match=r"is invalid.*has version 7.*used version 8"):
        second.result(10)
    assert faults.read()["refused_answers"] == 1
    replica.close()
    pair.close()
