"""Every process of a sampler takes the same versions, whatever comes late, fails or is offered
anew."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrl_async.errors import Closed, WeightsError
from jaxrl_async.ports.weights import FixedWeights
from jaxrl_async.remote.sampler.follower import take_version
from jaxrl_async.remote.sampler.joint_weights import JointWeights, OfferRelay, forget_version
from jaxrl_async.remote.wire.messages import GivenUpRequest, JointRound, Live, Offer, Staged, Torn
from jaxrl_async.types import VersionedParams


class End:
    """One end of a session; what is sent waits in the other end's queue."""

    def __init__(self) -> None:
        self.arrived: deque[Any] = deque()
        self.handlers: dict[type, Callable[[Any], None]] = {}
        self.other: End
        self.peer, self.ended = "other", None

    def send(self, message: Any) -> None:
        self.other.arrived.append(message)

    def on(self, kind: type, handler: Callable[[Any], None]) -> None:
        assert kind not in self.handlers
        self.handlers[kind] = handler

    def deliver(self) -> None:
        message = self.arrived.popleft()
        self.handlers[type(message)](message)


def line() -> tuple[End, End]:
    a, b = End(), End()
    a.other, b.other = b, a
    return a, b


class Source(FixedWeights):
    """Fetches as remote.weights.receiver does: one version besides the live one, and an offer ends
    the fetching of an older one."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.order: int | None = None
        self.running: int | None = None
        self.staged: VersionedParams | None = None
        self.taken: VersionedParams | None = None
        self.lives: list[int] = []
        session.on(Offer, self._note_offer)

    def _note_offer(self, offer: Offer) -> None:
        self.order, self.running = offer.version, None

    def begin(self) -> bool:
        """Begin to fetch; False: there is nothing to fetch, or no room."""
        version, held = self.order, self.staged or self.taken
        if version is None or self.running is not None:
            return False
        if version <= max([-1, *self.lives] if held is None else [held.version, *self.lives]):
            self.order = None
            self._session.send(Staged(version=version, num_bytes=0, seconds=0.0, source=""))
            return True
        if held is None:
            self.order, self.running = None, version
        return held is None

    def finish(self, *, sound: bool) -> None:
        assert self.running is not None
        version, self.running = self.running, None
        if not sound:
            self._session.send(Torn(version=version, error="cut off"))
            return
        self.staged = VersionedParams(version=version, params=version)
        self._session.send(Staged(version=version, num_bytes=1, seconds=0.0, source=""))

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        if self.staged is not None:
            self.taken, self.staged = self.staged, None
            return self.taken
        return None

    def live(self, version: int) -> None:
        self.lives.append(version)
        self.taken = None
        self._session.send(Live(version=version))


class World:
    """A trainer, a leader and followers, whose steps come in any order."""

    def __init__(self, followers: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.trainer, at_leader = line()
        lines = [line() for _ in range(followers)]
        self.relay = OfferRelay(at_leader, [a for a, _ in lines])  # type: ignore[arg-type]
        own = Source(self.relay)
        self.joint = JointWeights(self.relay, own)
        self.sources = [own, *(Source(b) for _, b in lines)]
        self.ends = [self.trainer, at_leader, *(end for both in lines for end in both)]
        self.to_followers = [a for a, _ in lines]
        self.orders: list[deque[int]] = [deque() for _ in lines]
        self.used: list[list[int]] = [[] for _ in self.sources]  # versions, by process
        self.newest, self.failures, self.lives = -1, 0, []
        for number, (_, b) in enumerate(lines, start=1):
            forget = self.sources[number]
            b.on(GivenUpRequest, lambda order, source=forget: forget_version(source, order.version))
            b.on(JointRound, lambda order, n=number: self.orders[n - 1].append(order.version))
        self.trainer.on(Staged, lambda message: None)
        self.trainer.on(Live, lambda message: self.lives.append(message.version))
        self.trainer.on(Torn, lambda message: self.offer(self.newest))

    def offer(self, version: int) -> None:
        self.newest = version
        self.trainer.send(Offer(version=version, where={}))

    def steps(self) -> list[Callable[[], object]]:
        """All that can happen next."""
        can: list[Callable[[], object]] = [end.deliver for end in self.ends if end.arrived]
        for source in self.sources:
            if source.order is not None and source.running is None:
                can.append(source.begin)
            if source.running is not None:
                can.append(lambda source=source: source.finish(sound=self.is_sound()))
        if self.relay.staged_version is not None and self.sources[0].staged is not None:
            can.append(self.leader_takes)
        can += [lambda n=n: self.follower_takes(n) for n, q in enumerate(self.orders) if q]
        return can

    def is_sound(self) -> bool:
        fails = self.failures > 0 and self.random.random() < 0.4
        self.failures -= fails
        return not fails

    def leader_takes(self) -> None:
        update = self.joint.poll()
        assert update is not None
        for end in self.to_followers:
            end.send(JointRound(version=update.version))
        self.used[0].append(update.version)
        self.joint.live(update.version)

    def follower_takes(self, number: int) -> None:
        source, version = self.sources[1 + number], self.orders[number].popleft()
        update = take_version(source, version)
        self.used[1 + number].append(update.version)
        source.live(version)

    def run(self, most: int = 3000) -> None:
        """Until nothing can happen any more, in any order."""
        idle = 0
        for _ in range(most):
            can = self.steps()
            if not can or idle > 50:
                return
            idle = idle + 1 if self.random.choice(can)() is False else 0
        raise AssertionError("it never comes to rest")


@settings(max_examples=60, deadline=None)
@given(
    followers=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    gaps=st.lists(st.integers(0, 25), min_size=1, max_size=6),
    failures=st.integers(0, 4),
)
@example(followers=2, seed=372, gaps=[15, 0], failures=2)  # "torn" arrives after all have it
def test_fuzz_all_processes_take_the_same_versions_and_the_newest_at_last(
    followers, seed, gaps, failures
):
    world = World(followers, seed)
    world.failures = failures
    for version, gap in enumerate(gaps):
        world.offer(version)
        for _ in range(gap):
            if can := world.steps():
                world.random.choice(can)()
        if world.random.random() < 0.2:
            world.offer(version)  # again, though nothing went wrong
    world.run()
    assert world.used == [world.used[0]] * (1 + followers)
    assert world.used[0] == sorted(set(world.used[0])) and world.used[0][-1] == len(gaps) - 1
    assert world.lives == world.used[0], "the trainer hears of each once"


def test_a_follower_that_has_other_weights_than_the_leader_takes_says_so():
    a, _ = line()
    source = Source(a)
    with pytest.raises(WeightsError, match=r"uses weights of version 3.*has nothing new"):
        take_version(source, 3)
    source.staged = VersionedParams(version=2, params=None)
    with pytest.raises(WeightsError, match="has version 2"):
        take_version(source, 3)


def test_the_processes_of_a_sampler_have_no_successors():
    with pytest.raises(Closed, match="restart them"):
        World(1, 0).joint.rejoin()
