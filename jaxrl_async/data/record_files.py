"""Files of records: JSON lines, parquet, and folders written by `datasets`.

file ──row──> columns by name, plain values        unreadable rows: Bad, counted and logged
"""

import datetime
import decimal
import importlib
import itertools
import json
import logging
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxrl_async.data.chat_formats.chat_messages import without_nulls
from jaxrl_async.data.hub import hub_records, hub_rows
from jaxrl_async.errors import DataError, MissingExtraError, extra_module

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 2**26
"""Maximum length of a line, bytes; no more than this of a line is ever in memory."""
TABLES = {".csv": "read_csv(FILE)", ".tsv": "read_table(FILE)", ".xlsx": "read_excel(FILE)"}
"""Suffixes of unsupported tables, with the pandas functions that read them."""
PACKED: Mapping[bytes, str] = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "lzma"}
"""First bytes of supported compressed files, with Python's module for each."""
PACKED_SUFFIX = re.compile(r"\.(?:gz|bz2|xz)$")
PARQUET = b"PAR1"
OTHER_FILES: Mapping[bytes, str] = {
    PARQUET: "a compressed parquet file. Decompress it",
    b"\xff\xfe": "UTF-16. Write it as UTF-8",
    b"\xfe\xff": "UTF-16. Write it as UTF-8",
    b"PK\x03\x04": "a zip archive. Extract it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd. Decompress it (zstd -d FILE), or use gzip",
    b"ARROW1": "an Arrow file. Give the folder of datasets' save_to_disk, or write it as parquet",
    b"SQLite": "a database. Write its table as JSON lines or parquet",
}
"""First bytes of unsupported files, with descriptions."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Bytes that some programs write at the start of a UTF-8 file."""
LOGGED_RECORDS = 10
"""Number of skipped records that are logged individually; further ones are only counted."""
MAX_DEPTH = 64
"""Maximum nesting depth of lists and objects in a record."""
ROWS_AT_ONCE = 1024
"""Maximum number of rows of a parquet or Arrow file in memory."""
STATE_FILE = "state.json"
"""File in a folder of datasets' save_to_disk that names the Arrow files, in order."""
T = TypeVar("T")


class Bad(StrEnum):
    """Reason why a record is skipped."""

    ENCODING = "not UTF-8"
    JSON = "not a JSON object"
    TWICE = "a key appears twice in one object"
    DEEP = "lists and objects nested more than 64 deep"
    LONG = "a line of more than 64 MiB"
    FIELD = "a field is missing or is not text"
    EMPTY = "the prompt has no tokens"
    TOO_LONG = "the prompt is too long"
    MESSAGES = "the messages are not a conversation that the policy can continue"
    TEMPLATE = "the chat template refuses the messages"
    TOOLS = "the tools cannot be shown to the policy"
    NO_ANSWER = "the answer is empty, but the reward compares with it"
    PAIR_TOO_LONG = "the prompt with an answer is longer than a training row"


REMEDIES: Mapping[Bad, str] = {
    Bad.ENCODING: "write the file as UTF-8",
    Bad.LONG: "write such records to a parquet file, which has no such limit",
    Bad.TOO_LONG: "raise data.max_prompt_tokens or, if it is null, sampler.max_length",
    Bad.PAIR_TOO_LONG: "raise trainer.row_length, or sampler.max_length if it is null",
    Bad.TEMPLATE: "set data.chat_format",
    Bad.TOOLS: "set data.chat_format to one that shows tools, or data.jsonl.tools_field",
    Bad.NO_ANSWER: "set data.jsonl.answer_field or a reward that needs no answer",
}
"""Remedies for bad records by kind, if they cannot be corrected."""


class BadRecord(DataError):
    """A record cannot be used."""

    def __init__(self, kind: Bad, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else str(kind))
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record of a file, as read."""

    location: str  # such as "line 3"
    fields: Mapping[str, Any] | BadRecord  # plain values by column, or the error
    mark: int = 0  # hash of the read content


def parse_rows(
    path: str | Path,
    parse: Callable[[Mapping[str, Any]], T],
    max_bad_share: float,
    fields: str,
) -> list[T]:
    """Parse each record of a file or folder, and return the good results.

    Bad records are skipped, counted by kind and logged with their location. Duplicates of earlier
    records are kept; their number is logged.

    Args:
        path: see `rows_of_file`.
        parse: converts a record's columns, or raises BadRecord.
        max_bad_share: maximum fraction of bad records.
        fields: remedy for a missing field, for the error message.

    Raises:
        DataError: the file cannot be read, has no usable record, or more than max_bad_share of it
            is bad.
        MissingExtraError: see `rows_of_file`.
    """
    records: list[T] = []
    bad = _BadRecords(path)
    seen: set[int] = set()
    copies = 0
    for row in rows_of_file(path):
        if isinstance(row.fields, BadRecord):
            bad.add(row.location, row.fields)
            continue
        try:
            records.append(parse(row.fields))
        except BadRecord as error:
            bad.add(row.location, error)
            continue
        copies += row.mark in seen
        seen.add(row.mark)
    if copies:
        _warn_of_copies(str(path), copies, len(records))
    bad.judge(len(records), max_bad_share, fields)
    return records


def rows_of_file(path: str | Path) -> Iterator[Row]:
    """Yield the records of a file, a folder or a dataset of the Hugging Face hub
    (OWNER/NAME:CONFIG:SPLIT). A file is parquet or JSON lines, also compressed with gzip, bz2 or
    xz; blank lines are ignored. A folder has parquet files or is from datasets' save_to_disk.
    Columns of bytes and similar types in tables are dropped and logged.

    At most one line of MAX_LINE_BYTES, or ROWS_AT_ONCE rows, are in memory. Raises DataError, and
    MissingExtraError if pyarrow is needed and not installed.
    """
    source = Path(path)
    if (named := hub_records(str(path))) is not None:
        left_out: set[str] = set()
        for number, columns in enumerate(hub_rows(named), start=1):
            yield _table_row(source, number, columns, left_out)
    elif os.path.isdir(path):  # also works for names that are too long to exist
        yield from _tables(source, *_files_of_folder(source))
    elif source.suffix.lower() == ".parquet" or _first_bytes(source).startswith(PARQUET):
        yield from _tables(source, _parquet_batches, [source])
    else:
        _check_kind(source)
        for number, line in _lines(path):
            fields = line if isinstance(line, BadRecord) else _checked_object(line)
            yield Row(location=f"line {number}", fields=fields, mark=hash(line))


def _check_kind(path: Path) -> None:
    """Raise DataError for an unsupported type of file, such as a table of other libraries."""
    suffix = Path(PACKED_SUFFIX.sub("", path.name.lower())).suffix
    if suffix in TABLES:
        raise DataError(
            f"{path}: records are JSON lines or parquet. Give the table itself to "
            f"jaxrl_async.train (data=pandas.{TABLES[suffix]}), or write it as JSON "
            "lines (DataFrame.to_json(FILE, orient='records', lines=True))."
        )
    begins = _unpacked_beginning(path)
    if kind := next((what for mark, what in OTHER_FILES.items() if begins.startswith(mark)), None):
        raise DataError(f"{path}: it is {kind}.")
    text = begins.removeprefix(BYTE_ORDER_MARK).lstrip()
    if suffix == ".json" and text.startswith(b"["):
        raise DataError(
            f"{path}: a list of records. Write one object per line (JSON lines), or give the "
            "list itself to jaxrl_async.train (data=json.load(FILE))."
        )
    if suffix == ".json" and text.splitlines()[:1] == [b"{"]:
        raise DataError(
            f"{path}: one JSON object on several lines. Write each record as an object on a "
            "separate line (JSON lines; json.dumps without indent)."
        )


@cache
def _warn_of_copies(path: str, copies: int, records: int) -> None:
    """Log this once, even though a file is read for each of its splits."""
    log.warning("%s: %d of %d records are duplicates of earlier ones", path, copies, records)


def _unpacked_beginning(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed; otherwise like _first_bytes."""
    if not _first_bytes(path):
        return b""
    try:
        with _open_file(path) as file:
            return bytes(file.read(64))
    except (OSError, EOFError, zlib.error, lzma.LZMAError):
        return b""


def _first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file. Returns none if it is not a regular file (a pipe would
    block forever) or cannot be read; reading it later reports the error."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(16)
    except OSError:
        return b""


# --- JSON lines ----------------------------------------------------------------------------------


def _lines(path: str | Path) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Yield number (from 1) and bytes of each non-blank line; Bad.LONG if it is too long.

    Raises DataError if the file cannot be read.
    """
    try:
        if not Path(path).is_file():  # reading a pipe would block forever
            kind = "is not a file" if Path(path).exists() else "does not exist"
            raise DataError(f"{path}: {kind}; cannot be read. Give a file of JSON lines.")
        with _open_file(Path(path)) as file:
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
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read: {error}. Give a file of JSON lines.") from None


def _open_file(path: Path) -> Any:
    """Open a file of lines, decompressing it while reading."""
    begins = _first_bytes(path)
    module = next((name for mark, name in PACKED.items() if begins.startswith(mark)), None)
    return path.open("rb") if module is None else importlib.import_module(module).open(path, "rb")


def _checked_object(line: bytes) -> dict[str, Any] | BadRecord:
    try:
        return parse_object(line)
    except BadRecord as error:
        return error


class _DuplicateKey(ValueError):
    """A key appears twice in one object."""


def _unique_keys(pairs: Sequence[tuple[str, object]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _DuplicateKey
    return fields


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object. NaN and Infinity are accepted, since Python writes them.

    Raises BadRecord.
    """
    try:
        fields = json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError:
        raise BadRecord(Bad.ENCODING) from None
    except _DuplicateKey:
        raise BadRecord(Bad.TWICE) from None
    except (ValueError, RecursionError):
        raise BadRecord(Bad.JSON) from None
    if not isinstance(fields, dict):
        raise BadRecord(Bad.JSON)
    if _is_deep(fields):
        raise BadRecord(Bad.DEEP)
    return fields


def _is_deep(fields: Mapping[str, object]) -> bool:
    """Return True if lists and objects are nested more than MAX_DEPTH deep."""
    level: list[Any] = [fields]
    for _ in range(MAX_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    return bool(level)


# --- tables --------------------------------------------------------------------------------------

Batches = Callable[[Path], Iterator[Any]]
"""Reads a file's record batches with pyarrow."""


def _tables(source: Path, batches: Batches, files: list[Path]) -> Iterator[Row]:
    """Yield the rows of several files, numbered from 1 across all files."""
    number, left_out = 0, set[str]()
    try:
        for file in files:
            for batch in batches(file):
                _check_names(file, batch.schema.names)
                for column in batch.schema:
                    if (holds := _unsupported(column.type)) and column.name not in left_out:
                        left_out.add(column.name)
                        _warn_of_column(str(source), column.name, holds)
                for fields in batch.to_pylist():
                    number += 1
                    yield _table_row(source, number, fields, left_out)
    except (DataError, MissingExtraError):
        raise
    except Exception as error:  # errors of pyarrow, and of to_pylist
        raise DataError(
            f"{source}: cannot be read: {type(error).__name__}: {str(error)[:200]}. Write it again."
        ) from error


def _check_names(file: Path, names: Sequence[str]) -> None:
    """Raise DataError if two columns have one name."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(
            f"{file}: {names.count(twice[0])} columns are named {twice[0]!r}, but a record can "
            "have only one of them. Rename or drop the others."
        )


@cache
def _warn_of_column(source: str, name: str, holds: str) -> None:
    """Log this once, even though a file is read for each of its splits."""
    log.warning(
        "%s: the column %r is dropped: it holds %s, which is not supported. Write it as text or "
        "numbers if it is needed.",
        source,
        name,
        holds,
    )


def _unsupported(kind: Any) -> str:
    """Return the unsupported value type in any part of an Arrow type, or ''."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    inner += [kind.value_type] if str(kind).startswith("dictionary") else []
    own = next((held for name, held in UNHELD.items() if name in str(kind)), "")
    return next(filter(None, map(_unsupported, inner)), "") if inner else own


UNHELD: Mapping[str, str] = {"binary": "a bytes", "duration": "a timedelta"}
"""Unsupported Python types by a part of the name of their Arrow type."""


def _table_row(table: Path, number: int, fields: Mapping[str, object], left_out: set[str]) -> Row:
    """Return a row of a table without columns of unsupported types. left_out: names of the dropped
    columns; updated in place."""
    location, plain = f"row {number}", dict[str, Any]()
    for name, value in fields.items():
        if name in left_out:
            continue
        try:
            plain[name] = without_nulls(_plain(value, MAX_DEPTH))
        except _NotPlain as error:
            left_out.add(name)
            _warn_of_column(str(table), name, str(error))
        except BadRecord as error:
            return Row(location=location, fields=error)
    return Row(location=location, fields=plain, mark=hash(repr(plain)))


def _files_of_folder(folder: Path) -> tuple[Batches, list[Path]]:
    """Return a folder's files in order, and the function that reads them."""
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
    needs = "parquet files and datasets' folders need pyarrow"
    return extra_module(module, "datasets", needs, ", or give JSON lines")


# --- plain values --------------------------------------------------------------------------------


class _NotPlain(TypeError):
    """A value has a type that checkpoints do not support."""


def _plain(value: object, depth: int) -> Any:
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
    if isinstance(value, str | bool | int | float):  # a subclass, such as an enum
        return next(kind(value) for kind in (str, bool, int, float) if isinstance(value, kind))
    raise _NotPlain(f"a {type(value).__name__}")


# --- skipped records -----------------------------------------------------------------------------


class _BadRecords:
    """The skipped records of one file: counted by kind; the first few are also logged."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._kinds: Counter[Bad] = Counter()
        self._first: list[str] = []

    def add(self, location: str, reason: BadRecord) -> None:
        """Count a skipped record."""
        self._kinds[reason.kind] += 1
        if len(self._first) < LOGGED_RECORDS:
            self._first.append(f"{location}: {reason}")
            log.warning("%s, %s: skipped: %s", self._path, location, reason)

    def judge(self, good: int, max_bad_share: float, fields: str) -> None:
        """Log the counts; raise DataError if too many are bad or none is good."""
        bad = self._kinds.total()
        if not bad and not good:
            raise DataError(
                f"{self._path}: the file is empty. Give a file with one JSON object per line."
            )
        if bad:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self._kinds.most_common())
            log.warning("%s: %d of %d records skipped: %s", self._path, bad, bad + good, kinds)
        share = bad / (bad + good)
        if share > max_bad_share or not good:
            raise DataError(
                f"{self._path}: {bad} of {bad + good} records cannot be used ({share:.1%}, at most "
                f"{max_bad_share:.1%} allowed): {'; '.join(self._first[:3])}. Correct them, or "
                f"{self._remedy(fields)}data.jsonl.max_bad_share."
            )

    def _remedy(self, fields: str) -> str:
        """Return the remedies for the found kinds of bad records, up to the last setting."""
        remedies = [REMEDIES.get(kind, "") for kind in self._kinds]
        if Bad.FIELD in self._kinds:
            remedies.append(fields)
        first = "; ".join(dict.fromkeys(filter(None, remedies)))
        return f"{first}; or raise " if first else "raise "
