"""Rates and shares of one step, from the parts' cumulative counters: which part was busy and which
waited."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_async.buffer.contents import BufferStats
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.weights.exchange import ChannelStats
from jaxrl_async.weights.remote_port import Traffic

log = logging.getLogger(__name__)


class PivotCounts(NamedTuple):
    """Continuations sampled from pivots, as in RolloutStats."""

    forks: int = 0
    tokens: int = 0
    shared_tokens: int = 0


class Counters(NamedTuple):
    """Readings of all parts at one moment."""

    at_s: float
    sampler: SamplerStats
    channel: ChannelStats
    buffer: BufferStats
    gate_wait_s: float
    living: int  # samplers at work
    faults: Mapping[str, float]  # by name, as FaultCounts counts them
    cancelled_members: int = 0  # as in RolloutStats
    cancelled_turn_tokens: int = 0
    pivots: PivotCounts = PivotCounts()
    endpoint: Mapping[str, int] = MappingProxyType({})  # by name, as EndpointCounts; may be empty
    judge: Mapping[str, float] = MappingProxyType({})  # by name, as JudgeMeter; empty: no judge
    process: Mapping[str, float] = MappingProxyType({})  # by name, as ProcessTally; empty: none
    teachers: Mapping[str, float] = MappingProxyType({})  # as NAME/COUNTER; empty: none is asked


class Utilisation:
    """The share of a slice's peak FLOP/s that updates use. A rate above the peak becomes the new
    peak: no share is above 1."""

    def __init__(self, peak_flops: float, *, measured: bool) -> None:
        """Begin with a peak.

        Args:
            peak_flops: peak of the whole slice, FLOP/s.
            measured: whether it was measured here, maybe alongside other work; else it is a
                setting, and a log line reports one that is too low.
        """
        self._peak_flops, self._measured = peak_flops, measured

    def of(self, flops: float, seconds: float) -> float:
        """Return the share of the peak for `flops` FLOPs in `seconds` seconds."""
        rate = flops / max(seconds, 1e-9)
        if rate > self._peak_flops:
            if not self._measured:
                log.warning(
                    "metrics.peak_flops is too low: an update ran at %.3g FLOP/s, above the peak "
                    "of %.3g of the trainer's devices together. throughput/mfu now uses the higher "
                    "rate as the peak; correct the setting.",
                    rate,
                    self._peak_flops,
                )
            self._peak_flops = rate
        return rate / self._peak_flops


class Observer:
    """Turns counters into per-step rates. Owned by the trainer's thread."""

    def __init__(
        self,
        read: Callable[[], Counters],
        *,
        utilisation: Utilisation,
        share: Callable[[dict[str, float]], Sequence[Mapping[str, float]]] = lambda own: [own],
    ) -> None:
        """Read the counters for the first time.

        Args:
            read: reads the counters of all parts.
            utilisation: of the trainer's slice.
            share: sends this process's rates to all processes; returns the rates of all.
        """
        self._read, self._utilisation, self._share = read, utilisation, share
        self._first = self._last = read()

    def complete(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return a step's metrics with the rates since the last call; its FLOPs are converted to a
        utilisation."""
        before, self._last = self._last, self._read()
        wall_s = max(self._last.at_s - before.at_s, 1e-9)
        metrics = dict(values)
        flops = metrics.pop("train/flops", None)
        if flops is not None:
            metrics["throughput/mfu"] = self._utilisation.of(flops, metrics["time/train_s"])
            metrics["throughput/trained_tokens_per_s"] = metrics["train/tokens"] / wall_s
        metrics["time/elapsed_s"] = self._last.at_s - self._first.at_s
        return metrics | combined_rates(self._share(rates(before, self._last, wall_s)))


ADDED = (
    "rollout/cancelled_members",
    "rollout/cancelled_tokens",
    "rollout/forks",
    "rollout/fork_tokens",
    "rollout/shared_tokens",
    "sampler/failed",
    "sampler/preempted",
    "sampler/restarted",
    "sampler/discarded_tokens",
    "sampler/recomputed_tokens",
    "sampler/scored_tokens",
    "sampler/in_flight",
    "throughput/generated_tokens_per_s",
    "throughput/aside_tokens_per_s",
    "sampler/joins",
    "weights/transfer_bytes",
    "weights/transfers",
    "weights/sent_bytes",
    "weights/passed_bytes",
    "weights/base_bytes",
    "weights/repeats",
    "buffer/active",
    "buffer/ready",
    "judge/calls",
    "judge/cached",
    "judge/prompt_tokens",
    "judge/completion_tokens",
    "judge/call_s",
    "process/steps",
)
LARGEST = (
    "weights/transfer_s",
    "weights/live_s",
    "weights/swap_pause_s",
    "weights/probe_error",
)
"""Rates that are summed over processes, and rates whose maximum is reported; all others are
averaged."""


def combined_rates(of_processes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the rates of all processes."""
    combined: dict[str, float] = {}
    for key in sorted({key for rates in of_processes for key in rates}):
        values = [rates[key] for rates in of_processes if key in rates]
        total = max(values) if key in LARGEST else sum(values)
        is_total = key in ADDED or key in LARGEST or key.startswith(("endpoint/", "teacher/"))
        combined[key] = total if is_total else total / len(values)
    return combined


def rates(before: Counters, after: Counters, wall_s: float) -> dict[str, float]:
    """Return the shares and rates between two readings; keys as in METRICS."""
    sampler, was = after.sampler, before.sampler
    busy = min((sampler.busy_s - was.busy_s) / wall_s, 1.0)
    slot_steps = sampler.slot_steps - was.slot_steps
    used = sampler.used_slot_steps - was.used_slot_steps
    aside = sampler.aside_tokens - was.aside_tokens
    tokens = sampler.generated_tokens - was.generated_tokens - aside
    return {
        "sampler/busy_share": busy,
        "sampler/idle_share": 1.0 - busy,
        "sampler/slot_occupancy": used / slot_steps if slot_steps else 0.0,
        **kv_use(was, sampler),
        **cancellations(before, after),
        **continuations(before.pivots, after.pivots),
        "sampler/gate_wait_share": min((after.gate_wait_s - before.gate_wait_s) / wall_s, 1.0),
        "throughput/generated_tokens_per_s": tokens / wall_s,
        "throughput/aside_tokens_per_s": aside / wall_s,
        **(transfer(sampler, after.channel) if sampler.swaps else {}),
        **remote_transfers(before.channel.remote, after.channel.remote),
        "buffer/active": float(after.buffer.active),
        "buffer/ready": float(after.buffer.ready),
        "sampler/living": float(after.living),
        **_since("faults", before.faults, after.faults),
        **_since("endpoint", before.endpoint, after.endpoint),
        **_since("judge", before.judge, after.judge),
        **process_rewards(before.process, after.process),
        **_since("teacher", before.teachers, after.teachers),
    }


def _since(space: str, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the increase of counters between two readings."""
    return {f"{space}/{name}": float(n - before.get(name, 0)) for name, n in after.items()}


def process_rewards(was: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the number of rewarded steps between two readings, and their mean reward."""
    if not now:
        return {}
    steps = now["steps"] - was.get("steps", 0.0)
    mean = {"process/step_reward": (now["total"] - was.get("total", 0.0)) / steps} if steps else {}
    return {"process/steps": steps, **mean}


def kv_use(was: SamplerStats, now: SamplerStats) -> dict[str, float]:
    """Return how fully the samplers used their slots and pages between two readings."""
    waiting = now.waiting_slot_steps - was.waiting_slot_steps
    requested = now.prefix_asked_tokens - was.prefix_asked_tokens
    used = now.waiting_used_slot_steps - was.waiting_used_slot_steps
    hit = now.prefix_hit_tokens - was.prefix_hit_tokens
    counted = ("failed", "preempted", "restarted", "discarded_tokens", "recomputed_tokens")
    scored = now.scored_tokens - was.scored_tokens
    return {
        **({"sampler/scored_tokens": float(scored)} if scored else {}),
        **({"sampler/occupancy_while_waiting": used / waiting} if waiting else {}),
        **({"sampler/prefix_hit_share": hit / requested} if requested else {}),
        **{f"sampler/{name}": float(getattr(now, name) - getattr(was, name)) for name in counted},
        "sampler/kv_page_share": now.used_page_share,
        "sampler/in_flight": float(now.in_flight),
    }


def cancellations(before: Counters, after: Counters) -> dict[str, float]:
    """Return cancelled members and tokens between two readings; empty if there were none."""
    tokens = after.sampler.cancelled_tokens - before.sampler.cancelled_tokens
    tokens += after.cancelled_turn_tokens - before.cancelled_turn_tokens
    members = after.cancelled_members - before.cancelled_members
    if not tokens and not members:
        return {}
    return {
        "rollout/cancelled_members": float(members),
        "rollout/cancelled_tokens": float(tokens),
    }


def continuations(was: PivotCounts, now: PivotCounts) -> dict[str, float]:
    """Return the continuations from pivots between two readings; empty if there were never any."""
    if not now.forks:
        return {}
    return {
        "rollout/forks": float(now.forks - was.forks),
        "rollout/fork_tokens": float(now.tokens - was.tokens),
        "rollout/shared_tokens": float(now.shared_tokens - was.shared_tokens),
    }


def transfer(sampler: SamplerStats, channel: ChannelStats) -> dict[str, float]:
    """Return the metrics of the last completed transfer of weights."""
    return {
        "weights/transfer_s": channel.transfer_s,
        "weights/live_s": channel.live_s,
        "weights/transfer_bytes": float(channel.transfer_bytes),
        "weights/swap_pause_s": sampler.swap_pause_s,
        "weights/probe_error": sampler.probe_error,
    }


def remote_transfers(was: Traffic, now: Traffic) -> dict[str, float]:
    """Return the transfers of weights to samplers in separate processes between two readings;
    empty if no sampler ever joined."""
    if not now.joins:
        return {}
    transfer_s = now.transfer_s - was.transfer_s
    fetched_bytes = now.fetched_bytes - was.fetched_bytes
    return {
        "weights/transfers": float(now.transfers - was.transfers),
        "weights/sent_bytes": float(now.sent_bytes - was.sent_bytes),
        "weights/passed_bytes": float(now.passed_bytes - was.passed_bytes),
        "weights/base_bytes": float(now.base_bytes - was.base_bytes),
        **({"weights/gb_per_s": fetched_bytes / 1e9 / transfer_s} if transfer_s > 0 else {}),
        "weights/repeats": float(now.repeats - was.repeats),
        "sampler/joins": float(now.joins - was.joins),
    }


def measured_peak_flops(device: jax.Device, size: int = 1024, repeats: int = 20) -> float:
    """Measure the FLOP/s of a square fp32 matrix product on one device: the best of `repeats`,
    since samplers may be compiling at the same time."""
    x = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    product = jax.jit(lambda a: a @ a)
    product(x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
