"""A transfer that fails half way, arrives torn, or whose sampler has left: all or nothing."""

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.config.schema import AxesSection
from jaxrl_async.errors import WeightsError
from jaxrl_async.mesh import SAMPLER_RULES, TRAINER_RULES, make_slices, shardings
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.model.spec import Weight
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.delivery import FunctionLink, send
from jaxrl_async.weights.local import Push
from jaxrl_async.weights.manifest import Sums

SAME = FunctionLink(lambda p: p)
TABLE = {
    "w": Weight(shape=(8, 4), axes=("embed", "mlp"), init="ones", hf="w"),
    "b": Weight(shape=(4,), axes=("mlp",), init="ones", hf="b"),
}


def pushed(trainer=None, sampler=None, **options):
    """A Push, and weights on the trainer's side."""
    mesh = schema.MeshSection(
        trainer=AxesSection(**(trainer or {})), sampler=AxesSection(**(sampler or {}))
    )
    slices = make_slices(mesh)
    source = shardings(TABLE, slices.trainer, TRAINER_RULES)
    params = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.full(4, 0.1)}
    push = Push(source, shardings(TABLE, slices.sampler, SAMPLER_RULES), **options)
    return push, jax.device_put(params, source)


def channel_of(push):
    faults = FaultCounts()
    return WeightChannel([push], checksum=True, count=faults.add), faults


@pytest.mark.parametrize(
    ("trainer", "sampler", "dtype"),
    [
        ({}, {}, None),
        ({"fsdp": 4}, {"tensor": 2}, None),
        ({"fsdp": 2}, {"data": 2, "tensor": 2}, jnp.bfloat16),
    ],
)
def test_a_sound_transfer_passes_whatever_its_shards_and_its_type(trainer, sampler, dtype):
    push, params = pushed(trainer, sampler, dtype=dtype)
    channel, faults = channel_of(push)
    channel.publish(1, params)
    update = channel.subscribe().poll(wait=True)
    np.testing.assert_allclose(update.params["w"], np.arange(32.0).reshape(8, 4))
    assert not any(faults.read().values())


def numpy_checksum(x):
    """The formula in the module's docstring, with Python's integers."""
    bits = x.reshape(-1).view(np.uint32)
    return sum(int(b) * (2 * i + 1) for i, b in enumerate(bits)) % 2**32


def test_the_checksum_is_the_formula_on_any_mesh():
    push, params = pushed({"fsdp": 2}, {"tensor": 4})
    expected = [numpy_checksum(np.asarray(params[k])) for k in ("b", "w")]
    for tree in (params, push(params), jax.device_get(params)):
        assert Sums(tree).read().tolist() == expected


def test_a_changed_bit_a_swapped_block_and_differing_copies_are_all_seen():
    push, params = pushed({}, {"data": 2})
    sound = Sums(params).read()
    w = np.asarray(params["w"]).copy()
    w.view(np.uint32)[3, 1] ^= 1
    assert (Sums({"w": w, "b": params["b"]}).read() != sound).tolist() == [False, True]
    swapped = np.roll(np.asarray(params["w"]), 4, axis=0)
    assert (Sums({"w": swapped, "b": params["b"]}).read() != sound).tolist() == [False, True]
    moved = push(params)["b"]
    shards = [s.data for s in moved.addressable_shards]
    torn = jax.make_array_from_single_device_arrays(
        moved.shape, moved.sharding, [shards[0], shards[1] + 1]
    )
    assert Sums({"b": torn}).read() is None


def tear(push, monkeypatch, times, step="move"):
    """The next `times` moves (or what else is the step) lose a part of what they move."""
    whole, left = getattr(push, step), [times]

    def torn(cast):
        moved = dict(whole(cast))
        if left[0]:
            left[0] -= 1
            moved["w"] = jax.device_put(moved["w"].at[5:].set(0), moved["w"].sharding)
        return moved

    monkeypatch.setattr(push, step, torn)


@pytest.mark.parametrize("step", ["move", "finish"])
@pytest.mark.parametrize("on_host", [False, True])
def test_a_torn_copy_is_not_used_and_sent_once_more(monkeypatch, on_host, step):
    push, params = pushed({"fsdp": 2}, {"tensor": 2}, on_host=on_host)
    tear(push, monkeypatch, 1, step)
    channel, faults = channel_of(push)
    channel.publish(1, params)
    jax.tree.map(lambda x: x.delete(), params)  # the next step has donated them
    update = channel.subscribe().poll(wait=True)
    np.testing.assert_array_equal(update.params["w"], np.arange(32.0).reshape(8, 4))
    assert {k: n for k, n in faults.read().items() if n} == {
        "torn_transfers": 1, "transfer_retries": 1
    }  # fmt: skip


def test_a_copy_torn_twice_ends_the_run_and_is_never_given_out(monkeypatch):
    push, params = pushed()
    tear(push, monkeypatch, 2)
    channel, _ = channel_of(push)
    channel.publish(1, params)
    end, wake = channel.subscribe(), threading.Event()
    jax.block_until_ready(end.under_way.params)
    end.attach(wake)
    wake.clear()
    assert end.poll() is None, "the sampler continues with the weights that it has"
    assert wake.is_set(), "and polls again even if it has nothing to do"
    with pytest.raises(WeightsError, match=r"arrived corrupted twice.*first 'w'"):
        end.poll(wait=True)


def test_where_one_of_several_cannot_be_sent_to_none_gets_any():
    sent, fail = [], [True]

    def second(params):
        if fail[0]:
            fail[0] = False
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory there")
        return params

    faults = FaultCounts()
    channel = WeightChannel(
        [FunctionLink(lambda p: sent.append(p) or p), FunctionLink(second)], count=faults.add
    )
    ends = [channel.subscribe(), channel.subscribe()]
    channel.publish(1, {"w": jnp.ones(2)})
    assert [end.poll(wait=True).version for end in ends] == [1, 1]
    assert len(sent) == 2 and faults.read()["transfer_retries"] == 1


def test_where_the_second_try_fails_too_the_samplers_keep_what_they_have():
    def broken(params):
        raise RuntimeError("no memory there")

    channel = WeightChannel([SAME, FunctionLink(broken)])
    ends = [channel.subscribe(), channel.subscribe()]
    with pytest.raises(WeightsError, match=r"version 1 could not be sent.*version 0"):
        channel.publish(1, {"w": jnp.ones(2)})
    assert [end.poll(wait=True) for end in ends] == [None, None]
    assert channel.published_version == 0


def test_no_publish_waits_for_a_sampler_that_left_and_live_is_the_lowest_of_the_others():
    live = []
    channel = WeightChannel([SAME] * 2, on_live=live.append)
    first, second = channel.subscribe(), channel.subscribe()
    channel.publish(1, {"w": jnp.ones(2)})
    assert first.poll(wait=True).version == 1
    first.live(1)
    assert live == []
    second.leave()
    assert live == [1]
    channel.publish(2, {"w": jnp.ones(2)})
    first.poll(wait=True)
    first.live(2)
    channel.publish(3, {"w": jnp.ones(2)})
    assert second.poll(wait=True) is None, "it has left"
    second.live(3)
    assert live == [1, 2]


def test_one_that_rejoins_gets_the_newest_and_holds_live_back_from_then_on():
    channel = WeightChannel([SAME] * 2)
    first, second = channel.subscribe(), channel.subscribe()
    second.leave()
    for version in (1, 2):
        channel.publish(version, {"w": jnp.full(2, version)})
        first.poll(wait=True)
        first.live(version)
    again = second.rejoin()
    assert channel.live_version == 2, "versions never fall"
    channel.publish(3, {"w": jnp.full(2, 3)}) if again.poll(wait=True).version == 2 else None
    again.live(2)
    first.poll(wait=True)
    first.live(3)
    assert channel.live_version == 2
    assert again.poll(wait=True).version == 3
    again.live(3)
    assert channel.live_version == 3


def test_weights_that_were_taken_and_not_live_are_there_again_for_the_next():
    channel = WeightChannel([SAME])
    end = channel.subscribe()
    channel.publish(1, {"w": jnp.ones(2)})
    assert end.poll(wait=True).version == 1
    end.leave()
    again = end.rejoin()
    assert again.poll(wait=True).version == 1
    again.live(1)
    again.leave()
    assert again.rejoin().poll(wait=True) is None, "the newest are those that it used"


def test_a_publish_that_waited_for_a_hanging_sampler_returns_when_it_leaves():
    channel = WeightChannel([SAME])
    end = channel.subscribe()
    channel.publish(1, {"w": jnp.ones(2)})
    thread = threading.Thread(target=channel.publish, args=(2, {"w": jnp.ones(2)}), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    end.leave()
    thread.join(30)
    assert not thread.is_alive()
    assert end.rejoin().poll(wait=True).version == 2


@pytest.mark.parametrize("differing", ["sent", "received"])
def test_copies_of_one_array_that_differ_are_no_sound_transfer(differing, monkeypatch):
    push, params = pushed()
    delivery = send(push, VersionedParams(version=1, params=params), checksum=False)
    own = Sums(params).read()

    class Told:
        def __init__(self, of):
            self.of = of

        def read(self):
            return None if (self.of == "source") == (differing == "sent") else own

    monkeypatch.setattr("jaxrl_async.weights.delivery.Sums", Told)
    with pytest.raises(WeightsError, match="differ between devices"):
        replace(delivery, sums=Told("source")).check()
