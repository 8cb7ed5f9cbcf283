"""Files and command lines of TRL and verl, read as fields and written as ours."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxrl_async.config.draft import parse_yaml, read_draft
from jaxrl_async.config.load import flattened
from jaxrl_async.config.peers.counterpart import Peer, PeerConversion, flat_fields, is_plain, plain
from jaxrl_async.config.peers.peer_hints import PEERS
from jaxrl_async.config.peers.trl_fields import TRL
from jaxrl_async.config.peers.verl_fields import VERL
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError

MISSING = "???"
"""Value of a field in verl's files that a user must give."""


def peer_of(source: str) -> Peer | None:
    """Return a library by its name; None: there is none of this name."""
    return next((peer for peer in PEERS if peer.name.lower() == source.lower()), None)


def fields_of_file(path: Path) -> tuple[Peer, dict[str, Any]]:
    """Read a library's YAML file: return the library, and its fields by dotted name. Values that
    refer to others (`${...}`) are left out. Raises ConfigError."""
    tree = read_draft(path).tree
    flat = {name: value for name, value in flat_fields(tree) if not _refers(value)}
    counts = {peer.name: sum(peer.find(name) is not None for name in flat) for peer in (TRL, VERL)}
    peer = max((TRL, VERL), key=lambda peer: counts[peer.name])
    if not counts[peer.name]:
        raise ConfigError(
            f"{path}: none of its settings is TRL's or verl's. Give a configuration of one of them."
        )
    if peer is TRL:  # some of its fields are mappings
        flat = {str(name): value for name, value in tree.items()}
    return peer, {k: v for k, v in flat.items() if not k.endswith("_target_")}


def _refers(value: object) -> bool:
    return isinstance(value, str) and ("${" in value or value == MISSING)


def fields_of_args(args: Sequence[str]) -> dict[str, Any]:
    """Return fields of a command line: NAME=VALUE and +NAME=VALUE as verl's, --NAME VALUE and
    --NAME=VALUE as TRL's. Values are YAML. Raises ConfigError."""
    return {
        name: parse_yaml(raw, f"{name}={raw}") if raw.strip() else raw
        for name, raw in _pairs(list(args))
        if not _refers(raw)
    }


def _pairs(args: list[str]) -> Iterator[tuple[str, str]]:
    while args:
        arg = args.pop(0)
        name, equals, raw = arg.lstrip("+").partition("=")
        if arg.startswith("--"):
            name = name.removeprefix("--").replace("-", "_")
            if not equals:
                values = []
                while args and not re.match(r"--|\+?[\w.]+=", args[0]):
                    values.append(args.pop(0))
                raw = values[0] if len(values) == 1 else f"[{', '.join(values)}]"
                raw = "true" if not values else raw
        elif not equals or not name:
            raise ConfigError(f"{arg!r} is not a setting. Write NAME=VALUE or --NAME VALUE.")
        yield name, raw


def nested(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return settings by key path as sections, without those that have their defaults."""
    usual = flattened(Config().model_dump())
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        value = _written(value)
        if path in usual and usual[path] == value:
            continue
        *sections, name = path.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return tree


def _written(value: object) -> Any:
    value = plain(value)
    if not is_plain(value):
        raise ConfigError(f"{value!r:.80} cannot be written to a configuration.")
    if isinstance(value, Mapping):
        return {key: _written(inner) for key, inner in value.items()}
    return [_written(v) for v in value] if isinstance(value, list | tuple | set) else value


def notes_of(peer: Peer, conversion: PeerConversion) -> list[str]:
    """Return what differs here although it has a counterpart: lines for a reader."""
    always = "staleness.max_staleness"
    paths = [path for path in peer.notes if path in conversion.settings or path == always]
    return [
        f"{path}: {peer.notes[path]}"
        for path in paths
        if path != always or always not in conversion.settings
    ]


def written(peer: Peer, conversion: PeerConversion, source: str) -> str:
    """Return a converted configuration as a YAML file, with comments about what differs."""
    tree = nested(conversion.settings)
    order = [name for name in Config.model_fields if name in tree]
    body = yaml.safe_dump(
        {name: tree[name] for name in order}, sort_keys=False, allow_unicode=True, width=100
    )
    lines = [f"# {source}, converted from {peer.name} by jaxrl-async convert"]
    lines += [f"# {note}" for note in notes_of(peer, conversion)]
    if conversion.unconverted:
        lines += ["#", "# Without a counterpart:"]
        lines += [f"#   {name}: {reason}" for name, reason in conversion.unconverted.items()]
    return "\n".join(lines) + "\n\n" + (body if tree else "{}\n")
