"""A sampler on the hosts of one slice: one process on each host, in one JAX world.

    trainer ──session──> process 0: leads ──Begin, rounds──> process 1, 2, ...: follow
                            └──────────── Offer ───────────────> each fetches its own part

The first process joins the run like a single-process sampler; the others get the trainer's Welcome
from it. All processes end together, since programs over all devices wait for every process.
"""

import logging
import threading
from contextlib import ExitStack

import jax

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.remote.run.sampler_parts import parts_of
from jaxrl_async.remote.sampler.follower import follow
from jaxrl_async.remote.sampler.joint_weights import JointWeights, OfferRelay
from jaxrl_async.remote.sampler.leader import FollowerGroup, leading_sampler
from jaxrl_async.remote.sampler.rendezvous import FollowerHub, LeaderAddress, dial_leader
from jaxrl_async.remote.wire.messages import Prepared, Welcome
from jaxrl_async.remote.wire.session import WireLimits, WireSession
from jaxrl_async.run.signals import Stop
from jaxrl_async.sampler.sampler import Sampler

log = logging.getLogger(__name__)


def lead_sampler(
    session: WireSession,
    welcome: Welcome,
    own: RemoteSection,
    *,
    host: str,
    secret: bytes,
    stop: Stop,
    closing: ExitStack,
) -> Sampler:
    """Return the sampler of all processes of this JAX world; call this in the first process.

    Args:
        session: with the trainer.
        welcome: from the trainer.
        own: the certificates and the port of this side.
        host: this machine's address for other processes.
        secret: to be proved by connections for weights.
        stop: requested if a following process is asked to leave.
        closing: closes the objects created here.

    Raises JoinRefused if a process does not join or differs, and the errors of building a sampler.
    """
    limits = WireLimits()
    hub = FollowerHub(jax.process_count(), welcome, limits=limits)
    closing.callback(hub.close)
    LeaderAddress.broadcast(hub, host, leads=True, shared=secret)
    parts = parts_of(welcome)
    wait_s = parts.config.remote_settings.wait_s
    followers = FollowerGroup(hub.wait_for_all(wait_s), on_leave=stop.request)
    setup = parts.setup(followers)
    followers.wait_ready(setup, wait_s)
    relay = OfferRelay(session, followers.sessions)
    receiver, _ = parts.receiver(relay, own, host=host, secret=secret)
    closing.callback(receiver.close)
    weights = JointWeights(relay, receiver)
    session.send(Prepared())  # each process has only its part: none relays weights
    sampler = closing.enter_context(
        leading_sampler(setup, followers, weights.first(wait_s), weights)
    )
    receiver.begun()
    return sampler


def follow_sampler(own: RemoteSection, *, stop: Stop, wait_s: float) -> None:
    """Follow the first process of this JAX world until its sampler is closed; blocks.

    Args:
        own: the certificates and the port of this side.
        stop: requested by a signal; the first process is then asked to leave.
        wait_s: maximum wait for the first process.

    Raises the errors of remote.sampler.follower.follow, and of building a sampler.
    """
    leader = LeaderAddress.broadcast(None, leads=False)
    if leader is None:
        log.info("the first process does not start: this one also ends")
        return
    index = jax.process_index()
    session, welcome = dial_leader(leader, index, limits=WireLimits(), timeout_s=wait_s)
    parts = parts_of(welcome)
    receiver, _ = parts.receiver(session, own, host="127.0.0.1", secret=leader.shared)
    must_leave = threading.Event()
    try:
        with stop.acting_on(must_leave.set):
            follow(
                session,
                parts.setup(),
                receiver,
                process=index,
                must_leave=must_leave,
                begun=receiver.begun,
            )
    finally:
        receiver.close()
    log.info("the sampler is closed")
