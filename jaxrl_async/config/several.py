"""Several runs in one configuration (`runs`): the separate configuration of each.

    all other sections ──────────────┐
    runs.NAME: differences ──merged──┴──> the configuration of the run NAME

A section is merged setting by setting; a choice with its arguments, a list and a table are replaced
whole. Needs no JAX.
"""

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic.fields import FieldInfo

from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import Section

Settings = dict[str, Any]


def section_of(target: FieldInfo) -> type[Section] | None:
    """Return the section of a field, even if it may be null; None: the field is a setting."""
    kinds = [kind for kind in get_args(target.annotation) if kind is not NoneType]
    kind = kinds[0] if len(kinds) == 1 and is_optional(target) else target.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def is_optional(target: FieldInfo) -> bool:
    """Return whether a field may be null."""
    return NoneType in get_args(target.annotation)


def _inner(section: type[Section], key: object) -> type[Section] | None:
    target = section.model_fields.get(key) if isinstance(key, str) else None
    return None if target is None else section_of(target)


def merged(
    shared: Mapping[Any, object], own: Mapping[Any, object], section: type[Section] = Config
) -> Settings:
    """Return the settings of a section, with `own` in place of the shared ones."""
    tree = dict(shared)
    for key, value in own.items():
        inner, before = _inner(section, key), tree.get(key)
        if inner is not None and isinstance(before, Mapping) and isinstance(value, Mapping):
            value = merged(before, value, inner)
        tree[key] = value
    return tree


def differences(
    shared: Mapping[str, Any], own: Mapping[str, Any], section: type[Section] = Config
) -> Settings:
    """Return the settings of `own` that differ: `merged` restores `own` from them. Both are
    complete (model_dump)."""
    different: Settings = {}
    for key, value in own.items():
        inner = _inner(section, key)
        before = shared[key]
        if inner is not None and before is not None and value is not None:
            value, before = differences(before, value, inner), {}
        if value != before:
            different[key] = value
    return different


def folders_of(config: Config) -> dict[str, Path]:
    """Return the folder of each of several runs, by name."""
    root = Path(config.run.dir) / config.run.name
    return {name: root / name for name in config.runs}


def runs_of(config: Config) -> dict[str, Config]:
    """Return the configuration of each run by name, with DIR/NAME/OWN NAME as its folder. Raises
    pydantic's ValidationError for settings that have not been through `load`."""
    shared = config.model_dump(exclude={"runs"})
    folder = {"dir": str(Path(config.run.dir) / config.run.name), "overwrite": False}
    return {
        name: Config.model_validate(merged(merged(shared, own), {"run": {**folder, "name": name}}))
        for name, own in config.runs.items()
    }
