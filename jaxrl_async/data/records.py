"""Records: questions with their answers, from the embedded task or from files of JSON lines.

file ──line──> JSON object ──fields──> Record       what cannot be used: Bad, counted and logged
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

import numpy as np

from jaxrl_async.config.schema import AdditionSection, DataSection, JsonlSection
from jaxrl_async.data.addition import AdditionStream, Problem, held_out, worked_answer
from jaxrl_async.data.tokenizer import BARE, Tokenizer, check_template
from jaxrl_async.errors import DataError
from jaxrl_async.types import BoolArray, IntArray

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 2**20
"""Longest line of a file of records; no more than this of a line is ever in memory."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""The first bytes that some programs write to a UTF-8 file."""
LOGGED_RECORDS = 10
"""Skipped records that are logged one by one; the others are only counted."""
GOLDEN = 2_654_435_761
"""Odd multiplier that spreads consecutive indices evenly over 32 bits (Knuth)."""
MAX_DEPTH = 64
"""Deepest nesting of lists and objects in a record."""

Split = Literal["train", "eval"]
T = TypeVar("T")


class Bad(StrEnum):
    """Why a record is skipped."""

    ENCODING = "not UTF-8"
    JSON = "not a JSON object"
    TWICE = "a key appears twice in one object"
    DEEP = "lists and objects nested more than 64 deep"
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
    answer: str | None  # whole answer, to imitate; None: it is not text
    template: str | None = None  # of token_ids, see Tokenizer.encode_prompt
    columns: Mapping[str, Any] = field(default_factory=dict)  # the whole record, by column


class RecordSource(Protocol):
    """Records by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


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
        """Return the worked answer for worked_share of the problems, by index, else the sum."""
        is_worked = index * GOLDEN % 2**32 < self._worked_share * 2**32
        return worked_answer(problem.a, problem.b) if is_worked else problem.reference


def read_jsonl(
    path: str | Path, data: DataSection, tokenizer: Tokenizer, *, taught: bool = False
) -> list[Record]:
    """Read the usable records of a file with one JSON object per line; blank lines do not count.

    Bad records are skipped, counted by kind and logged with their line.

    Args:
        path: the file.
        data: names of fields, template and limits.
        tokenizer: encodes the prompts.
        taught: the answers are to be imitated, so a record whose answer is not text is bad.

    Raises:
        DataError: the file cannot be read, has no usable record, or more than
            data.jsonl.max_bad_share of it is bad.
    """
    if data.jsonl.template is not None:
        check_template(data.jsonl.template)
    records = parse_lines(
        path,
        lambda line: parse_record(line, data, tokenizer, taught=taught),
        data.jsonl.max_bad_share,
        "set data.jsonl.prompt_field, data.jsonl.answer_field, data.max_prompt_tokens or "
        "data.jsonl.max_bad_share",
    )
    _log_unmarked(path, data.jsonl.answer_mark, records)
    return records


def _log_unmarked(path: str | Path, mark: str | None, records: Sequence[Record]) -> None:
    """Log how many answers lack the mark; the whole answer is their reference."""
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


def parse_lines(
    path: str | Path, parse: Callable[[bytes], T | Bad], max_bad_share: float, remedy: str
) -> list[T]:
    """Parse each line that is not blank, and return the good results.

    Bad lines are skipped, counted and logged as in read_jsonl. Copies of earlier lines are kept;
    their number is logged. At most MAX_LINE_BYTES of the file are in memory at once.

    Args:
        path: the file.
        parse: makes a record from a line, or says why it is bad.
        max_bad_share: largest share of bad lines.
        remedy: what to set if more are bad, in words.

    Raises:
        DataError: as in read_jsonl.
    """
    records: list[T] = []
    bad = _BadRecords(path)
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
    """Yield number (from 1) and bytes of each line that is not blank; Bad.LONG if it is too long.

    Raises DataError if the file cannot be read.
    """
    try:
        if not Path(path).is_file():  # reading a pipe would block for ever
            kind = "is not a file" if Path(path).exists() else "does not exist"
            raise DataError(f"{path}: {kind}; cannot be read. Give a file of JSON lines.")
        with Path(path).open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                line = line.removeprefix(BYTE_ORDER_MARK)  # on any line of concatenated files
                if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    yield number, Bad.LONG
                elif line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}. Give a file of JSON lines.") from None


def parse_record(
    line: bytes, data: DataSection, tokenizer: Tokenizer, *, taught: bool = False
) -> Record | Bad:
    """Parse a line to a record; for the arguments see read_jsonl."""
    fields, section = parse_object(line), data.jsonl
    if isinstance(fields, Bad):
        return fields
    question = field_text(fields.get(section.prompt_field))
    value = "" if section.answer_field is None else fields.get(section.answer_field)
    answer = field_text(value)
    reference = _reference(value, answer, section.answer_mark)
    if question is None or reference is None or (taught and answer is None):
        return Bad.FIELD
    token_ids = tokenizer.encode_prompt(question, section.template)
    if not len(token_ids):
        return Bad.EMPTY
    if len(token_ids) > data.max_prompt_tokens:
        return Bad.TOO_LONG
    return Record(
        token_ids=token_ids,
        text=question,
        reference=reference,
        answer=answer,
        template=section.template,
        columns=fields,
    )


def _reference(value: Any, answer: str | None, mark: str | None) -> str | None:
    """Return the text that a reward compares with, or None if there is none.

    It is the final answer, or JSON if the field's value is neither text nor a number.
    """
    if answer is not None:
        return final_answer(answer, mark)
    if value is None:
        return None
    try:
        return field_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


class _Twice(ValueError):
    """A key appears twice in one object."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _Twice
    return fields


def parse_object(line: bytes) -> dict[str, Any] | Bad:
    """Parse a line to a JSON object. NaN and Infinity are accepted, as Python writes them."""
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
    """Return whether lists and objects are nested more than MAX_DEPTH deep."""
    level: list[Any] = [fields]
    for _ in range(MAX_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    return bool(level)


def field_text(value: Any) -> str | None:
    """Return a field's value as text, or None.

    A finite number counts as its digits; half a surrogate pair is not text.
    """
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
    """Return what follows the last mark, or the whole answer if it has none."""
    return (answer.rpartition(mark)[2] if mark else answer).strip()


class _BadRecords:
    """The skipped records of one file: counted by kind, the first few also logged."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._kinds: Counter[Bad] = Counter()
        self._first: list[str] = []

    def add(self, number: int, reason: Bad) -> None:
        """Count a skipped record."""
        self._kinds[reason] += 1
        if len(self._first) < LOGGED_RECORDS:
            self._first.append(f"line {number}: {reason}")
            log.warning("%s, line %d: skipped: %s", self._path, number, reason)

    def judge(self, good: int, max_bad_share: float, remedy: str) -> None:
        """Log the counts; raise DataError if too many are bad or none is good."""
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
    """Return the training records, or the held-out ones: eval_path's, else the last of the file.

    read: returns the usable records of a file. Raises DataError if none is left to train on.
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
            f"{section.eval_size} are held out: none is left to train on. Lower eval_size or set "
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
) -> RecordSource:
    """Return the records of one split; taught: see read_jsonl. Raises DataError or ConfigError."""
    if data.source == "jsonl":
        return jsonl_split(
            data.jsonl, split, lambda path: read_jsonl(path, data, tokenizer, taught=taught)
        )
    return _addition_split(data.addition, tokenizer, seed, split)


def supervised_pair(record: Record, tokenizer: Tokenizer) -> tuple[IntArray, BoolArray]:
    """Return a record's prompt, answer and end token, and the mask of what is learnt.

    Returns token_ids [length] int32 and mask [length] bool, True for answer and end token. The
    record must have an answer.
    """
    assert record.answer is not None, "the record was read with taught=True"
    answer = tokenizer.encode_answer(record.text, record.answer, record.template)
    mask = np.arange(len(record.token_ids) + len(answer)) >= len(record.token_ids)
    return np.concatenate([record.token_ids, answer]).astype(np.int32), mask
