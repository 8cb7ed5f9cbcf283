"""Who is next of those that wait, beside a queue that only follows the rules as they are written;
random traffic, from threads through a real sampler and without them."""

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_sampler, request

from jaxrl_async.remote.sampler.outstanding import SENT_FACTOR, OutstandingRequests
from jaxrl_async.sampler.batch.admission import WaitingQueue
from jaxrl_async.types import Request


@dataclass(eq=False)
class Asked:
    request: Request


def asked(level: int, order: int = 0) -> Asked:
    ids = np.zeros(1, np.int32)
    return Asked(Request(request_id="r", token_ids=ids, max_new_tokens=1, priority=(level, order)))


@dataclass
class Rules:
    """The rules of WaitingQueue, one after another."""

    overtakes: int
    front: list = field(default_factory=list)
    others: list = field(default_factory=list)  # in the order of arrival
    passed: int = 0

    def head(self):
        if self.front:
            return self.front[0]
        if not self.others:
            return None
        if self.passed >= self.overtakes:
            return self.others[0]
        best = min(one.request.priority for one in self.others)
        return next(one for one in self.others if one.request.priority == best)

    def admit(self, one) -> None:
        if one in self.others:
            self.passed = 0 if one is self.others[0] else self.passed + 1
        self.remove(one)

    def remove(self, one) -> None:
        (self.front if one in self.front else self.others).remove(one)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 2)))),
        st.tuples(st.just("admit"), st.integers(1, 6)),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("back"), st.integers(0, 2)),
    ),
    max_size=40,
)


@given(steps=steps, overtakes=st.integers(0, 4))
def test_the_queue_does_as_its_rules_say(steps, overtakes) -> None:
    queue, rules, had_turn = WaitingQueue(overtakes), Rules(overtakes), []
    for what, how in steps:
        if what == "add":
            new = [asked(*priority) for priority in how]
            queue.add(new)
            rules.others += new
        elif what == "admit":
            for _ in range(how):
                one = rules.head()
                assert queue.head() is one
                if one is not None:
                    queue.admit(one)
                    rules.admit(one)
                    had_turn.append(one)
        elif what == "back" and len(had_turn) >= how:
            again, had_turn = had_turn[:how], had_turn[how:]
            queue.put_back(again)
            rules.front = [*again, *rules.front]
        elif what == "remove" and len(queue):
            gone = list(queue)[how % len(queue)]
            queue.remove(gone)
            rules.remove(gone)
            assert gone not in queue
        assert len(queue) == len(rules.front) + len(rules.others)
        assert [*queue.front(), *queue._entries] == [*rules.front, *rules.others]
        by_priority = sorted(rules.others, key=lambda one: one.request.priority)
        assert list(queue) == [*rules.front, *by_priority]


@pytest.mark.full
@given(
    older=st.integers(0, 5),
    overtakes=st.integers(0, 5),
    flood=st.lists(st.integers(-2, 0), min_size=80, max_size=80),
)
def test_nobody_starves_whatever_arrives(older, overtakes, flood) -> None:
    queue = WaitingQueue(overtakes)
    last = asked(1)
    queue.add([*(asked(1) for _ in range(older)), last])
    admitted = 0
    for level in flood:
        queue.add([asked(level)])
        one = queue.head()
        queue.admit(one)
        admitted += 1
        if one is last:
            break
    assert last not in queue and admitted <= (older + 1) * (overtakes + 1)


def test_without_priorities_the_order_of_arrival_holds() -> None:
    queue, all_of_them = WaitingQueue(), [asked(0) for _ in range(200)]
    queue.add(all_of_them)
    order = []
    while (one := queue.head()) is not None:
        queue.admit(one)
        order.append(one)
    assert order == all_of_them


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    traffic=st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.integers(-2, 2)), max_size=8),
        min_size=3,
        max_size=3,
    )
)
@pytest.mark.full
@pytest.mark.exhaustive
def test_a_sampler_serves_random_traffic_of_threads_as_the_rules_say(one_slot, traffic) -> None:
    """What its thread did to its queue, done again to the rules by one thread."""
    batch, events = one_slot.loop.batch, []
    queue, real = batch.queue, {}
    for name in ("add", "put_back", "admit", "remove"):
        real[name] = getattr(queue, name)

        def noted(given, name=name, **how):
            given = list(given) if name in ("add", "put_back") else given
            events.append((name, given, queue.head()))
            return real[name](given, **how)

        setattr(queue, name, noted)
    queue._passed_in_a_row = 0

    def submit(share: list, thread: int) -> None:
        reqs = [
            request(n, request_id=f"t{thread}/{i}", max_new_tokens=2, priority=(level, n))
            for i, (n, level) in enumerate(share)
        ]
        for future in one_slot.start_many(reqs):
            future.result(60)

    threads = [threading.Thread(target=submit, args=(s, t)) for t, s in enumerate(traffic)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    one_slot.between_blocks(lambda: None)
    for name, method in real.items():
        setattr(queue, name, method)
    rules, admitted = Rules(64), 0
    for name, given_, head in events:
        assert name in ("admit", "remove") or given_ is not None
        if name == "add":
            rules.others += given_
        elif name == "put_back":
            rules.front = [*given_, *rules.front]
        elif name == "admit":
            assert given_ is rules.head() is head
            rules.admit(given_)
            admitted += 1
    assert admitted == sum(len(share) for share in traffic)


@pytest.fixture(scope="module")
def one_slot():
    with make_sampler(slots=1, reserve=0.0) as sampler:
        sampler.generate([request(0)])
        yield sampler


def test_what_a_remote_sampler_is_sent_first_is_the_most_urgent() -> None:
    requests = OutstandingRequests(capacity=1)
    reqs = [request(i, priority=(level, 0)) for i, level in enumerate([0, 1, 0, -1, 0, -1, 1])]
    outs = requests.add(reqs)
    sent = requests.take_sendable()
    assert len(sent) == SENT_FACTOR
    assert sent == [outs[3], outs[5], outs[0]]
    assert not requests.withdraw(outs[2]), "the sampler need not be told"
    requests.pop([out.wire_id for out in sent])
    assert requests.take_sendable() == [outs[4], outs[1], outs[6]]


def test_those_put_back_come_behind_as_many_as_are_named_and_before_the_rest():
    queue = WaitingQueue()
    one, two, three, four = (asked(0) for _ in range(4))
    queue.add([four])
    queue.put_back([one, three])
    queue.put_back([two], behind=1)
    assert queue.front() == (one, two, three)
    assert list(queue) == [one, two, three, four]
