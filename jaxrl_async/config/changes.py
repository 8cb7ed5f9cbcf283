"""Differences between an earlier run's settings and the current ones. Needs no JAX."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_async.config.former import OFF, renewed_table
from jaxrl_async.config.load import flattened
from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import Section
from jaxrl_async.config.several import section_of


class Change(NamedTuple):
    """A setting that differs; None: absent."""

    name: str  # dotted
    before: Any
    now: Any


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the differences between two tables of settings by dotted names, as YAML or JSON gives
    them.

    `before` may be of an older version: missing settings have their defaults, and renamed ones are
    read by their current names. A section that is null now differs by its main setting.
    """
    before, defaults = renewed_table(before), _defaults()
    null = tuple(f"{section}." for section in OFF if section in now and now[section] is None)
    main = {f"{section}.{key}" for section, (key, _) in OFF.items()}
    for name in sorted(before.keys() | now.keys()):
        if name.startswith(null) and name not in main:
            continue
        was = before[name] if name in before else defaults.get(name)
        if was != now.get(name):
            yield Change(name, was, now.get(name))


def _defaults() -> dict[str, Any]:
    """Return the defaults of all settings by dotted names, of those in null sections, too."""
    found = flattened(Config().model_dump(mode="json"))
    for section in OFF:
        kind: type[Section] | None = Config
        for name in section.split("."):
            assert kind is not None
            kind = section_of(kind.model_fields[name])
        assert kind is not None
        inner = kind.model_construct().model_dump(mode="json")  # without what has no default
        found |= flattened(inner, f"{section}.")
    return found
