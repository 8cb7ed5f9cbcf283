"""Models and data sets by their name on the Hugging Face hub: owner/name. The one door to
huggingface_hub and datasets.

owner/name ──cache, else download──> folder of a model       owner/name:CONFIG:SPLIT ──> rows

Without a network what the cache holds is used, and what it lacks is refused within seconds.
"""

import importlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_async.data.gguf_file import is_gguf
from jaxrl_async.errors import ConfigError, DataError, MissingExtraError, in_a_line

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
RECORDS = re.compile(rf"({NAME.pattern})(?::([\w.+-]+))?(?::([\w.+-]+))?")
CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")
"""End of a model's folder in the cache."""
ASK_S = 5.0
"""Longest wait for the hub to answer at all, seconds; a download may then take its time."""
INDEX = "model.safetensors.index.json"
TOP_ONLY = ["*/*"]
"""Left out: other forms of the weights, in folders of their own."""
WANTED = {
    "model": ["*.json", "*.safetensors", "*.jinja", "*.model"],
    "tokenizer": ["*.json", "*.jinja", "*.model"],
    "config": ["config.json"],
}
"""Files that are downloaded."""


@dataclass(frozen=True, slots=True)
class HubRecords:
    """A data set's records by name."""

    name: str  # owner/name
    config: str | None  # None: its only one, or its default
    split: str


def is_hub_name(path: str) -> bool:
    """Return whether a path is owner/name, and no path of this machine."""
    is_name = NAME.fullmatch(path) is not None and not is_gguf(path)
    return is_name and not os.path.exists(Path(path).parent)


def hub_records(path: str) -> HubRecords | None:
    """Return which records owner/name, owner/name:CONFIG or owner/name:CONFIG:SPLIT means; None: it
    is a path of this machine."""
    match = RECORDS.fullmatch(path)
    if match is None or os.path.exists(path) or not is_hub_name(match[1]):
        return None
    return HubRecords(match[1], match[2], match[3] or "train")


def hub_name_of(folder: str) -> str:
    """Return the hub's name of a folder in its cache; any other folder as it is."""
    match = CACHED.search(folder)
    return folder if match is None else f"{match[1]}/{match[2]}"


def model_folder(name: str, setting: str, kind: str = "model") -> Path:
    """Return the folder of a model or a tokenizer of the hub, downloaded if the cache lacks it.

    Args:
        name: owner/name.
        setting: that names it, for messages.
        kind: "model"; without weights: "tokenizer", or "config".

    Raises ConfigError where it is neither cached nor to be had.
    """
    own = name.rpartition("/")[2]
    return _snapshot(
        name,
        kind,
        f"{setting} = {name!r}: there is no such folder here",
        f"run `hf download {name}`, or `hf download {name} --local-dir {own}` and set "
        f"{setting}={own}",
        allow_patterns=WANTED[kind],
        ignore_patterns=TOP_ONLY,
    )


def records_folder(records: HubRecords, setting: str) -> Path:
    """Return the folder of a data set of the hub, downloaded if the cache lacks it. Raises
    ConfigError where it is neither cached nor to be had."""
    return _snapshot(
        records.name,
        "dataset",
        f"{setting} = {records.name!r}: there is no such file here",
        f"run `hf download {records.name} --repo-type dataset`",
    )


def hub_rows(records: HubRecords) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a data set of the hub, columns by name. Raises ConfigError, DataError, and
    MissingExtraError if `datasets` is not installed."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError(
            f"{records.name}: data sets by name need the package datasets ({error}). Install the "
            "extra [datasets]: pip install 'jaxrl_async[datasets]'."
        ) from None
    folder = records_folder(records, "data.jsonl.path")
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(str(folder), records.config, split=records.split)
    except Exception as error:  # of many kinds, and each says what there is instead
        raise DataError(
            f"{records.name}: its split {records.split!r} cannot be read: {str(error)[:300]} "
            "Name them: OWNER/NAME:CONFIG:SPLIT."
        ) from error
    yield from rows


class Upload:
    """A repository of the hub that a folder is to be sent to."""

    def __init__(self, name: str, *, private: bool) -> None:
        """Make the repository unless it is there, before anything long is begun.

        Raises ConfigError where that cannot be done, which says what to do; also if it is to be
        private, and is there and public.
        """
        if not NAME.fullmatch(name):
            raise ConfigError(f"--upload {name}: give OWNER/NAME, such as ada/adder.")
        self._name, self._hub = name, importlib.import_module("huggingface_hub").HfApi()
        try:
            self._hub.whoami()
            self._hub.create_repo(name, private=private or None, exist_ok=True)
            is_public = private and not self._hub.repo_info(name).private
        except Exception as error:  # of many kinds
            raise ConfigError(
                f"--upload {name}: the hub does not take it ({type(error).__name__}: "
                f"{in_a_line(error, 160)}). Log in with `hf auth login` by a token that may write, "
                f"or leave --upload out, and upload the folder later: `hf upload {name} OUT`."
            ) from error
        if is_public:
            raise ConfigError(
                f"--private: {name} is there already, and everybody sees it. Make it private in "
                "its settings on the hub, give another name, or leave --private out."
            )

    def send(self, folder: Path, message: str) -> str:
        """Upload a folder as one commit; return what to tell. Raises DataError, and the folder
        stays."""
        try:
            done = self._hub.upload_folder(
                repo_id=self._name, folder_path=folder, commit_message=message
            )
        except Exception as error:
            raise DataError(
                f"{folder} is written, and its upload failed ({type(error).__name__}: "
                f"{in_a_line(error, 160)}). Try again: `hf upload {self._name} {folder}`."
            ) from error
        return f"uploaded: {done.commit_url}"


def cached_folder(name: str, kind: str) -> Path | None:
    """Return the folder of a repository in the hub's cache; None: it, or a part of it, is missing.

    kind: as model_folder's, or "dataset".
    """
    hub = importlib.import_module("huggingface_hub")
    try:
        folder = Path(hub.snapshot_download(name, repo_type=_repo(kind), local_files_only=True))
    except Exception:  # of several kinds, which say that it is not in the cache
        return None
    return folder if WHOLE[kind](folder) else None


def _repo(kind: str) -> str:
    return "dataset" if kind == "dataset" else "model"


def _snapshot(name: str, kind: str, missing: str, remedy: str, **chosen: Any) -> Path:
    """Return the folder of a repository: from the cache if it is whole there, else downloaded."""
    if (cached := cached_folder(name, kind)) is not None:
        return cached
    hub, missing = importlib.import_module("huggingface_hub"), f"{missing}, nor in the hub's cache"
    try:
        # With a limit, which the download itself has only for each of its many requests.
        hub.HfApi().repo_info(name, repo_type=_repo(kind), timeout=ASK_S)
    except Exception as error:
        raise ConfigError(f"{missing}, and {_why(error)} {remedy}.") from error
    log.info("downloading %s from the Hugging Face hub", name)
    try:
        return Path(hub.snapshot_download(name, repo_type=_repo(kind), **chosen))
    except Exception as error:
        raise ConfigError(
            f"{missing}, and the download failed: {in_a_line(error, 160)}; {remedy}."
        ) from error


def _why(error: Exception) -> str:
    """Say why the hub did not tell what it has, up to what to do."""
    kind = type(error).__name__
    if kind == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set. Where there is a network,"
    if kind == "GatedRepoError":
        return "its terms must be accepted on its page first: then `hf auth login`;"
    if kind == "RepositoryNotFoundError":
        return "the hub has none of this name, or it is private: `hf auth login`, or correct it;"
    return f"the hub cannot be reached ({kind}: {in_a_line(error, 160)}). Where there is a network,"


def _has_weights(folder: Path) -> bool:
    """Return whether a folder has a model's configuration and all of its weights."""
    if not (folder / "config.json").is_file():
        return False
    if not (folder / INDEX).is_file():
        return (folder / "model.safetensors").is_file()
    try:
        files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    return all((folder / file).is_file() for file in files)


WHOLE = {
    "model": _has_weights,
    "tokenizer": lambda folder: (folder / "tokenizer.json").is_file(),
    "config": lambda folder: (folder / "config.json").is_file(),
    "dataset": lambda folder: any(folder.iterdir()),
}
"""Whether the cache has all that is needed."""
