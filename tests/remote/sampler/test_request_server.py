"""The sampler's side of a session: a real sampler, and a trainer that the test plays."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from remotes import SETTINGS, until
from tiny import PARAMS, SECTION, SPEC, make_sampler, request

from jaxrl_async.remote.sampler.request_server import ReplicaServer
from jaxrl_async.remote.wire.messages import (
    Answers,
    Ask,
    Beat,
    Cancel,
    Died,
    Leave,
    Leaving,
    RemoteReply,
    Start,
)
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.testing.session_pair import session_pair
from jaxrl_async.types import Partial, StopReason, VersionedParams


class Served:
    """A server and its messages, in order."""

    def __init__(self) -> None:
        self.pair = session_pair()
        self.sampler = Sampler((SPEC, PARAMS), section=SECTION, settings=SETTINGS)
        self.server = ReplicaServer(self.pair.sampler, self.sampler, beat_s=0.01)
        self.messages: list = []
        self.beats: list = []
        for kind in (Answers, RemoteReply, Died, Leaving):
            self.pair.trainer.on(kind, self.messages.append)
        self.pair.trainer.on(Beat, self.beats.append)
        self.server.start()

    def ask(self, message: object) -> None:
        self.pair.trainer.send(message)

    def of(self, kind: type) -> list:
        return [m for m in self.messages if isinstance(m, kind)]

    @property
    def completions(self) -> dict:
        return {c.request_id: c for m in self.of(Answers) for c in m.completions}

    @property
    def failures(self) -> dict:
        return {f.request_id: f.error for m in self.of(Answers) for f in m.failures}


@pytest.fixture
def served():
    served = Served()
    yield served
    served.server.close()
    served.sampler.close()
    served.pair.close()


def requests(count: int, length: int = 24) -> tuple:
    return tuple(
        request(i, request_id=f"w{i}", max_new_tokens=length, stop_token_ids=())
        for i in range(count)
    )


@pytest.fixture(scope="module")
def expected():
    with make_sampler() as sampler:
        return {c.request_id: c.token_ids.tolist() for c in sampler.generate(requests(12))}


@pytest.mark.full
def test_answers_are_those_of_the_sampler_and_beats_say_how_it_is(served, expected):
    served.ask(Start(requests=requests(12)))
    until(lambda: len(served.completions) == 12)
    assert {i: c.token_ids.tolist() for i, c in served.completions.items()} == expected
    until(lambda: served.beats[-1].stats["requests_done"] == 12)
    assert served.beats[-1].places == served.sampler.capacity


@pytest.mark.full
def test_one_that_cannot_be_served_fails_alone_and_a_cancelled_one_is_acknowledged(served):
    good, bad, late = requests(3)
    served.ask(Start(requests=(good, replace(bad, max_new_tokens=10**6), late)))
    served.ask(Cancel(request_ids=("w2", "nobody")))
    until(lambda: len(served.completions) + len(served.failures) == 3)
    assert "sampler.max_new_tokens" in served.failures["w1"] and "w0" in served.completions


@pytest.mark.full
def test_questions_are_answered_after_what_was_done_before(served):
    served.ask(Start(requests=requests(8)))
    until(lambda: len(served.completions) >= 1)
    served.ask(Ask(number=1))
    served.ask(Ask(number=2, request_id="nobody"))
    until(lambda: len(served.of(RemoteReply)) == 2)
    report, unknown = served.of(RemoteReply)
    known = {p.request.request_id: p for p in report.partials}
    before = served.messages[: served.messages.index(report)]
    done = {c.request_id for m in before if isinstance(m, Answers) for c in m.completions}
    assert not done & known.keys(), "as if at one moment"
    assert all(len(p.token_ids) and p.kv is None for p in known.values())
    assert "nobody" in unknown.error and not unknown.partials
    until(lambda: len(served.completions) == 8)


@pytest.mark.full
def test_one_that_is_stopped_is_saved_and_answered(served):
    generate = served.sampler.engine.generate

    def waits(*args, **settings):
        until(lambda: served.sampler.loop.inbox)  # the question is there
        served.sampler.engine.generate = generate
        return generate(*args, **settings)

    served.sampler.engine.generate = waits
    served.ask(Start(requests=requests(1)))
    served.ask(Ask(number=1, request_id="w0", stop=True))
    until(lambda: served.of(RemoteReply) and served.completions)
    assert served.completions["w0"].stop is StopReason.CANCELLED
    (saved,) = served.of(RemoteReply)[0].partials
    assert saved.token_ids.tolist() == served.completions["w0"].token_ids.tolist()


@pytest.mark.full
@pytest.mark.parametrize("done", [0, 1, 5])
def test_when_it_leaves_each_request_is_answered_or_handed_back_once(served, expected, done):
    served.ask(Start(requests=requests(12)))
    until(lambda: len(served.completions) >= done)
    served.ask(Leave(reason="preempted"))
    later = (replace(r, request_id=f"{r.request_id}'") for r in requests(3))
    served.ask(Start(requests=tuple(later)))
    until(lambda: served.server.over.is_set())
    until(lambda: served.of(Leaving))
    (leaving,) = served.of(Leaving)
    assert served.messages[-1] is leaving and leaving.reason == "preempted"
    handed = {p.request.request_id: p for p in leaving.partials}
    assert not handed.keys() & served.completions.keys() and not served.failures
    for request_id, partial in handed.items():
        n = len(partial.token_ids)
        assert 0 < n < 24 and partial.token_ids.tolist() == expected[request_id][:n]
    for request_id, answer in served.completions.items():
        assert answer.token_ids.tolist() == expected[request_id]
    assert len(handed) + len(served.completions) >= done
    until(lambda: not served.sampler.loop.busy)
    sampled = sum(len(p.token_ids) for p in handed.values()) + 24 * len(served.completions)
    # one block before they get the order to end, and the one in which they are
    most = sampled + 2 * SECTION.block * served.sampler.capacity
    assert sampled <= served.sampler.stats().generated_tokens <= most


def test_one_that_hangs_leaves_with_empty_hands(served):
    entered, go_on = threading.Event(), threading.Event()
    generate = served.sampler.engine.generate

    def stuck(*args, **settings):
        entered.set()
        go_on.wait(30)
        return generate(*args, **settings)

    served.sampler.engine.generate = stuck
    served.ask(Start(requests=requests(2, length=2)))
    assert entered.wait(30)
    assert not served.server.leave("preempted", timeout_s=0.05)
    until(lambda: served.of(Leaving))
    assert served.of(Leaving)[0].partials == () and served.server.over.is_set()
    go_on.set()
    until(lambda: not served.sampler.loop.busy)
    assert not served.completions


def test_a_dead_sampler_says_why_and_what_it_was_doing(served):
    served.sampler.engine.generate = lambda *args, **settings: 1 / 0
    served.ask(Start(requests=requests(2)))
    until(lambda: served.of(Died))
    (died,) = served.of(Died)
    assert "ZeroDivisionError" in died.error and set(died.blamed) == {"w0", "w1"}
    assert served.server.over.wait(5) and not served.failures, "the trainer deals them again"


def test_when_the_trainer_is_gone_its_requests_are_dropped_and_the_sampler_lives(served):
    served.ask(Start(requests=requests(12)))
    until(lambda: served.completions)
    served.pair.line.cut()
    assert served.server.over.wait(5) and "the line was cut" in served.server.reason
    until(lambda: not served.sampler.loop.busy)
    assert served.sampler.error is None
    (again,) = served.sampler.generate(requests(1))
    assert len(again.token_ids) == 24


def test_saved_requests_are_continued(served, expected):
    half = np.array(expected["w0"][:10], np.int32)
    begun = Partial(
        request=requests(1)[0],
        token_ids=half,
        logprobs=np.full(10, -1.0, np.float32),
        versions=np.zeros(10, np.int32),
        seed=0,
    )
    served.ask(Start(requests=(begun,)))
    until(lambda: served.completions)
    assert served.completions["w0"].token_ids.tolist() == expected["w0"]


def test_an_id_that_is_in_use_ends_the_session(served):
    served.ask(Start(requests=requests(1) * 2))
    assert served.server.over.wait(5) and "already running" in served.server.reason


class OneUpdate:
    """A weight source that brings one version, and notes which is live."""

    def __init__(self) -> None:
        self.update: VersionedParams | None = None
        self.wake: threading.Event | None = None
        self.live_versions: list[int] = []

    def attach(self, wake: threading.Event) -> None:
        self.wake = wake

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        update, self.update = self.update, None
        return update

    def live(self, version: int) -> None:
        self.live_versions.append(version)

    def leave(self) -> None:
        """There is nothing to leave."""


def test_a_sampler_that_has_had_no_request_takes_new_weights() -> None:
    source, pair = OneUpdate(), session_pair()
    sampler = Sampler((SPEC, PARAMS), section=SECTION, settings=SETTINGS, weights=source)
    server = ReplicaServer(pair.sampler, sampler, beat_s=0.01)
    server.start()
    source.update = VersionedParams(version=5, params=PARAMS)
    source.wake.set()
    until(lambda: 5 in source.live_versions)
    server.close()
    sampler.close()
    pair.close()


def test_the_statistics_of_new_weights_precede_answers_sampled_with_them() -> None:
    source, pair = OneUpdate(), session_pair()
    source.update = VersionedParams(version=5, params=PARAMS)
    sampler = Sampler((SPEC, PARAMS), section=SECTION, settings=SETTINGS, weights=source)
    messages: list = []
    pair.trainer.on(Beat, messages.append)
    pair.trainer.on(Answers, messages.append)
    server = ReplicaServer(pair.sampler, sampler, beat_s=3600.0)
    server.start()
    pair.trainer.send(Start(requests=requests(12)))
    until(lambda: sum(len(m.completions) for m in messages if isinstance(m, Answers)) == 12)
    swaps = 0
    for message in messages:
        if isinstance(message, Beat):
            swaps = message.stats["swaps"]
        elif any(5 in c.versions for c in message.completions):
            assert swaps == 1
    assert swaps == 1
    server.close()
    sampler.close()
    pair.close()
