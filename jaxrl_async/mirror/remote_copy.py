"""A run's copy on another file system: file names and write order.

COPY_TO/NAME/
    checkpoints/STEP/...              a checkpoint's files; CHECKSUMS is written last, removed first
    metrics.jsonl, config.yaml, ...   as in the run's folder
    copy_owner.json                   the process that writes here: the last one that started

An object appears complete or not at all, so a checkpoint is complete once it has CHECKSUMS.
"""

import importlib
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_async.data.addresses import PACKAGES
from jaxrl_async.errors import ConfigError, in_a_line
from jaxrl_async.run.checkpoint.seal import CHECKSUMS
from jaxrl_async.run.folder import BEGINNINGS

OWNER = "copy_owner.json"
"""File that names the writer of the copy; exists only in the copy."""
CHECKPOINT_FILE = re.compile(r"((?:[^/]+/){0,2}checkpoints)/(\d+)/(.+)")
"""Matches a checkpoint file of a run, of one of several runs, or of a warm start."""


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Location of a run's copy."""

    address: str  # COPY_TO/NAME
    system: Any  # an fsspec file system
    root: str  # the address as the file system knows it

    def names(self) -> dict[str, int]:
        """Return the files of the copy, by name relative to the run, with their sizes in bytes."""
        self.system.invalidate_cache()
        try:
            found = self.system.find(self.root, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {p[len(self.root) :].lstrip("/"): int(i["size"] or 0) for p, i in found.items()}
        return {name: size for name, size in sizes.items() if name and not name.endswith("/")}

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if it does not exist."""
        self.system.invalidate_cache()
        try:
            return bytes(self.system.cat_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None

    def put(self, path: Path, name: str) -> None:
        """Upload a file."""
        target = f"{self.root}/{name}"
        self.system.makedirs(target.rpartition("/")[0], exist_ok=True)  # no-op on object stores
        self.system.put_file(str(path), target)

    def get(self, name: str, path: Path) -> None:
        """Download a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.system.get_file(f"{self.root}/{name}", str(path))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; the checksum files of complete checkpoints are removed first."""
        for name in sorted(names, key=lambda n: (not is_checksum_file(n), n)):
            try:
                self.system.rm_file(f"{self.root}/{name}")
            except FileNotFoundError:
                continue

    def owner(self) -> str | None:
        """Return the sign of the process that writes here; None: no process has started."""
        content = self.read(OWNER)
        return None if content is None else str(json.loads(content)["sign"])

    def claim(self, sign: str) -> None:
        """Make the process with this sign the writer."""
        facts = {"sign": sign, "host": socket.gethostname(), "process": os.getpid()}
        self.system.makedirs(self.root, exist_ok=True)
        self.system.pipe_file(f"{self.root}/{OWNER}", json.dumps(facts).encode())

    def move_aside(self) -> str:
        """Move the copy to the first free address with a number appended; return that address."""
        number = 1
        while self.system.exists(f"{self.root}.{number}"):
            number += 1
        self.system.mv(self.root, f"{self.root}.{number}", recursive=True)
        self.system.invalidate_cache()
        return f"{self.address}.{number}"


def open_target(copy_to: str, name: str) -> CopyTarget:
    """Return the location of this run's copy; nothing is created. Raises ConfigError."""
    address = f"{copy_to.rstrip('/')}/{name}"
    try:
        fsspec = importlib.import_module("fsspec")
        system, root = fsspec.core.url_to_fs(address)
    except Exception as error:  # error types depend on the file system
        raise unreachable(address, error) from error
    return CopyTarget(address, system, root.rstrip("/"))


def is_checksum_file(name: str) -> bool:
    """Return whether this file marks a checkpoint as complete."""
    match = CHECKPOINT_FILE.fullmatch(name)
    return match is not None and match[3] == CHECKSUMS


def holds_run(names: Mapping[str, int]) -> bool:
    """Return whether a run has started there, by the same rule as folder.holds_something."""
    skipped = (*BEGINNINGS, OWNER)
    return any(size and name.partition("/")[0] not in skipped for name, size in names.items())


def whole_checkpoints(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the steps of the complete checkpoints by folder, newest first."""
    steps: dict[str, list[int]] = {}
    for name in names:
        match = CHECKPOINT_FILE.fullmatch(name)
        if match is not None and match[3] == CHECKSUMS:
            steps.setdefault(match[1], []).append(int(match[2]))
    return {folder: sorted(found, reverse=True) for folder, found in steps.items()}


def unreachable(address: str, error: Exception) -> ConfigError:
    """Return a ConfigError that says how to fix an unreachable address."""
    scheme = address.partition("://")[0]
    advice = (
        f"Install support for {scheme}://: pip install {PACKAGES[scheme]}"
        if isinstance(error, ImportError) and scheme in PACKAGES
        else "Check that the bucket exists and that this machine may read and write it"
    )
    return ConfigError(
        f"run.copy_to: {address} cannot be used ({type(error).__name__}: "
        f"{in_a_line(error, 160)}). {advice}, or remove run.copy_to."
    )
