"""Files of records: JSON lines, parquet, and folders that `datasets` wrote.

file ──row──> columns by name, plain values        what cannot be read: Bad, counted and logged
"""

import datetime
import decimal
import importlib
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxrl_async.data.hub import hub_records, hub_rows
from jaxrl_async.errors import DataError, MissingExtraError

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 2**20
"""Longest line of a file of records; no more than this of a line is ever in memory."""
TABLES = {".csv": "read_csv(FILE)", ".tsv": "read_table(FILE)", ".xlsx": "read_excel(FILE)"}
"""Endings of tables that are not read, and what reads them."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""The first bytes that some programs write to a UTF-8 file."""
LOGGED_RECORDS = 10
"""Skipped records that are logged one by one; the others are only counted."""
MAX_DEPTH = 64
"""Deepest nesting of lists and objects in a record."""
ROWS_AT_ONCE = 1024
"""Rows of a parquet or Arrow file that are in memory at once."""
STATE_FILE = "state.json"
"""File in a folder of datasets' save_to_disk that names the Arrow files, in order."""
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
    VALUE = "a column holds something else than text, numbers, lists and objects"
    MESSAGES = "the messages are not a conversation that the policy can continue"
    TEMPLATE = "the chat template refuses the messages"
    PAIR_TOO_LONG = "the prompt with an answer is longer than a training row"


class BadRecord(DataError):
    """A record cannot be used."""

    def __init__(self, kind: Bad, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else str(kind))
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record of a file as it was read."""

    place: str  # such as "line 3"
    fields: Mapping[str, Any] | BadRecord  # plain values by column, or why there are none
    mark: int = 0  # hash of what was read


def parse_rows(
    path: str | Path,
    parse: Callable[[Mapping[str, Any]], T],
    max_bad_share: float,
    remedy: str,
) -> list[T]:
    """Parse each record of a file or folder, and return the good results.

    Bad records are skipped, counted by kind and logged with their place. Copies of earlier ones are
    kept; their number is logged.

    Args:
        path: see `rows_of`.
        parse: makes something of a record's columns, or raises BadRecord.
        max_bad_share: largest share of bad records.
        remedy: what to set if more are bad, in words.

    Raises:
        DataError: the file cannot be read, has no usable record, or more than max_bad_share of it
            is bad.
        MissingExtraError: see `rows_of`.
    """
    records: list[T] = []
    bad = _BadRecords(path)
    seen: set[int] = set()
    copies = 0
    for row in rows_of_file(path):
        if isinstance(row.fields, BadRecord):
            bad.add(row.place, row.fields)
            continue
        try:
            records.append(parse(row.fields))
        except BadRecord as error:
            bad.add(row.place, error)
            continue
        copies += row.mark in seen
        seen.add(row.mark)
    if copies:
        _tell_of_copies(str(path), copies, len(records))
    bad.judge(len(records), max_bad_share, remedy)
    return records


def rows_of_file(path: str | Path) -> Iterator[Row]:
    """Yield the records of FILE.parquet, of a folder of such files or of datasets' save_to_disk,
    or of any other file as JSON lines, whose blank lines do not count; or of a data set of the
    Hugging Face hub, OWNER/NAME:CONFIG:SPLIT.

    At most a line of MAX_LINE_BYTES, or ROWS_AT_ONCE rows, are in memory at once. Raises DataError,
    and MissingExtraError if pyarrow is needed and not installed.
    """
    place = Path(path)
    if (named := hub_records(str(path))) is not None:
        for number, columns in enumerate(hub_rows(named), start=1):
            yield _table_row(number, columns)
    elif os.path.isdir(path):  # which answers for a name that is too long to exist
        yield from _tables(place, *_files_of_folder(place))
    elif place.suffix == ".parquet":
        yield from _tables(place, _parquet_batches, [place])
    else:
        _check_kind(place)
        for number, line in _lines(path):
            fields = line if isinstance(line, BadRecord) else _checked_object(line)
            yield Row(place=f"line {number}", fields=fields, mark=hash(line))


def _check_kind(path: Path) -> None:
    """Raise DataError for a file that other libraries read as a table."""
    if path.suffix.lower() in TABLES:
        raise DataError(
            f"{path}: records are JSON lines or parquet. Give the table itself to "
            f"jaxrl_async.train (data=pandas.{TABLES[path.suffix.lower()]}), or write it as JSON "
            "lines (DataFrame.to_json(FILE, orient='records', lines=True))."
        )
    if path.suffix.lower() == ".json" and path.is_file():
        with path.open("rb") as file:
            if file.read(64).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"[":
                raise DataError(
                    f"{path}: a list of records. Write one object a line (JSON lines), or give the "
                    "list itself to jaxrl_async.train (data=json.load(FILE))."
                )


@cache
def _tell_of_copies(path: str, copies: int, records: int) -> None:
    """Log it once, though a file is read for each of its splits."""
    log.warning("%s: %d of %d records are copies of earlier ones", path, copies, records)


# --- JSON lines ----------------------------------------------------------------------------------


def _lines(path: str | Path) -> Iterator[tuple[int, bytes | BadRecord]]:
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
                    yield number, BadRecord(Bad.LONG)
                elif line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}. Give a file of JSON lines.") from None


def _checked_object(line: bytes) -> dict[str, Any] | BadRecord:
    try:
        return parse_object(line)
    except BadRecord as error:
        return error


class _Twice(ValueError):
    """A key appears twice in one object."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _Twice
    return fields


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse a line to a JSON object. NaN and Infinity are accepted, as Python writes them.

    Raises BadRecord.
    """
    try:
        fields = json.loads(line.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise BadRecord(Bad.ENCODING) from None
    except _Twice:
        raise BadRecord(Bad.TWICE) from None
    except (ValueError, RecursionError):
        raise BadRecord(Bad.JSON) from None
    if not isinstance(fields, dict):
        raise BadRecord(Bad.JSON)
    if _is_deep(fields):
        raise BadRecord(Bad.DEEP)
    return fields


def _is_deep(fields: dict[str, Any]) -> bool:
    """Return whether lists and objects are nested more than MAX_DEPTH deep."""
    level: list[Any] = [fields]
    for _ in range(MAX_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    return bool(level)


# --- tables --------------------------------------------------------------------------------------

Batches = Callable[[Path], Iterator[Any]]
"""Reads a file's record batches, as pyarrow has them."""


def _tables(place: Path, batches: Batches, files: list[Path]) -> Iterator[Row]:
    """Yield the rows of several files, numbered from 1 through all of them."""
    number = 0
    try:
        for file in files:
            for batch in batches(file):
                for fields in batch.to_pylist():
                    number += 1
                    yield _table_row(number, fields)
    except (DataError, MissingExtraError):
        raise
    except Exception as error:  # pyarrow's own, and what to_pylist raises
        raise DataError(
            f"{place}: cannot be read: {type(error).__name__}: {str(error)[:200]}. Write it again."
        ) from error


def _table_row(number: int, fields: Mapping[str, Any]) -> Row:
    place = f"row {number}"
    try:
        plain = plain_columns(fields)
    except BadRecord as error:
        return Row(place=place, fields=error)
    return Row(place=place, fields=plain, mark=hash(repr(plain)))


def _files_of_folder(folder: Path) -> tuple[Batches, list[Path]]:
    """Return a folder's files in order, and how to read them."""
    if (folder / STATE_FILE).is_file():
        try:
            state = json.loads((folder / STATE_FILE).read_text("utf-8"))
            names = [str(file["filename"]) for file in state["_data_files"]]
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise DataError(f"{folder / STATE_FILE}: cannot be read: {error}.") from None
        if strange := [name for name in names if Path(name).name != name]:
            raise DataError(f"{folder / STATE_FILE}: {strange[0]!r} is not a file of the folder.")
        return _arrow_batches, [folder / name for name in names]
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise DataError(
            f"{folder}: no {STATE_FILE} (datasets' save_to_disk writes one for each split) and no "
            "*.parquet. Give the folder of one split, or a file of records."
        )
    return _parquet_batches, files


def _parquet_batches(file: Path) -> Iterator[Any]:
    if not file.is_file():
        raise DataError(f"{file}: there is no such file. Give a file of records.")
    with _pyarrow("pyarrow.parquet").ParquetFile(str(file)) as table:
        yield from table.iter_batches(batch_size=ROWS_AT_ONCE)


def _arrow_batches(file: Path) -> Iterator[Any]:
    with (
        _pyarrow("pyarrow").OSFile(str(file)) as source,
        _pyarrow("pyarrow.ipc").open_stream(source) as batches,
    ):
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield batch.slice(start, ROWS_AT_ONCE)


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"parquet files and datasets' folders need pyarrow ({error}). Install the extra "
            "[datasets]: pip install 'jaxrl_async[datasets]', or give JSON lines."
        ) from None


# --- plain values --------------------------------------------------------------------------------


def plain_columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's columns as text, numbers, lists and objects, as checkpoints hold them.

    Dates become ISO text, decimals text, NumPy's values Python's. Raises BadRecord that names a
    column with something else in it.
    """
    columns = {}
    for name, value in fields.items():
        if not isinstance(name, str):
            raise BadRecord(Bad.VALUE, f"the column {name!r} has no text for its name")
        try:
            columns[name] = _plain(value, MAX_DEPTH)
        except _NotPlain as error:
            raise BadRecord(Bad.VALUE, f"the column {name!r} holds {error}") from None
    return columns


class _NotPlain(TypeError):
    """A value is not one that checkpoints hold."""


def _plain(value: Any, depth: int) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if not depth:
        raise BadRecord(Bad.DEEP)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _NotPlain("an object with keys that are not text")
        return {key: _plain(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, depth - 1) for inner in value]
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist(), depth - 1)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, str | bool | int | float):  # of a class of their own, such as an enum
        return next(kind(value) for kind in (str, bool, int, float) if isinstance(value, kind))
    raise _NotPlain(f"a {type(value).__name__}")


# --- what is skipped -----------------------------------------------------------------------------


class _BadRecords:
    """The skipped records of one file: counted by kind, the first few also logged."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._kinds: Counter[Bad] = Counter()
        self._first: list[str] = []

    def add(self, place: str, reason: BadRecord) -> None:
        """Count a skipped record."""
        self._kinds[reason.kind] += 1
        if len(self._first) < LOGGED_RECORDS:
            self._first.append(f"{place}: {reason}")
            log.warning("%s, %s: skipped: %s", self._path, place, reason)

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
