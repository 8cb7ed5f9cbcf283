"""Which frozen base a run's adapter changes: noted when the run begins, compared when it goes on.

An adapter on another base computes something else, and nothing else would notice. What is compared
are samples of the weights' files, so that a large model costs megabytes of reading: other weights
differ in nearly all of their bytes.
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import jax

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.frozen_base import form_of
from jaxrl_async.model.hf import weight_files

log = logging.getLogger(__name__)

SAMPLES, SAMPLE_BYTES = 512, 8192
"""How many places of a file are read, and how much of each; shorter files are read whole."""


def keep_seal(config: Config, base: Path) -> None:
    """Note which base a new run's adapter changes. All processes call it; the first one writes.

    base: the run's own, which a run without model.path has.
    """
    if not config.model.lora.rank or config.run.resume or jax.process_index() != 0:
        return
    target = _file(base)
    written = target.with_suffix(".tmp")
    written.write_text(json.dumps(_seal(config, base), indent=2), encoding="utf-8")
    os.replace(written, target)


def check_seal(config: Config, base: Path) -> None:
    """Raise ConfigError if a resumed run's adapter would change another base than before.

    base: the run's own, which a run without model.path has.
    """
    if not config.model.lora.rank or not config.run.resume:
        return
    if config.model.path is None and not base.is_dir():
        raise ConfigError(
            f"{base}: the weights that the run's adapter changes are missing. Put the folder back, "
            "or start a new run."
        )
    try:
        before = json.loads(_file(base).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.warning("whether the adapter's base is the one from before is not known: %s", error)
        return
    now = _seal(config, base)
    if not isinstance(before, dict) or before == now:
        return
    if before.get("base") != now["base"]:
        raise ConfigError(
            f"model.lora.base or group_size: the run's adapter was trained on a base in "
            f"{before.get('base')}, not {now['base']}. Set them as before, or start a new run."
        )
    raise ConfigError(
        f"{_folder(config, base)}: its weights are not those that the run's adapter was trained "
        "on. Put those back, point model.path at a copy of them, or start a new run."
    )


def _seal(config: Config, base: Path) -> dict[str, Any]:
    """Return the base's form, and a hash of each of its files."""
    form, folder = form_of(config.model.lora), _folder(config, base)
    grouped = f", groups of {form.group}" if form and form.kind != "int8" else ""
    kept = "full" if form is None else form.kind + grouped
    return {"base": kept, "files": {file.name: _sampled(file) for file in weight_files(folder)}}


def _folder(config: Config, base: Path) -> Path:
    """Return the directory that the base is read from."""
    return base if config.model.path is None else Path(config.model.path)


def _file(base: Path) -> Path:
    return base.with_name(base.name + ".json")


def _sampled(file: Path) -> str:
    """Return a hash of a file's size and of pieces of it, from the first to the last byte."""
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        if size <= SAMPLES * SAMPLE_BYTES:
            found.update(stream.read())
            return found.hexdigest()
        for number in range(SAMPLES):
            stream.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            found.update(stream.read(SAMPLE_BYTES))
    return found.hexdigest()
