"""Random traffic on the channel, real threads and sessions: the promises hold at any moment."""

import random
import threading
import time
from contextlib import suppress

import pytest
from remote_side import TrainerSide, eventually

from jaxrl_async.errors import Disconnected
from jaxrl_async.weights.delivery import FunctionLink

pytestmark = pytest.mark.full

ACTIONS = {
    "publish": 3, "poll": 8, "join": 2, "begin": 4, "stop": 1, "go": 2, "torn": 0.5, "leave": 0.5,
    "lose": 0.5,
}  # fmt: skip
"""What happens, and how often."""


class Traffic:
    """Performs actions, and watches the live version from a thread of its own."""

    def __init__(self, side, local):
        self.side, self.published, self.joined = side, 0, 0
        self.local = side.channel.subscribe() if local else None
        self.samplers, self.wrong, self.over = [], [], threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def watch(self):
        last = 0
        while not self.over.wait(0.0005):
            live = self.side.channel.live_version
            if live < last:
                self.wrong.append(f"the live version fell from {last} to {live}")
            last = live
            for sampler in list(self.samplers):
                drawn = sampler.drawn[-1] if sampler.drawn else None
                if drawn is not None and drawn < live and sampler.end.entered:
                    self.wrong.append(f"{sampler.end.name} uses {drawn} < {live}")

    def act(self, action, pick):
        of = self.samplers[pick % len(self.samplers)] if self.samplers else None
        if action == "publish":
            if self.local is not None:
                self.poll_local()
            self.published += 1
            self.side.publish(self.published)  # a wait for a stopped sampler would never end
        elif action == "join" and len(self.samplers) < 4:
            self.joined += 1
            name = f"s{self.joined}"
            self.samplers.append(self.side.join(name, address=f"{name}:1" if pick % 2 else ""))
        elif of is None:
            return
        elif action == "begin" and not of.drawn and of.receiver.staged is not None:
            of.begin()
        elif action == "poll" and of.drawn:
            of.poll()
        elif action == "stop":
            of.fetching.go.clear()
        elif action == "go":
            of.fetching.go.set()
        elif action == "torn":
            of.fetching.torn = 1
        elif action in ("leave", "lose"):
            self.samplers.remove(of)
            of.end.leave() if action == "leave" else of.pair.line.cut()

    def poll_local(self):
        update = self.local.poll(wait=True)
        if update is not None:
            self.local.live(update.version)

    @staticmethod
    def is_gone(sampler):
        return sampler.pair.trainer.ended is not None

    def is_new(self, sampler):
        return sampler.poll() is None and sampler.drawn[-1:] == [self.published]

    def settle(self):
        """Let everything come to its end: all samplers use the newest version, but those that
        are let go: what was torn before may have been the last try."""
        for sampler in self.samplers:
            sampler.fetching.go.set()
            sampler.fetching.torn = 0
        for sampler in self.samplers:
            if not sampler.drawn:
                with suppress(Disconnected):
                    sampler.begin()
        if self.local is not None:
            self.poll_local()
        for sampler in self.samplers:
            eventually(lambda sampler=sampler: self.is_gone(sampler) or self.is_new(sampler))
        self.samplers = [s for s in self.samplers if not self.is_gone(s)]
        if self.samplers or self.local is not None:
            eventually(lambda: self.side.channel.live_version == self.published)
        for sampler in self.samplers:
            assert sampler.entered.wait(30)


def perform(seed, local):
    """Perform random actions; return the channel's statistics."""
    draw = random.Random(seed)
    links = [FunctionLink(lambda p: p)] if local else []
    with pytest.MonkeyPatch.context() as patch, TrainerSide(links=links, fanout=1) as side:
        patch.setattr("jaxrl_async.remote.weights.transfers.RETRY_S", 0.01)
        traffic = Traffic(side, local)
        try:
            for action in draw.choices([*ACTIONS], weights=[*ACTIONS.values()], k=100):
                traffic.act(action, draw.randrange(12))
                time.sleep(draw.choice([0, 0, 0.001]))
            traffic.settle()
            eventually(lambda: list(side.offering.offered) == [traffic.published])
        finally:
            traffic.over.set()
            traffic.watcher.join(30)
        assert traffic.wrong == []
        assert side.live == sorted(set(side.live)), "on_live is called with rising versions"
        assert side.offering.most_offered <= 2
        return side.channel.stats().remote


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_keeps_every_promise(seed):
    perform(seed, local=seed % 3 == 0)


@pytest.mark.exhaustive
def test_much_random_traffic_keeps_every_promise():
    seen = [perform(seed, local=seed % 3 == 0) for seed in range(100, 200)]
    assert sum(s.joins for s in seen) > 300 and sum(s.transfers for s in seen) > 600
    assert min(sum(s.late for s in seen), sum(s.repeats for s in seen)) > 20
    assert sum(s.passed_bytes for s in seen) > 0
