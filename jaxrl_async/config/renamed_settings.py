"""Settings that version 0.3 wrote differently: accepted for one more version, with a warning. Needs
no JAX."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_async.config.draft import shown
from jaxrl_async.config.offline_section import PreferenceSection

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


REPLACED: Mapping[str, str] = {
    "data.source": "data.addition={} or data.jsonl.path=FILE",
    "endpoint.enabled": "endpoint={}",
    "preference.margin": "reward_model.margin",
}
"""Former switches, and how the section that is chosen now is given instead."""
SWITCHED_SECTIONS = (("endpoint",), ("data", "addition"), ("data", "jsonl"))
"""Sections that these switches make null."""


class CurrentSetting(NamedTuple):
    """A setting by its current name, with its current value."""

    name: str  # dotted
    value: Any


class ReplacedSetting(NamedTuple):
    """A setting that was written in a former way."""

    written: str  # its name there, dotted
    current: str  # its current name
    warning: str


def current_form(name: str, value: object) -> CurrentSetting:
    """Return the current form of a setting, given by its dotted name."""
    name = NAMES.get(name, name)
    if isinstance(value, str):
        value = VALUES.get(name, {}).get(value, value)
    return CurrentSetting(name, value)


def turns_off(name: str, value: object) -> bool:
    """Return whether this value of a setting, given by its dotted name, turned its section off."""
    off = any(name == f"{section}.{key}" and value == was for section, (key, was) in OFF.items())
    return off and not isinstance(value, bool)  # False == 0


def current_name(name: str) -> str | None:
    """Return how a former setting is written now; None: it is not one."""
    return NAMES.get(name) or REPLACED.get(name)


def rename_settings(tree: dict[str, object]) -> list[ReplacedSetting]:
    """Replace former names and values of settings in nested sections; return those replaced. If
    the current name is given as well, its value is used. Settings of several sources are renamed in
    each source before they are merged, so that the later source counts."""
    replaced: list[ReplacedSetting] = []
    for written in (*NAMES, *VALUES):
        section, _, key = written.rpartition(".")
        settings = _inner(tree, section.split("."))
        if key not in settings:
            continue
        current = current_form(written, settings[key])
        if current == (written, settings[key]):
            continue
        del settings[key]
        warning = f"{written} is now written {current.name}={_written(current.value)}"
        key = current.name.rpartition(".")[2]
        if key in settings:
            now = f"it is now written {current.name}, which is given, too"
            warning = f"{written} is not read: {now}"
        settings.setdefault(key, current.value)
        replaced.append(ReplacedSetting(written, current.name, warning))
    return [*replaced, *_renew_source(tree), *_renew_endpoint(tree), *_move_margin(tree)]


def _renew_source(tree: dict[str, object]) -> list[ReplacedSetting]:
    """Make null the source of prompts that data.source does not name."""
    data = _inner(tree, ["data"])
    source = data.get("source")
    if source not in ("addition", "jsonl"):
        return []
    del data["source"]
    other = "jsonl" if source == "addition" else "addition"
    if not isinstance(data.get(source), dict):
        data[source] = {}
    records = data.get("jsonl")
    if other == "jsonl" and _inner(tree, ["warm_start"]).get("path") and isinstance(records, dict):
        data["jsonl"] = {k: v for k, v in records.items() if k not in ("path", "eval_path")}
        warning = "data.source=addition is now written data.addition={}, without data.jsonl.path"
    else:
        data[other] = None
        current = "data.addition={}" if source == "addition" else "data.jsonl.path=FILE"
        warning = f"data.source={source} is now written {current}, with data.{other}=null"
    return [ReplacedSetting("data.source", f"data.{source}", warning)]


def _renew_endpoint(tree: dict[str, object]) -> list[ReplacedSetting]:
    """Make the endpoint null where endpoint.enabled turned it off, unless its settings were read
    nevertheless: for a task's program or external agents."""
    endpoint = _inner(tree, ["endpoint"])
    on = endpoint.get("enabled")
    if not isinstance(on, bool):
        return []
    del endpoint["enabled"]
    if not on and not (tree.get("task") or endpoint.get("external_agents")):
        tree["endpoint"] = None
    now = "null" if tree["endpoint"] is None else "{...}, without enabled" if endpoint else "{}"
    warning = f"endpoint.enabled={_written(on)} is now written endpoint={now}"
    return [ReplacedSetting("endpoint.enabled", "endpoint", warning)]


def _move_margin(tree: dict[str, object]) -> list[ReplacedSetting]:
    """Move the margin of a reward model to the section of its own."""
    settings = _inner(tree, ["preference"])
    if "margin" not in settings:
        return []
    return [_moved_to_reward_model(tree, "margin", settings.pop("margin"))]


def _move_size(tree: dict[str, object]) -> list[ReplacedSetting]:
    """Move the batch size of run.job=reward_model to the section of its own."""
    settings, own = _inner(tree, ["preference"]), tree.get("reward_model") or {}
    of_job = _inner(tree, ["run"]).get("job") == "reward_model"
    if not of_job or "batch_size" not in settings or not isinstance(own, dict):
        return []
    if "batch_size" in own and settings == PreferenceSection().model_dump():
        return []  # the defaults of the other job, as a run's config.yaml has them
    return [_moved_to_reward_model(tree, "batch_size", settings.pop("batch_size"))]


def _moved_to_reward_model(tree: dict[str, object], name: str, value: object) -> ReplacedSetting:
    """Write a former setting of preference into reward_model, unless that has it."""
    section = tree.get("reward_model")
    own = section if isinstance(section, dict) else {}
    was, now = f"preference.{name}", f"reward_model.{name}"
    warning = f"{was} is now written {now}={_written(value)}"
    if name in own:
        warning = f"{was} is not read: it is now written {now}, which is given, too"
    tree["reward_model"] = {name: value, **own}
    return ReplacedSetting(was, now, warning)


def turn_off(tree: dict[str, object]) -> list[ReplacedSetting]:
    """Make null the nested sections that were turned off in a former way, and move what depends on
    the job; return these. This comes last, since a later source may turn a section on and keep the
    other settings."""
    replaced = _move_size(tree)
    for section, (key, _) in OFF.items():
        *outer, name = section.split(".")
        holder = _inner(tree, outer)
        settings, switch = holder.get(name), f"{section}.{key}"
        if isinstance(settings, dict) and key in settings and turns_off(switch, settings[key]):
            warning = f"{switch}={_written(settings[key])} is now written {section}=null"
            holder[name] = None
            replaced.append(ReplacedSetting(switch, section, warning))
    if tree.get("seats") == {}:
        tree["seats"] = None
        replaced.append(ReplacedSetting("seats", "seats", "seats={} is now written seats=null"))
    return replaced


def _written(value: object) -> str:
    """Return a value for a message, a text without quotes."""
    return value if isinstance(value, str) else shown(value)


def _inner(tree: dict[str, object], path: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a section in nested ones; empty if the section is missing."""
    for name in path:
        inner = tree.get(name)
        tree = inner if isinstance(inner, dict) else {}
    return tree
