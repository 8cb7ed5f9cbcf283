"""Settings that version 0.3 wrote differently: accepted for one more version, with a warning. Needs
no JAX."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NAMES: Mapping[str, str] = {
    "algorithm.least_members": "algorithm.min_members",
    "endpoint.outsider_key_variable": "endpoint.agent_key_variable",
    "endpoint.outsider_tries": "endpoint.agent_tries",
    "endpoint.outsiders": "endpoint.external_agents",
    "eval.beside": "eval.asynchronous",
    "remote.least": "remote.min_samplers",
    "teacher.top_of": "teacher.top_k_of",
}
"""Settings by their former names."""
OFF: Mapping[str, tuple[str, Any]] = {
    "algorithm.pivots": ("continuations", 0),
    "metrics.mlflow": ("experiment", None),
    "metrics.trackio": ("project", None),
    "metrics.wandb": ("project", None),
    "model.lora": ("rank", 0),
    "pairs": ("loss", None),
    "reward.judge": ("model", None),
    "reward.process": ("function", None),
    "teacher": ("source", "none"),
}
"""Sections that are null now: the setting and the value by which they were formerly turned off."""
VALUES: Mapping[str, Mapping[str, str]] = {
    "mesh.samplers_in": {"elsewhere": "external"},
    "sampler.engine": {"ours": "native"},
}
"""Former values by setting (its current name), each with its current value."""


class Renewed(NamedTuple):
    """A setting by its current name, with its current value."""

    name: str  # dotted
    value: Any


def renewed(name: str, value: Any) -> Renewed:
    """Return the current form of a setting, given by its dotted name."""
    name = NAMES.get(name, name)
    if isinstance(value, str):
        value = VALUES.get(name, {}).get(value, value)
    return Renewed(name, value)


def renewed_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current form of settings by dotted names."""
    now = dict(renewed(*one) for one in table.items())
    for section, (key, off) in OFF.items():
        switch = f"{section}.{key}"
        if switch in now and now[switch] == off:
            now = {name: v for name, v in now.items() if not name.startswith(f"{section}.")}
            now[section] = None
    return now


def renew(tree: dict[str, Any]) -> dict[str, str]:
    """Replace former names and values of settings in nested sections; return the current form
    (name=value) of each replaced setting, by its dotted name as written. If the current name is
    given as well, its value is used."""
    replaced: dict[str, str] = {}
    for section, (key, off) in OFF.items():
        *outer, name = section.split(".")
        holder = _inner(tree, outer)
        settings = holder.get(name)
        if isinstance(settings, dict) and key in settings and settings[key] == off:
            holder[name] = None
            replaced[f"{section}.{key}"] = f"{section}=null"
    for written in (*NAMES, *VALUES):
        section, _, key = written.rpartition(".")
        settings = _inner(tree, section.split("."))
        if key not in settings:
            continue
        now = renewed(written, settings[key])
        if now == (written, settings[key]):
            continue
        del settings[key]
        settings.setdefault(now.name.rpartition(".")[2], now.value)
        replaced[written] = f"{now.name}={now.value}"
    return replaced


def _inner(tree: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a section in nested ones; empty if the section is missing."""
    for name in path:
        inner = tree.get(name)
        tree = inner if isinstance(inner, dict) else {}
    return tree
