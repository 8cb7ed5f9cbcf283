"""Convert carriers to bytes and back, for checkpoints and for messages between processes: JSON for
the structure, one buffer for the arrays.

    8 bytes: length of the JSON │ JSON │ arrays, one after another

Only the dataclasses and enums that the reader names can be loaded; pickle is not used. Data that
many messages share is converted once (`Encoded`) and stored among the arrays in this form.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxrl_async import types

Bytes = NDArray[np.uint8]

KIND = "!"
"""Key that marks a JSON object as something other than a mapping and names its kind."""
CARRIERS: tuple[type, ...] = tuple(
    kind
    for kind in vars(types).values()
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum))
)
"""The records and enums of types.py."""
PLAIN_KINDS = "biufcSU"
"""Kinds of NumPy dtypes that are saved, each by its `str`: numbers and text."""
ML_DTYPES: dict[str, Any] = {
    name: np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
"""dtypes that NumPy itself does not define (bfloat16, 8-bit floats), by name."""
LEAVES = frozenset((str, int, float, bool, type(None)))
"""Types that JSON stores unchanged."""
PLAIN_DTYPE = re.compile(rf"[<>|][{PLAIN_KINDS}]\d{{1,9}}")
"""Names of NumPy's own dtypes; no other received text is passed to np.dtype."""


def dumps(tree: object) -> Bytes:
    """Convert records, enums, arrays, tuples, lists, str-keyed mappings and plain values to bytes.

    Raises TypeError for anything else, naming it.
    """
    arrays: list[NDArray[Any]] = []
    text = json.dumps(_encoded(tree, arrays), check_circular=False).encode()
    head = np.array([len(text)], "<u8").tobytes()
    parts: list[Any] = [head, text, *map(np.ascontiguousarray, arrays)]
    return np.frombuffer(b"".join(parts), np.uint8)


def loads(data: Bytes | memoryview, kinds: Sequence[type] = ()) -> Any:
    """Convert bytes from `dumps` back; `kinds` are records in addition to types.py.

    Raises ValueError for any other bytes, including malicious ones.
    """
    try:
        return _loaded(np.ascontiguousarray(data, np.uint8).data, _kinds_by_name(tuple(kinds)))
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"not a record of this program: {error}") from None


class Encoded(Mapping[str, Any]):
    """A mapping that is part of many messages and is converted to bytes only once. It is loaded as
    a plain mapping."""

    def __init__(self, value: Mapping[str, object]) -> None:
        """value: the mapping, which must not change afterwards."""
        self._value = value

    @cached_property
    def data(self) -> Bytes:
        """The mapping as encoded by `dumps`."""
        return dumps(dict(self._value))

    def __getitem__(self, key: str) -> Any:
        return self._value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def __len__(self) -> int:
        return len(self._value)


def _loaded(raw: memoryview, known: Mapping[str, type]) -> Any:
    size = int.from_bytes(raw[:8], "little") if len(raw) >= 8 else -1
    if not 0 <= size <= len(raw) - 8:
        raise ValueError("not a record of this program: its head is torn")
    return _decoded(json.loads(bytes(raw[8 : 8 + size])), raw[8 + size :], known, [0])


@lru_cache(maxsize=64)
def _kinds_by_name(kinds: tuple[type, ...]) -> Mapping[str, type]:
    return {kind.__name__: kind for kind in (*CARRIERS, *kinds)}


def _encoded(value: Any, arrays: list[NDArray[Any]]) -> Any:
    kind: type = type(value)
    if kind in LEAVES:
        return value
    if kind is np.ndarray:
        arrays.append(value)
        return {KIND: "array", "dtype": _dtype_name(value.dtype), "shape": value.shape}
    names = _field_names(kind)
    if names is not None:
        fields = [(name, getattr(value, name)) for name in names]
        encoded = {k: v if type(v) in LEAVES else _encoded(v, arrays) for k, v in fields}
        return {KIND: kind.__name__, "fields": encoded}
    return _encoded_other(value, arrays)


def _encoded_other(value: Any, arrays: list[NDArray[np.generic]]) -> Any:
    if isinstance(value, Enum):
        return {KIND: type(value).__name__, "value": value.value}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        return _encoded(value.view(np.ndarray), arrays)
    if isinstance(value, tuple):
        return {KIND: "tuple", "items": [_encoded(v, arrays) for v in value]}
    if isinstance(value, list):
        return [_encoded(v, arrays) for v in value]
    if isinstance(value, Encoded):
        return {KIND: "encoded", "of": _encoded(value.data, arrays)}
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        encoded = {k: _encoded(v, arrays) for k, v in value.items()}
        return {KIND: "mapping", "fields": encoded} if KIND in value else encoded
    raise TypeError(f"{type(value).__name__} cannot be saved: it is no plain value or record")


@lru_cache(maxsize=1024)
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the names of a record's fields; None if the type is not a record."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


@lru_cache(maxsize=256)
def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.name in ML_DTYPES:
        return dtype.name
    if dtype.kind not in PLAIN_KINDS:
        raise TypeError(f"an array of {dtype} cannot be saved")
    return dtype.str


@lru_cache(maxsize=256)
def _named_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype with this name from `_dtype_name`; raise ValueError for other names."""
    if name in ML_DTYPES:
        return np.dtype(ML_DTYPES[name])
    if not PLAIN_DTYPE.fullmatch(name) or _dtype_name(dtype := np.dtype(name)) != name:
        raise ValueError(f"not a record of this program: arrays of {name!r} are never written")
    return dtype


def _decoded(value: object, buffer: memoryview, known: Mapping[str, type], at: list[int]) -> Any:
    """Decode a JSON value; `at[0]` is the byte at which the next array starts, in writing order."""
    if isinstance(value, list):
        return [v if type(v) in LEAVES else _decoded(v, buffer, known, at) for v in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return _decoded_fields(value, buffer, known, at)
    kind = value[KIND]
    if kind == "array":
        return _view(value, buffer, at).copy()
    if kind == "encoded":  # not copied: it may contain another one
        return _loaded(_view(value["of"], buffer, at).reshape(-1).view(np.uint8).data, known)
    if kind == "mapping":  # a mapping that itself has the key KIND
        return _decoded_fields(value["fields"], buffer, known, at)
    if kind == "tuple":
        return tuple(_decoded(v, buffer, known, at) for v in value["items"])
    record = known[kind]
    if issubclass(record, Enum):
        return record(value["value"])
    return record(**_decoded_fields(value["fields"], buffer, known, at))


def _decoded_fields(
    fields: Mapping[str, object], buffer: memoryview, known: Mapping[str, type], at: list[int]
) -> dict[str, Any]:
    return {
        k: v if type(v) in LEAVES else _decoded(v, buffer, known, at) for k, v in fields.items()
    }


def _view(head: Mapping[str, Any], buffer: memoryview, at: list[int]) -> NDArray[Any]:
    dtype, shape, count = _named_dtype(head["dtype"]), head["shape"], 1
    for length in shape:
        if type(length) is not int or not 0 <= length < 2**48:
            raise ValueError("not a record of this program: an array's shape is torn")
        count *= length
    start, at[0] = at[0], at[0] + dtype.itemsize * count
    if at[0] > len(buffer):
        raise ValueError("not a record of this program: an array is torn")
    return np.frombuffer(buffer[start : at[0]], dtype).reshape(shape)
