"""Hints about settings that are written as in TRL, Tunix or verl."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_async.config.peers.counterpart import (
    DEVICES,
    KEEP,
    RECORDS,
    NoCounterpart,
    Peer,
    flat_fields,
    is_plain,
)
from jaxrl_async.config.peers.trl_fields import TRL
from jaxrl_async.config.peers.tunix_fields import TUNIX
from jaxrl_async.config.peers.verl_fields import VERL
from jaxrl_async.config.schema import Config
from jaxrl_async.config.setting_fields import value_text

PEERS = (TRL, TUNIX, VERL)
NO_VALUE = object()
"""In place of a value that is unknown."""
SHOWN_CHARS = 200
"""Longer values are not shown."""


def setting_text(path: str, value: object) -> str:
    """Return a setting as an override; without its value if YAML cannot write it shortly."""
    if not is_plain(value):
        return path
    text = value_text(value)
    return f"{path}={text}" if len(text) <= SHOWN_CHARS else path


def peer_hint(
    dotted: str,
    value: object = NO_VALUE,
    settings: Mapping[str, object] | None = None,
    written: Callable[[str, Any], str] = setting_text,
    *,
    whole_name: bool = False,
) -> str | None:
    """Return what a setting of another library is called here, with its converted value.

    Args:
        dotted: the setting, as it was written.
        value: its value there, which is converted.
        settings: all settings that were written, by section and name; those of the same library
            count in conversions that depend on several.
        written: writes a setting here, by key path, and its value.
        whole_name: find only a library's settings of this whole name, sections included.

    None: none of the libraries has it.
    """
    named = [(peer, name) for peer in PEERS if (name := _name_in(peer, dotted, whole_name))]
    names: dict[tuple[str, str], list[str]] = {}
    for peer, name in named:
        text = _hint_text(peer, name, value, dict(flat_fields(settings or {})), written)
        names.setdefault((name, text), []).append(f"{peer.name}'s")
    return "; ".join(f"{_joined(of)} {name} {text}" for (name, text), of in names.items()) or None


USUAL: Mapping[str, tuple[str, ...]] = {
    "lr": ("algorithm.learning_rate",),
    "batch_size": ("algorithm.groups_per_step", "algorithm.group_size"),
    "n_samples": ("algorithm.group_size",),
    "num_samples": ("algorithm.group_size",),
    "num_epochs": ("run.steps",),
    "n_epochs": ("run.steps",),
    "rank": ("model.lora.rank",),
    "max_tokens": ("sampler.max_new_tokens",),
}
"""Names that many programs use, and the settings that mean it here."""
UNITS: Mapping[str, str] = {
    "algorithm.groups_per_step": "prompts of an update",
    "algorithm.group_size": "answers to a prompt",
    "run.steps": "updates",
}
"""What these settings count."""


def usual_hint(
    dotted: str,
    value: object = NO_VALUE,
    written: Callable[[str, Any], str] = setting_text,
) -> str | None:
    """Return what a usual name is called here; None: it is not one of USUAL, or of an evaluation,
    which these settings are not about. See peer_hint."""
    paths = USUAL.get(dotted.rpartition(".")[2])
    if paths is None or dotted.partition(".")[0] in ("eval", "evals"):
        return None

    def setting_hint(path: str) -> str:
        if path in UNITS:
            return f"{written(path, 0).partition('=')[0]} ({UNITS[path]})"
        return path if value is NO_VALUE else written(path, value)

    return f"it is {_joined([setting_hint(path) for path in paths])} here"


def _name_in(peer: Peer, dotted: str, whole_name: bool) -> str | None:
    """Return a library's field by the name that was written, or by the last part of it."""
    if peer.find(dotted) is not None or any(n.startswith(f"{dotted}.") for n in peer.fields):
        return dotted if "." in dotted or dotted not in Config.model_fields else None
    last = dotted.rpartition(".")[2]
    if whole_name:
        return None
    if last in peer.fields or last in peer.arguments:
        return last
    below = [name for name in peer.fields if name.endswith(f".{last}")]
    return below[0] if len(below) == 1 and "." not in dotted else None


def _hint_text(
    peer: Peer,
    name: str,
    value: object,
    settings: Mapping[str, object],
    written: Callable[[str, Any], str],
) -> str:
    known = peer.find(name)
    if known is None or (isinstance(value, Mapping) and not known.settings):
        return "is a section there: jaxrl-async convert FILE converts a whole file"
    if known.reason:
        return f"has no counterpart: {known.reason}"
    has_value = value is not NO_VALUE
    fields = {n: f.default for n, f in {**peer.fields, **peer.arguments}.items()}
    fields |= {n: True for setting in known.settings for n in setting.switches}
    fields |= {n: v for n, v in settings.items() if n in peer.fields}
    fields |= {DEVICES: 1, RECORDS: None} | ({name: value} if has_value else {})
    single = [setting for setting in known.settings if not setting.joint]
    parts = []
    for setting in single or known.settings:
        if setting.path.endswith("="):
            parts.append(setting.path)
            continue
        try:
            own = fields[name] if setting.value is None else setting.value(fields)
        except NoCounterpart as error:
            return f"has no counterpart: {error}"
        except (TypeError, ValueError, KeyError, AttributeError):  # a value of another kind
            has_value, own = False, None
        if own is not KEEP:
            parts.append(written(setting.path, own) if has_value else setting.path)
    if not parts:
        return "needs no counterpart: leave it out"
    others = "" if single or not has_value else f", with what else is given of {peer.name}'s"
    return f"is {' and '.join(parts)} here{others}"


def _joined(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
