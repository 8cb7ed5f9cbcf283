"""The bound on staleness with real threads while samplers join, lag, leave and are lost."""

import random
import threading
import time

import pytest
from remote_side import TrainerSide

from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.errors import Closed, Disconnected
from jaxrl_async.testing.fakes import make_group

pytestmark = pytest.mark.full

STEPS, PER_STEP = 25, 3
LIMIT_S = 60.0


class Fleet:
    """Samplers that generate on separate threads until they leave."""

    def __init__(self, side, seed):
        self.side, self.random = side, random.Random(seed)
        self.samplers, self.names, self.over = [], 0, threading.Event()

    def join(self):
        self.names += 1
        sampler = self.side.join(f"s{self.names}", address=f"s{self.names}:1")
        threading.Thread(target=self.serve, args=(sampler,), daemon=True).start()
        self.samplers.append(sampler)

    def serve(self, sampler):
        try:
            sampler.begin()
        except Disconnected:
            return  # it was lost before it had any weights
        pause_s = self.random.choice([0.0, 0.002, 0.01])  # between two blocks
        while not self.over.wait(pause_s or 0.0005):
            sampler.poll()

    def churn(self):
        """Let samplers come and go; now and then there is none."""
        while not self.over.wait(self.random.choice([0.002, 0.02])):
            if len(self.samplers) < 3 and self.random.random() < 0.7:
                self.join()
            elif self.samplers:
                gone = self.samplers.pop(self.random.randrange(len(self.samplers)))
                gone.end.leave() if self.random.random() < 0.5 else gone.pair.line.cut()

    def version(self):
        """Version of the next token of any sampler that serves requests; waits for one."""
        while not self.over.is_set():
            serving = [s for s in list(self.samplers) if s.end.entered]
            if serving:
                return self.random.choice(serving).drawn[-1]
            time.sleep(0.0005)
        raise Closed("over")


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_bound_holds_whatever_joins_and_leaves(max_staleness):
    buffer = ReplayBuffer(BufferSettings(groups_per_step=PER_STEP, max_staleness=max_staleness))
    staleness, errors = [], []
    with TrainerSide(on_live=buffer.set_live, fanout=1) as side:
        fleet = Fleet(side, seed=max_staleness)

        def rollouts():
            while True:
                for ticket in buffer.admit():
                    buffer.put(make_group(ticket, [fleet.version(), fleet.version()]))

        def trainer():
            for version in range(STEPS):
                draw = buffer.draw(version, LIMIT_S)
                assert not draw.dropped
                staleness.extend(version - g.oldest_version for g in draw.groups)
                side.publish(version + 1)

        def guarded(work):
            try:
                work()
            except Closed:
                pass
            except BaseException as error:
                errors.append(error)

        fleet.join()
        works = (rollouts, trainer, fleet.churn)
        threads = [threading.Thread(target=guarded, args=(w,), daemon=True) for w in works]
        for thread in threads:
            thread.start()
        threads[1].join(LIMIT_S)
        fleet.over.set()
        buffer.close()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not errors and not any(t.is_alive() for t in threads)
        assert fleet.names > 2, "they came and went"
    assert len(staleness) == STEPS * PER_STEP
    assert max(staleness) <= max_staleness
