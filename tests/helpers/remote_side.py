"""A channel with remote samplers in one process: real threads and sessions, weights in memory."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.remote.weights.outbox import WeightOutbox
from jaxrl_async.remote.weights.receiver import WeightReceiver
from jaxrl_async.remote.weights.remote_link import RemoteEnd
from jaxrl_async.testing.session_pair import session_pair
from jaxrl_async.testing.torn_transports import MemoryFetching, MemoryOffering
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.local import Conversion, PrivateCopy

WAIT_S = 30.0


def weights(version):
    return {"b": jnp.full((3,), version, jnp.float32), "w": jnp.full((4, 2), -version, jnp.float32)}


def eventually(holds):
    """Wait until something holds; fail after a long time."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


class TrainerSide:
    """A channel and all that belongs to it on the trainer's side."""

    def __init__(self, *, links=(), version=0, on_live=None, **section):
        self.offering, self.faults, self.live = MemoryOffering(), FaultCounts(), []
        self.peers = {self.offering.address: self.offering}
        source = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), weights(0))
        self.outbox = WeightOutbox(
            PrivateCopy(source, Conversion()),
            self.offering,
            RemoteSection(**section),
            count=self.faults.add,
        )
        self.channel = WeightChannel(
            links, remote=self.outbox, on_live=on_live or self.live.append, version=version
        )
        self.samplers = []
        self.channel.begin(weights(version))

    def publish(self, version):
        self.channel.publish(version, weights(version), np.full(2, version, np.float32))

    def join(self, name="s", *, address="", layout=None):
        sampler = SamplerSide(self, name, address, layout or self.outbox.manifest.layout_hash)
        self.samplers.append(sampler)
        return sampler

    def counted(self):
        return {name: n for name, n in self.faults.read().items() if n}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for sampler in self.samplers:
            sampler.close()
        self.channel.close()


class SamplerSide:
    """One remote sampler: its session, its receiver, and its end at the channel."""

    def __init__(self, side, name, address, layout):
        self.pair = session_pair(sampler=name)
        self.fetching = MemoryFetching(side.peers, address, layout)
        self.receiver = WeightReceiver(self.pair.sampler, self.fetching)
        self.entered = threading.Event()
        self.end = RemoteEnd(
            self.pair.trainer, address, side.channel.exchange, side.outbox, self.entered.set
        )
        self.drawn = []  # versions, as they were swapped to

    def begin(self):
        """Build the sampler: take the first weights and draw from them."""
        self.swap(self.receiver.first(WAIT_S))
        return self

    def enter(self):
        """Begin, and wait until versions wait for it; of the newest weights alone."""
        self.begin()
        assert self.entered.wait(WAIT_S)
        return self

    def swap(self, update):
        np.testing.assert_array_equal(update.params["w"], weights(update.version)["w"])
        assert not self.drawn or update.version > self.drawn[-1]
        self.drawn.append(update.version)
        self.receiver.live(update.version)

    def poll(self):
        """Swap to new weights if some are there."""
        update = self.receiver.poll()
        if update is not None:
            self.swap(update)
        return update

    def draw_from(self, version):
        """Poll until it draws from a version."""
        eventually(lambda: self.poll() is None and self.drawn[-1] == version)

    def close(self):
        self.fetching.go.set()
        self.pair.close()
        self.receiver.close()
