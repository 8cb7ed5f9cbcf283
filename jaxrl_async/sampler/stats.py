"""The statistics of a sampler: each field declares how it merges. Pure host code."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from jaxrl_async.ports.generate import ReplicaStats

Merge = Callable[[Sequence[float]], float]


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def last(values: Sequence[float]) -> float:
    """Return the last of these values."""
    return values[-1]


@dataclass(frozen=True, slots=True)
class Kind:
    """The rules that merge several readings of one field."""

    over_time: Merge  # of replicas that replaced one another, oldest first
    over_replicas: Merge  # of replicas that run at the same time


COUNTER = Kind(sum, sum)
SECONDS = Kind(sum, mean)  # means stay shares of the wall time
GAUGE = Kind(last, sum)  # current value: it ends with its replica
SHARE = Kind(last, mean)  # a gauge that each replica has
LARGEST = Kind(max, max)
PROGRAMS = Kind(max, sum)  # a replica's programs outlive it


def _stat(kind: Kind, start: float = 0) -> Any:
    return field(default=start, metadata={"kind": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerStats:
    """Counters since the start (subtract two readings), and gauges of the moment."""

    busy_s: float = _stat(SECONDS, 0.0)  # the thread at work
    idle_s: float = _stat(SECONDS, 0.0)  # nothing to decode
    blocks: int = _stat(COUNTER)
    slot_steps: int = _stat(COUNTER)  # slots times decode steps
    row_steps: int = _stat(COUNTER)  # computed rows times decode steps
    used_slot_steps: int = _stat(COUNTER)  # slot_steps that sampled a token
    waiting_slot_steps: int = _stat(COUNTER)  # slot_steps of blocks at whose end requests waited
    waiting_used_slot_steps: int = _stat(COUNTER)
    generated_tokens: int = _stat(COUNTER)
    aside_tokens: int = _stat(COUNTER)  # of these, for evaluations, guests and opponents
    prefill_tokens: int = _stat(COUNTER)  # computed, without padding
    recomputed_tokens: int = _stat(COUNTER)  # of these, again after a swap or a preemption
    scored_tokens: int = _stat(COUNTER)  # of prompts, whose log-probs were computed
    prefix_hit_tokens: int = _stat(COUNTER)  # prompt tokens found in the prefix store
    prefix_hidden_tokens: int = _stat(COUNTER)  # found except in layers with a window
    prefix_asked_tokens: int = _stat(COUNTER)  # prompt tokens looked up there
    evicted_pages: int = _stat(COUNTER)
    requests_done: int = _stat(COUNTER)
    truncated: int = _stat(COUNTER)  # ended by length
    cancelled: int = _stat(COUNTER)
    cancelled_tokens: int = _stat(COUNTER)  # sampled by requests that were cancelled later
    failed: int = _stat(COUNTER)  # requests whose host work raised an error
    preempted: int = _stat(COUNTER)  # lost their pages for a while, for lack of memory
    restarted: int = _stat(COUNTER)  # restarted after a swap
    discarded_tokens: int = _stat(COUNTER)  # sampled, then discarded by a restart
    in_flight: int = _stat(GAUGE)  # requests that have a slot
    waiting: int = _stat(GAUGE)  # requests that wait for a slot
    used_page_share: float = _stat(SHARE, 0.0)  # of the KV pages, with the prefix store's
    swaps: int = _stat(COUNTER)
    swap_pause_s: float = _stat(LARGEST, 0.0)  # between two blocks at the last swap, with the probe
    max_swap_pause_s: float = _stat(LARGEST, 0.0)
    probe_error: float = _stat(LARGEST, 0.0)  # largest difference on the last probe, nats
    max_probe_error: float = _stat(LARGEST, 0.0)
    compiled_programs: int = _stat(PROGRAMS)

    @property
    def work_done(self) -> tuple[int, ...]:
        """Counters; at least one rises while the sampler makes progress."""
        return self.blocks, self.prefill_tokens, self.swaps

    def plus(self, **more: float) -> Self:
        """Return these statistics with more added to counters."""
        added: dict[str, Any] = {name: getattr(self, name) + n for name, n in more.items()}
        return replace(self, **added)

    def updated(self, record: Any) -> Self:
        """Return these statistics with the values of another record that has some of their
        fields."""
        values: dict[str, Any] = {f.name: getattr(record, f.name) for f in fields(record)}
        return replace(self, **values)

    def after(self, earlier: "SamplerStats") -> "SamplerStats":
        """Return these statistics merged with those of the sampler that this one replaced."""
        return _merged([earlier, self], lambda kind: kind.over_time)

    def since(self, earlier: "SamplerStats") -> Self:
        """Return these statistics minus the counters of an earlier reading of the same sampler."""
        return self.plus(
            **{
                f.name: -getattr(earlier, f.name)
                for f in fields(self)
                if f.metadata["kind"].over_time is sum
            }
        )

    def ended(self) -> Self:
        """Return the statistics of a sampler that has ended: its gauges are 0."""
        gauges: dict[str, Any] = {
            f.name: f.default for f in fields(self) if f.metadata["kind"].over_time is last
        }
        return replace(self, **gauges)

    def merged_with(self, others: Sequence["SamplerStats"]) -> "SamplerStats":
        """Return the merged statistics of this sampler and others that run at the same time."""
        return _merged([self, *others], lambda kind: kind.over_replicas) if others else self

    def with_waiting(self, count: int) -> Self:
        """Return these statistics with `count` more requests that wait for a slot."""
        return replace(self, waiting=self.waiting + count) if count else self


def _merged(stats: Sequence[SamplerStats], merge_of: Callable[[Kind], Merge]) -> SamplerStats:
    """Merge readings field by field, as the kind of each field says."""
    values: dict[str, Any] = {
        f.name: merge_of(f.metadata["kind"])([getattr(s, f.name) for s in stats])
        for f in fields(SamplerStats)
    }
    return replace(stats[0], **values)


class RouterTotals:
    """Merges the statistics of replicas that join and leave: a counter never falls, and times stay
    means over the replicas of their time.

    Keeps the totals until the last join or leave, and the readings of each replica then. Without a
    join or leave, a reading merges the current replicas.
    """

    def __init__(self) -> None:
        self._before: ReplicaStats | None = None
        self._counted: dict[int, ReplicaStats] = {}  # by slot, at the last change

    def read(self, slots: Mapping[int, ReplicaStats]) -> ReplicaStats:
        """Return one reading, given the readings of all slots."""
        parts = [
            stats.since(self._counted[number]) if number in self._counted else stats
            for number, stats in slots.items()
        ]
        if not parts:
            return SamplerStats() if self._before is None else self._before
        now = parts[0].merged_with(parts[1:])
        return now if self._before is None else now.after(self._before)

    def change(self, slots: Mapping[int, ReplicaStats]) -> None:
        """Record that a slot is about to be added or removed, given the readings of all slots."""
        if slots:
            self._before, self._counted = self.read(slots).ended(), dict(slots)
