"""Prompts: from a source of records to an endless, checkpointable stream. The one door to grain.

    records ──seed, shuffle──> every process's share ──repeat──> PromptStream ──> Prompt

What comes at which place of the stream depends on the seed and on the place alone, so that a
stream's whole state is how far it has come.
"""

import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import grain
import numpy as np

from jaxrl_async.config.schema import AdditionSection, Config, DataSection, JsonlSection
from jaxrl_async.data.addition import AdditionStream, Problem, held_out, worked_answer
from jaxrl_async.data.tokenizer import BARE, Tokenizer, check_template
from jaxrl_async.errors import DataError
from jaxrl_async.types import BoolArray, EpisodeGroup, IntArray, Prompt

log = logging.getLogger(__name__)

EVAL_POSITION = 2**30
"""Held-out prompts have positions from here on: their random numbers are no training prompt's."""
MAX_LINE_BYTES = 2**20
"""Longest line of a file of records; more of one is never in memory."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some programs begin a file in UTF-8 with."""
LOGGED_RECORDS = 10
"""Skipped records that are logged one by one; the others are only counted."""
GOLDEN = 2_654_435_761
"""Odd multiplier that spreads consecutive indices evenly over 32 bits (Knuth's)."""
MAX_DEPTH = 64
"""Lists and objects inside of one another in a record."""

Split = Literal["train", "eval"]
T = TypeVar("T")


class Bad(StrEnum):
    """Why a record is skipped."""

    ENCODING = "not UTF-8"
    JSON = "not a JSON object"
    TWICE = "a key stands twice in one object"
    DEEP = "more than 64 lists and objects inside of one another"
    LONG = "a line of more than 1 MiB"
    FIELD = "a field is missing or is not text"
    EMPTY = "the prompt has no tokens"
    TOO_LONG = "the prompt is longer than data.max_prompt_tokens"
    PAIR_TOO_LONG = "the prompt with an answer is longer than a training row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One question with its answer, as token ids and as text."""

    token_ids: IntArray  # [prompt] int32
    text: str  # of the prompt
    reference: str  # final answer
    answer: str | None  # whole answer, to imitate; null: none that is text
    template: str | None = None  # that token_ids were made with, as Tokenizer.encode_prompt's
    columns: Mapping[str, Any] = field(default_factory=dict)  # all of it, by column


class Source(Protocol):
    """Records by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


# --- sources -----------------------------------------------------------------------------------


class AdditionSource:
    """Records of the embedded task."""

    def __init__(
        self,
        problems: AdditionStream | Sequence[Problem],
        tokenizer: Tokenizer,
        worked_share: float = 1.0,
    ) -> None:
        self._problems = problems
        self._tokenizer = tokenizer
        self._worked_share = worked_share

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Record:
        problem = self._problems[index]
        return Record(
            token_ids=self._tokenizer.encode_prompt(problem.prompt, BARE),
            text=problem.prompt,
            reference=problem.reference,
            answer=self._answer(problem, index),
            template=BARE,
            columns={"a": problem.a, "b": problem.b},
        )

    def _answer(self, problem: Problem, index: int) -> str:
        """Written out for worked_share of the problems, by index; the sum alone for the others."""
        is_worked = index * GOLDEN % 2**32 < self._worked_share * 2**32
        return worked_answer(problem.a, problem.b) if is_worked else problem.reference


def read_jsonl(
    path: str | Path,
    section: JsonlSection,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    *,
    taught: bool = False,
) -> list[Record]:
    """The usable records of a file of JSON objects, one a line; blank lines do not count.

    taught: the answers are to be imitated, so that one that is not text makes a record bad. Bad
    records are skipped, counted by kind, and logged with their line. Raises DataError where the
    file cannot be read, has no usable record, or more than max_bad_share of it is bad.
    """
    if section.template is not None:
        check_template(section.template)
    records = read_lines(
        path,
        lambda line: parse_record(line, section, tokenizer, max_prompt_tokens, taught=taught),
        section.max_bad_share,
        "set data.jsonl.prompt_field, data.jsonl.answer_field, data.max_prompt_tokens or "
        "data.jsonl.max_bad_share",
    )
    _tell_unmarked(path, section.answer_mark, records)
    return records


def _tell_unmarked(path: str | Path, mark: str | None, records: Sequence[Record]) -> None:
    """Log how many answers lack the mark before the final one: all of them is the reference."""
    unmarked = sum(mark is not None and mark not in (r.answer or "") for r in records)
    if unmarked:
        log.warning(
            "%s: %d of %d answers have no data.jsonl.answer_mark %r; the whole answer is the "
            "reference there",
            path,
            unmarked,
            len(records),
            mark,
        )


def read_lines(
    path: str | Path, parse: Callable[[bytes], T | Bad], max_bad_share: float, remedy: str
) -> list[T]:
    """What `parse` makes of each line that is not blank, without what it calls Bad.

    Skips, counts, logs and raises as read_jsonl says; remedy: what to set where too much is bad.
    The file is read line by line, and no more than MAX_LINE_BYTES of a line. Copies of earlier
    lines are kept; how many there are is logged.
    """
    records: list[T] = []
    bad = _Bad(path)
    seen: set[int] = set()
    copies = 0
    for number, line in _lines(path):
        record = line if isinstance(line, Bad) else parse(line)
        if isinstance(record, Bad):
            bad.add(number, record)
            continue
        records.append(record)
        copies += hash(line) in seen
        seen.add(hash(line))
    if copies:
        log.warning("%s: %d of %d records are copies of earlier ones", path, copies, len(records))
    bad.judge(len(records), max_bad_share, remedy)
    return records


def _lines(path: str | Path) -> Iterator[tuple[int, bytes | Bad]]:
    """Number, from 1, and bytes of each line that is not blank; Bad.LONG for one that is too long.

    Raises DataError where the file cannot be read.
    """
    try:
        if not Path(path).is_file():  # a pipe would be waited on for ever
            kind = "is not a file" if Path(path).exists() else "is not there"
            raise DataError(f"{path}: {kind}; cannot be read. Give a file of JSON lines.")
        with Path(path).open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                line = line.removeprefix(BYTE_ORDER_MARK)  # in joined files anywhere
                if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    yield number, Bad.LONG
                elif line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}. Give a file of JSON lines.") from None


def parse_record(
    line: bytes,
    section: JsonlSection,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    *,
    taught: bool = False,
) -> Record | Bad:
    """The record that a line holds; taught: as read_jsonl's."""
    fields = parse_object(line)
    if isinstance(fields, Bad):
        return fields
    question = text_of(fields.get(section.prompt_field))
    told = "" if section.answer_field is None else fields.get(section.answer_field)
    answer = text_of(told)
    reference = _reference(told, answer, section.answer_mark)
    if question is None or reference is None or (taught and answer is None):
        return Bad.FIELD
    token_ids = tokenizer.encode_prompt(question, section.template)
    if not len(token_ids):
        return Bad.EMPTY
    if len(token_ids) > max_prompt_tokens:
        return Bad.TOO_LONG
    return Record(
        token_ids=token_ids,
        text=question,
        reference=reference,
        answer=answer,
        template=section.template,
        columns=fields,
    )


def _reference(told: Any, answer: str | None, mark: str | None) -> str | None:
    """The text that a reward compares with: the final answer, or JSON where the field holds
    something else than text or a number; null where there is nothing, or it cannot be written."""
    if answer is not None:
        return final_answer(answer, mark)
    if told is None:
        return None
    try:
        return text_of(json.dumps(told, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


class _Twice(ValueError):
    """A key stands twice in one object."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _Twice
    return fields


def parse_object(line: bytes) -> dict[str, Any] | Bad:
    """The JSON object that a line holds. NaN and Infinity, which JSON has not, are numbers as
    Python writes them."""
    try:
        fields = json.loads(line.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError:
        return Bad.ENCODING
    except _Twice:
        return Bad.TWICE
    except (ValueError, RecursionError):
        return Bad.JSON
    if not isinstance(fields, dict):
        return Bad.JSON
    return Bad.DEEP if _is_deep(fields) else fields


def _is_deep(fields: dict[str, Any]) -> bool:
    """Whether more than MAX_DEPTH lists and objects are inside of one another."""
    level: list[Any] = [fields]
    for _ in range(MAX_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    return bool(level)


def text_of(value: Any) -> str | None:
    """A text field's value; a finite number counts as its digits, half a surrogate pair is no
    text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        str(value).encode()
    except ValueError:
        return None
    return str(value)


def final_answer(answer: str, mark: str | None) -> str:
    """What follows the last mark; the whole answer where there is none."""
    return (answer.rpartition(mark)[2] if mark else answer).strip()


class _Bad:
    """The skipped records of one file: counted by kind, the first of them kept and logged."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._kinds: Counter[Bad] = Counter()
        self._first: list[str] = []

    def add(self, number: int, reason: Bad) -> None:
        """A record was skipped."""
        self._kinds[reason] += 1
        if len(self._first) < LOGGED_RECORDS:
            self._first.append(f"line {number}: {reason}")
            log.warning("%s, line %d: skipped: %s", self._path, number, reason)

    def judge(self, good: int, max_bad_share: float, remedy: str) -> None:
        """Log the counts. Raises DataError where too many are bad or none is good."""
        bad = self._kinds.total()
        if not bad and not good:
            raise DataError(
                f"{self._path}: the file is empty. Give a file with one JSON object a line."
            )
        if bad:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self._kinds.most_common())
            log.warning("%s: %d of %d records skipped: %s", self._path, bad, bad + good, kinds)
        share = bad / (bad + good)
        if share > max_bad_share or not good:
            raise DataError(
                f"{self._path}: {bad} of {bad + good} records cannot be used ({share:.1%}, at most "
                f"{max_bad_share:.1%} may be): {'; '.join(self._first[:3])}. Correct them, or "
                f"{remedy}."
            )


def jsonl_split(section: JsonlSection, split: Split, read: Callable[[str], list[T]]) -> list[T]:
    """Training records, or held-out ones: those of eval_path, or else the last of the same file.

    read: the usable records of a file. Raises DataError where none is left to train on.
    """
    if section.eval_path is not None:
        if split == "train":
            return read(section.path)
        held_out = read(section.eval_path)
        if len(held_out) > section.eval_size:
            log.info(
                "%s: the first %d of %d records are used (data.jsonl.eval_size)",
                section.eval_path,
                section.eval_size,
                len(held_out),
            )
        return held_out[: section.eval_size]
    records = read(section.path)
    if len(records) <= section.eval_size:
        raise DataError(
            f"{section.path}: {len(records)} usable records, of which data.jsonl.eval_size = "
            f"{section.eval_size} are held out: none is left to train on. Lower it or set "
            "data.jsonl.eval_path."
        )
    return records[: -section.eval_size] if split == "train" else records[-section.eval_size :]


def _addition_split(
    section: AdditionSection, tokenizer: Tokenizer, seed: int, split: Split
) -> AdditionSource:
    held = held_out(section.digits, section.eval_size)
    problems = AdditionStream(section, seed) if split == "train" else held
    return AdditionSource(problems, tokenizer, section.worked_share)


def make_source(
    data: DataSection,
    tokenizer: Tokenizer,
    seed: int,
    split: Split = "train",
    *,
    taught: bool = False,
) -> Source:
    """The records of one split; taught: as read_jsonl's. Raises DataError or ConfigError."""
    if data.source == "jsonl":
        return jsonl_split(
            data.jsonl,
            split,
            lambda path: read_jsonl(
                path, data.jsonl, tokenizer, data.max_prompt_tokens, taught=taught
            ),
        )
    return _addition_split(data.addition, tokenizer, seed, split)


# --- streams -----------------------------------------------------------------------------------


def shuffled(source: Any, seed: int, process_index: int = 0, process_count: int = 1) -> Any:
    """Endless MapDataset of (number, record): this process's share, shuffled anew each pass."""
    numbers = grain.MapDataset.range(len(source)).seed(seed).shuffle()
    mine = numbers[process_index::process_count]
    if len(mine) == 0:
        raise DataError(
            f"{len(source)} records cannot be shared among {process_count} processes. "
            "Give more records."
        )
    return mine.repeat().map(lambda number: (int(number), source[int(number)]))


class PromptStream:
    """Endless prompts of one process, shuffled anew in each pass. Owned by the loop that reads it.

    Process i of n gives the positions i, i + n, i + 2n, ...: unique over all processes.
    """

    def __init__(
        self, source: Source, seed: int, *, process_index: int = 0, process_count: int = 1
    ) -> None:
        if not 0 <= process_index < process_count:
            raise DataError(f"process {process_index} is not one of {process_count}.")
        self._dataset = shuffled(source, seed, process_index, process_count)
        self._first, self._stride = process_index, process_count
        self._identity = {
            "seed": seed,
            "num_records": len(source),
            "process_index": process_index,
            "process_count": process_count,
        }
        self._next = 0

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> Prompt:
        """The next prompt; never ends."""
        self._next += 1
        return self.at(self._next - 1)

    def at(self, place: int) -> Prompt:
        """The prompt at a place of this process's stream, wherever the stream is."""
        number, record = self._dataset[place]
        return _prompt(record, number, self._first + self._stride * place)

    def observe(self, group: EpisodeGroup) -> None:
        """What became of a prompt; a stream in fixed order does not care."""

    def measures(self, next_draw: int) -> dict[str, float]:
        """What is to be reported of the stream before a draw: nothing."""
        return {}

    def state(self, next_draw: int | None = None) -> dict[str, Any]:
        """Where the stream is before that draw (None: now), and which stream it is; JSON."""
        return {**self._identity, "next": self._next if next_draw is None else next_draw}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError where that was another stream, or where
        a curriculum has passed prompts over, which would be lost."""
        if state.get("passed_over"):
            raise DataError(
                f"the saved place is of a stream with a curriculum, which has passed over "
                f"{len(state['passed_over'])} prompts: in fixed order they would be lost. Keep "
                "data.curriculum, with data.curriculum_pool=1 for the order of the stream, or "
                "start a new run."
            )
        self._next = place_in(self._identity, state, "prompts")


def place_in(identity: dict[str, int], state: dict[str, Any], what: str) -> int:
    """The place that a stream of this identity has come to. DataError where `state` is of
    another."""
    differing = [key for key, value in identity.items() if state.get(key) != value]
    if differing or not isinstance(state.get("next"), int) or state["next"] < 0:
        told = ", ".join(f"{k} {state.get(k)} then, {identity[k]} now" for k in differing)
        raise DataError(
            f"the saved place is of another stream of {what}: {told or 'no place in it'}. "
            "Resume with the same data, seed and processes, or start a new run."
        )
    return int(state["next"])


def _prompt(record: Record, prompt_id: int, position: int) -> Prompt:
    return Prompt(
        prompt_id=prompt_id,
        position=position,
        token_ids=record.token_ids,
        text=record.text,
        reference=record.reference,
        columns=record.columns,
    )


def make_prompts(
    data: DataSection,
    tokenizer: Tokenizer,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    split: Split = "train",
) -> PromptStream:
    """The endless stream of one process. Raises DataError or ConfigError."""
    source = make_source(data, tokenizer, seed, split)
    return PromptStream(source, seed, process_index=process_index, process_count=process_count)


def eval_prompts(data: DataSection, tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The held-out prompts, always the same ones in the same order."""
    source = make_source(data, tokenizer, 0, "eval")
    return tuple(_prompt(source[i], i, EVAL_POSITION + i) for i in range(len(source)))


# --- warm start ---------------------------------------------------------------------------------


def supervised_pair(record: Record, tokenizer: Tokenizer) -> tuple[IntArray, BoolArray]:
    """Prompt, answer and end token; the mask says what is learnt: answer and end token.

    Returns token_ids [length] int32 and mask [length] bool. The record must have an answer.
    """
    assert record.answer is not None, "read as taught"
    answer = tokenizer.encode_answer(record.text, record.answer, record.template)
    mask = np.arange(len(record.token_ids) + len(answer)) >= len(record.token_ids)
    return np.concatenate([record.token_ids, answer]).astype(np.int32), mask


def warm_start_pairs(config: Config, tokenizer: Tokenizer) -> "FittingPairs":
    """Endless (token_ids, mask) for the supervised warm start, shuffled anew in each pass.

    From warm_start.path where it is set, else from the training records. Raises DataError.
    """
    source = _warm_start_source(config, tokenizer)
    return FittingPairs(source, config.run.seed + 1, tokenizer, config.row_length)


def _warm_start_source(config: Config, tokenizer: Tokenizer) -> Source:
    data = config.data
    if config.warm_start.path is not None:
        return read_jsonl(
            config.warm_start.path, data.jsonl, tokenizer, data.max_prompt_tokens, taught=True
        )
    return make_source(data, tokenizer, config.run.seed, "train", taught=True)


class FittingPairs:
    """Endless pairs of at most max_length tokens; longer ones are left out and counted.

    What comes after `restore` is what came after `state`.
    """

    def __init__(self, source: Source, seed: int, tokenizer: Tokenizer, max_length: int) -> None:
        self._dataset = shuffled(source, seed)
        self._tokenizer, self._max_length = tokenizer, max_length
        self._identity = {"seed": seed, "num_records": len(source)}
        self._place = self._left_out = 0

    def __iter__(self) -> "FittingPairs":
        return self

    def __next__(self) -> tuple[IntArray, BoolArray]:
        """The next pair; never ends. Raises DataError where no record fits."""
        while True:
            _, record = self._dataset[self._place]
            self._place += 1
            token_ids, mask = supervised_pair(record, self._tokenizer)
            if len(token_ids) <= self._max_length:
                return token_ids, mask
            self._leave_out()

    def _leave_out(self) -> None:
        self._left_out += 1
        if self._left_out == self._identity["num_records"] == self._place:
            raise DataError(
                f"no pair of the warm start fits a training row of {self._max_length} tokens. "
                "Raise trainer.row_length or sampler.max_length."
            )
        if self._left_out == 1 or self._left_out % 100 == 0:
            log.warning(
                "warm start: %d of %d pairs so far are longer than a row of %d tokens and left out",
                self._left_out,
                self._place,
                self._max_length,
            )

    def state(self) -> dict[str, int]:
        """How far the pairs have come, and which pairs they are; JSON."""
        return {**self._identity, "next": self._place, "left_out": self._left_out}

    def restore(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken. Raises DataError where that was of other pairs."""
        self._place = place_in(self._identity, state, "pairs")
        self._left_out = state["left_out"]
