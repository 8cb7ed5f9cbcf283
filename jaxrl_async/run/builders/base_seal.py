"""Identity of the frozen base of a run's adapter: recorded at the start, compared on resume.

An adapter on another base computes something else, and nothing else would notice. Hashes of the
whole files are compared, since bases may differ in a few rows alone. A file whose path, size and
modification time are unchanged is not read again.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.config.schema import ModelSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.frozen_base import form_of
from jaxrl_async.model.hf import weight_files

log = logging.getLogger(__name__)

READERS = 4
"""Number of files that are read at the same time."""


def keep_seal(model: ModelSection, base: Path) -> None:
    """Record which base a new run's adapter changes. All processes call it; the first one writes.

    base: the run's folder for the base of a run without model.path.
    """
    if jax.process_index() != 0:
        return
    target, identities = _file(base), _identities(_folder(model, base), {})
    weights = {name: asdict(identity) for name, identity in identities.items()}
    written = target.with_suffix(".tmp")
    seal = json.dumps({"base": _form_of(model.lora), "weights": weights}, indent=2)
    written.write_text(seal, encoding="utf-8")
    os.replace(written, target)


def check_seal(model: ModelSection, base: Path) -> None:
    """Raise ConfigError if a resumed run's adapter would change another base than before.

    base: the run's folder for the base of a run without model.path.
    """
    if model.path is None and not base.is_dir():
        raise ConfigError(
            f"{base}: the weights that the run's adapter changes are missing. Put the folder back, "
            "or start a new run."
        )
    try:
        before = json.loads(_file(base).read_text(encoding="utf-8"))
        identities = {name: _Identity(**identity) for name, identity in before["weights"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the adapter's base could not be compared with the one from before: %r", error)
        return
    if before.get("base") != (form := _form_of(model.lora)):
        raise ConfigError(
            f"model.lora.base or group_size: the run's adapter was trained on a base in "
            f"{before.get('base')}, not {form}. Set them as before, or start a new run."
        )
    now = _identities(_folder(model, base), identities)
    if {name: identity.sha256 for name, identity in now.items()} == {
        name: identity.sha256 for name, identity in identities.items()
    }:
        return
    raise ConfigError(
        f"{_folder(model, base)}: its weights are not the weights that the run's adapter was "
        "trained on. Restore them, point model.path at a copy of them, or start a new run."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """Identity of one file of weights."""

    path: str
    size: int  # bytes
    changed_ns: int
    sha256: str


def _form_of(lora: LoraSection | None) -> str:
    """Return the format in which the base is kept."""
    form = form_of(lora)
    if form is None:
        return "full"
    return form.kind + (f", groups of {form.group}" if form.kind != "int8" else "")


def _identities(folder: Path, before: Mapping[str, _Identity]) -> dict[str, _Identity]:
    """Return the identity of each file of weights in a folder, by name; a file is read only if it
    differs from `before`."""

    def identify(file: Path) -> _Identity:
        path, facts = os.path.realpath(file), file.stat()
        known = before.get(file.name)
        if known and (known.path, known.size, known.changed_ns) == (
            path,
            facts.st_size,
            facts.st_mtime_ns,
        ):
            return known
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return _Identity(path=path, size=facts.st_size, changed_ns=facts.st_mtime_ns, sha256=digest)

    files = weight_files(folder)
    with ThreadPoolExecutor(READERS) as pool:
        return {file.name: one for file, one in zip(files, pool.map(identify, files), strict=True)}


def _folder(model: ModelSection, base: Path) -> Path:
    """Return the directory that the base is read from."""
    return base if model.path is None else Path(model.path)


def _file(base: Path) -> Path:
    return base.with_name(base.name + ".json")
