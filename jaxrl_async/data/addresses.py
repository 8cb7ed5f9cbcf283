"""Models and records that are elsewhere: at an address of another file system, such as
gs://BUCKET/DIR, to which this is the one door to fsspec; by name on the hub; or in a GGUF file.

gs://bucket/model ──list──> names, sizes, sums ──hash──> cache folder, copied into it once

What has changed there goes into another folder: a run that reads the old one goes on with it.
"""

import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from jaxrl_async.data.gguf_file import is_gguf
from jaxrl_async.data.gguf_folder import gguf_folder
from jaxrl_async.data.hub import WANTED, is_hub_name, model_folder
from jaxrl_async.errors import ConfigError, in_a_line

log = logging.getLogger(__name__)

ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://.+", re.DOTALL)
PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "s3a": "s3fs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
"""What fsspec needs for a kind of address."""
UNFINISHED = ".copying-"
"""What the names of copies begin with that are being made."""
ABANDONED_S = 2 * 86_400
"""Age at which an unfinished copy is removed, seconds."""


def is_address(path: str) -> bool:
    """Return whether a path is an address of another file system: it begins with SCHEME://."""
    return ADDRESS.fullmatch(path) is not None


def is_elsewhere(path: str) -> bool:
    """Return whether folder_here returns another path than this."""
    return is_address(path) or is_gguf(path) or is_hub_name(path)


def folder_here(path: str, setting: str, kind: str = "model") -> Path:
    """Return where a model's folder is on this machine: that at an address is copied, a name of the
    hub taken from its cache or downloaded, that of a GGUF file made in the cache, and any other
    path is returned as it is. Arguments as copied_here's; raises what it and gguf_folder do."""
    if is_gguf(path):
        file = str(copied_here(path, setting, kind)) if is_address(path) else path
        return gguf_folder(file, setting, cache_root())
    if is_address(path):
        return copied_here(path, setting, kind)
    return model_folder(path, setting, kind) if is_hub_name(path) else Path(path)


def argument_here(path: str, kind: str = "dataset") -> Path:
    """Return where a folder that a command names is on this machine: what lies at an address is
    copied, of these kinds of copied_here, and a GGUF file has a folder in the cache; another path
    is returned as it is. Raises what folder_here does."""
    setting = "the command's argument"
    if is_gguf(path):
        return folder_here(path, setting, kind)
    return copied_here(path, setting, kind) if is_address(path) else Path(path)


def cache_root() -> Path:
    """Return the folder of all copies: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_async"


def copied_here(address: str, setting: str, kind: str = "model") -> Path:
    """Return a copy of a file or a folder on this machine, made unless there is one of what lies
    there now.

    Args:
        address: SCHEME://...
        setting: that names it, for messages.
        kind: as hub.model_folder's, of a folder whose files are a model's; "dataset": all files
            below it; "records of a run": all but weights and checkpoints.

    Raises ConfigError if nothing can be had from there.
    """
    address = address.rstrip("/")
    files, system, root = _listed(address, setting, kind)
    content = json.dumps([address, kind, sorted(files.items())])
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    parent = cache_root() / digest
    whole = parent / _last_part(address, root)
    if not parent.is_dir():
        log.info("copying %s to %s", address.partition("?")[0], whole)
        try:
            _copy(system, root, files, parent, whole.name)
        except Exception as error:  # each file system has its own kinds
            raise _unreachable(address, setting, error) from error
    return whole


def _listed(address: str, setting: str, kind: str) -> tuple[dict[str, str], Any, str]:
    """Return what is to be copied, as name below the address and a sign of its content, with the
    file system and the path there. A file's own name is empty."""
    fsspec = importlib.import_module("fsspec")
    try:
        system, root = fsspec.core.url_to_fs(address)
        root = root.rstrip("/")
        system.invalidate_cache()
        if system.isfile(root):
            return {"": _sign(system.info(root))}, system, root
        found = system.find(root, detail=True)  # with sizes, times and sums, as it has them
        inside = {path[len(root) :].lstrip("/"): _sign(info) for path, info in found.items()}
        files = {name: sign for name, sign in inside.items() if _is_wanted(name, kind)}
        if wrong := [name for name in files if ".." in name.split("/")]:
            raise ValueError(f"the name {wrong[0]!r} leads out of the folder")
    except Exception as error:
        raise _unreachable(address, setting, error) from error
    if not files:
        what = (
            "nothing" if not inside or kind not in WANTED else f"none of {', '.join(WANTED[kind])}"
        )
        raise ConfigError(f"{setting} = {address!r}: there is {what}. Correct the address.")
    return files, system, root


def _sign(info: Mapping[str, Any]) -> str:
    """Return what is known of a file's content: size, times and sums, as its file system has them;
    without the place that an address leads on to, which may be another each time."""
    return str({name: value for name, value in info.items() if name != "url"})


def _last_part(address: str, root: str) -> str:
    """Return the name of a copy: without the query of https://, such as a signature."""
    if address.startswith(("http://", "https://")):
        parts = urlsplit(address)
        return unquote(parts.path).rpartition("/")[2] or parts.netloc
    return root.rpartition("/")[2]


def _is_wanted(name: str, kind: str) -> bool:
    if kind == "dataset":
        return True
    if kind == "records of a run":
        return "checkpoints" not in name.split("/") and not name.endswith(".safetensors")
    return "/" not in name and any(fnmatch(name, pattern) for pattern in WANTED[kind])


def _copy(system: Any, root: str, files: dict[str, str], parent: Path, last: str) -> None:
    """Copy the files into parent/last, which appears whole or not at all."""
    parent.parent.mkdir(parents=True, exist_ok=True)
    for left in parent.parent.glob(UNFINISHED + "*"):  # by a process that was killed
        with suppress(FileNotFoundError):  # its own process has finished it
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(dir=parent.parent, prefix=UNFINISHED))
    try:
        for name in files:
            target = made / last / name if name else made / last
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(f"{root}/{name}" if name else root, str(target))
        try:
            made.rename(parent)
        except OSError:
            if not parent.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _unreachable(address: str, setting: str, error: Exception) -> ConfigError:
    """Return an error that says what to do."""
    match = ADDRESS.fullmatch(address)
    scheme = match[1] if match else ""
    said = f"{type(error).__name__}: {in_a_line(error, 160)}"
    if isinstance(error, ImportError) and scheme in PACKAGES:
        remedy = f"Install what reads {scheme}://: pip install {PACKAGES[scheme]}"
    elif isinstance(error, ValueError) and "not known" in str(error).lower():
        remedy = f"Give a kind that fsspec knows, such as {', '.join(sorted(PACKAGES))}"
    else:
        remedy = "See that it is there and that this machine may read it"
    return ConfigError(
        f"{setting} = {address!r} cannot be read ({said}). {remedy}, or copy it here and give its "
        "path."
    )
