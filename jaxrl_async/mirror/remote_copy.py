"""A run's copy at an address of another file system: its names, and what is written last.

COPY_TO/NAME/
    checkpoints/STEP/...              a checkpoint's files; CHECKSUMS comes last and goes first
    metrics.jsonl, config.yaml, ...   as in the run's folder
    copy_owner.json                   which process writes here: the last one that began

An object appears whole or not at all, so a checkpoint there is whole once it has CHECKSUMS.
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
"""Who writes the copy; in the copy alone."""
OF_CHECKPOINT = re.compile(r"((?:[^/]+/){0,2}checkpoints)/(\d+)/(.+)")
"""A file of a checkpoint, of the run, of one of several, or of a warm start."""


@dataclass(frozen=True, slots=True)
class CopyPlace:
    """Where a run's copy lies."""

    address: str  # COPY_TO/NAME
    system: Any  # of fsspec
    root: str  # the address as the file system knows it

    def names(self) -> dict[str, int]:
        """Return the files there with their sizes in bytes, by name below the run."""
        self.system.invalidate_cache()
        try:
            found = self.system.find(self.root, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {p[len(self.root) :].lstrip("/"): int(i["size"] or 0) for p, i in found.items()}
        return {name: size for name, size in sizes.items() if name and not name.endswith("/")}

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None: there is none."""
        self.system.invalidate_cache()
        try:
            return bytes(self.system.cat_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None

    def put(self, path: Path, name: str) -> None:
        """Write a file there."""
        target = f"{self.root}/{name}"
        self.system.makedirs(target.rpartition("/")[0], exist_ok=True)  # objects need none
        self.system.put_file(str(path), target)

    def get(self, name: str, path: Path) -> None:
        """Read a file into one of this machine."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.system.get_file(f"{self.root}/{name}", str(path))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; the marks of whole checkpoints go first."""
        for name in sorted(names, key=lambda n: (not is_mark(n), n)):
            try:
                self.system.rm_file(f"{self.root}/{name}")
            except FileNotFoundError:
                continue

    def owner(self) -> str | None:
        """Return the sign of the process that writes here; None: none has begun."""
        content = self.read(OWNER)
        return None if content is None else str(json.loads(content)["sign"])

    def take(self, sign: str) -> None:
        """Make the process of this sign the one that writes here."""
        facts = {"sign": sign, "host": socket.gethostname(), "process": os.getpid()}
        self.system.makedirs(self.root, exist_ok=True)
        self.system.pipe_file(f"{self.root}/{OWNER}", json.dumps(facts).encode())

    def move_aside(self) -> str:
        """Move all that is there to the first free address with a number behind it; return that."""
        number = 1
        while self.system.exists(f"{self.root}.{number}"):
            number += 1
        self.system.mv(self.root, f"{self.root}.{number}", recursive=True)
        self.system.invalidate_cache()
        return f"{self.address}.{number}"


def open_place(copy_to: str, name: str) -> CopyPlace:
    """Return where the copy of the run of this name lies; nothing is made. Raises ConfigError."""
    address = f"{copy_to.rstrip('/')}/{name}"
    try:
        fsspec = importlib.import_module("fsspec")
        system, root = fsspec.core.url_to_fs(address)
    except Exception as error:  # each file system has its own kinds
        raise unreachable(address, error) from error
    return CopyPlace(address, system, root.rstrip("/"))


def is_mark(name: str) -> bool:
    """Return whether this file makes a checkpoint whole."""
    match = OF_CHECKPOINT.fullmatch(name)
    return match is not None and match[3] == CHECKSUMS


def holds_run(names: Mapping[str, int]) -> bool:
    """Return whether a run began there, as folder.holds_something says it of a folder."""
    skipped = (*BEGINNINGS, OWNER)
    return any(size and name.partition("/")[0] not in skipped for name, size in names.items())


def whole_checkpoints(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the steps of the whole checkpoints, newest first, by the folder that they are in."""
    steps: dict[str, list[int]] = {}
    for name in names:
        match = OF_CHECKPOINT.fullmatch(name)
        if match is not None and match[3] == CHECKSUMS:
            steps.setdefault(match[1], []).append(int(match[2]))
    return {folder: sorted(of, reverse=True) for folder, of in steps.items()}


def unreachable(address: str, error: Exception) -> ConfigError:
    """Return an error that says what to do."""
    scheme = address.partition("://")[0]
    remedy = (
        f"Install what reads {scheme}://: pip install {PACKAGES[scheme]}"
        if isinstance(error, ImportError) and scheme in PACKAGES
        else "See that the bucket is there and that this machine may read and write it"
    )
    return ConfigError(
        f"run.copy_to: {address} cannot be used ({type(error).__name__}: "
        f"{in_a_line(error, 160)}). {remedy}, or leave run.copy_to out."
    )
