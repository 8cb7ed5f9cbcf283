"""Models and datasets by their name on the Hugging Face hub: owner/name. Only this module uses
huggingface_hub and loads datasets.

owner/name ──cache, else download──> folder of a model       owner/name:CONFIG:SPLIT ──> rows

Without a network, cached content is used, and a missing repository is an error within seconds.
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
from jaxrl_async.errors import ConfigError, DataError, extra_module, in_a_line

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
RECORDS = re.compile(rf"({NAME.pattern})(?::([\w.+-]+))?(?::([\w.+-]+))?")
CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")
"""Pattern of a model's folder in the cache."""
ASK_S = 5.0
"""Maximum wait for the hub's first answer, seconds; downloads have no limit."""
INDEX = "model.safetensors.index.json"
TOP_ONLY = ["*/*"]
"""Excluded: other forms of the weights, in separate folders."""
WANTED = {
    "model": ["*.json", "*.safetensors", "*.jinja", "*.model"],
    "tokenizer": ["*.json", "*.jinja", "*.model"],
    "config": ["config.json"],
}
"""Files to download."""


@dataclass(frozen=True, slots=True)
class HubRecords:
    """Name of a dataset's records."""

    name: str  # owner/name
    config: str | None  # None: its only or default config
    split: str


def is_hub_name(path: str) -> bool:
    """Return True if a path is owner/name, and not a local path."""
    is_name = NAME.fullmatch(path) is not None and not is_gguf(path)
    return is_name and not os.path.exists(Path(path).parent)


def hub_records(path: str) -> HubRecords | None:
    """Parse owner/name, owner/name:CONFIG or owner/name:CONFIG:SPLIT; None: it is a local path."""
    match = RECORDS.fullmatch(path)
    if match is None or os.path.exists(path) or not is_hub_name(match[1]):
        return None
    return HubRecords(match[1], match[2], match[3] or "train")


def hub_name_of(folder: str) -> str:
    """Return the hub's name of a folder in its cache; return any other folder unchanged."""
    match = CACHED.search(folder)
    return folder if match is None else f"{match[1]}/{match[2]}"


def model_folder(name: str, setting: str, kind: str = "model") -> Path:
    """Return the folder of a model or tokenizer from the hub; download it if it is not cached.

    Args:
        name: owner/name.
        setting: the setting that names it, for messages.
        kind: "model", or without weights "tokenizer" or "config".

    Raises ConfigError if it is neither cached nor available.
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
    """Return the folder of a dataset from the hub; download it if it is not cached. Raises
    ConfigError if it is neither cached nor available."""
    return _snapshot(
        records.name,
        "dataset",
        f"{setting} = {records.name!r}: there is no such file here",
        f"run `hf download {records.name} --repo-type dataset`",
    )


def hub_rows(records: HubRecords) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a dataset from the hub, columns by name. Raises ConfigError, DataError, and
    MissingExtraError if `datasets` is not installed."""
    needs = f"{records.name}: datasets by name need the package datasets"
    datasets = extra_module("datasets", "datasets", needs)
    folder = records_folder(records, "data.jsonl.path")
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(str(folder), records.config, split=records.split)
    except Exception as error:  # many types; each lists the alternatives
        raise DataError(
            f"{records.name}: its split {records.split!r} cannot be read: {str(error)[:300]} "
            "Give OWNER/NAME:CONFIG:SPLIT."
        ) from error
    yield from rows


class Upload:
    """A hub repository to upload a folder to."""

    def __init__(self, name: str, *, private: bool) -> None:
        """Create the repository if it does not exist, before any long work starts.

        Raises ConfigError with a remedy if that fails, or if it must be private but exists and is
        public.
        """
        if not NAME.fullmatch(name):
            raise ConfigError(f"--upload {name}: give OWNER/NAME, such as ada/adder.")
        self._name, self._hub = name, importlib.import_module("huggingface_hub").HfApi()
        try:
            self._hub.whoami()
            self._hub.create_repo(name, private=private or None, exist_ok=True)
            is_public = private and not self._hub.repo_info(name).private
        except Exception as error:  # many types
            raise ConfigError(
                f"--upload {name}: the hub refuses it ({type(error).__name__}: "
                f"{in_a_line(error, 160)}). Log in with `hf auth login` and a token with write "
                f"access, or omit --upload and upload the folder later: `hf upload {name} OUT`."
            ) from error
        if is_public:
            raise ConfigError(
                f"--private: {name} already exists and is public. Make it private in "
                "its settings on the hub, give another name, or omit --private."
            )

    def send(self, folder: Path, message: str) -> str:
        """Upload a folder as one commit; return a message for the user. Raises DataError; the
        folder is kept."""
        try:
            done = self._hub.upload_folder(
                repo_id=self._name, folder_path=folder, commit_message=message
            )
        except Exception as error:
            raise DataError(
                f"{folder} was written, but its upload failed ({type(error).__name__}: "
                f"{in_a_line(error, 160)}). Try again: `hf upload {self._name} {folder}`."
            ) from error
        return f"uploaded: {done.commit_url}"


def cached_folder(name: str, kind: str) -> Path | None:
    """Return the folder of a repository in the hub's cache; None: it is missing or incomplete.

    kind: as for model_folder, or "dataset".
    """
    hub = importlib.import_module("huggingface_hub")
    try:
        folder = Path(hub.snapshot_download(name, repo_type=_repo(kind), local_files_only=True))
    except Exception:  # several types that mean "not cached"
        return None
    return folder if WHOLE[kind](folder) else None


def _repo(kind: str) -> str:
    return "dataset" if kind == "dataset" else "model"


def _snapshot(name: str, kind: str, missing: str, remedy: str, **chosen: object) -> Path:
    """Return the folder of a repository, from the cache if it is complete there, else
    downloaded."""
    if (cached := cached_folder(name, kind)) is not None:
        return cached
    hub, missing = importlib.import_module("huggingface_hub"), f"{missing}, nor in the hub's cache"
    try:
        # Check with a timeout; the download itself has only timeouts per request.
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
    """Describe why the hub did not answer, followed by the remedy."""
    kind = type(error).__name__
    if kind == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set. With a network connection,"
    if kind == "GatedRepoError":
        return "its terms must first be accepted on its page: then `hf auth login`;"
    if kind == "RepositoryNotFoundError":
        return "it does not exist on the hub, or is private: `hf auth login`, or correct the name;"
    return f"the hub cannot be reached ({kind}: {in_a_line(error, 160)}). With a network,"


def _has_weights(folder: Path) -> bool:
    """Return True if a folder has a model's configuration and all its weights."""
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
"""Functions that check that a cached folder is complete."""
