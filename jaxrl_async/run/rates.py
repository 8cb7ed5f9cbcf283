"""Rates and shares of one step, from the parts' cumulative counters: who was busy, who waited."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Counters(NamedTuple):
    """Readings of all parts at one moment."""

    at_s: float
    sampler: Any  # SamplerStats
    channel: Any  # ChannelStats
    buffer: Any  # BufferStats
    gate_wait_s: float
    living: int  # samplers at work
    faults: Mapping[str, int]  # by name, as metrics.faults counts them


class Observer:
    """Turns counters into per-step rates. Owned by the trainer's thread."""

    def __init__(
        self,
        read: Callable[[], Counters],
        *,
        peak_flops: float,
        share: Callable[[dict[str, float]], Sequence[Mapping[str, float]]] = lambda own: [own],
    ) -> None:
        """peak_flops: of the whole trainer slice, FLOP/s. share: what this process counted -> what
        all did."""
        self._read, self._peak_flops, self._share = read, peak_flops, share
        self._first = self._last = read()

    def complete(self, values: Mapping[str, float]) -> dict[str, float]:
        """A step's values with the rates since the last call added; its FLOPs become a
        utilisation."""
        before, self._last = self._last, self._read()
        wall_s = max(self._last.at_s - before.at_s, 1e-9)
        done = dict(values)
        flops = done.pop("train/flops", None)
        if flops is not None:
            done["throughput/mfu"] = flops / (self._peak_flops * max(done["time/train_s"], 1e-9))
            done["throughput/trained_tokens_per_s"] = done["train/tokens"] / wall_s
        done["time/elapsed_s"] = self._last.at_s - self._first.at_s
        return done | combined(self._share(rates(before, self._last, wall_s)))


ADDED = (
    "sampler/failed",
    "sampler/preempted",
    "sampler/restarted",
    "sampler/discarded_tokens",
    "sampler/recomputed_tokens",
    "sampler/in_flight",
    "throughput/generated_tokens_per_s",
    "weights/transfer_bytes",
    "buffer/active",
    "buffer/ready",
)
LARGEST = ("weights/transfer_s", "weights/swap_pause_s", "weights/probe_error")
"""What the rates of several processes add up to, or the largest of them; of others, the mean."""


def combined(of_processes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The rates of all processes as one."""
    told: dict[str, float] = {}
    for key in sorted({key for values in of_processes for key in values}):
        found = [values[key] for values in of_processes if key in values]
        total = max(found) if key in LARGEST else sum(found)
        told[key] = total if key in ADDED or key in LARGEST else total / len(found)
    return told


def rates(before: Counters, after: Counters, wall_s: float) -> dict[str, float]:
    """Shares and rates between two readings; keys as in METRICS."""
    sampler, was = after.sampler, before.sampler
    busy = min((sampler.busy_s - was.busy_s) / wall_s, 1.0)
    slot_steps = sampler.slot_steps - was.slot_steps
    used = sampler.used_slot_steps - was.used_slot_steps
    tokens = sampler.generated_tokens - was.generated_tokens
    return {
        "sampler/busy_share": busy,
        "sampler/idle_share": 1.0 - busy,
        "sampler/slot_occupancy": used / slot_steps if slot_steps else 0.0,
        **kv_use(was, sampler),
        "sampler/gate_wait_share": min((after.gate_wait_s - before.gate_wait_s) / wall_s, 1.0),
        "throughput/generated_tokens_per_s": tokens / wall_s,
        **(transfer(sampler, after.channel) if sampler.swaps else {}),
        "buffer/active": float(after.buffer.active),
        "buffer/ready": float(after.buffer.ready),
        "sampler/living": float(after.living),
        **{f"faults/{k}": float(n - before.faults.get(k, 0)) for k, n in after.faults.items()},
    }


def kv_use(was: Any, now: Any) -> dict[str, float]:
    """How well the sampler used its slots and pages between two readings."""
    waiting = now.waiting_slot_steps - was.waiting_slot_steps
    asked = now.prefix_asked_tokens - was.prefix_asked_tokens
    used = now.waiting_used_slot_steps - was.waiting_used_slot_steps
    found = now.prefix_hit_tokens - was.prefix_hit_tokens
    counted = ("failed", "preempted", "restarted", "discarded_tokens", "recomputed_tokens")
    return {
        **({"sampler/occupancy_while_waiting": used / waiting} if waiting else {}),
        **({"sampler/prefix_hit_share": found / asked} if asked else {}),
        **{f"sampler/{name}": float(getattr(now, name) - getattr(was, name)) for name in counted},
        "sampler/kv_page_share": now.used_page_share,
        "sampler/in_flight": float(now.in_flight),
    }


def transfer(sampler: Any, channel: Any) -> dict[str, float]:
    """The last transfer of weights that has gone through."""
    return {
        "weights/transfer_s": channel.transfer_s,
        "weights/transfer_bytes": float(channel.transfer_bytes),
        "weights/swap_pause_s": sampler.swap_pause_s,
        "weights/probe_error": sampler.probe_error,
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
