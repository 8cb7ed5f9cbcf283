"""Models and records from elsewhere: at an address of another file system, such as
gs://BUCKET/DIR; by name on the hub; or in a GGUF file. Only this module uses fsspec.

gs://bucket/model ──list──> names, sizes, sums ──hash──> cache folder, copied into it once

Changed content is copied into a new folder, so a run that reads the old copy can continue.
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
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from jaxrl_async.data.gguf_file import is_gguf
from jaxrl_async.data.hub import WANTED, is_hub_name, model_folder
from jaxrl_async.errors import ConfigError, in_a_line
from jaxrl_async.later import Later

if TYPE_CHECKING:
    from jaxrl_async.data import gguf_folder
else:
    gguf_folder = Later("jaxrl_async.data.gguf_folder")

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
"""Package that fsspec needs for each address scheme."""
UNFINISHED = ".copying-"
"""Name prefix of unfinished copies."""
ABANDONED_S = 2 * 86_400
"""Age at which an unfinished copy is removed, seconds."""


def is_address(path: str) -> bool:
    """Return True if a path is an address of another file system (SCHEME://...)."""
    return ADDRESS.fullmatch(path) is not None


def is_remote(path: str) -> bool:
    """Return True if local_folder returns a path other than this one."""
    return is_address(path) or is_gguf(path) or is_hub_name(path)


def local_folder(path: str, setting: str, kind: str = "model") -> Path:
    """Return a model's folder on this machine. A folder at an address is copied, a hub name is
    taken from the hub's cache or downloaded, and a GGUF file's folder is created in the cache. Any
    other path is returned unchanged. Takes the arguments of copy_locally; raises its errors and
    gguf_folder's."""
    if is_gguf(path):
        file = str(copy_locally(path, setting, kind)) if is_address(path) else path
        return gguf_folder.gguf_folder(file, setting, cache_root())
    if is_address(path):
        return copy_locally(path, setting, kind)
    return model_folder(path, setting, kind) if is_hub_name(path) else Path(path)


def local_argument(path: str, kind: str = "dataset") -> Path:
    """Return the local folder of a command's argument. Content at an address is copied (kind: see
    copy_locally), and a GGUF file has a folder in the cache; any other path is returned unchanged.
    Raises the errors of local_folder."""
    setting = "the command's argument"
    if is_gguf(path):
        return local_folder(path, setting, kind)
    return copy_locally(path, setting, kind) if is_address(path) else Path(path)


def cache_root() -> Path:
    """Return the folder of all copies, in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_async"


def copy_locally(address: str, setting: str, kind: str = "model") -> Path:
    """Return a local copy of a file or folder; copy it unless an up-to-date copy exists.

    Args:
        address: SCHEME://...
        setting: the setting that names it, for messages.
        kind: see hub.model_folder, for a model's folder; "dataset": all files below it; "records of
            a run": all except weights and checkpoints.

    Raises ConfigError if it cannot be read.
    """
    address = address.rstrip("/")
    files, system, root = _list_files(address, setting, kind)
    content = json.dumps([address, kind, sorted(files.items())])
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    parent = cache_root() / digest
    target = parent / _last_part(address, root)
    if not parent.is_dir():
        log.info("copying %s to %s", address.partition("?")[0], target)
        try:
            _copy(system, root, files, parent, target.name)
        except Exception as error:  # each file system has its own error types
            raise _unreachable_error(address, setting, error) from error
    return target


def _list_files(address: str, setting: str, kind: str) -> tuple[dict[str, str], Any, str]:
    """Return the files to copy, as {name below the address: signature of its content}, with the
    file system and its path. The name of a single file is empty."""
    fsspec = importlib.import_module("fsspec")
    try:
        system, root = fsspec.core.url_to_fs(address)
        root = root.rstrip("/")
        system.invalidate_cache()
        if system.isfile(root):
            return {"": _signature(system.info(root))}, system, root
        paths = system.find(root, detail=True)  # with sizes, times and checksums, if available
        inside = {path[len(root) :].lstrip("/"): _signature(info) for path, info in paths.items()}
        files = {name: sign for name, sign in inside.items() if _is_needed(name, kind)}
        if wrong := [name for name in files if ".." in name.split("/")]:
            raise ValueError(f"the name {wrong[0]!r} is outside the folder")
    except Exception as error:
        raise _unreachable_error(address, setting, error) from error
    if not files:
        what = (
            "nothing" if not inside or kind not in WANTED else f"none of {', '.join(WANTED[kind])}"
        )
        raise ConfigError(f"{setting} = {address!r}: found {what}. Correct the address.")
    return files, system, root


def _signature(info: Mapping[str, object]) -> str:
    """Return a signature of a file's content: size, times and checksums, if available. It excludes
    the redirect target of an address, which may differ each time."""
    return str({name: value for name, value in info.items() if name != "url"})


def _last_part(address: str, root: str) -> str:
    """Return the name of a copy, without the query of an https:// address."""
    if address.startswith(("http://", "https://")):
        parts = urlsplit(address)
        return unquote(parts.path).rpartition("/")[2] or parts.netloc
    return root.rpartition("/")[2]


def _is_needed(name: str, kind: str) -> bool:
    if kind == "dataset":
        return True
    if kind == "records of a run":
        return "checkpoints" not in name.split("/") and not name.endswith(".safetensors")
    return "/" not in name and any(fnmatch(name, pattern) for pattern in WANTED[kind])


def _copy(system: Any, root: str, files: dict[str, str], parent: Path, last: str) -> None:
    """Copy the files into parent/last atomically."""
    parent.parent.mkdir(parents=True, exist_ok=True)
    for left in parent.parent.glob(UNFINISHED + "*"):  # of a killed process
        with suppress(FileNotFoundError):  # its process has finished it
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
            if not parent.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _unreachable_error(address: str, setting: str, error: Exception) -> ConfigError:
    """Return an error with a remedy."""
    match = ADDRESS.fullmatch(address)
    scheme = match[1] if match else ""
    reason = f"{type(error).__name__}: {in_a_line(error, 160)}"
    if isinstance(error, ImportError) and scheme in PACKAGES:
        remedy = f"Install the package for {scheme}://: pip install {PACKAGES[scheme]}"
    elif isinstance(error, ValueError) and "not known" in str(error).lower():
        remedy = f"Use a scheme that fsspec supports, such as {', '.join(sorted(PACKAGES))}"
    else:
        remedy = "Check that it exists and that this machine may read it"
    return ConfigError(
        f"{setting} = {address!r} cannot be read ({reason}). {remedy}, or copy it here and give "
        "its path."
    )
