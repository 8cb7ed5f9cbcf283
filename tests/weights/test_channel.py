"""The channel: newest complete version, one under way, no caller left waiting."""

import threading

import jax.numpy as jnp
import pytest

from jaxrl_async.errors import Closed, WeightsError
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.delivery import FunctionLink
from jaxrl_async.weights.manifest import manifest_of

PARAMS = {"w": jnp.ones(4)}
SAME = FunctionLink(lambda p: p)


def in_thread(work) -> tuple[threading.Thread, list]:
    result: list = []

    def target() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, result


def test_what_is_published_is_polled_once_and_becomes_live() -> None:
    live: list[int] = []
    channel = WeightChannel([SAME], on_live=live.append)
    end, wake = channel.subscribe(), threading.Event()
    end.attach(wake)
    assert end.poll() is None and end.under_way is None
    channel.publish(1, PARAMS, probe_logprobs="probe")
    assert wake.is_set()
    assert end.under_way is not None and end.under_way.version == 1
    update = end.poll(wait=True)
    assert update is not None and (update.version, update.probe_logprobs) == (1, "probe")
    assert end.poll() is None and end.under_way is None and channel.live_version == 0
    end.live(1)
    channel.wait_live(1, timeout_s=0)
    assert live == [1] and channel.stats().transfer_bytes == 16


def test_a_second_publish_waits_until_the_first_is_taken() -> None:
    channel = WeightChannel([SAME])
    channel.publish(1, PARAMS)
    thread, result = in_thread(lambda: channel.publish(2, PARAMS))
    thread.join(0.2)
    assert thread.is_alive()
    end = channel.subscribe()
    first = end.poll(wait=True)
    thread.join(10)
    second = end.poll(wait=True)
    assert result == [None]
    assert first and second and (first.version, second.version) == (1, 2)


def test_another_models_weights_are_refused_before_anything_moves() -> None:
    moved: list[object] = []
    channel = WeightChannel([FunctionLink(moved.append)], expected=manifest_of({"w": jnp.ones(5)}))
    with pytest.raises(WeightsError, match="'w'"):
        channel.publish(1, PARAMS)
    assert not moved


def test_waiting_for_weights_that_never_come_ends_with_a_reason() -> None:
    with pytest.raises(WeightsError, match="not live"):
        WeightChannel([SAME]).wait_live(1, timeout_s=0.01)


def test_closing_wakes_every_waiter() -> None:
    channel = WeightChannel([SAME])
    channel.publish(1, PARAMS)
    waits = [
        in_thread(lambda: channel.publish(2, PARAMS)),
        in_thread(lambda: channel.wait_live(1, timeout_s=60)),
    ]
    channel.close()
    for thread, result in waits:
        thread.join(10)
        assert isinstance(result[0], Closed)
