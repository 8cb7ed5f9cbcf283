"""The fields of a configuration: found by key path, and described in words. Needs no JAX."""

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from jaxrl_async.config.draft import KeyPath
from jaxrl_async.config.schema import Choice, Choices, Config
from jaxrl_async.config.section import MAX_WHOLE, Section
from jaxrl_async.config.several import section_of


def all_paths(section: type[Section], path: KeyPath) -> Iterator[tuple[KeyPath, bool]]:
    """Yield every key path and whether it is a section."""
    for name, target in section.model_fields.items():
        yield (*path, name), is_section(target)
        inner = section_of(target)
        if inner is not None:
            yield from all_paths(inner, (*path, name))


def field_at(path: KeyPath) -> FieldInfo | None:
    """Return the field at a key path, or None."""
    section: type[Section] | None = Config
    target, named = None, None
    for key in path:
        if named is not None:  # the key is a name that the user chose
            target = FieldInfo(annotation=named)
        elif section is None:
            return None
        else:
            target = section.model_fields.get(key)
        section = section_of(target) if target is not None else None
        named = named_section(target) if target is not None else None
    return target


def known_prefix(path: KeyPath) -> KeyPath:
    while path and field_at(path) is None:
        path = path[:-1]
    return path


def _is_section_type(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def named_section(target: FieldInfo) -> type[Section] | None:
    """Return the section that a field holds by names that the user chooses; None: it holds none."""
    for kind in alternatives(target.annotation):
        if get_origin(kind) is dict and _is_section_type(get_args(kind)[1]):
            named: type[Section] = get_args(kind)[1]
            return named
    return None


def is_in_named(path: KeyPath) -> bool:
    """Return whether a key path leads into a section that has a name of the user's."""
    outer = (field_at(path[:length]) for length in range(1, len(path) - 1))
    return any(target is not None and named_section(target) is not None for target in outer)


def is_section(target: FieldInfo | None) -> bool:
    return target is not None and section_of(target) is not None


def is_choice(target: FieldInfo | None) -> bool:
    choices = (Choice, Choice | None, Choices, Choices | None)
    return target is not None and target.annotation in choices


def is_below_choice(path: KeyPath) -> bool:
    prefix = known_prefix(path)
    return bool(prefix) and len(path) - len(prefix) <= 2 and is_choice(field_at(prefix))


def alternatives(kind: object) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def may_be_null(kind: object) -> bool:
    return type(None) in alternatives(kind)


def is_text(kind: object) -> bool:
    rest = [k for k in alternatives(kind) if k is not type(None)]
    return len(rest) == 1 and (rest[0] is str or get_origin(rest[0]) is Literal)


def allowed_text(target: FieldInfo) -> str:
    """Describe type, range and choices in words: "a whole number >= 1 or null"."""
    if is_choice(target):
        single = (Choice, Choice | None)
        listed = ", or a list of these" * (target.annotation not in single)
        null = ", or null" * may_be_null(target.annotation)
        return "a name or {name: {argument: value}}" + listed + null
    return _kind(target.annotation, target.metadata)


def _kind(kind: Any, limits: Sequence[Any]) -> str:
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        return _kind(
            inner, [m for n in notes for m in (n.metadata if isinstance(n, FieldInfo) else [n])]
        )
    if len(alternatives(kind)) > 1:
        return " or ".join(
            _kind(k, limits if k is not type(None) else ()) for k in alternatives(kind)
        )
    if kind is type(None):
        return "null"
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        each = "a name or {name: {argument: value}}" if item == Choice else _kind(item, ())
        return f"a list, each {each}"
    if get_origin(kind) is dict:
        is_named = _is_section_type(get_args(kind)[1])
        if get_origin(get_args(kind)[1]) is dict:
            return "{name: settings by section, or a file of them}"
        return "{name: {setting: value}}" if is_named else "{name: value}, both text"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(kind))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return " ".join([words.get(kind, str(kind)), *_range(limits)])


def _range(limits: Sequence[Any]) -> list[str]:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in limits
        for name, sign in signs.items()
        if getattr(limit, name, None) not in (None, MAX_WHOLE)  # which is not mentioned
    ]
    patterns = [f"like {limit.pattern}" for limit in limits if getattr(limit, "pattern", None)]
    return [" and ".join(bounds)] * bool(bounds) + patterns


def default_text(target: FieldInfo) -> str:
    if target.is_required():
        return "required"
    return value_text(target.get_default(call_default_factory=True))


def value_text(value: object) -> str:
    """Return a value as YAML on one line."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(
        value,
        default_flow_style=True,
        default_style=style,
        width=10**6,
        allow_unicode=True,
        sort_keys=False,
    )
    return text.removesuffix("...\n").strip()
