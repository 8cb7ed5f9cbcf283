"""A leader and a follower in one process, each with a device of its own: what is sent, and how it
ends."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import pytest
from hosts_worker import (
    LONG,
    SEED,
    SPEC,
    WAIT_S,
    Case,
    Lives,
    OfferedWeights,
    mesh_of,
    params_of,
    requests_of,
    setup_of,
)
from tiny import Held

from jaxrl_async.errors import Disconnected, JoinRefused, RolloutError
from jaxrl_async.remote.sampler import follower as following
from jaxrl_async.remote.sampler.follower import follow
from jaxrl_async.remote.sampler.joint_weights import JointWeights, OfferRelay
from jaxrl_async.remote.sampler.leader import FollowerGroup, leading_sampler
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.testing.session_pair import session_pair

pytestmark = pytest.mark.full

CASE = Case(plain=True)


class Two:
    """A leader and a follower; `lost` has the reasons that each got for the other's end."""

    def __init__(self, follower: Case = CASE, **options: Any) -> None:
        meshes = [mesh_of([device]) for device in jax.devices()[:2]]
        self.pair, at_trainer = session_pair(), session_pair()
        self.lost: list[str] = []
        self.asked: list[str] = []
        self.ended = threading.Event()
        self.others = FollowerGroup(
            [self.pair.trainer], lost=self.note_lost, on_leave=self.asked.append
        )
        self.setup = setup_of(CASE, meshes[0], SamplerSettings(followers=self.others))
        relay = OfferRelay(at_trainer.sampler, self.others.sessions)
        self.joint = JointWeights(relay, OfferedWeights(relay, meshes[0]))
        self.lives = Lives(at_trainer.trainer)
        pool = ThreadPoolExecutor(1)
        self.follower = pool.submit(
            follow,
            self.pair.sampler,
            setup_of(follower, meshes[1], SamplerSettings()),
            OfferedWeights(self.pair.sampler, meshes[1]),
            process=1,
            lost=self.note_lost,
            **options,
        )
        self.lives.offer(0)

    def note_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.ended.set()

    def begun(self) -> Sampler:
        self.others.wait_ready(self.setup, WAIT_S)
        return leading_sampler(self.setup, self.others, self.joint.first(WAIT_S), self.joint)


@pytest.mark.exhaustive
def test_a_follower_plays_what_the_leader_takes_in_until_it_is_dismissed():
    two = Two()
    with two.begun() as sampler:
        futures = sampler.start_many([r for group in requests_of(CASE) for r in group])
        two.lives.offer(1)
        futures[-1].cancel()
        completions = [f.result(WAIT_S) for f in futures[:-1]]
        two.lives.wait(1)
        held = Held(sampler, 1)
        long = sampler.start_many(LONG)
        partials = held.meanwhile(*[partial(sampler.save, r.request_id, stop=True) for r in LONG])
        resumed = sampler.resume([*partials])
        assert all(f.result(WAIT_S).token_ids.size < 30 for f in long)
    two.follower.result(WAIT_S)  # its batch was the leader's before each round
    assert not two.lost and len(completions) == 3 * CASE.groups - 1
    mesh = mesh_of(jax.devices()[:1])
    alone = Sampler((SPEC, params_of(1, mesh)), section=CASE.settings, mesh=mesh, seed=SEED)
    with alone:
        expected = alone.generate(LONG)
    assert [c.token_ids.tolist() for c in resumed] == [c.token_ids.tolist() for c in expected]


def test_a_follower_that_was_made_otherwise_is_refused():
    two = Two(replace(CASE, section={"block": 8}))
    with pytest.raises(JoinRefused, match=r"process 1.*different settings"):
        two.others.wait_ready(two.setup, WAIT_S)
    two.others.dismiss()
    two.follower.result(WAIT_S)


def test_processes_that_have_parted_end_with_the_reason(monkeypatch):
    monkeypatch.setattr(following, "state_hash", lambda batch: 1)
    two = Two()
    sampler = two.begun()
    future = sampler.start_many(LONG[:1])[0]
    with pytest.raises(RolloutError, match="differs from the leader's"):
        two.follower.result(WAIT_S)
    with pytest.raises(Exception, match=r"process 1 has failed|closed before"):
        sampler.generate(LONG[:1])
        sampler.close()
        future.result(WAIT_S)
    assert two.ended.wait(WAIT_S)
    assert len(two.lost) == 1 and "process 1 has failed" in two.lost[0]


def test_the_end_of_the_leader_ends_the_follower():
    two = Two()
    two.begun()
    two.pair.line.cut()
    with pytest.raises(Disconnected, match="lost the leader"):
        two.follower.result(WAIT_S)
    assert two.ended.wait(WAIT_S) and all("the line was cut" in reason for reason in two.lost)


def test_a_follower_that_must_go_asks_the_leader_to_leave():
    must_leave = threading.Event()
    two = Two(must_leave=must_leave)
    with two.begun() as sampler:
        must_leave.set()
        while not two.asked:
            sampler.generate(LONG[:1])
    two.follower.result(WAIT_S)
    assert two.asked == ["a process of the sampler was asked to leave"] and not two.lost
