"""Arguments for a user's functions: copies, or arrays that cannot be written. Needs no JAX.

A function may consume its arguments (`tests.pop()`): the next call gets them complete again.
"""

import copy
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

from jaxrl_async.types import Message

T = TypeVar("T")
log = logging.getLogger(__name__)

_WARNED: dict[str, object] = {}
UNCHANGEABLE = (str, bytes, int, float, bool, complex, type(None))


def copied(value: T, what: str = "a value") -> T:
    """Return a deep copy of a value of a record.

    A value that cannot be copied (an open file, a lock) is returned itself, with one warning for
    each `what`.
    """
    if isinstance(value, UNCHANGEABLE):
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:  # the value's own __deepcopy__ may raise anything
        _warn_shared(what, type(value).__name__, f"{type(error).__name__}: {error}")
        return value


def _warn_shared(what: str, kind: str, error: str) -> None:
    own = object()
    if _WARNED.setdefault(what, own) is own:  # only the first thread warns
        log.warning(
            "%s is a %s that cannot be copied (%s): all calls of your functions share it, and one "
            "that changes it changes it for all others.",
            what,
            kind,
            error,
        )


def copied_columns(columns: Mapping[str, object]) -> dict[str, Any]:
    """Return a record with copies of its values, by column."""
    return {name: copied(value, f"the column {name!r}") for name, value in columns.items()}


def read_only(carrier: T) -> T:
    """Return a carrier of types.py (an Episode) whose arrays are read-only, and whose mappings and
    messages are copies."""
    if isinstance(carrier, np.ndarray):
        view = carrier.view()
        view.flags.writeable = False
        return view
    if is_dataclass(carrier) and not isinstance(carrier, type):
        own = {f.name: getattr(carrier, f.name) for f in fields(carrier)}
        return replace(carrier, **{name: read_only(value) for name, value in own.items()})
    if isinstance(carrier, tuple) and type(carrier) is tuple:
        return tuple(map(read_only, carrier))  # type: ignore[return-value]
    return copied(carrier)


def read_only_arguments(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function of carriers to make its arguments read-only."""

    @functools.wraps(function)
    def call(*carriers: Any) -> T:
        return function(*map(read_only, carriers))

    return call


def as_json(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return copies of messages that a checkpoint can hold: values that are not JSON become
    text."""
    try:
        return tuple(json.loads(json.dumps(list(map(dict, messages)), default=str)))
    except (TypeError, ValueError, RecursionError):  # keys that are not text; a loop
        return tuple({"role": m["role"], "content": str(m.get("content"))} for m in messages)
