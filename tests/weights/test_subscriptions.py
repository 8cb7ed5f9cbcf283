"""Several samplers on one channel, the halves of a growing push, statistics of a transfer."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.config.schema import AxesSection
from jaxrl_async.errors import Closed, WeightsError
from jaxrl_async.mesh import SAMPLER_RULES, TRAINER_RULES, make_slices, shardings
from jaxrl_async.model.spec import Weight
from jaxrl_async.testing.clock import VirtualClock
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.delivery import FunctionLink
from jaxrl_async.weights.exchange import ExchangeEntry
from jaxrl_async.weights.local import Push

PARAMS = {"w": np.ones(4, np.float32)}
SAME = FunctionLink(lambda p: p)


class Arriving:
    """An array on its way: ready when the test says so."""

    nbytes = 16

    def __init__(self, log):
        self.ready, self.log = False, log

    def is_ready(self):
        return self.ready

    def block_until_ready(self):
        self.ready = True


def test_a_version_is_live_once_the_last_sampler_says_so():
    live = []
    channel = WeightChannel([SAME] * 2, on_live=live.append)
    first, second = channel.subscribe(), channel.subscribe()
    channel.publish(1, PARAMS)
    assert first.poll().version == 1
    first.live(1)
    assert (live, channel.live_version) == ([], 0)
    with pytest.raises(WeightsError, match="it uses 0"):
        channel.wait_live(1, 0)
    assert second.poll().version == 1
    second.live(1)
    assert (live, channel.live_version) == ([1], 1)


def test_a_version_is_live_only_up_to_the_lowest_that_a_sampler_uses():
    """The last report finds no sampler at the old version, and two different new ones."""
    channel = WeightChannel([SAME] * 2)
    first, second = channel.subscribe(), channel.subscribe()
    for version in (1, 2):
        channel.publish(version, PARAMS)
        assert first.poll().version == second.poll().version == version
    first.live(2)
    assert channel.live_version == 0
    second.live(1)
    assert channel.live_version == 1


def test_publish_waits_for_the_slowest_sampler():
    channel = WeightChannel([SAME] * 2)
    first, second = channel.subscribe(), channel.subscribe()
    channel.publish(1, PARAMS)
    first.poll()
    thread = threading.Thread(target=channel.publish, args=(2, PARAMS), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and first.poll() is None
    second.poll()
    thread.join(10)
    assert not thread.is_alive() and first.poll().version == second.poll().version == 2


def test_each_sampler_may_have_its_own_push():
    channel = WeightChannel(
        [FunctionLink(lambda p: {"a": p["w"]}), FunctionLink(lambda p: {"b": p["w"]})]
    )
    ends = [channel.subscribe(), channel.subscribe()]
    with pytest.raises(WeightsError, match="2 samplers"):
        channel.subscribe()
    channel.publish(1, PARAMS)
    assert [list(end.poll().params) for end in ends] == [["a"], ["b"]]


def test_the_live_callback_may_use_the_channel():
    seen = []
    channel = WeightChannel([SAME], on_live=lambda v: seen.append(channel.live_version))
    channel.publish(1, PARAMS)
    end = channel.subscribe()
    end.poll()
    end.live(1)
    assert seen == [1]


def test_an_event_attached_after_a_publish_is_set_at_once():
    channel = WeightChannel([SAME])
    channel.publish(1, PARAMS)
    wake = threading.Event()
    channel.subscribe().attach(wake)
    assert wake.is_set()


def test_versions_must_rise():
    channel = WeightChannel([SAME], version=3)
    assert channel.live_version == 3
    with pytest.raises(AssertionError):
        channel.publish(3, PARAMS)


def test_a_changed_tree_is_refused_without_an_expected_manifest():
    channel = WeightChannel([SAME])
    channel.publish(1, PARAMS)
    channel.subscribe().poll()
    with pytest.raises(WeightsError, match="'w'"):
        channel.publish(2, {"w": np.ones(5, np.float32)})


def test_an_update_waits_for_the_trainers_probe_too():
    probe = Arriving([])
    channel = WeightChannel([SAME])
    channel.publish(1, PARAMS, probe)
    end = channel.subscribe()
    assert end.poll() is None
    assert end.poll(wait=True).probe_logprobs is probe and probe.ready


def test_waiting_for_the_sampler_to_take_weights_ends_with_close():
    channel = WeightChannel([SAME])
    channel.wait_taken()
    channel.publish(1, PARAMS)
    raised = []

    def wait():
        try:
            channel.wait_taken()
        except Closed as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    wake = threading.Event()
    channel.subscribe().attach(wake)
    channel.close()
    thread.join(10)
    assert len(raised) == 1 and wake.is_set()


def test_times_are_from_publish_to_complete_and_to_live():
    clock = VirtualClock()
    slow = Arriving([])
    channel = WeightChannel([FunctionLink(lambda p: {"w": slow})], clock=clock)
    end = channel.subscribe()
    channel.publish(1, PARAMS)
    clock.advance(2)
    assert end.poll() is None
    slow.ready = True
    end.poll()
    clock.advance(3)
    end.live(1)
    stats = channel.stats()
    assert (stats.transfer_s, stats.live_s, stats.publish_s, stats.wait_s) == (2, 5, 0, 0)
    assert (stats.published, stats.transfer_bytes) == (1, 16)


def test_a_push_to_a_larger_slice_is_finished_on_the_samplers_thread(monkeypatch):
    table = {"w": Weight(shape=(8, 4), axes=("embed", "mlp"), init="ones", hf="w")}
    slices = make_slices(
        schema.MeshSection(trainer=AxesSection(fsdp=2), sampler=AxesSection(tensor=4))
    )
    source = shardings(table, slices.trainer, TRAINER_RULES)
    push = Push(source, shardings(table, slices.sampler, SAMPLER_RULES))
    params = jax.device_put({"w": jnp.arange(32.0).reshape(8, 4)}, source)
    finished_by = []
    finish = push.finish

    def watched(moved):
        finished_by.append(threading.current_thread().name)
        return finish(moved)

    monkeypatch.setattr(push, "finish", watched)
    channel = WeightChannel([push])
    trainer = threading.Thread(target=channel.publish, args=(1, params), name="trainer")
    trainer.start()
    trainer.join(60)
    assert finished_by == []
    update = channel.subscribe().poll(wait=True)
    assert finished_by == [threading.current_thread().name]
    np.testing.assert_array_equal(update.params["w"], np.arange(32.0).reshape(8, 4))
    assert {s.data.shape for s in update.params["w"].addressable_shards} == {(8, 1)}


def test_integers_keep_their_type_when_weights_are_cast():
    table = {"w": Weight(shape=(4,), axes=("mlp",), init="ones", hf="w")}
    slices = make_slices(schema.MeshSection())
    goal = [shardings(table, mesh, TRAINER_RULES)["w"] for mesh in (slices.trainer, slices.sampler)]
    push = Push(*({"w": s, "n": s} for s in goal), dtype=jnp.bfloat16)
    moved = push(jax.device_put({"w": jnp.ones(4), "n": jnp.arange(4)}, goal[0]))
    assert (moved["w"].dtype, moved["n"].dtype) == (jnp.bfloat16, jnp.int32)


@pytest.mark.parametrize("polled", [False, True])
def test_a_replacement_gets_the_weights_that_its_predecessor_took_and_did_not_use(polled):
    channel = WeightChannel([SAME, SAME])
    end, other = channel.subscribe(), channel.subscribe()
    channel.publish(1, PARAMS)
    if polled:
        assert end.poll(wait=True).version == 1
    end.leave()
    other.poll(wait=True)
    other.live(1)
    assert channel.live_version == 1, "no publish waits for one that has left"
    again = end.rejoin()
    update = again.poll(wait=True)
    assert update is not None and update.version == 1
    again.live(1)
    again.leave()
    assert again.rejoin().poll(wait=True) is None, "it already has those that it used"


def test_a_sampler_with_weights_older_than_the_live_ones_does_not_enter():
    channel = WeightChannel([SAME], version=3)
    late, fresh = (
        ExchangeEntry(live_version=0, counts=False),
        ExchangeEntry(live_version=0, counts=False),
    )
    with channel.exchange.changed:
        assert not channel.exchange.enter(late, 2) and not late.counts
        assert channel.exchange.enter(fresh, 3) and fresh.counts
