"""What the fields of another library's configuration are called here, and their values.

    given fields + the library's own defaults ──Setting.value──> our settings
                                              └─ NoCounterpart ─> fields without one, with reasons

Needs no JAX, and none of these libraries.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Fields = Mapping[str, Any]
"""All fields of a library's configuration by dotted name, defaults included, and DEVICES and
RECORDS."""
DEVICES, RECORDS = "*devices", "*records"
"""Number of devices that train, 1 if it is unknown; number of training records, or None."""
KEEP = object()
"""Value of a setting that keeps its default here."""
PROMPT_TOKENS = 512
"""Room for a prompt in sampler.max_length, tokens, for a library that does not bound prompts."""


class NoCounterpart(Exception):
    """A value without a counterpart here; the message is the reason, and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """A setting here that some of a library's fields determine."""

    path: str  # "algorithm.group_size", or "data=" for an argument of jaxrl_async.train
    value: Callable[[Fields], Any] | None = None  # None: the field's own value
    joint: bool = False  # several fields determine it
    switches: tuple[str, ...] = ()  # fields that a hint about one of the others takes as true


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerField:
    """A field of a library's configuration."""

    default: Any
    settings: tuple[Setting, ...] = ()
    reason: str = ""  # why there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library's configuration."""

    name: str
    fields: Mapping[str, PeerField]  # by dotted name
    sections: Mapping[str, str] = field(default_factory=dict)  # reasons for all fields below
    arguments: Mapping[str, PeerField] = field(default_factory=dict)  # of its trainer, in Python
    notes: Mapping[str, str] = field(default_factory=dict)  # by key path: what differs here

    def find(self, name: str) -> PeerField | None:
        """Return a field or an argument; None: the library has none of this name."""
        known = self.arguments.get(name) or self.fields.get(name)
        if known is not None:
            return known
        within = [s for s in self.sections if name == s or name.startswith(f"{s}.")]
        if not within:
            within = [s for s in self.sections if s.endswith("_") and name.startswith(s)]
        longest = max(within, key=len, default=None)
        return None if longest is None else PeerField(default=KEEP, reason=self.sections[longest])


def same(*paths: str) -> tuple[Setting, ...]:
    """Return the settings that take a field's value unchanged."""
    return tuple(Setting(path) for path in paths)


def without(reason: str, **defaults: object) -> dict[str, PeerField]:
    """Return fields that have no counterpart, with their defaults."""
    return {name: PeerField(default=d, reason=reason) for name, d in defaults.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConversion:
    """A library's configuration in our settings."""

    settings: dict[str, Any]  # by key path
    unconverted: dict[str, str]  # given fields without a counterpart, with the reasons


def converted(
    peer: Peer, values: Mapping[str, object], *, devices: int = 1, records: int | None = None
) -> PeerConversion:
    """Convert a configuration.

    Args:
        peer: the library.
        values: of the fields that are set, by dotted name. Others have the library's defaults,
            whose counterparts are settings, too.
        devices: number of devices that train there; a batch size may be for each.
        records: number of training records, for libraries that count epochs; None: unknown.
    """
    fields = {name: one.default for name, one in peer.fields.items()}
    fields |= {name: numeric(value, fields.get(name)) for name, value in values.items()}
    fields |= {DEVICES: devices, RECORDS: records}
    settings: dict[str, Any] = {}
    unconverted: dict[str, str] = {}
    failed: set[str] = set()  # paths
    for name, one in {**dict.fromkeys(values), **peer.fields}.items():
        known = one or peer.find(name)
        if known is None:
            unconverted[name] = f"{peer.name} has no field of this name"
        elif known.reason and name in values and not same_value(values[name], known.default):
            unconverted[name] = known.reason
        for setting in () if known is None else known.settings:
            if setting.path in settings or setting.path in failed:
                continue
            try:
                value = fields[name] if setting.value is None else setting.value(fields)
            except NoCounterpart as error:
                unconverted[name] = str(error)
                failed.add(setting.path)
                continue
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                unconverted[name] = (
                    f"{fields[name]!r:.80} is not a value that {setting.path} has ({error})"
                )
                failed.add(setting.path)
                continue
            if value is not KEEP:
                settings[setting.path] = value
    return PeerConversion(settings=settings, unconverted=unconverted)


def same_value(value: object, default: object) -> bool:
    """Return whether a field has its default. Empty values are equal; objects that a library made
    for an empty field count as it."""
    value = plain(value)
    if default is KEEP:
        return False
    if value is default or value == default:
        return True
    empty: tuple[Any, ...] = (None, False, "", [], {}, ())
    return default in empty and (value in empty or not is_plain(value))


def plain(value: object) -> Any:
    """Return an enumeration's value; any other value unchanged."""
    return value.value if isinstance(value, Enum) else value


def numeric(value: object, default: object) -> Any:
    """Return a text as a number where a field is one: YAML reads 1e-6 as a text."""
    if not isinstance(value, str) or isinstance(default, bool | str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if isinstance(default, int) and number.is_integer() else number


def is_plain(value: object) -> bool:
    """Return whether a value is one that a YAML file can hold."""
    if isinstance(value, Mapping):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def flat_fields(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of nested sections by dotted name; an empty section is none."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat_fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---- conversions that several libraries need


def whole(number: float) -> int:
    """Return a number as a whole one, rounded down. Raises NoCounterpart below 1."""
    if number < 1:
        raise NoCounterpart(f"it comes to {number:g}, and must be at least 1")
    return int(number)


def run_name(text: str) -> str:
    """Return a text as run.name: other characters than letters, digits, . _ - become -."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text)
    return name.lstrip(".")[:128] or "run"


def tracker(
    kind: str, listed: str, name: str, key: str, shown: str | None = None
) -> Callable[[Fields], Any]:
    """Return the conversion of a list of trackers to the section of one of them.

    Args:
        kind: the tracker.
        listed: the field with the list of trackers.
        name: the field with the project's name.
        key: the section's setting of the project.
        shown: the field with the run's name for wandb; None: the name is not converted.
    """

    def section(fields: Fields) -> Any:
        if kind not in trackers_in(fields[listed]):
            return KEEP
        settings = {key: str(fields[name] or "jaxrl_async")}
        return settings | ({"name": str(fields[shown])} if shown and fields[shown] else {})

    return section


def trackers_in(value: Any) -> list[str]:
    """Return the names in a field that takes one tracker, a list of them, or none."""
    names = [value] if isinstance(value, str) else list(value or ())
    return [str(plain(n)) for n in names if str(plain(n)) not in ("none", "None")]


def other_trackers(listed: str, known: tuple[str, ...]) -> Callable[[Fields], Any]:
    """Return a check that raises NoCounterpart for trackers that are not known here."""

    def check(fields: Fields) -> Any:
        others = [n for n in trackers_in(fields[listed]) if n not in known]
        if others:
            raise NoCounterpart(
                f"there is no tracker {', '.join(others)}; the section metrics has wandb, mlflow, "
                "trackio and tensorboard"
            )
        return KEEP

    return check


def chat_arguments(arguments: Mapping[str, object] | None) -> Any:
    """Return arguments of a chat template as data.chat_arguments. Raises NoCounterpart."""
    values = dict(arguments or {})
    if any(not isinstance(value, bool | int | float | str) for value in values.values()):
        raise NoCounterpart("data.chat_arguments takes numbers, texts, true and false")
    return values or KEEP


def kl_estimator(name: str, *, where: str) -> str:
    """Return verl's and Tunix's name of a KL estimator as algorithm.kl. where: algorithm.kl_in.
    Raises NoCounterpart."""
    known = {"kl": "k1", "mse": "k2", "mse_kl": "k2", "low_var_kl": "k3", "full": "full"}
    estimator = name if name in ("k1", "k2", "k3") else known.get(name)
    if estimator is None:
        raise NoCounterpart(f"there is no KL estimator {name!r}; see algorithm.kl")
    if estimator == "k1" and where == "loss":
        raise NoCounterpart(
            f"in a loss the estimator {name!r} has an expected gradient of 0, so it is not "
            "available here; set algorithm.kl=k2, k3 or unbiased"
        )
    return estimator
