"""Digests of what judges the answers of a run, and of its held-out records.

A checkpoint holds them, and a resumed run logs which have changed.
"""

import hashlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

from jaxrl_async.config.schema import Config
from jaxrl_async.config.userfile import is_own
from jaxrl_async.data.survey import digest_of
from jaxrl_async.tasks.task import Task
from jaxrl_async.types import Prompt

log = logging.getLogger(__name__)

REWARD, HELD_OUT = "reward", "held-out records"


def inputs_digest(config: Config, task: Task, held_out: tuple[Prompt, ...]) -> dict[str, str]:
    """Return the digest of each of them, by a name for people.

    Functions count by their code and by the functions and constants of their module that they use,
    files of the user's by their bytes, built-in graders by their names.
    """
    judging = hashlib.sha256()
    for text in _judging(config, task):
        judging.update(text.encode() + b"\0")
    kept = [
        {"text": p.text, "reference": p.reference, "columns": dict(sorted(p.columns.items()))}
        for p in held_out
    ]
    return {REWARD: judging.hexdigest()[:16], HELD_OUT: digest_of(kept)}


def tell_of_changes(before: Mapping[str, str] | None, now: Mapping[str, str], where: Path) -> None:
    """Log a warning of each digest that was another when a checkpoint was written; None: it has
    none."""
    changed = [name for name, text in now.items() if (before or now).get(name, text) != text]
    for name in changed:
        log.warning(
            "%s: resumed with another %s than before: what is measured from now on cannot be "
            "compared with what was. Resume with the same %s if that is not meant.",
            where,
            name,
            name,
        )


def _judging(config: Config, task: Task) -> Iterator[str]:
    """Yield texts that change with what judges the answers."""
    names = [*config.reward.weights] if config.reward.function is not None else []
    for name in (*names, config.reward.process.function or ""):
        file = Path(name.rpartition(":")[0])
        readable = is_own(name) and file.is_file()
        yield (
            f"{name.rpartition(':')[2]} {hashlib.sha256(file.read_bytes()).hexdigest()}"
            if (readable)
            else name
        )
    for judge in (*task.rewards, task.environment, task.game, task.program):
        if judge is not None:
            yield "\n".join(code_of(judge))


def code_of(thing: Any, seen: set[int] | None = None) -> Iterator[str]:
    """Yield texts that change with the code of a function, a method, a class or an object that can
    be called, and with the constants and functions of its module that it uses.

    seen: ids of functions and classes that were yielded already.
    """
    seen = set() if seen is None else seen
    if _is_constant(thing):
        yield repr(thing)
    elif inspect.ismethod(thing):
        yield from code_of(thing.__func__, seen)
    elif isinstance(thing, FunctionType | type):
        thing = inspect.unwrap(thing)
        if id(thing) not in seen:
            seen.add(id(thing))
            yield from _class(thing, seen) if isinstance(thing, type) else _function(thing, seen)
    elif hasattr(thing, "func") and hasattr(thing, "keywords"):  # functools.partial
        yield repr([a for a in (*thing.args, *thing.keywords.items()) if _is_constant(a)])
        yield from code_of(thing.func, seen)
    elif callable(thing):
        yield from code_of(type(thing), seen)
        own = getattr(thing, "__dict__", {})
        yield repr(sorted((key, value) for key, value in own.items() if _is_constant(value)))


def _class(kind: type, seen: set[int]) -> Iterator[str]:
    yield kind.__qualname__
    for name, value in sorted(vars(kind).items()):
        value = getattr(value, "__func__", value)
        if isinstance(value, FunctionType):
            yield from code_of(value, seen)
        elif not name.startswith("__") and _is_constant(value):
            yield f"{name}={value!r}"


def _function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    yield function.__qualname__.rpartition(".")[2]
    names = list(_code(function.__code__))
    yield repr(names)
    yield repr([v for v in (function.__defaults__ or ()) if _is_constant(v)])
    used = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    used += [function.__globals__[n] for n in sorted({*names} & function.__globals__.keys())]
    for value in used:
        own = getattr(value, "__module__", None) == function.__module__
        if _is_constant(value) or (own and isinstance(value, FunctionType | type)):
            yield from code_of(value, seen)


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _code(code: CodeType) -> Iterator[str]:
    """Yield what a function's code consists of, its inner functions' too: names, constants,
    instructions; not lines and files."""
    yield code.co_code.hex()
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _is_constant(value: Any) -> bool:
    """Return whether the value's repr says all of it, in each process alike."""
    if isinstance(value, tuple | list):
        return all(map(_is_constant, value))
    if isinstance(value, dict):
        return all(_is_constant(k) and _is_constant(v) for k, v in value.items())
    pattern = type(value).__module__ == "re"
    return value is None or pattern or isinstance(value, str | bytes | int | float | bool)
