"""Real samplers behind sessions in memory, and a router that they join and leave."""

import itertools
import time

from tiny import PARAMS, SECTION, SPEC

from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.remote.sampler.remote_replica import RemoteReplica
from jaxrl_async.remote.sampler.request_server import ReplicaServer
from jaxrl_async.sampler.request_checks import RequestCheck
from jaxrl_async.sampler.router.router import Elastic, Router
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, limits_of
from jaxrl_async.testing.session_pair import session_pair

SETTINGS = SamplerSettings(one_thread=True)
CHECK = RequestCheck(limits_of(SPEC, SECTION, 0, SETTINGS), itertools.count())


class Remotes:
    """A router, and the samplers that have joined it. A context manager."""

    def __init__(self, count: int, **limits: object) -> None:
        self.faults, self.newest = FaultCounts(), 0
        self.router = Router([], count=self.faults.add, elastic=Elastic(check=CHECK, **limits))
        self.router.start()
        self.all: list[tuple] = []
        for _ in range(count):
            self.join()

    def join(self, **settings: object) -> int:
        """Let another sampler join; return its place in `all`."""
        sampler = Sampler((SPEC, PARAMS), section=SECTION, settings=SETTINGS, **settings)
        pair = session_pair(sampler=f"sampler {len(self.all)}")
        server = ReplicaServer(pair.sampler, sampler, beat_s=0.05)
        replica = RemoteReplica(
            pair.trainer,
            CHECK,
            capacity=sampler.capacity,
            newest=lambda: self.newest,
            count=self.faults.add,
        )
        server.start()
        self.router.join(replica)
        self.all.append((pair, server, sampler, replica))
        return len(self.all) - 1

    def leave(self, number: int) -> None:
        assert self.all[number][1].leave("told to")

    def cut(self, number: int) -> None:
        self.all[number][0].line.cut()

    def __enter__(self) -> "Remotes":
        return self

    def __exit__(self, *error: object) -> None:
        self.router.close()
        for pair, server, sampler, _ in self.all:
            server.close()
            sampler.close()
            pair.close()

    def counted(self) -> dict:
        return {k: n for k, n in self.faults.read().items() if n}


def until(condition, timeout_s: float = 60.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.002)
