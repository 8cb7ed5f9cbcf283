"""A GGUF file as a Hugging Face directory: small files derived from its header, and a pointer to
it.

FILE.gguf ──header──> config.json, generation_config.json, tokenizer, gguf.json ──> cache folder

Weights stay in the GGUF file; gguf.json has its path, size and time. A changed file gets a new
folder, so a run either continues with its original weights or fails.
"""

import hashlib
import importlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_async.data.gguf_file import POINTER, GgufFile, local_gguf, read_gguf, sizes_of
from jaxrl_async.errors import ConfigError, DataError, in_a_line
from jaxrl_async.later import Later

if TYPE_CHECKING:
    from jaxrl_async.data import gguf_config
else:
    gguf_config = Later("jaxrl_async.data.gguf_config")

log = logging.getLogger(__name__)

FORM = 2
"""Format version, incremented when the directory's files change, to ignore older ones."""
UNFINISHED = ".making-"


def gguf_folder(path: str, setting: str, cache: Path) -> Path:
    """Return the directory of a GGUF file; create it unless it is in the cache. Raises ConfigError,
    CheckpointError, and MissingExtraError if the package gguf is not installed.

    Args:
        path: see gguf_file.local_gguf.
        setting: the setting that names it, for messages.
        cache: folder of all copies, addresses.cache_root().
    """
    file = local_gguf(path, setting).resolve()
    facts = {"path": str(file), **sizes_of(file)}
    digest = hashlib.sha256(json.dumps([FORM, facts]).encode()).hexdigest()[:16]
    folder = cache / "gguf" / digest / file.stem
    if not (folder / POINTER).is_file():
        read = read_gguf(file)
        contents = {
            "config.json": gguf_config.config_of(read),
            "generation_config.json": gguf_config.token_ids(read),
            POINTER: facts,
        }
        try:
            _make(read, contents, folder)
        except OSError as error:
            raise ConfigError(
                f"{setting} = {path!r}: its small files cannot be written to {folder} "
                f"({in_a_line(error)}). Set XDG_CACHE_HOME to a writable folder."
            ) from None
    return folder


def _make(file: GgufFile, contents: Mapping[str, Mapping[str, object]], folder: Path) -> None:
    """Write the directory atomically: the contents by name, and the tokenizer."""
    parent = folder.parent
    parent.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=parent.parent, prefix=UNFINISHED))
    made = unfinished / folder.name
    try:
        made.mkdir()
        _write_tokenizer(file, made)
        for name, content in contents.items():
            (made / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
        with suppress(OSError):
            unfinished.rename(parent)
        if not (folder / POINTER).is_file():  # and no other process was first
            shutil.rmtree(parent, ignore_errors=True)  # an older, incomplete one
            unfinished.rename(parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the tokenizer's files. If the header's tokenizer is unsupported, write none and log a
    warning: data.tokenizer may name another."""
    vocabulary = importlib.import_module("jaxrl_async.data.gguf_vocabulary")  # a slow import
    try:
        vocabulary.tokenizer_of(file).save_pretrained(str(folder))
    except DataError as error:
        log.warning(
            "%s: %s. Set data.tokenizer to the model's Hugging Face directory or name.",
            file.path,
            error,
        )
