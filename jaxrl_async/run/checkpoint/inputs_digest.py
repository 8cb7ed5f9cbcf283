"""Digests of a run's graders and of its held-out records.

A checkpoint holds them, and a resumed run logs which have changed.
"""

import hashlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np

from jaxrl_async.config.schema import Config
from jaxrl_async.config.userfile import is_own
from jaxrl_async.data.prompts import digest_of
from jaxrl_async.tasks.task import Task
from jaxrl_async.types import Prompt

log = logging.getLogger(__name__)

REWARD, HELD_OUT = "reward", "held-out records"


def inputs_digest(config: Config, task: Task, held_out: tuple[Prompt, ...]) -> dict[str, str]:
    """Return the digests by a name for people.

    Functions are digested by their code and by the functions and constants of their module that
    they use, user files by their bytes, built-in graders by their names, all by their weights.
    """
    judging = hashlib.sha256()
    for text in _judging(config, task):
        judging.update(text.encode() + b"\0")
    records = [
        {"text": p.text, "reference": p.reference, "columns": dict(sorted(p.columns.items()))}
        for p in held_out
    ]
    return {REWARD: judging.hexdigest()[:16], HELD_OUT: digest_of(records)}


def warn_of_changes(before: Mapping[str, str] | None, now: Mapping[str, str], where: Path) -> None:
    """Log a warning for each digest that has changed since a checkpoint was written; None: it has
    no digests."""
    changed = [name for name, text in now.items() if (before or now).get(name, text) != text]
    for name in changed:
        log.warning(
            "%s: resumed with another %s than before: metrics from now on cannot be compared with "
            "earlier ones. Resume with the same %s if that is not intended.",
            where,
            name,
            name,
        )


def _judging(config: Config, task: Task) -> Iterator[str]:
    """Yield texts that change with the graders."""
    weights = config.reward.weights if config.reward.function is not None else {}
    yield repr([*weights.values()])
    process = config.reward.process
    for name in (*weights, "" if process is None else process.function):
        path, _, function = name.rpartition(":")
        file = Path(path)
        if is_own(name) and file.is_file():
            yield f"{function} {hashlib.sha256(file.read_bytes()).hexdigest()}"
        else:
            yield name
    for judge in (*task.rewards, task.environment, task.game, task.program):
        if judge is not None:
            yield "\n".join(code_of(judge))


def code_of(thing: Any, seen: set[int] | None = None) -> Iterator[str]:
    """Yield texts that change with the code of a function, a method, a class or an object that can
    be called, and with the constants and functions of its module that it uses.

    seen: ids of functions and classes that were yielded already.
    """
    seen = set() if seen is None else seen
    if (constant := _constant(thing)) is not None:
        yield constant
    elif inspect.ismethod(thing):
        yield from code_of(thing.__func__, seen)
    elif isinstance(thing, FunctionType | type):
        if id(thing) not in seen:
            seen.add(id(thing))
            yield from _class(thing, seen) if isinstance(thing, type) else _function(thing, seen)
    elif hasattr(thing, "func") and hasattr(thing, "keywords"):  # functools.partial
        yield from _constants([*thing.args, *thing.keywords.items()])
        yield from code_of(thing.func, seen)
    elif callable(thing):
        yield from code_of(type(thing), seen)
        yield from _constants(sorted(getattr(thing, "__dict__", {}).items()))
    if (wrapped := getattr(thing, "__wrapped__", None)) is not None:  # by a decorator
        yield from code_of(wrapped, seen)


def _class(kind: type, seen: set[int]) -> Iterator[str]:
    yield kind.__qualname__
    for name, value in sorted(vars(kind).items()):
        value = getattr(value, "__func__", value)
        if isinstance(value, FunctionType):
            yield from code_of(value, seen)
        elif not name.startswith("__"):
            yield from _constants([(name, value)])


def _function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    yield function.__qualname__.rpartition(".")[2]
    names = list(_code(function.__code__))
    yield repr(names)
    yield from _constants([*(function.__defaults__ or ())])
    yield from _constants(sorted((function.__kwdefaults__ or {}).items()))
    used = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    used += [function.__globals__[n] for n in sorted({*names} & function.__globals__.keys())]
    for value in used:
        own = getattr(value, "__module__", None) == function.__module__
        if _constant(value) is not None or (own and isinstance(value, FunctionType | type)):
            yield from code_of(value, seen)


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _code(code: CodeType) -> Iterator[str]:
    """Yield names, constants and instructions of a function's code and its inner functions, without
    lines, files and docstrings."""
    yield code.co_code.hex()
    yield from code.co_names
    for index, constant in enumerate(code.co_consts):
        if isinstance(constant, CodeType):
            yield from _code(constant)
        elif index or not _has_docstring(code):
            yield _constant(constant) or repr(constant)
        else:
            yield repr(None)  # as in a function without one


def _has_docstring(code: CodeType) -> bool:
    """Return whether a code's first constant is its docstring."""
    if sys.version_info >= (3, 14):
        return bool(code.co_flags & 0x4000000)  # CO_HAS_DOCSTRING
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
    return bool(is_function) and isinstance(code.co_consts[0], str)


def _constants(values: Sequence[object]) -> Iterator[str]:
    """Yield the texts of the values that are constants."""
    yield repr([text for value in values if (text := _constant(value)) is not None])


def _constant(value: object) -> str | None:
    """Return a text of a value, equal in each process; None if it is not a constant."""
    if isinstance(value, tuple | list | set | frozenset):
        parts = [_constant(part) for part in value]
        if isinstance(value, set | frozenset):  # whose order differs between processes
            parts.sort(key=str)
        return None if None in parts else f"{type(value).__name__} {parts}"
    if isinstance(value, dict):
        items = _constant(list(value.items()))
        return None if items is None else f"dict {items}"
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, re.Pattern):  # whose repr is cut
        return f"re {value.pattern!r} {value.flags}"
    plain = value is None or isinstance(value, str | bytes | int | float | bool | np.generic)
    return repr(value) if plain else None
