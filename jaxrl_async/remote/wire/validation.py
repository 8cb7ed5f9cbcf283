"""Check that a record that came from another process holds what its fields' types say.

The codec makes only known records, but puts anything into their fields; what is wrong there would
fail far from here, or not at all. Checks are made once for each type.
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
from jaxrl_async.types import Completion, Partial

Check = Callable[[Any], str | None]
"""Returns None for a value that fits, else the way to what does not, and what is wrong with it."""


def check_fits(record: Any) -> None:
    """Raise ValueError, which names the field, if a record does not fit its own types."""
    kind: type = type(record)
    wrong = _record_check(kind)(record)
    if wrong is not None:
        raise ValueError(f"{kind.__name__}{wrong}")


ARRAY_ALIAS = typing.get_origin(NDArray[np.int32])
"""np.ndarray itself or, from NumPy 2.5 on Python 3.12, the alias NDArray, whose argument is the
scalar type."""


@lru_cache(maxsize=1024)
def _check(kind: Any) -> Check:
    """Make the check of a type as it is written in a record."""
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
    if kind is float:  # a whole number may have been given
        return lambda value: None if type(value) in (float, int) else _is_a(value, float)
    if kind in (int, str, bool, type(None)) or issubclass(kind, Enum):
        return lambda value: None if type(value) is kind else _is_a(value, kind)
    raise TypeError(f"a message cannot have a field of {kind}")


def _is_a(value: Any, wanted: type) -> str:
    return f" is a {type(value).__name__}, not a {wanted.__name__}"


@lru_cache(maxsize=1024)
def _record_check(kind: type) -> Check:
    hints = typing.get_type_hints(kind)
    checks = [(field.name, _check(hints[field.name])) for field in dataclasses.fields(kind)]

    def check(value: Any) -> str | None:
        if type(value) is not kind:
            return _is_a(value, kind)
        for name, fits in checks:
            wrong = fits(getattr(value, name))
            if wrong is not None:
                return f".{name}{wrong}"
        return _lengths(value) if kind in (Completion, Partial) else None

    return check


def _lengths(drawn: Any) -> str | None:
    """Check the arrays that have an entry for each drawn token."""
    shape = drawn.token_ids.shape
    if len(shape) != 1:
        return f".token_ids has the shape {shape}, not [drawn]"
    for name in ("logprobs", "versions", "full_logprobs"):
        value = getattr(drawn, name)
        if value is not None and value.shape != shape:
            return f".{name} has the shape {value.shape}, not that of token_ids, {shape}"
    return None


def _union_check(args: tuple[Any, ...]) -> Check:
    optional = type(None) in args
    checks = [_check(arg) for arg in args if arg is not type(None)]

    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        problems = []
        for fits in checks:
            wrong = fits(value)
            if wrong is None:
                return None
            problems.append(wrong)
        return max(problems, key=lambda wrong: wrong.startswith("."))  # the most telling

    return check


def _tuple_check(args: tuple[Any, ...]) -> Check:
    checks = [_check(arg) for arg in args if arg is not Ellipsis]
    any_length = Ellipsis in args

    def check(value: Any) -> str | None:
        if type(value) is not tuple:
            return _is_a(value, tuple)
        if not any_length and len(value) != len(checks):
            return f" has {len(value)} entries, not {len(checks)}"
        for index, item in enumerate(value):
            wrong = checks[0 if any_length else index](item)
            if wrong is not None:
                return f"[{index}]{wrong}"
        return None

    return check


def _mapping_check(arg: Any) -> Check:
    fits = _check(arg)

    def check(value: Any) -> str | None:
        if type(value) is not dict:
            return _is_a(value, dict)
        for key, item in value.items():
            wrong = fits(item)
            if wrong is not None:
                return f"[{key!r}]{wrong}"
        return None

    return check


def _array_check(kind: Any) -> Check:
    """Check the kind of numbers, not their size: engines keep log-probs and KV in several."""
    scalar = typing.get_origin(kind) or kind
    kinds = (np.signedinteger, np.unsignedinteger, np.floating, np.bool_)
    family = next(f for f in kinds if issubclass(scalar, f))

    def check(value: Any) -> str | None:
        if type(value) is not np.ndarray:
            return _is_a(value, np.ndarray)
        if not _is_of(value.dtype, family):
            return f" is an array of {value.dtype}, not of {family.__name__}"
        return None

    return check


@lru_cache(maxsize=256)
def _is_of(dtype: np.dtype[Any], family: type) -> bool:
    return np.issubdtype(dtype, family) or (family is np.floating and dtype.name in ML_DTYPES)
