"""Which sampler is offered which version: every order of events keeps the promises."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relay_tree import sources

from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights.transfers import KEPT, TRIES, Recipient, Transfers

EVENTS = ["publish", "keep", "offer", "stage", "live", "torn", "join", "leave", "wait"]


class World:
    """Samplers and a trainer in virtual time; what it does is up to the test."""

    def __init__(self, enters=lambda version: True):
        self.transfers = Transfers(fanout=2, timeout_s=10.0)
        self.now_s, self.newest, self.pending, self.enters = 0.0, 0, 0, enters
        self.joined = 0
        self.keep()

    def keep(self):
        """What the outbox does with the newest version."""
        t = self.transfers
        t.drop(t.outdated())
        if self.pending is None:
            return
        before = t.blocking(self.pending)
        if before is not None:
            t.drop(before)
            t.keep(self.pending)
            self.pending = None
            assert len(t.kept) <= KEPT
            t.drop(t.outdated())

    def join(self):
        self.joined += 1
        one = Recipient(name=f"s{self.joined}", address=f"s{self.joined}:1")
        self.transfers.join(one)
        return one

    def offer(self):
        offers = self.transfers.due(self.now_s, "trainer:1")
        for offer in offers:
            assert offer.version == self.transfers.kept[-1]
            assert offer.sources[-1] == "trainer:1"
            assert f"{offer.recipient.address}" not in offer.sources
            assert offer.recipient.staged is None or offer.recipient.staged < offer.version
        return offers

    def expire(self):
        gone = [t for t in self.transfers.expired(self.now_s) if t.failures >= TRIES]
        self.transfers.hold_expired(self.now_s)
        for one in gone:
            self.transfers.leave(one)

    def event(self, name, pick):
        t = self.transfers
        one = t.recipients[pick % len(t.recipients)] if t.recipients else None
        if name == "publish":
            self.newest += 1
            self.pending = self.newest
        elif name == "keep":
            self.keep()
        elif name == "offer":
            self.offer()
        elif name == "join" and len(t.recipients) < 5:
            self.join()
        elif name == "wait":
            self.now_s += (0.5, 1.0, 11.0)[pick % 3]
            self.expire()
        elif one is None:
            return
        elif name == "stage" and one.fetching is not None:
            assert t.staged(one, one.fetching)
        elif name == "live" and one.staged is not None:
            t.live(one, one.staged, self.enters)
        elif name == "torn" and one.fetching is not None:
            t.torn(one, one.fetching, self.now_s)
            if one.failures >= TRIES:
                t.leave(one)
        elif name == "leave":
            t.leave(one)

    def check(self):
        t = self.transfers
        assert len(t.kept) <= KEPT and t.kept == sorted(t.kept)
        for one in t.recipients:
            assert one.fetching is None or one.fetching in t.kept, "it fetches what is there"
            assert one.fetching is None or one.staged == one.live, "one set besides the live"
        for version, holders in t.holders.items():
            for one in holders:
                assert one in t.recipients
                assert version != t.kept[-1] or version in (one.fetching, one.staged)
        next_s = t.next_s(self.now_s)
        assert next_s is None or all(
            next_s <= x.due_s for x in t.recipients if x.fetching is not None
        )


@pytest.mark.full
@given(st.integers(0, 2**32))
def test_at_most_two_versions_are_kept_and_everybody_ends_with_the_newest(seed):
    world, draw = World(enters=lambda version: version % 3 != 0), random.Random(seed)
    events = draw.choices(EVENTS, weights=[3, 3, 3, 3, 3, 1, 1, 0.3, 0.3], k=150)
    for name in events:
        world.event(name, draw.randrange(30))
        world.check()
    for _ in range(12):  # nothing else happens: all that is under way comes to its end
        world.keep()
        world.offer()
        for one in world.transfers.recipients:
            if one.fetching is not None:
                world.transfers.staged(one, one.fetching)
            if one.staged is not None:
                world.transfers.live(one, one.staged, lambda version: True)
        world.now_s += 60.0
        world.expire()
        world.check()
    assert world.pending is None and world.transfers.kept == [world.newest]
    assert all(one.live == world.newest for one in world.transfers.recipients)


def test_a_slow_sampler_delays_no_other_and_skips_what_it_missed():
    world = World()
    fast, slow = world.join(), world.join()
    world.offer()
    for version in range(1, 6):
        world.transfers.staged(fast, fast.fetching)
        world.transfers.live(fast, fast.staged, lambda v: True)
        world.event("publish", 0)
        world.keep()
        world.offer()
        assert (fast.fetching, slow.fetching) == (version, 0)
    assert world.transfers.kept == [0, 5]
    world.transfers.staged(slow, 0)
    world.transfers.live(slow, 0, lambda v: True)
    assert [o.version for o in world.offer()] == [5]
    world.keep()
    assert world.transfers.kept == [5]


def test_one_too_late_is_held_for_at_its_next_transfer_but_not_for_ever():
    world = World(enters=lambda version: False)
    one = world.join()
    world.offer()
    assert one.held_until_s is None, "an engine may take minutes to build"
    world.event("stage", 0)
    world.event("live", 0)
    world.event("publish", 0)
    world.keep()
    world.offer()
    assert one.held_until_s == 10.0 == world.transfers.next_s(world.now_s)
    world.event("stage", 0)
    world.now_s = 10.0
    assert world.transfers.hold_expired(world.now_s) == [one] and one.held_until_s is None
    world.event("live", 0)
    assert one.late, "and again, at the next"


def test_a_held_one_whose_transfer_fails_is_held_for_no_longer():
    world = World(enters=lambda version: False)
    one = world.join()
    for name in ("offer", "stage", "live", "publish", "keep", "offer", "torn"):
        world.event(name, 0)
    assert world.transfers.hold_expired(world.now_s) == [one]
    world.now_s += 1.0
    assert len(world.offer()) == 1 and one.held_until_s is None


def test_a_failed_transfer_waits_before_the_next_try_and_success_forgets_it():
    world = World()
    one = world.join()
    world.offer()
    for failures, wait_s in ((1, 1.0), (2, 2.0)):
        world.event("torn", 0)
        assert one.failures == failures and world.offer() == []
        assert world.transfers.next_s(world.now_s) == world.now_s + wait_s
        world.now_s += wait_s
        assert len(world.offer()) == 1
    world.event("stage", 0)
    assert one.failures == 0


def test_an_answer_that_was_late_counts_all_the_same():
    world = World()
    one = world.join()
    world.offer()
    world.now_s = 10.0
    assert world.transfers.expired(world.now_s) == [one]
    world.event("publish", 0)
    world.keep()
    world.now_s = 12.0
    assert [o.version for o in world.offer()] == [1]
    assert world.transfers.staged(one, 0) and one.fetching == 1
    assert not world.transfers.torn(one, 0, world.now_s), "that one is over"
    assert world.transfers.staged(one, 1) and not world.transfers.staged(one, 1)


def test_what_cannot_be_is_refused():
    world = World()
    one = world.join()
    with pytest.raises(WeightsError, match="was offered nothing"):
        world.transfers.staged(one, 0)
    with pytest.raises(WeightsError, match="has nothing"):
        world.transfers.live(one, 0, world.enters)
    world.offer()
    with pytest.raises(WeightsError, match="was offered version 0"):
        world.transfers.staged(one, 1)
    world.event("stage", 0)
    with pytest.raises(WeightsError, match="has version 0"):
        world.transfers.live(one, 1, world.enters)


class Plain:
    """What `Transfers` promises, by a look at every sampler at every question."""

    def __init__(self, transfers):
        self.t, self.sources = transfers, {}

    def due(self, now_s):
        ready = [x for x in self.t.recipients if x.fetching is None and x.staged == x.live]
        ready = [x for x in ready if not x.sending and now_s >= x.due_s]
        return {x.name for x in ready if x.staged is None or x.staged < self.t.kept[-1]}

    def late(self, now_s):
        return {t.name for t in self.t.recipients if t.fetching is not None and now_s >= t.due_s}

    def hold_expired(self, now_s):
        held = [t for t in self.t.recipients if t.held_until_s is not None]
        return {t.name for t in held if now_s >= t.held_until_s}

    def next_s(self, now_s):
        times = [t.due_s for t in self.t.recipients if t.fetching is not None or t.due_s > now_s]
        times += [t.held_until_s for t in self.t.recipients if t.held_until_s is not None]
        return min(times, default=None)

    def fetched(self, version):
        return any(t.fetching == version for t in self.t.recipients)


@pytest.mark.full
@given(st.integers(0, 2**32))
def test_the_answers_are_those_of_a_look_at_every_sampler(seed):
    draw = random.Random(seed)
    world = World(enters=lambda version: version % 3 != 0)
    t, plain = world.transfers, Plain(world.transfers)
    for _ in range(120):
        name = draw.choices(EVENTS, weights=[3, 3, 4, 3, 3, 2, 2, 1, 1])[0]
        now_s, before = world.now_s, {v: [*held] for v, held in t.holders.items()}
        if name == "offer" and t.kept:
            expected = plain.due(now_s)
            offers = world.offer()
            assert {o.recipient.name for o in offers} == expected
            for offer in offers:
                members = [h.address for h in before.get(offer.version, [])]
                assert offer.sources == sources([*members, "x"], 2, "trainer:1")[-1]
                before.setdefault(offer.version, []).append(offer.recipient)
                if draw.random() < 0.5:  # its session has no room for it
                    offer.recipient.sending = True
        elif name == "wait":
            world.now_s += draw.choice((0.5, 1.0, 11.0))
            expected = plain.late(world.now_s)
            assert {x.name for x in t.expired(world.now_s)} == expected
            expected = plain.hold_expired(world.now_s)
            assert {x.name for x in t.hold_expired(world.now_s)} == expected
            for one in [x for x in t.recipients if x.failures >= TRIES]:
                t.leave(one)
        else:
            world.event(name, draw.randrange(30))
        for one in t.recipients:
            if one.sending and draw.random() < 0.3:
                t.sent(one)
        assert t.next_s(world.now_s) == plain.next_s(world.now_s)
        assert all((v in t.outdated()) == (not plain.fetched(v)) for v in t.kept[:-1])
        assert all(t.relays(one.address) for one in t.recipients)
        assert not t.relays("trainer:1") and not t.relays("")


def test_an_event_of_one_sampler_costs_no_look_at_the_others(monkeypatch):
    world, looks = World(), []
    for _ in range(500):
        world.join()
    ready = Recipient.ready
    monkeypatch.setattr(Recipient, "ready", property(lambda t: looks.append(t) or ready.fget(t)))
    offers = world.offer()
    assert len(offers) == 500 and len(looks) <= 2 * 500
    looks.clear()
    for offer in offers:
        world.transfers.staged(offer.recipient, 0)
        world.transfers.live(offer.recipient, 0, lambda version: True)
        assert world.offer() == [] and world.transfers.expired(0.0) == []
    assert len(looks) <= 4 * 500, "before, each offer looked at all 500"
