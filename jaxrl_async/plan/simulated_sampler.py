"""One simulated sampler: its sequences as columns, and the tokens of a decode block."""

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jaxrl_async.plan.pipeline import Histogram, Pipeline
from jaxrl_async.sampler.batch.shapes import decode_rows

Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

REMAINING, SAMPLED, VERSIONS, GROUP, OLDEST, BEGUN, BEGUN_VERSIONS, MARK = range(8)
"""Rows of a sequence's column: tokens left | tokens generated | sum of their versions | group's
number | version of the first, -1: none | tokens generated, and sum of their versions, when it was
dealt to this sampler | prefilled tokens, since the sampler's start, after which it can decode."""


class SimulatedSampler:
    """One sampler, and its sequences in order of admission."""

    def __init__(self, number: int, capacity: int, *, version: int = 0, now: float = 0.0) -> None:
        self.number = number
        self.seqs: Longs = np.zeros((8, capacity), np.int64)
        self.held = 0  # columns in use
        self.queue: deque[Longs] = deque()  # waiting answers; a group's answers together
        self.version = version
        self.staged: int | None = None  # a version in transfer, or arrived
        self.arrives_s = 0.0
        self.to_prefill = self.prefilled = 0  # tokens, since the start
        self.idle_since: float | None = now
        self.idle_s = 0.0
        self.waking = False  # a wake event is pending
        self.leaves = False  # after the running block
        self.removed = False

    def admit(self, prompt_tokens: int) -> None:
        """Move the longest waiting into free columns. Members that move together share a prefill of
        their prompt; tokens that they generated elsewhere are also prefilled."""
        free = self.seqs.shape[1] - self.held
        while self.queue and free:
            waiting = self.queue[0]
            new = waiting[:, :free]
            start, end = self.held, self.held + new.shape[1]
            columns = self.seqs[:, start:end]
            columns[:] = new
            if columns[BEGUN].any():
                columns[MARK] = self.to_prefill + prompt_tokens + columns[BEGUN].cumsum()
                self.to_prefill = int(columns[MARK, -1])
            else:
                self.to_prefill += prompt_tokens
                columns[MARK] = self.to_prefill
            oldest = columns[OLDEST]
            columns[OLDEST] = np.where(oldest < 0, self.version, np.minimum(oldest, self.version))
            if new.shape[1] < waiting.shape[1]:
                self.queue[0] = waiting[:, free:]
            else:
                self.queue.popleft()
            self.held, free = end, free - new.shape[1]

    def decodable(self) -> Longs:
        """Return [n] tokens left of the prefilled sequences, oldest first."""
        ready = int(np.searchsorted(self.seqs[MARK, : self.held], self.prefilled, "right"))
        return self.seqs[REMAINING, :ready]

    def add_sampled(self, sampled: Longs) -> list[list[int]]:
        """Count the generated tokens [n] of a block; remove and return the finished answers, each
        [tokens, sum of versions, group's number, oldest version]."""
        seqs, n = self.seqs, len(sampled)
        seqs[:3, :n] += sampled * np.array([[-1], [1], [self.version]])
        ends = np.flatnonzero(seqs[REMAINING, :n] == 0)
        done: list[list[int]] = seqs[SAMPLED:BEGUN, ends].T.tolist()
        if done:
            held = seqs[:, : self.held]
            unfinished = held.compress(held[REMAINING] > 0, axis=1)
            self.held = unfinished.shape[1]
            seqs[:, : self.held] = unfinished
        return done

    def hand_back(self, *, with_tokens: bool) -> tuple[list[Longs], int]:
        """Give up all sequences; return them by group, and the number of lost tokens.

        with_tokens: they continue elsewhere; otherwise each starts as it was dealt to this sampler.
        """
        held, lost = self.seqs[:, : self.held].copy(), 0
        if not with_tokens:
            lost_tokens = held[SAMPLED] - held[BEGUN]
            lost = int(lost_tokens.sum())
            held[REMAINING] += lost_tokens
            held[SAMPLED], held[VERSIONS] = held[BEGUN], held[BEGUN_VERSIONS]
            held[OLDEST][held[SAMPLED] == 0] = -1
        held[BEGUN], held[BEGUN_VERSIONS] = held[SAMPLED], held[VERSIONS]
        held[OLDEST][held[SAMPLED] == 0] = -1
        numbers = dict.fromkeys(held[GROUP].tolist())
        groups = [held[:, held[GROUP] == number] for number in numbers]
        groups += self.queue
        self.held, self.queue = 0, deque()
        return groups, lost

    def idle_until(self, now: float) -> float:
        """Return the idle time until now, seconds."""
        return self.idle_s + (0.0 if self.idle_since is None else now - self.idle_since)

    def end_idling(self, now: float) -> None:
        """Record that it is no longer idle, if it was."""
        self.idle_s, self.idle_since = self.idle_until(now), None

    @property
    def sampled_tokens(self) -> int:
        """Generated tokens of the sequences that it holds, or that wait here."""
        return int(self.seqs[SAMPLED, : self.held].sum()) + sampled_in(self.queue)


class BlockTimes:
    """Computes the times of a sampler's blocks."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._side, self._prompt_tokens = pipeline.samplers, pipeline.prompt_tokens
        self._step_s: dict[int, float] = {}  # by rows

    def block(self, prefilled: int, steps: int, sampled: Longs) -> float:
        """Return the seconds of a block.

        Args:
            prefilled: Tokens that are prefilled before it.
            steps: Decode steps; 0: nothing decodes.
            sampled: [rows] tokens that each sequence with a row has generated before it.
        """
        side, rows = self._side, len(sampled)
        block_s = side.block_s
        if prefilled:
            block_s += side.prefill_s + prefilled * side.prefill_token_s
        if steps:
            context = int(sampled.sum()) + rows * (self._prompt_tokens + steps // 2)
            block_s += steps * (self._step(rows) + context * side.context_token_s)
        return block_s

    def _step(self, running: int) -> float:
        """Return the seconds of a decode step without the time for its context."""
        side = self._side
        rows = decode_rows(running, side.slots)
        if rows not in self._step_s:
            self._step_s[rows] = float(np.interp(rows, side.rows, side.step_s))
        return self._step_s[rows]


def sampled_in(waiting: "deque[Longs] | list[Longs]") -> int:
    """Return the number of generated tokens of waiting sequences."""
    return sum(int(columns[SAMPLED].sum()) for columns in waiting)


def fresh_sequences(group: int, lengths: Doubles) -> Longs:
    """Return the columns of a group's answers, without generated tokens."""
    columns = np.zeros((8, len(lengths)), np.int64)
    columns[REMAINING], columns[GROUP], columns[OLDEST] = lengths, group, -1
    return columns


def block_of(remaining: Longs, slots: int, block: int) -> tuple[Longs, int, int]:
    """Simulate one decode block; return (tokens generated by each [n], steps run, rows).

    remaining: [n] tokens that each sequence may still generate, >= 1, oldest first. The first
    `slots` of them have rows; the next of the others takes over a finished row at the next step.
    The block ends early if no row runs.
    """
    rows = min(len(remaining), slots)
    sampled = np.zeros(len(remaining), np.int64)
    sampled[:rows] = np.minimum(remaining[:rows], block)
    steps = int(sampled[:rows].max(initial=0))
    if rows < len(remaining):
        free = sampled[:rows][sampled[:rows] < block].tolist()  # steps at which a row becomes free
        heapq.heapify(free)
        for i in range(rows, len(remaining)):
            if not free:
                break
            start = heapq.heappop(free)
            sampled[i] = min(int(remaining[i]), block - start)
            end = start + int(sampled[i])
            steps = max(steps, end)
            if end < block:
                heapq.heappush(free, end)
    return sampled, steps, rows


def value_sampler(histogram: Histogram, rng: np.random.Generator) -> Callable[[int], Doubles]:
    """Return a function that samples n random values [n]."""
    values = np.asarray(histogram.values, np.float64)
    edges = np.cumsum(histogram.weights) / np.sum(histogram.weights)
    edges[-1] = 1.0
    return lambda n: values[np.searchsorted(edges, rng.random(n), "right")]
