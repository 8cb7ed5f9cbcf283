"""The same meeting with real threads: rollouts, trainer and sampler around the real buffer and
channel, each as fast as it can. Nobody may be left waiting."""

import random
import threading

import numpy as np
import pytest

from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.errors import Closed
from jaxrl_async.testing.fakes import make_group, make_prompt
from jaxrl_async.types import Drop
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.delivery import FunctionLink

pytestmark = pytest.mark.full

STEPS = 60
LIMIT_S = 20.0


def guarded(work, errors):
    """A started thread; Closed ends it quietly, anything else is kept."""

    def run():
        try:
            work()
        except Closed:
            pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("max_staleness", "lookahead", "samplers"), [(0, 0, 1), (1, 0, 1), (2, 2, 2), (4, 0, 3)]
)
def test_threads_make_their_steps_within_the_bound_and_all_end(max_staleness, lookahead, samplers):
    per_step = 3
    buffer = ReplayBuffer(
        BufferSettings(groups_per_step=per_step, max_staleness=max_staleness, lookahead=lookahead)
    )
    channel = WeightChannel([FunctionLink(lambda p: p)] * samplers, on_live=buffer.set_live)
    errors, staleness, trained, bursts, done = [], [], [], [], threading.Event()

    def rollouts():
        r = random.Random(0)
        while True:
            tickets = list(buffer.admit())
            bursts.append(len(tickets))
            r.shuffle(tickets)
            for ticket in tickets:
                if r.random() < 0.1:
                    buffer.fail(ticket, make_prompt(), Drop.FAILED)
                else:
                    buffer.put(make_group(ticket, [ticket.version, channel.live_version]))

    def trainer():
        for version in range(STEPS):
            draw = buffer.draw(version)
            assert not draw.dropped
            staleness.extend(version - g.oldest_version for g in draw.groups)
            trained.extend(g.ticket.group for g in draw.groups)
            channel.publish(version + 1, {"w": np.full(4, version + 1)})
        channel.wait_live(STEPS, LIMIT_S)
        done.set()

    def sampler():
        end, wake = channel.subscribe(), threading.Event()
        end.attach(wake)
        while not closing.is_set():
            wake.wait(LIMIT_S)
            wake.clear()
            update = end.poll(wait=True)
            if update is not None:
                assert (update.params["w"] == update.version).all()
                end.live(update.version)

    closing = threading.Event()
    threads = [guarded(work, errors) for work in (rollouts, trainer, *[sampler] * samplers)]
    assert done.wait(LIMIT_S) or not errors, errors
    closing.set()
    buffer.close()
    channel.close()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not errors and not any(t.is_alive() for t in threads)
    assert done.is_set() and len(trained) == STEPS * per_step == len(set(trained))
    assert max(staleness) <= max_staleness
    if max_staleness == 0:
        assert bursts[0] == per_step
