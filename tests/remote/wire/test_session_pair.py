"""The sessions themselves, over a line in memory."""

import queue
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jaxrl_async.errors import ConfigError, Disconnected
from jaxrl_async.remote.wire import session as session_module
from jaxrl_async.remote.wire.messages import Answers, Beat, Cancel, Died, Live, Staged
from jaxrl_async.remote.wire.session import WireLimits
from jaxrl_async.testing.session_pair import SessionPair, session_pair
from jaxrl_async.types import Completion, StopReason

WAIT_S = 20.0


@pytest.fixture
def pair() -> Iterator[SessionPair]:
    made = session_pair(limits=WireLimits(silence_s=1.0, max_message_bytes=8 << 20))
    yield made
    made.close()


def completion(tokens: int) -> Completion:
    return Completion(
        request_id="g1/m0/t0",
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.linspace(-1, 0, tokens, dtype=np.float32),
        versions=np.full(tokens, 7, np.int32),
        stop=StopReason.EOS,
    )


def test_messages_arrive_whole_and_in_order_and_the_end_after_them(pair: SessionPair) -> None:
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    pair.trainer.on_end(got.put)
    for version in range(500):
        pair.sampler.send(Live(version=version))
    pair.sampler.send(Answers(completions=(completion(500_000),)))  # in pieces
    pair.trainer.on(Live, lambda m: got.put(m.version))  # they waited for a handler
    pair.trainer.on(Answers, lambda m: got.put(m.completions[0]))
    pair.sampler.end("done")
    assert [got.get(timeout=WAIT_S) for _ in range(500)] == list(range(500))
    received = got.get(timeout=WAIT_S)
    assert isinstance(received, Completion)
    np.testing.assert_array_equal(received.logprobs, completion(500_000).logprobs)
    assert received.stop is StopReason.EOS
    assert got.get(timeout=WAIT_S) == "done"
    assert pair.trainer.ended == pair.sampler.ended == "done"
    with pytest.raises(Disconnected, match="done"):
        pair.trainer.send(Cancel(request_ids=()))


def test_both_ends_may_end_at_once(pair: SessionPair) -> None:
    reasons: list[str] = []
    ends = (pair.trainer, pair.sampler)
    for end in ends:
        end.on_end(reasons.append)
    threads = [threading.Thread(target=end.end, args=(end.peer,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    late = queue.SimpleQueue[str]()
    for end in ends:
        end.on_end(late.put)
    assert {late.get(timeout=WAIT_S) for _ in ends} <= {"sampler-0", "trainer"}
    assert len(reasons) == 2


@pytest.mark.full
def test_a_line_that_loses_everything_ends_both(pair: SessionPair) -> None:
    ended = queue.SimpleQueue[str]()
    pair.trainer.on_end(ended.put)
    pair.sampler.on_end(ended.put)
    pair.line.silence()
    reasons = {ended.get(timeout=WAIT_S), ended.get(timeout=WAIT_S)}
    assert reasons == {
        "nothing received from sampler-0 for 1 s",
        "nothing received from trainer for 1 s",
    }


@pytest.mark.full
def test_an_idle_session_lives_on(pair: SessionPair) -> None:
    ended = queue.SimpleQueue[str]()
    pair.trainer.on_end(ended.put)
    with pytest.raises(queue.Empty):
        ended.get(timeout=1.5)  # longer than silence_s


def test_a_handler_that_raises_ends_it_and_gets_no_more(pair: SessionPair) -> None:
    calls: list[int] = []
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()

    def fails(message: Live) -> None:
        calls.append(message.version)
        raise RuntimeError("too much")

    pair.trainer.on(Live, fails)
    pair.sampler.on_end(reasons.put)
    for version in range(3):
        pair.sampler.send(Live(version=version))
    assert reasons.get(timeout=WAIT_S) == "handling of a Live failed: too much"
    pair.trainer.on_end(reasons.put)
    assert reasons.get(timeout=WAIT_S) == "handling of a Live failed: too much"
    assert calls == [0]


@pytest.mark.full
def test_a_reader_that_takes_nothing_is_given_up() -> None:
    pair = session_pair(limits=WireLimits(silence_s=1.0, queue_bytes=1 << 20))
    hold = threading.Event()
    pair.trainer.on(Answers, lambda m: hold.wait(WAIT_S) and None)
    with pytest.raises(Disconnected, match="has taken nothing for 1 s"):
        for _ in range(100):
            pair.sampler.send(Answers(completions=(completion(30_000),)))
    hold.set()
    pair.close()


def test_what_is_no_message_or_too_large_is_refused_at_the_sender(pair: SessionPair) -> None:
    with pytest.raises(TypeError, match="not a message"):
        pair.sampler.send({"a": 1})
    with pytest.raises(ConfigError, match=r"remote\.max_message_mib"):
        pair.sampler.send(Answers(completions=(completion(1_000_000),)))


def test_messages_of_each_thread_stay_in_order(pair: SessionPair) -> None:
    got: dict[str, list[int]] = {str(t): [] for t in range(8)}
    all_there = threading.Event()

    def note(message: Staged) -> None:
        got[message.source].append(message.version)
        if sum(map(len, got.values())) == 8 * 200:
            all_there.set()

    def sends(thread: str) -> None:
        for version in range(200):
            pair.sampler.send(Staged(version=version, num_bytes=0, seconds=0.0, source=thread))

    pair.trainer.on(Staged, note)
    threads = [threading.Thread(target=sends, args=(t,)) for t in got]
    for thread in threads:
        thread.start()
    assert all_there.wait(WAIT_S)
    assert all(versions == list(range(200)) for versions in got.values())


def test_a_second_handler_of_a_kind_is_a_mistake(pair: SessionPair) -> None:
    pair.trainer.on(Beat, lambda m: None)
    with pytest.raises(ValueError, match="Beat has a handler already"):
        pair.trainer.on(Beat, lambda m: None)
    with pytest.raises(ValueError, match="is not a message"):
        pair.trainer.on(Completion, lambda m: None)
    assert Died(error="x") == Died(error="x")


def test_without_room_nothing_waits_unless_it_is_asked_to() -> None:
    pair = session_pair(limits=WireLimits(queue_bytes=1 << 20))
    hold, got = threading.Event(), queue.SimpleQueue[int]()
    pair.trainer.on(Answers, lambda m: hold.wait(WAIT_S) and None)
    pair.trainer.on(Live, lambda m: got.put(m.version))
    large, sent = Answers(completions=(completion(30_000),)), 0
    while pair.sampler.send_now(large):
        sent += 1
        assert sent < 100, "the queues are full long before"
    assert not pair.sampler.send_now(large)
    later = threading.Thread(target=pair.sampler.send, args=(Live(version=7),))
    later.start()
    hold.set()
    assert got.get(timeout=WAIT_S) == 7
    assert pair.sampler.send_now(Live(version=8)) and got.get(timeout=WAIT_S) == 8
    later.join()
    pair.close()
    with pytest.raises(Disconnected):
        pair.sampler.send_now(Live(version=9))


@pytest.mark.full
def test_one_thread_watches_all_sessions_and_ends_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = session_module.Watch()
    monkeypatch.setattr(session_module, "WATCH", watch)

    def watching() -> int:
        targets = [getattr(t, "_target", None) for t in threading.enumerate()]
        return sum(getattr(target, "__self__", None) is watch for target in targets)

    limits = WireLimits(silence_s=1.0)
    pairs = [session_pair(sampler=f"s{n}", limits=limits) for n in range(8)]
    assert watching() == 1
    ended = queue.SimpleQueue[str]()
    pairs[3].sampler.on_end(ended.put)
    pairs[3].line.silence()
    assert ended.get(timeout=WAIT_S) == "nothing received from trainer for 1 s"
    assert all(pair.trainer.ended is None for n, pair in enumerate(pairs) if n != 3)
    for pair in pairs:
        pair.close()
    end_s = time.monotonic() + WAIT_S
    while watching() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert watching() == 0
    again = session_pair(limits=limits)
    assert watching() == 1
    again.close()


def test_a_session_that_ends_before_it_is_started_is_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = session_module.Watch()
    monkeypatch.setattr(session_module, "WATCH", watch)
    session = session_module.WireSession("s", WireLimits(silence_s=0.1))
    session.lost("another has joined in its place")
    session.start()
    end_s = time.monotonic() + WAIT_S
    while watch._due and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not watch._due
