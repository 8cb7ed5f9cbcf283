"""A GGUF file as a Hugging Face directory: small files that its header describes, and where it is.

FILE.gguf ──header──> config.json, generation_config.json, tokenizer, gguf.json ──> cache folder

Weights stay in the file, of which gguf.json names path, size and time. A file that has changed gets
another folder, so that a run that names one goes on with the weights that it began with, or not at
all.
"""

import hashlib
import importlib
import json
import logging
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxrl_async.data.gguf_config import config_of, token_ids
from jaxrl_async.data.gguf_file import GgufFile, gguf_here, read_gguf
from jaxrl_async.errors import CheckpointError, ConfigError, DataError, in_a_line

log = logging.getLogger(__name__)

POINTER = "gguf.json"
"""The file of such a directory that says where the weights are."""
FORM = 2
"""Raised when the files of the directory change, so that older ones are not used."""
UNFINISHED = ".making-"


def gguf_folder(path: str, setting: str, cache: Path) -> Path:
    """Return the directory of a GGUF file, made unless it is in the cache. Raises ConfigError,
    CheckpointError, and MissingExtraError if the package gguf is not installed.

    Args:
        path: as gguf_file.gguf_here's.
        setting: that names it, for messages.
        cache: folder of all copies, addresses.cache_root().
    """
    file = gguf_here(path, setting).resolve()
    facts = {"path": str(file), **_sizes(file)}
    digest = hashlib.sha256(json.dumps([FORM, facts]).encode()).hexdigest()[:16]
    folder = cache / "gguf" / digest / file.stem
    if not (folder / POINTER).is_file():
        read = read_gguf(file)
        contents = {
            "config.json": config_of(read),
            "generation_config.json": token_ids(read),
            POINTER: facts,
        }
        try:
            _make(read, contents, folder)
        except OSError as error:
            raise ConfigError(
                f"{setting} = {path!r}: its small files cannot be written to {folder} "
                f"({in_a_line(error)}). Set XDG_CACHE_HOME to a folder that can be written to."
            ) from None
    return folder


def gguf_of(folder: Path) -> Path | None:
    """Return the GGUF file that a directory stands for; None: it stands for none. Raises
    CheckpointError if the file is gone or has changed."""
    if not (folder / POINTER).is_file():
        return None
    try:
        facts = json.loads((folder / POINTER).read_text(encoding="utf-8"))
        file = Path(facts["path"])
        now = _sizes(file)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{folder}: the GGUF file that {POINTER} names cannot be read ({error!r:.200}). Put it "
            "back, or give the path of the file anew."
        ) from None
    if any(facts.get(name) != value for name, value in now.items()):
        raise CheckpointError(
            f"{file}: is not the file any more that {folder} was made of: its size or time has "
            "changed. Put that file back, or give its path anew, which starts from the new one."
        )
    return file


def _sizes(file: Path) -> dict[str, int]:
    facts = file.stat()
    return {"size": facts.st_size, "changed_ns": facts.st_mtime_ns}


def _make(file: GgufFile, contents: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write the directory, which appears whole or not at all: the contents by name, and the
    tokenizer."""
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
        if not (folder / POINTER).is_file():  # nor has another process been faster
            shutil.rmtree(parent, ignore_errors=True)  # an older one, of which files are gone
            unfinished.rename(parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the tokenizer's files; where the header's is not one that is known, none, and say so:
    data.tokenizer may name another."""
    vocabulary = importlib.import_module("jaxrl_async.data.gguf_vocabulary")  # seconds, if wanted
    try:
        vocabulary.tokenizer_of(file).save_pretrained(str(folder))
    except DataError as error:
        log.warning(
            "%s: %s. Set data.tokenizer to the model's Hugging Face directory or name.",
            file.path,
            error,
        )
