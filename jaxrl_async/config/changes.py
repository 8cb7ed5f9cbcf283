"""Differences between an earlier run's settings and the current ones. Needs no JAX."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_async.config.former import renewed_table
from jaxrl_async.config.load import flattened
from jaxrl_async.config.schema import Config


class Change(NamedTuple):
    """A setting that differs; None: absent."""

    name: str  # dotted
    before: Any
    now: Any


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the differences between two tables of settings by dotted names, as YAML or JSON gives
    them.

    `before` may be of an older version: missing settings have their defaults, and renamed ones are
    read by their current names.
    """
    defaults = flattened(json.loads(Config().model_dump_json()))
    before = renewed_table(before)
    for name in sorted(before.keys() | now.keys()):
        was = before[name] if name in before else defaults.get(name)
        if was != now.get(name):
            yield Change(name, was, now.get(name))
