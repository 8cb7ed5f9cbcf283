"""The trainer's side of a sampler in another process, against a sampler that the test plays."""

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
from remotes import until
from tiny import request

from jaxrl_async.errors import Closed, Disconnected, RolloutError
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.remote.sampler import remote_replica
from jaxrl_async.remote.sampler.outstanding import SENT_FACTOR
from jaxrl_async.remote.sampler.remote_replica import RemoteReplica
from jaxrl_async.remote.wire.messages import (
    Answers,
    Ask,
    Beat,
    Cancel,
    Died,
    Leave,
    Leaving,
    RemoteFailure,
    RemoteReply,
    Start,
)
from jaxrl_async.remote.wire.session import WireLimits
from jaxrl_async.sampler.request_checks import RequestCheck, RequestLimits
from jaxrl_async.testing.session_pair import session_pair
from jaxrl_async.types import Completion, LogprobRequest, Partial, PositionLogprobs, StopReason

CAPACITY, NEWEST = 2, 5


class Played:
    """A replica, and the messages that its sampler would get."""

    def __init__(self) -> None:
        self.pair, self.faults = session_pair(), FaultCounts()
        check = RequestCheck(RequestLimits(max_length=64, vocab=48, seed=0), itertools.count())
        self.replica = RemoteReplica(
            self.pair.trainer,
            check,
            capacity=CAPACITY,
            newest=lambda: NEWEST,
            count=self.faults.add,
        )
        self.got: dict[type, list] = {kind: [] for kind in (Start, Cancel, Ask, Leave)}
        for kind, messages in self.got.items():
            self.pair.sampler.on(kind, messages.append)

    @property
    def started(self) -> list:
        """All requests that have come, in order."""
        return [r for message in self.got[Start] for r in message.requests]

    def say(self, message: object) -> None:
        self.pair.sampler.send(message)

    def answer(self, req, **changes: object) -> None:
        self.say(Answers(completions=(completion(req, **changes),)))


@pytest.fixture
def played():
    played = Played()
    yield played
    played.replica.close()
    played.pair.close()


def a_request(number: int, **changes: object):
    base = {"max_new_tokens": 4, "stop_token_ids": (), "token_ids": np.arange(3, dtype=np.int32)}
    return request(number, **{**base, **changes})


def completion(req, **changes: object) -> Completion:
    tokens = changes.get("token_ids", np.arange(10, 10 + req.max_new_tokens, dtype=np.int32))
    base = {
        "request_id": req.request_id,
        "token_ids": tokens,
        "logprobs": np.full(len(tokens), -1.0, np.float32),
        "versions": np.full(len(tokens), 3, np.int32),
        "stop": StopReason.LENGTH,
    }
    return Completion(**{**base, **changes})


def partial_of(req, count: int = 2, **changes: object) -> Partial:
    done = completion(req)
    base = {
        "request": req,
        "token_ids": done.token_ids[:count],
        "logprobs": done.logprobs[:count],
        "versions": done.versions[:count],
        "seed": 0,
    }
    return Partial(**{**base, **changes})


def test_requests_go_together_and_come_back_under_their_own_ids(played):
    requests = [a_request(1), a_request(1), a_request(2)]
    futures = played.replica.start_many(requests)
    until(lambda: len(played.started) == 3)
    assert len(played.got[Start]) == 1, "one message for all"
    assert len({r.request_id for r in played.started}) == 3, "though two have one id"
    done = tuple(completion(r) for r in played.started[1:])
    failed = RemoteFailure(request_id=played.started[0].request_id, error="out of luck")
    played.say(Answers(completions=done, failures=(failed,)))
    assert [f.result(5).request_id for f in futures[1:]] == ["g1/m0/t0", "g2/m0/t0"]
    with pytest.raises(RolloutError, match="sampler-0: out of luck"):
        futures[0].result(5)


def test_no_more_is_sent_than_the_sampler_has_room_for(played):
    futures = played.replica.start_many([a_request(i) for i in range(10)])
    room = SENT_FACTOR * CAPACITY
    until(lambda: len(played.started) == room)
    futures[-1].cancel()
    for req in played.started[:2]:
        played.answer(req)
    until(lambda: len(played.started) == room + 2)
    played.say(Beat(stats={"blocks": 7, "busy_s": 1.5}, places=4 * CAPACITY))
    until(lambda: played.replica.capacity == 4 * CAPACITY)
    assert played.replica.stats().blocks == 7 and played.replica.stats().busy_s == 1.5
    played.answer(played.started[2])
    until(lambda: len(played.started) == 9)
    sent = [req.request_id.partition("#")[0] for req in played.started]
    assert sent == [f"g{i}/m0/t0" for i in range(9)], "a cancelled one is not sent at all"
    assert not played.got[Cancel]


def test_a_cancellation_is_sent_once_and_a_late_answer_is_no_fault(played):
    futures = played.replica.start_many([a_request(i) for i in range(3)])
    until(lambda: len(played.started) == 3)
    for future in futures[:2]:
        future.cancel()
    ids = [r.request_id for r in played.started]
    until(lambda: sum(len(m.request_ids) for m in played.got[Cancel]) == 2)
    assert [i for m in played.got[Cancel] for i in m.request_ids] == ids[:2]
    played.answer(played.started[0])  # it was done already
    played.say(Answers(failures=(RemoteFailure(request_id=ids[1], error="cancelled"),)))
    played.answer(played.started[2])
    assert futures[2].result(5).request_id == "g2/m0/t0"
    assert played.replica.error is None and not played.faults.read()["refused_answers"]


LONG = np.arange(5, dtype=np.int32)
WRONG = {
    "too long": {"token_ids": LONG},
    "too short": {"token_ids": LONG[:3]},
    "not of the vocabulary": {"token_ids": np.array([1, 2, 3, 48], np.int32)},
    "negative": {"token_ids": np.array([1, 2, 3, -1], np.int32)},
    "not int32": {"token_ids": np.arange(4)},
    "no array": {"token_ids": [1, 2, 3, 4]},
    "not a row": {"token_ids": np.zeros((4, 1), np.int32)},
    "fewer log-probs": {"logprobs": np.zeros(3, np.float32)},
    "float64": {"logprobs": np.zeros(4)},
    "more versions": {"versions": np.zeros(5, np.int32)},
    "falling versions": {"versions": np.array([3, 3, 2, 3], np.int32)},
    "a version that no sampler has": {"versions": np.array([3, 3, 3, NEWEST + 1], np.int32)},
    "negative versions": {"versions": np.array([-1, 3, 3, 3], np.int32)},
    "no stop token": {"stop": StopReason.EOS},
    "it was not stopped": {"stop": StopReason.CANCELLED},
    "no reason": {"stop": "length"},
    "time": {"latency_s": float("nan")},
    "extras": {"full_logprobs": np.zeros(3, np.float32)},
    "unknown": {"request_id": "g9/m9#77"},
    "no id": {"request_id": 3},
}


def refused(played, future) -> None:
    """The request fails because the session refused the type, or the replica, which counts that,
    the content."""
    with pytest.raises(Disconnected, match=r"is invalid|an invalid message") as raised:
        future.result(5)
    by_replica = "is invalid" in str(raised.value)
    assert played.faults.read()["refused_answers"] == by_replica


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_what_cannot_be_true_ends_the_session_and_nothing_of_it_counts(played, changes):
    requests = [a_request(1), a_request(2)]
    futures = played.replica.start_many(requests)
    until(lambda: len(played.started) == 2)
    good, bad = played.started
    both = (completion(good), completion(bad, **changes))
    played.say(Answers(completions=both))
    for future in futures:
        refused(played, future)
    with pytest.raises(Disconnected):
        played.replica.start_many(requests)
    until(lambda: played.pair.sampler.ended is not None)
    assert played.replica.blamed == {"g1/m0/t0", "g2/m0/t0"}


def scores(tokens: int = 4, **changes) -> PositionLogprobs:
    """Log-probs of a prompt: two likeliest tokens and one named id at each position."""
    values = {
        "logprobs": np.array([np.nan] + [-1] * (tokens - 1), np.float32),
        "top_ids": np.ones((tokens, 2), np.int32),
        "top_logprobs": np.full((tokens, 2), -1, np.float32),
        "id_logprobs": np.full((tokens, 1), -2, np.float32),
        "version": NEWEST,
    }
    return PositionLogprobs(**{**values, **changes})


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (scores(), True),
        (None, False),
        (scores(3), False),
        (scores(version=NEWEST + 1), False),
        (scores(version=None), False),
        (scores(top_ids=np.ones((4, 3), np.int32)), False),
        (scores(logprobs=np.array([np.nan, -1, 0.5, -1], np.float32)), False),
    ],
    ids=["good", "none", "short", "future", "unknown", "wide", "positive"],
)
def test_log_probs_of_a_prompt_arrive_as_requested(played, found, good):
    logprobs = LogprobRequest(prompt=True, top=2, ids=(5,))
    req = a_request(1, token_ids=np.arange(4, dtype=np.int32), max_new_tokens=0, logprobs=logprobs)
    future = played.replica.start_many([req])[0]
    until(lambda: played.started)
    assert played.started[0].logprobs == logprobs
    nothing = {
        "token_ids": np.zeros(0, np.int32),
        "logprobs": np.zeros(0, np.float32),
        "versions": np.zeros(0, np.int32),
    }
    played.answer(played.started[0], prompt_logprobs=found, **nothing)
    if not good:
        refused(played, future)
        return
    arrived = future.result(5).prompt_logprobs
    for name in ("logprobs", "top_ids", "top_logprobs", "id_logprobs", "version"):
        np.testing.assert_array_equal(getattr(arrived, name), getattr(found, name))


@pytest.mark.parametrize(
    ("stop_ids", "tokens", "stop", "good"),
    [
        ((7,), [1, 7], StopReason.EOS, True),
        ((7,), [1, 2, 3, 4], StopReason.LENGTH, True),
        ((7,), [1, 2, 3, 7], StopReason.LENGTH, False),
        ((7,), [7, 7], StopReason.EOS, False),
        ((7,), [1, 2, 7, 4], StopReason.LENGTH, False),
        ((7,), [], StopReason.EOS, False),
    ],
)
def test_an_answer_ends_at_its_first_stop_token(played, stop_ids, tokens, stop, good):
    future = played.replica.start_many([a_request(1, stop_token_ids=stop_ids)])[0]
    until(lambda: played.started)
    played.answer(played.started[0], token_ids=np.array(tokens, np.int32), stop=stop)
    assert (future.exception(5) is None) is good


@pytest.mark.parametrize(
    "message",
    [
        Answers(completions="abc"),
        Answers(completions=(a_request(1),)),
        Answers(failures=(3,)),
        Beat(stats={"blocks": float("inf")}, places=1),
        Beat(stats={"blocks": -1}, places=1),
        Beat(stats={"unheard": 1}, places=1),
        Beat(stats="fine", places=1),
        Leaving(reason="", partials=(3,)),
        Leaving(reason="", partials=None),
    ],
)
def test_no_message_is_too_strange_to_be_refused(played, message):
    future = played.replica.start_many([a_request(1)])[0]
    until(lambda: played.started)
    played.say(message)
    refused(played, future)


def test_a_request_answered_twice_ends_the_session(played):
    futures = played.replica.start_many([a_request(1), a_request(2)])
    until(lambda: len(played.started) == 2)
    played.answer(played.started[0])
    assert futures[0].result(5)
    played.answer(played.started[0])
    with pytest.raises(Disconnected, match="is not outstanding"):
        futures[1].result(5)


def test_what_a_leaving_sampler_hands_back_is_there_before_the_futures_fail(played):
    futures = played.replica.start_many([a_request(i) for i in range(8)])
    until(lambda: len(played.started) == 6)
    seen = []
    futures[0].add_done_callback(lambda f: seen.append(played.replica.departure))
    partials = tuple(partial_of(r, i) for i, r in enumerate(played.started[:3]))
    played.answer(played.started[5])
    played.say(Leaving(reason="preempted", partials=partials))
    for future in futures[:5] + futures[6:]:
        with pytest.raises(Disconnected, match="has left: preempted"):
            future.result(5)
    assert futures[5].result(0), "answered before"
    departure = played.replica.departure
    assert seen == [departure] and departure.reason == "preempted"
    assert [len(departure.partials[f].token_ids) for f in futures[:3]] == [0, 1, 2]
    assert departure.partials[futures[2]].request.request_id == "g2/m0/t0"
    assert len(departure.partials) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"versions": np.array([3, NEWEST + 1], np.int32)},
        {"token_ids": np.array([1, 99], np.int32)},
        {"token_ids": np.ones((2, 1), np.int32)},
        {"versions": np.array([3], np.int32)},
        {"logprobs": np.array([-1, -1, -1], np.float32)},
        {"full_logprobs": np.array([-1], np.float32)},
    ],
)
def test_what_is_handed_back_is_checked(played, changes):
    future = played.replica.start_many([a_request(1)])[0]
    until(lambda: played.started)
    played.say(Leaving(reason="", partials=(partial_of(played.started[0], **changes),)))
    with pytest.raises(Disconnected, match="is invalid"):
        future.result(5)
    assert played.replica.departure is None, "it begins again"


def test_a_handed_back_request_with_a_nan_begins_again(played):
    future = played.replica.start_many([a_request(1)])[0]
    until(lambda: played.started)
    nan = partial_of(played.started[0], logprobs=np.array([-1, np.nan], np.float32))
    played.say(Leaving(reason="preempted", partials=(nan,)))
    with pytest.raises(Disconnected, match="has left"):
        future.result(5)
    assert played.replica.departure is not None and not played.replica.departure.partials


def test_a_dying_sampler_says_what_it_had_on_its_device(played):
    future = played.replica.start_many([a_request(1), a_request(2)])[0]
    until(lambda: len(played.started) == 2)
    played.say(Died(error="XlaError: boom", blamed=(played.started[1].request_id, "who?")))
    with pytest.raises(RolloutError, match="sampler-0 died: XlaError: boom"):
        future.result(5)
    assert played.replica.blamed == {"g2/m0/t0"}
    assert not isinstance(played.replica.error, Disconnected)


def test_of_a_lost_sampler_the_first_requests_may_have_been_on_the_device(played):
    future = played.replica.start_many([a_request(i) for i in range(4)])[0]
    until(lambda: len(played.started) == 4)
    played.pair.line.cut()
    with pytest.raises(Disconnected, match="the line was cut"):
        future.result(5)
    assert played.replica.blamed == {"g0/m0/t0", "g1/m0/t0"}


def asked(played, number: int = 1):
    until(lambda: len(played.got[Ask]) == number)
    return played.got[Ask][-1]


def on_thread(work):
    """Run on a thread; return a function that waits for the result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    thread.start()

    def wait():
        thread.join(5)
        return result[0]

    return wait


def test_progress_is_what_runs_there_and_what_waits_here(played, monkeypatch):
    begun = [partial_of(a_request(8), 1), partial_of(a_request(9), 1)]
    played.replica.start_many([*[a_request(i) for i in range(6)], begun[0]])
    until(lambda: len(played.started) == 6)
    progress = on_thread(played.replica.progress)
    ask = asked(played)
    assert ask.request_id is None
    partials = (partial_of(played.started[1]), partial_of(played.started[0]))
    played.answer(played.started[0])  # it ended meanwhile
    played.say(RemoteReply(number=ask.number, partials=partials))
    assert [p.request.request_id for p in progress()] == ["g8/m0/t0", "g1/m0/t0"]
    monkeypatch.setattr(remote_replica, "PROGRESS_WAIT_S", 0.01)
    last = [p.request.request_id for p in played.replica.progress()]
    assert last == ["g8/m0/t0", "g1/m0/t0"], "the last report of an unresponsive sampler"
    played.say(RemoteReply(number=10**6, partials=()))  # to no question
    played.say(RemoteReply(number=asked(played, 2).number, error="too late"))
    assert played.replica.error is None


def test_a_saved_request_is_there_though_it_was_stopped(played):
    future = played.replica.start_many([a_request(1)])[0]
    until(lambda: played.started)
    save = on_thread(lambda: played.replica.save("g1/m0/t0", stop=True))
    ask = asked(played)
    (req,) = played.started
    assert ask.stop and ask.request_id == req.request_id
    half = completion(req, token_ids=LONG[:2], stop=StopReason.CANCELLED)
    played.say(Answers(completions=(half,)))
    played.say(RemoteReply(number=ask.number, partials=(partial_of(req),)))
    saved = save()
    assert saved.request.request_id == "g1/m0/t0" and len(saved.token_ids) == 2
    assert future.result(5).stop is StopReason.CANCELLED
    with pytest.raises(RolloutError, match="is not running"):
        played.replica.save("g1/m0/t0")


def test_a_question_that_fails_or_is_not_answered_says_so(played, monkeypatch):
    played.replica.start_many([a_request(1)])
    until(lambda: played.started)

    def fails():
        with pytest.raises(RolloutError, match="no such request"):
            played.replica.save("g1/m0/t0")
        return True

    wait = on_thread(fails)
    played.say(RemoteReply(number=asked(played).number, error="no such request"))
    assert wait()
    monkeypatch.setattr(remote_replica, "SAVE_WAIT_S", 0.01)
    with pytest.raises(TimeoutError, match="did not answer"):
        played.replica.save("g1/m0/t0")


def test_it_is_asked_to_leave_and_closed_with_its_requests(played):
    future = played.replica.start_many([a_request(1)])[0]
    played.replica.leave("too many")
    until(lambda: played.got[Leave])
    assert played.got[Leave][0].reason == "too many"
    played.replica.close()
    with pytest.raises(Closed):
        future.result(0)
    with pytest.raises(Closed):
        played.replica.start_many([a_request(2)])
    assert "the run has ended" in (played.pair.sampler.ended or "")


def test_one_that_is_taken_out_is_ignored_from_then_on(played):
    future = played.replica.start_many([a_request(1)])[0]
    until(lambda: played.started)
    played.replica.abandon()
    assert isinstance(future.exception(5), Disconnected)
    until(lambda: played.pair.sampler.ended is not None)
    with pytest.raises(RolloutError, match="cannot be replaced"):
        played.replica.successor()


def test_waiting_on_the_thread_that_receives_its_answers_is_an_error(played):
    future = played.replica.start_many([a_request(1)])[0]
    errors = []

    def waits(done):
        try:
            played.replica.check_waits()
        except RolloutError as error:
            errors.append(str(error))

    future.add_done_callback(waits)
    until(lambda: played.started)
    played.answer(played.started[0])
    until(lambda: errors)
    played.replica.check_waits()


def test_a_request_that_is_too_large_for_the_wire_fails_alone():
    pair = session_pair(limits=WireLimits(silence_s=5.0, max_message_bytes=4000))
    check = RequestCheck(RequestLimits(max_length=10_000, seed=0), itertools.count())
    replica = RemoteReplica(pair.trainer, check, capacity=8, newest=lambda: 0)
    got: list = []
    pair.sampler.on(Start, lambda m: got.extend(m.requests))
    large = a_request(1, token_ids=np.zeros(2000, np.int32))
    futures = replica.start_many([a_request(0), large, *[a_request(i) for i in range(2, 8)]])
    assert "remote.max_message_mib" in str(futures[1].exception(5))
    until(lambda: len(got) == 7)
    assert [r.key[0] for r in got] == [0, 2, 3, 4, 5, 6, 7]
    replica.close()
    pair.close()


def test_partials_travel_without_kv(played):
    begun = replace(
        partial_of(a_request(1)), kv=np.zeros((1, 2, 3, 1, 1), np.float32), kv_version=3
    )
    played.replica.start_many([begun])
    until(lambda: played.started)
    (sent,) = played.started
    assert isinstance(sent, Partial) and sent.kv is None and len(sent.token_ids) == 2
