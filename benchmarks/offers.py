"""Time the trainer's bookkeeping of one version of the weights for many samplers.

    python benchmarks/offers.py [--quick] [--samplers 64 256 1000 2000 4000] [--json [FILE]]

The trainer's own classes: channel, outbox and one end per sampler, with an offer of a 70B policy on
128 chips of 32 hosts (about 90 KB). The samplers are simulated: each reports immediately that it
has the version and samples from it. Nothing is sent; encoding each message is part of the time.

offers_ms   CPU of the process until every sampler's offer is encoded
version_ms  CPU of the process until the version is live everywhere
threads     most threads of the process in that time
"""

import argparse
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from common import Row, report

from jaxrl_async import codec
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.remote.weights.locations import HeldShard, Holder, offer_json
from jaxrl_async.remote.weights.outbox import WeightOutbox
from jaxrl_async.remote.weights.remote_link import RemoteEnd
from jaxrl_async.remote.wire.messages import Live, Offer, Staged
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.manifest import Manifest

SAMPLERS = (64, 256, 1000, 2000, 4000)
TRAINER = "10.1.0.1:8484"
HOSTS, CHIPS = 32, 128
WIDTH, MLP, LAYERS, KV, VOCAB = 8192, 28672, 80, 1024, 128_256


class PlayedOffering:
    """An Offering of weights that do not exist."""

    address = TRAINER

    def offer(self, version: int, params: Any) -> dict[str, Any]:
        """Say where a 70B policy would be."""
        manifest = Manifest(entries=_entries())
        return offer_json(version, manifest, [_holder(host) for host in range(HOSTS)])

    def compares(self, params: Any) -> bool:
        """No more checksums are needed."""
        return True

    def withdraw(self, version: int) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


class PlayedSession:
    """A session whose other side takes everything immediately."""

    peer, ended = "a sampler", None

    def __init__(self, offered: deque["PlayedSession"]) -> None:
        self.version, self._offered = -1, offered
        self._handlers: dict[type, Callable[[Any], None]] = {}

    def send(self, message: Any) -> None:
        """Encode a message, as a session does before it queues it."""
        codec.dumps(message)
        assert isinstance(message, Offer), "nothing else is sent here"
        self.version = message.version
        self._offered.append(self)

    def send_now(self, message: Any) -> bool:
        """There is always room."""
        self.send(message)
        return True

    def on(self, kind: type, handler: Callable[[Any], None]) -> None:
        """Keep a handler."""
        self._handlers[kind] = handler

    def on_end(self, callback: Callable[[str], None]) -> None:
        """It has no end."""

    def end(self, reason: str) -> None:
        """It has no end."""

    def answer(self) -> None:
        """Report that the offered version is here, and then that it is live."""
        self._handlers[Staged](
            Staged(version=self.version, num_bytes=1, seconds=1.0, source=TRAINER)
        )
        self._handlers[Live](Live(version=self.version))


def main() -> None:
    """Measure every number of samplers and print the table."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--quick", action="store_true", help="16 and 64 samplers")
    words.add_argument("--samplers", nargs="+", type=int, default=list(SAMPLERS))
    words.add_argument("--json", nargs="?", const="-", metavar="FILE", help="as the others")
    args = words.parse_args()
    counts = (16, 64) if args.quick else args.samplers
    report("offers", [row(count) for count in counts], args)


def row(samplers: int) -> Row:
    """Publish versions to so many samplers; return the minimum times of three."""
    outbox = WeightOutbox(lambda p: p, PlayedOffering(), RemoteSection(), checksum=False)
    channel = WeightChannel(remote=outbox)
    offered = deque[PlayedSession]()
    params = {"w": jnp.zeros(2)}
    channel.begin(params)
    for number in range(samplers):
        session = PlayedSession(offered)
        address = f"10.0.{number // 250}.{number % 250}:8484"
        RemoteEnd(session, address, channel.exchange, outbox)
    _come(channel, offered, samplers, 0)
    times, threads = [], 0
    for version in (1, 2, 3):
        began = time.process_time()
        channel.publish(version, params, np.zeros(15, np.float32))
        made, done, most = _come(channel, offered, samplers, version)
        times.append((made - began, done - began))
        threads = max(threads, most)
    channel.close()
    offers, live = (1e3 * min(taken) for taken in zip(*times, strict=True))
    return {"samplers": samplers, "offers_ms": offers, "version_ms": live, "threads": threads}


def _come(
    channel: WeightChannel, offered: deque[PlayedSession], samplers: int, version: int
) -> tuple[float, float, int]:
    """Simulate the samplers until a version is live; return the process' CPU time when all
    offers were made, when all was done, and most threads."""
    threads = 0
    while len(offered) < samplers:
        threads = max(threads, threading.active_count())
        time.sleep(1e-3)
    made = time.process_time()
    while offered:
        offered.popleft().answer()
    while channel.live_version < version or channel.stats().remote.transfers < samplers:
        time.sleep(1e-4)
    return made, time.process_time(), threads


def _entries() -> tuple[tuple[str, tuple[int, ...], str], ...]:
    layer = {
        "q": (WIDTH, WIDTH), "k": (WIDTH, KV), "v": (WIDTH, KV), "o": (WIDTH, WIDTH),
        "gate": (WIDTH, MLP), "up": (WIDTH, MLP), "down": (MLP, WIDTH), "norms": (2 * WIDTH,),
    }  # fmt: skip
    layers = [(f"layers/{name}", (LAYERS, *shape), "bfloat16") for name, shape in layer.items()]
    return (("embed", (VOCAB, WIDTH), "bfloat16"), *layers)


def _holder(host: int) -> Holder:
    """Return what a host of the trainer has: its chips' parts of each array."""
    shards = []
    for array, (_, shape, _) in enumerate(_entries()):
        axis = next(n for n, size in enumerate(shape) if size % CHIPS == 0)
        size = shape[axis] // CHIPS
        for chip in range(host * CHIPS // HOSTS, (host + 1) * CHIPS // HOSTS):
            box = tuple((0, s) for s in shape)
            box = (*box[:axis], (chip * size, (chip + 1) * size), *box[axis + 1 :])
            shards.append(HeldShard(array=array, box=box, checksum=2**63 + chip))
    return Holder(shards=tuple(shards), address=f"10.1.0.{host}:8484", boot_id="b" * 36)


if __name__ == "__main__":
    main()
