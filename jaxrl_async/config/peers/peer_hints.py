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
NOT_GIVEN = object()
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
    value: object = NOT_GIVEN,
    given: Mapping[str, object] | None = None,
    written: Callable[[str, Any], str] = setting_text,
    *,
    whole_name: bool = False,
) -> str | None:
    """Return what a setting of another library is called here, with its converted value.

    Args:
        dotted: the setting, as it was written.
        value: its value there, which is converted.
        given: all settings that were written, by section and name; those of the same library
            count in conversions that depend on several.
        written: writes a setting here, by key path, and its value.
        whole_name: find only a library's settings of this whole name, sections included.

    None: none of the libraries has it.
    """
    named = [(peer, name) for peer in PEERS if (name := _name_in(peer, dotted, whole_name))]
    told: dict[tuple[str, str], list[str]] = {}
    for peer, name in named:
        text = _told(peer, name, value, dict(flat_fields(given or {})), written)
        told.setdefault((name, text), []).append(f"{peer.name}'s")
    return "; ".join(f"{_joined(of)} {name} {text}" for (name, text), of in told.items()) or None


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
    value: object = NOT_GIVEN,
    written: Callable[[str, Any], str] = setting_text,
) -> str | None:
    """Return what a usual name is called here; None: it is not one of USUAL, or of an evaluation,
    which these settings are not about. See peer_hint."""
    paths = USUAL.get(dotted.rpartition(".")[2])
    if paths is None or dotted.partition(".")[0] in ("eval", "evals"):
        return None

    def told(path: str) -> str:
        if path in UNITS:
            return f"{written(path, 0).partition('=')[0]} ({UNITS[path]})"
        return path if value is NOT_GIVEN else written(path, value)

    return f"it is {_joined([told(path) for path in paths])} here"


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


def _told(
    peer: Peer,
    name: str,
    value: object,
    given: Mapping[str, object],
    written: Callable[[str, Any], str],
) -> str:
    one = peer.find(name)
    if one is None or (isinstance(value, Mapping) and not one.settings):
        return "is a section there: jaxrl-async convert FILE converts a whole file"
    if one.reason:
        return f"has no counterpart: {one.reason}"
    known = value is not NOT_GIVEN
    fields = {n: f.default for n, f in {**peer.fields, **peer.arguments}.items()}
    fields |= {n: True for setting in one.settings for n in setting.switches}
    fields |= {n: v for n, v in given.items() if n in peer.fields}
    fields |= {DEVICES: 1, RECORDS: None} | ({name: value} if known else {})
    single = [setting for setting in one.settings if not setting.joint]
    parts = []
    for setting in single or one.settings:
        if setting.path.endswith("="):
            parts.append(setting.path)
            continue
        try:
            own = fields[name] if setting.value is None else setting.value(fields)
        except NoCounterpart as error:
            return f"has no counterpart: {error}"
        except (TypeError, ValueError, KeyError, AttributeError):  # a value of another kind
            known, own = False, None
        if own is not KEEP:
            parts.append(written(setting.path, own) if known else setting.path)
    if not parts:
        return "needs no counterpart: leave it out"
    others = "" if single or not known else f", with what else is given of {peer.name}'s"
    return f"is {' and '.join(parts)} here{others}"


def _joined(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
