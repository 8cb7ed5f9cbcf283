"""Prompts: turns records into an endless stream that can be resumed from a checkpoint. Only this
module uses grain.

    records ──seed, shuffle──> the process's shard ──repeat──> PromptStream ──> Prompt

The prompt at a position of the stream depends only on the seed and the position, so the stream's
whole state is its position.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, TypeVar

import grain
import numpy as np

from jaxrl_async.codec import dumps
from jaxrl_async.config.schema import DataSection, WarmStartSection
from jaxrl_async.data.images import ImageStore
from jaxrl_async.data.records import (
    OwnRecords,
    Record,
    RecordSource,
    make_source,
    read_records,
    supervised_pair,
)
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import DataError, TextTooLong
from jaxrl_async.types import BoolArray, EpisodeGroup, IntArray, Prompt

log = logging.getLogger(__name__)

EVAL_POSITION = 2**30
"""First position of held-out prompts, to separate their random numbers from training prompts."""

CheckRecord = Callable[[Prompt], None]
"""Checks a record, as a prompt at no position; raises ConfigError."""
Ended = Callable[[int], bool]
"""Whether a group, by number, had ended when the buffer was read for a checkpoint: a resumed run
neither starts it nor plays it again."""


def shuffled(source: Any, seed: int, process_index: int = 0, process_count: int = 1) -> Any:
    """Return an endless MapDataset of (index, record): a process's shard, reshuffled in each
    pass."""
    numbers = grain.MapDataset.range(len(source)).seed(seed).shuffle()
    share = numbers[process_index::process_count]
    if len(share) == 0:
        raise DataError(
            f"{len(source)} records cannot be sharded over {process_count} processes. "
            "Give more records."
        )
    return share.repeat().map(lambda number: (int(number), source[int(number)]))


class PromptStream:
    """The endless prompts of one process, reshuffled in each pass. Used only by the loop that reads
    it.

    Process i of n yields the positions i, i + n, i + 2n, ...; no other process yields these.
    """

    def __init__(
        self,
        source: RecordSource,
        seed: int,
        *,
        process_index: int = 0,
        process_count: int = 1,
        check: CheckRecord | None = None,
    ) -> None:
        """check: called with each surveyed record; see `sampled_records`."""
        if not 0 <= process_index < process_count:
            raise DataError(f"process {process_index} is not one of {process_count}.")
        self._dataset = shuffled(source, seed, process_index, process_count)
        surveyed = survey(source, check)
        self.references = surveyed.references
        """The reference answers of the surveyed records, see survey.sampled_records."""
        self._first, self._stride = process_index, process_count
        self._identity = {
            "seed": seed,
            "num_records": len(source),
            "records_digest": surveyed.digest,
            "process_index": process_index,
            "process_count": process_count,
        }
        self._next = 0

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> Prompt:
        """Return the next prompt; the stream never ends."""
        self._next += 1
        return self.at(self._next - 1)

    def at(self, index: int) -> Prompt:
        """Return the prompt at an index of this process's stream, without advancing the stream."""
        number, record = self._dataset[index]
        return prompt_of(record, number, self._first + self._stride * index)

    def observe(self, group: EpisodeGroup) -> None:
        """Ignore a scored group: the order is fixed."""

    def measures(self, next_draw: int) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def state(self, next_draw: int | None = None, ended: Ended | None = None) -> dict[str, Any]:
        """Return the position before this draw (None: now) and the stream's identity, as JSON. It
        does not depend on which groups have ended."""
        return {**self._identity, "next": self._next if next_draw is None else next_draw}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises DataError if it is the state of a different stream, of several tasks, or of a
        curriculum with skipped prompts, which would be lost.
        """
        if state.get("passed_over"):
            raise DataError(
                f"the saved position is of a stream with a curriculum, which has skipped "
                f"{len(state['passed_over'])} prompts: in fixed order they would be lost. Keep "
                "data.curriculum, with data.curriculum_pool=1 for the order of the stream, or "
                "start a new run."
            )
        if "tasks" in state:
            raise DataError(
                "the checkpoint is of a run with several tasks (tasks), and this run has one. "
                "Resume with the same tasks, or choose another run.name; model.path=.../policy "
                "starts from a finished run's weights."
            )
        self._next = saved_position(self._identity, state, "prompts")


def saved_position(identity: Mapping[str, object], state: Mapping[str, Any], what: str) -> int:
    """Return the position in a stream's saved state; raise DataError for a different stream.

    what: the type of the stream's items, for the error. An older state without a digest matches any
    records.
    """
    state = {"records_digest": identity.get("records_digest"), **state}
    differing = [key for key, value in identity.items() if state.get(key) != value]
    if differing or not isinstance(state.get("next"), int) or state["next"] < 0:
        changes = ", ".join(f"{k} {state.get(k)} then, {identity[k]} now" for k in differing)
        raise DataError(
            f"the saved position is of another stream of {what}: {changes or 'it is missing'}. "
            "Resume with the same data, seed and processes, or start a new run."
        )
    return int(state["next"])


def prompt_of(record: Record, prompt_id: int, position: int) -> Prompt:
    """Return the record as a prompt of the stream."""
    return Prompt(
        prompt_id=prompt_id,
        position=position,
        token_ids=record.token_ids,
        text=record.text,
        reference=record.reference,
        columns=record.columns,
        messages=record.messages,
    )


def make_prompts(
    data: DataSection,
    tokenizer: Tokenizer,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    own: OwnRecords | None = None,
    graded: bool = False,
    check: CheckRecord | None = None,
) -> PromptStream:
    """Return the endless stream of one process. own, graded: see eval_prompts; check: see
    PromptStream. Raises DataError or ConfigError."""
    source = (
        make_source(data, tokenizer, seed, graded=graded) if own is None else own.source("train")
    )
    return PromptStream(
        source, seed, process_index=process_index, process_count=process_count, check=check
    )


def eval_prompts(
    data: DataSection,
    tokenizer: Tokenizer,
    own: OwnRecords | None = None,
    *,
    graded: bool = False,
) -> tuple[Prompt, ...]:
    """Return the held-out prompts, always the same ones in the same order.

    own: a task's records, instead of the configured ones. graded: records of files without an
    answer are skipped as bad.
    """
    source = (
        make_source(data, tokenizer, 0, "eval", graded=graded)
        if own is None
        else own.source("eval")
    )
    return tuple(prompt_of(source[i], i, EVAL_POSITION + i) for i in range(len(source)))


# --- warm start ---------------------------------------------------------------------------------


def warm_start_pairs(
    data: DataSection,
    warm_start: WarmStartSection,
    tokenizer: Tokenizer,
    *,
    seed: int,
    max_length: int,
    own: OwnRecords | None = None,
) -> "FittingPairs":
    """Return endless (token_ids, mask) pairs for the warm start, reshuffled in each pass.

    They come from warm_start.path if it is set, else from the training records (own: see
    eval_prompts). Pairs longer than max_length tokens are skipped. Raises DataError.
    """
    source: RecordSource
    if warm_start.path is not None:
        source = read_records(warm_start.path, data, tokenizer, taught=True)
    elif own is not None:
        source = own.source("train", taught=True)
    else:
        source = make_source(data, tokenizer, seed, "train", taught=True)
    return FittingPairs(source, seed + 1, tokenizer, max_length)


class FittingPairs:
    """An endless stream of pairs of at most max_length tokens; longer ones are skipped and counted.

    After `restore`, it yields the same pairs as after the saved `state`.
    """

    def __init__(
        self, source: RecordSource, seed: int, tokenizer: Tokenizer, max_length: int
    ) -> None:
        self._dataset = shuffled(source, seed)
        self._tokenizer, self._max_length = tokenizer, max_length
        self._identity = {
            "seed": seed,
            "num_records": len(source),
            "records_digest": survey(source).digest,
        }
        self._next = self._left_out = 0

    @property
    def images(self) -> ImageStore | None:
        """The images that token ids refer to; None: none."""
        return self._tokenizer.images

    def __iter__(self) -> "FittingPairs":
        return self

    def __next__(self) -> tuple[IntArray, BoolArray]:
        """Return the next pair; the stream never ends. Raises DataError if no record fits."""
        while True:
            _, record = self._dataset[self._next]
            self._next += 1
            with suppress(TextTooLong):
                token_ids, mask = supervised_pair(record, self._tokenizer)
                if len(token_ids) <= self._max_length:
                    return token_ids, mask
            self._leave_out()

    def _leave_out(self) -> None:
        self._left_out += 1
        if self._left_out == self._identity["num_records"] == self._next:
            raise DataError(
                f"no pair of the warm start fits a training row of {self._max_length} tokens. "
                "Raise trainer.row_length or sampler.max_length."
            )
        if self._left_out == 1 or self._left_out % 100 == 0:
            log.warning(
                "warm start: skipped %d of %d pairs so far that are longer than a row of %d tokens",
                self._left_out,
                self._next,
                self._max_length,
            )

    def state(self) -> dict[str, Any]:
        """Return the position and the identity of the pairs, as JSON."""
        return {**self._identity, "next": self._next, "left_out": self._left_out}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; raise DataError if it is the state of other pairs."""
        self._next = saved_position(self._identity, state, "pairs")
        self._left_out = state["left_out"]


# ---- the digest of all records, which a resume compares, and their references


T_co = TypeVar("T_co", covariant=True)

SAMPLED = 256
"""Number of surveyed records if records are created on demand."""


class Indexed(Protocol[T_co]):
    """Records or examples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The result of surveying a source's records."""

    digest: str
    references: tuple[str, ...]


def survey(source: RecordSource, check: CheckRecord | None = None) -> Survey:
    """Survey the records of `sampled_records`, in order. check: called with each of them."""
    digest, references = _Digest(len(source)), []
    for number, record in zip(_sampled_indices(source), sampled_records(source), strict=True):
        if check is not None:
            check(prompt_of(record, number, -1))
        digest.add(_content(record))
        references.append(record.reference)
    return Survey(digest=digest.text, references=tuple(references))


def digest_of(examples: Indexed[object]) -> str:
    """Return the digest of tokenized examples: tuples or records of arrays, or None."""
    digest = _Digest(len(examples))
    for example in sampled_records(examples):
        kept = is_dataclass(example) and {f.name: getattr(example, f.name) for f in fields(example)}
        digest.add(kept or example)
    return digest.text


def sampled_records(source: Indexed[T_co]) -> Iterator[T_co]:
    """Yield all records if they are in memory, else SAMPLED records including the first and
    last."""
    return (source[index] for index in _sampled_indices(source))


def _sampled_indices(source: Indexed[object]) -> Sequence[int]:
    """Return the indices of the records that `sampled_records` yields."""
    count = len(source)
    if getattr(source, "in_memory", isinstance(source, list | tuple)) or count <= SAMPLED:
        return range(count)
    indices: list[int] = np.linspace(0, count - 1, SAMPLED).astype(np.int64).tolist()
    return indices


def _content(record: Record) -> Mapping[str, Any]:
    """Return a record's content, without the results of tokenizer and chat format."""
    columns = {name: record.columns[name] for name in sorted(record.columns)}
    return {"text": record.text, "reference": record.reference, "columns": columns}


class _Digest:
    """SHA-256 of a number of records and their contents."""

    def __init__(self, count: int) -> None:
        self._sha = hashlib.sha256(str(count).encode())

    def add(self, content: object) -> None:
        """Add a record, of a type supported by codec.dumps."""
        self._sha.update(dumps(content).tobytes())

    @property
    def text(self) -> str:
        """The truncated digest."""
        return self._sha.hexdigest()[:16]
