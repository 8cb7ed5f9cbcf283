"""Check that a record from another process matches the types of its fields.

The codec creates only known records but accepts any values in their fields. A wrong value would
fail far from here, or not at all. The check of each type is built once. Shapes and ranges are
checked where a record is used (sampler.request_checks, remote.sampler.answer_checks).
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.codec import ML_DTYPES

Check = Callable[[Any], str | None]
"""Returns None for a valid value, else the path to the invalid part and the problem."""


def check_fits(record: object) -> None:
    """Raise ValueError with the field's name if a record does not match its own types."""
    kind: type = type(record)
    wrong = _record_check(kind)(record)
    if wrong is not None:
        raise ValueError(f"{kind.__name__}{wrong}")


ARRAY_ALIAS = typing.get_origin(NDArray[np.int32])
"""np.ndarray itself or, from NumPy 2.5 on Python 3.12, the alias NDArray, whose argument is the
scalar type."""


@lru_cache(maxsize=1024)
def _check(kind: Any) -> Check:
    """Build the check of a type annotation of a record."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    named = getattr(kind if origin is None else origin, "__value__", None)
    if named is not None:  # NumPy 2.5's NDArray, from Python 3.12 on
        return _check(named if origin is None else named[args])
    if kind is Any:
        return lambda value: None
    if origin in (typing.Union, types.UnionType):
        return _union_check(args)
    if origin is tuple:
        return _tuple_check(args)
    if origin is Mapping:
        return _mapping_check(args[1])
    if origin is np.ndarray:
        return _array_check(typing.get_args(args[1])[0])
    if origin is ARRAY_ALIAS:
        return _array_check(args[0])
    if dataclasses.is_dataclass(kind):
        return _record_check(typing.cast(type, kind))
    if kind is float:  # an int is accepted
        return lambda value: None if type(value) in (float, int) else _wrong_type(value, float)
    if kind in (int, str, bool, type(None)) or issubclass(kind, Enum):
        return lambda value: None if type(value) is kind else _wrong_type(value, kind)
    raise TypeError(f"a message cannot have a field of {kind}")


def _wrong_type(value: object, expected: type) -> str:
    return f" is a {type(value).__name__}, not a {expected.__name__}"


@lru_cache(maxsize=1024)
def _record_check(kind: type) -> Check:
    hints = typing.get_type_hints(kind)
    checks = [(field.name, _check(hints[field.name])) for field in dataclasses.fields(kind)]

    def check(value: object) -> str | None:
        if type(value) is not kind:
            return _wrong_type(value, kind)
        for name, fits in checks:
            wrong = fits(getattr(value, name))
            if wrong is not None:
                return f".{name}{wrong}"
        return None

    return check


def _union_check(args: tuple[object, ...]) -> Check:
    optional = type(None) in args
    checks = [_check(arg) for arg in args if arg is not type(None)]

    def check(value: object) -> str | None:
        if value is None and optional:
            return None
        problems = []
        for fits in checks:
            wrong = fits(value)
            if wrong is None:
                return None
            problems.append(wrong)
        return max(problems, key=lambda wrong: wrong.startswith("."))  # the most specific

    return check


def _tuple_check(args: tuple[object, ...]) -> Check:
    checks = [_check(arg) for arg in args if arg is not Ellipsis]
    any_length = Ellipsis in args

    def check(value: object) -> str | None:
        if type(value) is not tuple:
            return _wrong_type(value, tuple)
        if not any_length and len(value) != len(checks):
            return f" has {len(value)} entries, not {len(checks)}"
        for index, item in enumerate(value):
            wrong = checks[0 if any_length else index](item)
            if wrong is not None:
                return f"[{index}]{wrong}"
        return None

    return check


def _mapping_check(arg: object) -> Check:
    fits = _check(arg)

    def check(value: object) -> str | None:
        if type(value) is not dict:
            return _wrong_type(value, dict)
        for key, item in value.items():
            wrong = fits(item)
            if wrong is not None:
                return f"[{key!r}]{wrong}"
        return None

    return check


def _array_check(kind: Any) -> Check:
    """Check the kind of the dtype, not its size: engines keep log-probs and KV in several sizes."""
    scalar = typing.get_origin(kind) or kind
    kinds = (np.signedinteger, np.unsignedinteger, np.floating, np.bool_)
    family = next(f for f in kinds if issubclass(scalar, f))

    def check(value: object) -> str | None:
        if type(value) is not np.ndarray:
            return _wrong_type(value, np.ndarray)
        if not _is_kind_of(value.dtype, family):
            return f" is an array of {value.dtype}, not of {family.__name__}"
        return None

    return check


@lru_cache(maxsize=256)
def _is_kind_of(dtype: np.dtype[Any], family: type) -> bool:
    return np.issubdtype(dtype, family) or (family is np.floating and dtype.name in ML_DTYPES)
