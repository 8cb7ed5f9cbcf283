"""One step in two views: its sequences, and the rows that they are packed into.

    sequences   AAAAA BBB CCCC DD      rewards, values, advantages: an array per episode
                  │ to_rows   ^
                  v           │ to_sequences
    rows        AAAAABBB               what programs see: [rows, length]
                CCCCDD..

The step is packed once. An index maps each sequence to its tokens in the rows, and all values that
are computed for the step become columns of the rows. A sequence is an episode, with its tokens in
the episode's order even if its contexts are packed separately.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.advantages import StepData
from jaxrl_async.algorithms.columns import COLUMNS, Columns
from jaxrl_async.algorithms.shaping import Shaped
from jaxrl_async.trainer.pack import Pair, pack_groups
from jaxrl_async.trainer.row_index import RowIndex, RowSelection, moved, repacked
from jaxrl_async.trainer.token_columns import NO_SAMPLER_COLUMNS, SamplerColumns
from jaxrl_async.types import Episode, EpisodeGroup, FloatArray, PackedBatch

ByGroup = tuple[tuple[NDArray[Any], ...], ...]
"""Per group and episode: [length]."""


class StepRows(NamedTuple):
    """The rows of a step or of a part of it; host arrays [rows, length, ...]."""

    batch: PackedBatch
    columns: Columns  # the policy's, of COLUMNS
    critic: Columns  # values, returns and, in a part of a step, weights; empty: no critic

    def at(self, to: RowSelection) -> "StepRows":
        """Return the rows composed of these tokens."""
        columns = {n: moved(c, to, COLUMNS[n].fill) for n, c in self.columns.items()}
        critic = {name: moved(column, to) for name, column in self.critic.items()}
        return StepRows(repacked(self.batch, to), columns, critic)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step: its data by sequence, its rows, and the index between them."""

    data: StepData
    rows: StepRows
    index: RowIndex

    @property
    def batch(self) -> PackedBatch:
        """The packed sequences."""
        return self.rows.batch

    def to_groups(self, values: NDArray[np.generic]) -> ByGroup:
        """Return [rows, length] values as an array [length] for each episode of each group."""
        rest = iter(self.index.to_sequences(values))  # demonstrations come last
        return tuple(tuple(next(rest) for _ in g.episodes) for g in self.data.groups)

    def owned_to_groups(self, values: NDArray[np.generic]) -> ByGroup:
        """Return the same with 0 for tokens that another context owns, and may train."""
        owned = iter(self.index.owned)
        return tuple(
            tuple(np.where(next(owned), v, np.zeros((), v.dtype)) for v in of_group)
            for of_group in self.to_groups(values)
        )

    def to_rows(self, values: Sequence[Sequence[FloatArray]]) -> FloatArray:
        """Return an array [length] per group and episode as [rows, length]; 0 outside the mask."""
        flat = self.index.to_rows([v for of_group in values for v in of_group])
        return np.where(self.batch.mask, flat, np.float32(0))

    def with_rows(self, advantages: FloatArray, columns: Columns, critic: Columns) -> "PackedStep":
        """Return the step with these advantages [rows, length] and columns."""
        rows = StepRows(replace(self.batch, advantages=advantages), columns, critic)
        return replace(self, rows=rows)


def pack_step(
    shaped: Shaped,
    row_length: int,
    *,
    pairs: Sequence[Pair] = (),
    sampler_columns: SamplerColumns = NO_SAMPLER_COLUMNS,
    share_prefixes: bool = False,
    tasks: Sequence[str] = (),
) -> PackedStep:
    """Pack a shaped step, with advantages of 0. Raise DataError as `pack` does.

    Args:
        shaped: the step's data, and masks of the trained tokens.
        row_length: tokens in a row.
        pairs: demonstrations, packed after the episodes.
        sampler_columns: the sampler's choices to pack.
        share_prefixes: as in `pack`, also in parts of the step.
        tasks: names of the run's tasks, for PackedBatch.task_ids; (): without.
    """
    batch = pack_groups(
        shaped.data.groups,
        None,
        row_length,
        masks=shaped.masks,
        pairs=pairs,
        sampler_columns=sampler_columns,
        share_prefixes=share_prefixes,
    )
    if tasks:
        batch = replace(batch, task_ids=task_ids_of(batch, shaped.data.groups, tasks))
    index = RowIndex.of(batch, share_prefixes)
    return PackedStep(shaped.data, StepRows(batch, {}, {}), index)


def task_ids_of(
    batch: PackedBatch, groups: Sequence[EpisodeGroup], tasks: Sequence[str]
) -> NDArray[np.int32]:
    """Return the index of each token's task in `tasks`, [rows, length]; 0 in padding and in
    demonstrations, which are packed after the groups' episodes."""
    of_sequence = [tasks.index(g.prompt.task) for g in groups for _ in g.episodes]
    ids, numbers = np.array([*of_sequence, 0], np.int32), batch.sequence_ids
    known = (numbers >= 0) & (numbers < len(of_sequence))
    task_ids: NDArray[np.int32] = ids[np.where(known, numbers, len(of_sequence))]
    return task_ids


def deal(batch: PackedBatch, parts: int, seed: Sequence[int]) -> list[NDArray[np.int64]]:
    """Deal the trained sequences into random parts of equal numbers, give or take one.

    A part takes one of the `parts` longest answers, one of the next, and so on. This balances
    tokens, and every part is equally likely for a sequence of any length. (verl deals equal numbers
    in the step's order, TRL after a shuffle.) Demonstrations are dealt separately in the same way.
    With fewer sequences than parts there are fewer parts. Sequences without trained tokens are in
    no part, unless no sequence has any.

    Args:
        batch: the whole step.
        parts: the wanted number.
        seed: numbers that key the shuffle.

    Returns:
        The sequence_ids of each part, sorted.
    """
    num_sequences = int(batch.sequence_ids.max(initial=-1)) + 1
    owned, worked = (
        np.bincount(batch.sequence_ids[mask], minlength=num_sequences)
        for mask in (batch.mask, batch.supervised)
    )
    kinds = [lengths for lengths in (owned, worked) if lengths.any()]
    if not kinds:
        return [np.arange(num_sequences)]
    parts = min(parts, int(np.count_nonzero(kinds[0])))
    rng = np.random.default_rng(list(seed))
    dealt = [_dealt(lengths, parts, rng) for lengths in kinds]
    return [np.sort(np.concatenate(of_part)) for of_part in zip(*dealt, strict=True)]


def _dealt(
    lengths: NDArray[np.int64], parts: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Deal the indices of lengths above 0.

    The remainder is chosen at random: no length is more likely to be in the larger parts.
    """
    indices = rng.permutation(np.flatnonzero(lengths))
    left, even = np.split(indices, [len(indices) % parts])
    even = even[np.argsort(-lengths[even], kind="stable")]
    dealt = list(rng.permuted(even.reshape(-1, parts), axis=1).T)
    for part, index in zip(rng.permutation(parts), left, strict=False):
        dealt[part] = np.append(dealt[part], index)
    return dealt


# ---- a few tokens, for the recorded samples


SHOWN_GROUPS, SHOWN_EPISODES = 2, 2
"""Number of a step's first groups, and of the first episodes of each, that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """The trainer's values of an episode's tokens, in the episode's order."""

    episode: Episode
    advantages: FloatArray  # [length]; 0 for untrained tokens
    logprobs: FloatArray  # [length], of the weights before the step; 0 where a context begins


def shown_episodes(groups: Sequence[EpisodeGroup]) -> list[Episode]:
    """Return the episodes of a step that are shown."""
    return [e for group in groups[:SHOWN_GROUPS] for e in group.episodes[:SHOWN_EPISODES]]


def views_of(
    step: PackedStep,
    episodes: Sequence[Episode],
    proximal: FloatArray | None,
    logprobs_of: Callable[[PackedBatch], FloatArray],
) -> list[TokenView]:
    """Return the values of some episodes; episodes that the step left out are missing.

    Args:
        step: after credit.
        episodes: of its groups.
        proximal: log-probs of the weights before the step, [rows, length]; None: not computed.
        logprobs_of: computes them for a batch; called with these episodes only.
    """
    all_episodes = [e for group in step.data.groups for e in group.episodes]
    numbers = [n for n, one in enumerate(all_episodes) if any(one is e for e in episodes)]
    if not numbers:
        return []
    if proximal is not None:
        logprobs = step.index.to_sequences(proximal)
    else:
        batch = step.rows.at(step.index.select(np.array(numbers))).batch
        logprobs = RowIndex.of(batch).to_sequences(logprobs_of(batch))
    advantages = step.index.to_sequences(step.batch.advantages)
    return [
        TokenView(episode=all_episodes[n], advantages=advantages[n], logprobs=logprobs[n])
        for n in numbers
    ]
