"""The statistics of a sampler: each field says once how it merges. Pure host code."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from jaxrl_async.ports import ReplicaStats

Merge = Callable[[Sequence[float]], float]


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def last(values: Sequence[float]) -> float:
    """Return the last of these values."""
    return values[-1]


@dataclass(frozen=True, slots=True)
class Kind:
    """How readings of one field become one reading."""

    over_time: Merge  # of replicas that replaced one another, oldest first
    over_replicas: Merge  # of replicas that work at the same time


COUNTER = Kind(sum, sum)
SECONDS = Kind(sum, mean)  # means stay shares of the wall time
GAUGE = Kind(last, sum)  # holds only now: it ends with its replica
SHARE = Kind(last, mean)  # the same, of something that each replica has
LARGEST = Kind(max, max)
PROGRAMS = Kind(max, sum)  # a replica's programs outlive it


def _is(kind: Kind, start: float = 0) -> Any:
    return field(default=start, metadata={"kind": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerStats:
    """Counters since the start (subtract two readings) and gauges, which hold at the moment."""

    busy_s: float = _is(SECONDS, 0.0)  # the thread at work
    idle_s: float = _is(SECONDS, 0.0)  # nothing to decode
    blocks: int = _is(COUNTER)
    slot_steps: int = _is(COUNTER)  # slots times decode steps
    row_steps: int = _is(COUNTER)  # computed rows times decode steps
    used_slot_steps: int = _is(COUNTER)  # slot_steps that drew a token
    waiting_slot_steps: int = _is(COUNTER)  # slot_steps of blocks at whose end requests waited
    waiting_used_slot_steps: int = _is(COUNTER)
    generated_tokens: int = _is(COUNTER)
    aside_tokens: int = _is(COUNTER)  # of those, for evaluations, guests and opponents
    prefill_tokens: int = _is(COUNTER)  # computed, without padding
    recomputed_tokens: int = _is(COUNTER)  # of those, again after a swap or a preemption
    prefix_hit_tokens: int = _is(COUNTER)  # prompt tokens found in the prefix store
    prefix_hidden_tokens: int = _is(COUNTER)  # found there but for layers with a window
    prefix_asked_tokens: int = _is(COUNTER)  # prompt tokens looked up there
    evicted_pages: int = _is(COUNTER)
    requests_done: int = _is(COUNTER)
    truncated: int = _is(COUNTER)  # ended by length
    cancelled: int = _is(COUNTER)
    cancelled_tokens: int = _is(COUNTER)  # drawn by requests that were cancelled later
    failed: int = _is(COUNTER)  # requests that raised on the sampler's thread, each alone
    preempted: int = _is(COUNTER)  # lost their pages for a while: memory was short
    restarted: int = _is(COUNTER)  # began again after a swap
    discarded_tokens: int = _is(COUNTER)  # drawn, then thrown away by a restart
    in_flight: int = _is(GAUGE)  # requests that have a place
    waiting: int = _is(GAUGE)  # requests that wait for one
    used_page_share: float = _is(SHARE, 0.0)  # of the KV pages, the prefix store's included
    swaps: int = _is(COUNTER)
    swap_pause_s: float = _is(LARGEST, 0.0)  # between two blocks at the last swap, with the probe
    max_swap_pause_s: float = _is(LARGEST, 0.0)
    probe_error: float = _is(LARGEST, 0.0)  # largest difference on the last probe, nats
    max_probe_error: float = _is(LARGEST, 0.0)
    compiled_programs: int = _is(PROGRAMS)

    @property
    def work_done(self) -> tuple[int, ...]:
        """Counters of which at least one rises while the sampler is making progress."""
        return self.blocks, self.prefill_tokens, self.swaps

    def plus(self, **more: float) -> Self:
        """Return these statistics with more added to counters."""
        added: dict[str, Any] = {name: getattr(self, name) + n for name, n in more.items()}
        return replace(self, **added)

    def updated(self, record: Any) -> Self:
        """Return these statistics with the values of another record, whose fields are among
        theirs."""
        values: dict[str, Any] = {f.name: getattr(record, f.name) for f in fields(record)}
        return replace(self, **values)

    def after(self, earlier: "SamplerStats") -> "SamplerStats":
        """Return these statistics plus those of the sampler that this one replaced."""
        return _merged([earlier, self], lambda kind: kind.over_time)

    def since(self, earlier: "SamplerStats") -> Self:
        """Return these statistics less the counters of an earlier reading of the same sampler."""
        return self.plus(
            **{
                f.name: -getattr(earlier, f.name)
                for f in fields(self)
                if f.metadata["kind"].over_time is sum
            }
        )

    def ended(self) -> Self:
        """Return the statistics of a sampler that is gone: its gauges are 0."""
        gauges: dict[str, Any] = {
            f.name: f.default for f in fields(self) if f.metadata["kind"].over_time is last
        }
        return replace(self, **gauges)

    def beside(self, others: Sequence["SamplerStats"]) -> "SamplerStats":
        """Return one reading for this sampler and the others that work beside it."""
        return _merged([self, *others], lambda kind: kind.over_replicas) if others else self

    def with_waiting(self, count: int) -> Self:
        """Return these statistics with so many more requests that wait for a slot."""
        return replace(self, waiting=self.waiting + count) if count else self


def _merged(stats: Sequence[SamplerStats], merge_of: Callable[[Kind], Merge]) -> SamplerStats:
    """Merge readings field by field, as the kind of each field says."""
    values: dict[str, Any] = {
        f.name: merge_of(f.metadata["kind"])([getattr(s, f.name) for s in stats])
        for f in fields(SamplerStats)
    }
    return replace(stats[0], **values)


class RouterTotals:
    """One reading of replicas that come and go: a counter never falls, and times stay means over
    the replicas that were there.

    Keeps the statistics from before the last join or leave, and what each replica had counted then.

    While nobody joins or leaves, a reading is that of the replicas beside one another.
    """

    def __init__(self) -> None:
        self._before: ReplicaStats | None = None
        self._counted: dict[int, ReplicaStats] = {}  # by slot, at the last change

    def read(self, slots: Mapping[int, ReplicaStats]) -> ReplicaStats:
        """Return one reading, given those of all slots."""
        parts = [
            stats.since(self._counted[number]) if number in self._counted else stats
            for number, stats in slots.items()
        ]
        if not parts:
            return SamplerStats() if self._before is None else self._before
        now = parts[0].beside(parts[1:])
        return now if self._before is None else now.after(self._before)

    def change(self, slots: Mapping[int, ReplicaStats]) -> None:
        """Take note that a slot is about to be added or removed, given the readings of all."""
        if slots:
            self._before, self._counted = self.read(slots).ended(), dict(slots)
