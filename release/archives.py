"""What is in a wheel and in a source archive, compared with the files that git tracks."""

import email
import hashlib
import re
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

PACKAGE, RECIPES, CONFIGS = "jaxrl_async/", "jaxrl_async/recipes", "configs/"
LEFT_OUT = ("benchmarks/",)
"""Folders that are in no archive."""
CHECKSUMS = "SHA256SUMS"
MADE = re.compile(r"(PKG-INFO|setup\.cfg|jaxrl_async\.egg-info/.*)")
"""Files of a source archive that setuptools makes."""
RELATIVE = re.compile(r"\]\((?![a-z]+://|mailto:)[^)\s]+\)|(?:src|href)=\"(?![a-z]+://)[^\"]+\"")
"""A link of Markdown or HTML that leads nowhere outside of the repository."""


def installed(tracked: Iterable[str]) -> set[str]:
    """Return the paths of a wheel for tracked files: the package, and configs/ as its recipes.

    RECIPES is a link of the repository, which an archive has as a folder.
    """
    tracked = set(tracked)
    own = {path for path in tracked if path.startswith(PACKAGE)} - {RECIPES}
    recipes = {path for path in tracked if path.startswith(CONFIGS)}
    return own | {f"{RECIPES}/{path.removeprefix(CONFIGS)}" for path in recipes}


def wheel_faults(wheel: Path, tracked: Iterable[str], urls: Sequence[str]) -> list[str]:
    """Return what is wrong with a wheel, a sentence each.

    Args:
        wheel: the archive.
        tracked: files of the repository, from its root on.
        urls: addresses that its description must name (pyproject.toml, project.urls).
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        told = next((n for n in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)), None)
        if told is None:
            return [f"{wheel.name} has no METADATA."]
        metadata = email.message_from_bytes(archive.read(told))
    beside = told.removesuffix("METADATA")
    faults = _differences(wheel, {n for n in names if not n.startswith(beside)}, installed(tracked))
    described = [value.partition(", ")[2] for value in metadata.get_all("Project-URL", [])]
    faults += [
        f"{wheel.name} does not name the address {url}." for url in urls if url not in described
    ]
    if metadata["Description-Content-Type"] != "text/markdown":
        faults.append(f"{wheel.name} does not say that its description is Markdown.")
    page = re.sub(r"^```.*?^```$", "", str(metadata.get_payload()), flags=re.MULTILINE | re.DOTALL)
    faults += [
        f"{wheel.name}: the description has the link {link}, which leads nowhere on an index."
        for link in RELATIVE.findall(page)
    ]
    faults += [
        f"{wheel.name} names the licence file {file} and does not hold it."
        for file in metadata.get_all("License-File", ["LICENSE"])
        if f"{beside}licenses/{file}" not in names
    ]
    return faults


def sdist_faults(sdist: Path, tracked: Iterable[str]) -> list[str]:
    """Return what is wrong with a source archive, a sentence each. Arguments as wheel_faults'."""
    with tarfile.open(sdist) as archive:
        paths = [PurePosixPath(m.name) for m in archive.getmembers() if not m.isdir()]
    top = sdist.name.removesuffix(".tar.gz")
    if stray := [str(path) for path in paths if path.parts[0] != top]:
        return [f"{sdist.name} has files outside of {top}/: {_some(stray)}."]
    names = {"/".join(path.parts[1:]) for path in paths}
    wanted = {p for p in tracked if not p.startswith(LEFT_OUT)} - {RECIPES}
    wanted |= installed(tracked)
    return _differences(sdist, {name for name in names if not MADE.fullmatch(name)}, wanted)


def _differences(archive: Path, names: set[str], wanted: set[str]) -> list[str]:
    faults = []
    if missing := sorted(wanted - names):
        faults.append(
            f"{archive.name} lacks {_some(missing)}. Name them in pyproject.toml or MANIFEST.in."
        )
    if more := sorted(names - wanted):
        faults.append(f"{archive.name} has files that git does not track: {_some(more)}.")
    return faults


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def checksum(file: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_checksums(folder: Path) -> Path:
    """Write the checksums of a folder's archives, as `sha256sum --check` reads them."""
    lines = [f"{checksum(file)}  {file.name}\n" for file in archives_in(folder)]
    (told := folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    return told


def archives_in(folder: Path) -> list[Path]:
    """Return the wheels and source archives in a folder, by name."""
    return sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
