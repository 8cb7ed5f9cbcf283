"""Rates and shares of one step, from the parts' cumulative counters: who was busy, who waited."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Counters(NamedTuple):
    """Cumulative readings at one moment."""

    at_s: float
    sampler: Any  # SamplerStats
    channel: Any  # ChannelStats


class Observer:
    """Turns counters into per-step rates. Owned by the trainer's thread."""

    def __init__(self, read: Callable[[], Counters]) -> None:
        self._read = read
        self._last = read()

    def step(self) -> dict[str, float]:
        """Rates since the last call."""
        before, self._last = self._last, self._read()
        return rates(before, self._last)


def rates(before: Counters, after: Counters) -> dict[str, float]:
    """Shares and rates between two readings; keys as in METRICS."""
    wall_s = max(after.at_s - before.at_s, 1e-9)
    sampler, was = after.sampler, before.sampler
    busy = (sampler.busy_s - was.busy_s) / wall_s
    slot_steps = sampler.slot_steps - was.slot_steps
    used = sampler.used_slot_steps - was.used_slot_steps
    return {
        "sampler/busy_share": min(busy, 1.0),
        "sampler/idle_share": max(0.0, 1.0 - busy),
        "sampler/slot_occupancy": used / slot_steps if slot_steps else 0.0,
        "throughput/generated_tokens_per_s": (sampler.generated_tokens - was.generated_tokens) / wall_s,
    }


def measured_peak_flops(device: jax.Device, size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of a square fp32 matrix product on one device: the best of `repeats`."""
    x = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    product = jax.jit(lambda a: a @ a)
    product(x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
