"""The pipeline that simulate.py simulates: sizes, times and lengths, with checks."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Literal

import numpy as np

from jaxrl_async.errors import ConfigError
from jaxrl_async.staleness import capacity, memory_bound, never_fills_a_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Values and their frequencies."""

    values: tuple[float, ...]
    weights: tuple[float, ...]  # not negative, on any scale

    def __post_init__(self) -> None:
        """Raise ConfigError if no value can be sampled."""
        same = len(self.values) == len(self.weights) > 0
        if not same or min(self.weights) < 0 or sum(self.weights) <= 0 or min(self.values) < 0:
            raise ConfigError(
                f"a histogram of {len(self.values)} values and {len(self.weights)} weights: it "
                "needs as many values as weights, none negative, and a weight above 0."
            )

    @classmethod
    def constant(cls, value: float) -> "Histogram":
        """Return a histogram of one value."""
        return cls(values=(value,), weights=(1.0,))

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Histogram":
        """Count how often each value occurs in `samples`."""
        values, counts = np.unique(np.asarray(list(samples), np.float64), return_counts=True)
        return cls(values=tuple(values.tolist()), weights=tuple(counts.astype(float).tolist()))

    @property
    def mean(self) -> float:
        """Mean of the values, weighted."""
        return float(np.average(self.values, weights=self.weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers:
    """The samplers: their capacity, and the time of their programs in seconds."""

    slots: int
    rows: tuple[int, ...]  # rows that decode, ascending, and
    step_s: tuple[float, ...]  # a decode step at that many; linear between, constant outside
    count: int = 1  # number of samplers
    reserve: int = 0  # sequences prefilled ahead
    block: int = 8  # decode steps in a dispatch
    context_token_s: float = 0.0  # a step's additional time per token of running context
    block_s: float = 0.0  # additional time of a block: dispatch and the host's work
    prefill_s: float = 0.0  # a round in which something is prefilled, and
    prefill_token_s: float = 0.0  # each token of it
    prefill_chunk: int = 2048  # tokens prefilled between two blocks
    swap_s: float = 0.0  # pause of decoding for a swap


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTree:
    """The transfer of a version to samplers in separate processes (mesh.samplers_in: processes or
    elsewhere):
    each sampler passes on what it has, and the trainer does not wait for any of them."""

    num_bytes: float  # of one sampler's weights
    trainer_bytes_per_s: float  # sent by the trainer, to all together
    sampler_bytes_per_s: float  # received by one sampler, and sent by it to all together
    fanout: int = 2  # samplers to which the trainer, and each sampler, sends a version
    offer_s: float = 0.0  # from publish until it is offered to samplers: the trainer's copy to host
    hop_s: float = 0.0  # delay of a piece in one source, in addition to its bytes
    stage_s: float = 0.0  # from the last piece until the swap: checksums, copy to the device


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """Samplers that join or leave at a given time."""

    at_s: float
    joins: int = 0  # number of processes that are started
    leaves: int = 0  # running samplers that get SIGTERM, chosen at random
    kills: int = 0  # samplers that get SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnover:
    """The joining and leaving of samplers during the run."""

    changes: tuple[FleetChange, ...] = ()
    preempted_per_minute: float = 0.0  # at random times, over all samplers; each is replaced
    handed_back_share: float = 1.0  # share that leaves with notice; the others are killed
    again_first: bool = False  # requests of a lost sampler overtake waiting ones
    handover_s: float = 0.0  # from a leaving sampler's last block until others have its requests
    noticed_s: float = 0.0  # from a kill until the trainer counts the sampler as lost
    replaced_s: Histogram = field(default_factory=lambda: Histogram.constant(0.0))
    """From a preemption until the replacement's process starts."""
    start_s: float = 0.0  # from process start to its first request for weights: imports, compiling
    wait_s: float = 600.0  # maximum time without any sampler (remote.wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """All inputs of the simulation. Times in seconds, lengths in tokens."""

    samplers: Samplers
    answer_tokens: Histogram
    prompt_tokens: int = 0
    group_size: int = 8
    groups_per_step: int = 8
    max_staleness: int = 1
    lookahead: int = 0
    when_too_old: Literal["wait", "drop"] = "wait"
    overcommit: float = 1.5  # with drop
    score_s: Histogram = field(default_factory=lambda: Histogram.constant(0.0))  # of a group
    scorers: int | None = None  # groups scored at a time; None: no limit
    update_s: float = 0.0  # constant part of packing, forward, backward and optimizer
    update_token_s: float = 0.0  # additional time for each token of the batch, prompts included
    publish_s: float = 0.0  # time of the trainer
    transfer_s: float = 0.0  # without a tree: from publish until the samplers have the weights
    tree: TransferTree | None = None  # None: samplers in threads, which the next publish waits for
    turnover: Turnover | None = None  # None: all samplers stay
    report_s: float = 0.0  # between two steps
    save_every: int = 0  # updates between two checkpoints; 0: none
    save_s: float = 0.0  # pause of the trainer for a checkpoint

    @property
    def capacity(self) -> int:
        """The gate's bound on concurrent groups."""
        if self.when_too_old == "drop":
            return memory_bound(self.max_staleness, self.groups_per_step, self.overcommit)
        return capacity(self.max_staleness, self.groups_per_step, self.lookahead)


def check_pipeline(p: Pipeline) -> None:
    """Raise ConfigError if the pipeline cannot run or a setting makes no sense."""
    s = p.samplers
    least = {
        "group_size": (p.group_size, 1),
        "groups_per_step": (p.groups_per_step, 1),
        "max_staleness": (p.max_staleness, 0),
        "lookahead": (p.lookahead, 0),
        "overcommit": (p.overcommit, 1),
        "prompt_tokens": (p.prompt_tokens, 0),
        "answer_tokens": (min(p.answer_tokens.values), 1),
        "scorers": (1 if p.scorers is None else p.scorers, 1),
        "samplers.count": (s.count, 1),
        "samplers.slots": (s.slots, 1),
        "samplers.reserve": (s.reserve, 0),
        "samplers.block": (s.block, 1),
        "samplers.prefill_chunk": (s.prefill_chunk, 1),
    }
    small = [f"{name} ({v}) must be at least {low}" for name, (v, low) in least.items() if v < low]
    if small:
        raise ConfigError(f"{', '.join(small)}. Correct the pipeline.")
    if p.when_too_old == "wait":
        problem = never_fills_a_step(p.max_staleness, p.groups_per_step, p.lookahead)
        if problem is not None:
            raise ConfigError(problem)
    _check_times(p, s)
    if p.tree is not None:
        _check_tree(p.tree)
    if p.turnover is not None:
        _check_turnover(p.turnover, p)


def _check_tree(tree: TransferTree) -> None:
    rates = (tree.trainer_bytes_per_s, tree.sampler_bytes_per_s)
    names = ("num_bytes", "offer_s", "hop_s", "stage_s")
    if tree.fanout < 1 or not all(0 <= getattr(tree, n) < np.inf for n in names):
        raise ConfigError(
            f"tree: {', '.join(names)} must be finite and not negative, and fanout "
            f"({tree.fanout}) at least 1: {tree}. Correct the pipeline."
        )
    if not min(rates) > 0:
        raise ConfigError(f"tree: rates of {rates} bytes/s must be above 0. Correct the pipeline.")


def _check_turnover(turnover: Turnover, p: Pipeline) -> None:
    if p.tree is None:
        raise ConfigError(
            "a pipeline with a turnover needs a tree: samplers in threads do not join or leave"
        )
    numbers = {
        "preempted_per_minute": turnover.preempted_per_minute,
        "handover_s": turnover.handover_s,
        "noticed_s": turnover.noticed_s,
        "start_s": turnover.start_s,
        "replaced_s": max(turnover.replaced_s.values),
        "wait_s": turnover.wait_s,
    }
    for change in turnover.changes:
        numbers["changes"] = min(change.at_s, change.joins, change.leaves, change.kills)
        if numbers["changes"] < 0:
            break
    wrong = [f"{name} ({value})" for name, value in numbers.items() if not 0 <= value < np.inf]
    if wrong:
        raise ConfigError(f"turnover: {', '.join(wrong)} must be finite and not negative.")
    if not 0 <= turnover.handed_back_share <= 1:
        raise ConfigError(
            f"turnover: handed_back_share ({turnover.handed_back_share}) is a share, from 0 to 1."
        )


def _check_times(p: Pipeline, s: Samplers) -> None:
    times = {f"samplers.{f.name}": getattr(s, f.name) for f in fields(s) if f.name.endswith("_s")}
    times |= {f.name: getattr(p, f.name) for f in fields(p) if f.name.endswith("_s")}
    steps_s = times.pop("samplers.step_s")
    times["score_s"] = max(p.score_s.values)  # a histogram has nothing negative
    wrong = [f"{name} ({value})" for name, value in times.items() if not 0 <= value < np.inf]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} must be finite and not negative, seconds.")
    grows = all(a < b for a, b in pairwise(s.rows))
    positive = len(steps_s) > 0 and 0 < min(steps_s) <= max(steps_s) < np.inf
    if len(s.rows) != len(steps_s) or not (grows and positive):
        raise ConfigError(
            f"samplers.rows {s.rows} and samplers.step_s {steps_s}: give ascending numbers of rows "
            "and the seconds, above 0, of a step at each."
        )
