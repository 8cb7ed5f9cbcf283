"""Surveys a run's records at the start: computes their digest, and collects the references.

A resume compares the digest with the one in the checkpoint.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxrl_async.codec import dumps
from jaxrl_async.data.records import Record, RecordSource

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


def survey(source: RecordSource) -> Survey:
    """Survey the records that `looked_at` yields, in order."""
    digest, references = _Digest(len(source)), []
    for record in looked_at(source):
        digest.add(_content(record))
        references.append(record.reference)
    return Survey(digest=digest.text, references=tuple(references))


def digest_of(examples: Indexed[Any]) -> str:
    """Return the digest of tokenized examples: tuples or records of arrays, or None."""
    digest = _Digest(len(examples))
    for example in looked_at(examples):
        kept = is_dataclass(example) and {f.name: getattr(example, f.name) for f in fields(example)}
        digest.add(kept or example)
    return digest.text


def looked_at(source: Indexed[T_co]) -> Iterator[T_co]:
    """Yield all records if they are in memory, else SAMPLED records including the first and
    last."""
    count = len(source)
    if getattr(source, "in_memory", isinstance(source, list | tuple)) or count <= SAMPLED:
        indices: Any = range(count)
    else:
        indices = np.linspace(0, count - 1, SAMPLED).astype(np.int64).tolist()
    return (source[int(index)] for index in indices)


def _content(record: Record) -> Mapping[str, Any]:
    """Return a record's content, without the results of tokenizer and chat format."""
    columns = {name: record.columns[name] for name in sorted(record.columns)}
    return {"text": record.text, "reference": record.reference, "columns": columns}


class _Digest:
    """SHA-256 of a number of records and their contents."""

    def __init__(self, count: int) -> None:
        self._sha = hashlib.sha256(str(count).encode())

    def add(self, content: Any) -> None:
        """Add a record, of a type supported by codec.dumps."""
        self._sha.update(dumps(content).tobytes())

    @property
    def text(self) -> str:
        """The truncated digest."""
        return self._sha.hexdigest()[:16]
