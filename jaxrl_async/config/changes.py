"""Differences between an earlier run's settings and the current ones. Needs no JAX."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_async.config.load import flattened
from jaxrl_async.config.renamed_settings import OFF, rename_settings, turn_off
from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import Section
from jaxrl_async.config.several import is_optional, section_of
from jaxrl_async.config.unused import OPTIONAL

READ_ANYWAY = tuple(f"{name}." for name in OPTIONAL)
"""Sections that have their defaults where they are null."""


class Change(NamedTuple):
    """A setting that differs; None: absent."""

    name: str  # dotted
    before: Any
    now: Any


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[Change]:
    """Yield the differences between two tables of settings by dotted names, as YAML or JSON gives
    them.

    `before` may be of an older version: missing settings have their defaults, and renamed ones are
    read by their current names. A section that is null now differs by its main setting.
    """
    before, defaults = _current_form(before), _defaults()
    null = tuple(f"{name}." for name in _optional() if name in now and now[name] is None)
    now = {**{name: d for name, d in defaults.items() if name.startswith(READ_ANYWAY)}, **now}
    switched = tuple(f"{section}." for section in OFF)
    main = {f"{section}.{key}" for section, (key, _) in OFF.items()}
    for name in sorted(before.keys() | now.keys()):
        was = before[name] if name in before else defaults.get(name)
        is_main = name in main if name.startswith(switched) else was != defaults.get(name)
        if name.startswith(null) and not is_main and not name.startswith(READ_ANYWAY):
            continue
        if was != now.get(name):
            yield Change(name, was, now.get(name))


def _current_form(table: Mapping[str, object]) -> dict[str, Any]:
    """Return the current form of settings by dotted names."""
    tree: dict[str, Any] = {}
    for dotted, value in table.items():
        inner, (*sections, name) = tree, dotted.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    rename_settings(tree)
    turn_off(tree)
    return flattened(tree)


def _optional(section: type[Section] = Config, path: str = "") -> dict[str, type[Section]]:
    """Return the sections that may be null, by dotted names."""
    sections: dict[str, type[Section]] = {}
    for name, target in section.model_fields.items():
        if (inner := section_of(target)) is None:
            continue
        if is_optional(target):
            sections[f"{path}{name}"] = inner
        sections |= _optional(inner, f"{path}{name}.")
    return sections


def _defaults() -> dict[str, Any]:
    """Return the defaults of all settings by dotted names, of those in null sections, too."""
    defaults = flattened(Config().model_dump(mode="json"))
    for name, kind in _optional().items():
        inner = kind.model_construct().model_dump(mode="json")  # without what has no default
        defaults |= flattened(inner, f"{name}.")
    return defaults
