"""Serve a folder of archives as a package index on this machine while a command runs.

python release/local_index.py dist pip install --extra-index-url INDEX jaxrl_async

INDEX stands for the address of the index, which is the simple one of PEP 503. It has only what is
in the folder; dependencies come from the usual index.
"""

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from archives import archives_in, checksum

HOST = "127.0.0.1"
SIMPLE, INDEX = "simple", "INDEX"


def project_of(archive: str) -> str:
    """Return the normalized name (PEP 503) of the project that an archive's file name says."""
    return re.sub(r"[-_.]+", "-", archive.split("-")[0]).lower()


def write_index(archives: Sequence[Path], folder: Path) -> None:
    """Copy archives into a folder, and write the index's pages into FOLDER/simple."""
    found: dict[str, list[Path]] = defaultdict(list)
    for archive in archives:
        shutil.copy2(archive, folder)
        found[project_of(archive.name)].append(archive)
    links = {
        name: [
            f'<a href="../../{html.escape(a.name)}#sha256={checksum(a)}">{html.escape(a.name)}</a>'
            for a in own
        ]
        for name, own in found.items()
    }
    links[""] = [f'<a href="{name}/">{name}</a>' for name in found]
    for name, lines in links.items():
        (page := folder / SIMPLE / name).mkdir(parents=True, exist_ok=True)
        text = "<!DOCTYPE html><html><body>\n" + "<br>\n".join(lines) + "\n</body></html>\n"
        (page / "index.html").write_text(text, encoding="utf-8")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the archives of a folder on a free port of this machine; yield the index's address."""
    with tempfile.TemporaryDirectory(prefix="jaxrl-index-") as copies:
        write_index(archives_in(folder), Path(copies))
        handler = partial(Quiet, directory=copies)
        with ThreadingHTTPServer((HOST, 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever, name="index", daemon=True)
            thread.start()
            try:
                yield f"http://{HOST}:{server.server_port}/{SIMPLE}/"
            finally:
                server.shutdown()
                thread.join()


class Quiet(SimpleHTTPRequestHandler):
    """Serve files without a line for each request."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which programs reach this machine without a proxy."""
    hosts = {name: environment.get(name) for name in ("no_proxy", "NO_PROXY")}
    more = {name: ",".join(filter(None, [known, HOST])) for name, known in hosts.items()}
    return {**environment, **more}


def main(words: Sequence[str]) -> int:
    """Serve the first word's folder while the command of the others runs; return its exit code."""
    if INDEX not in words[2:]:
        print(f"usage: local_index.py FOLDER COMMAND ... {INDEX} ...", file=sys.stderr)
        return 2
    folder = Path(words[0])
    if not archives_in(folder):
        print(f"local_index.py: {folder} has no wheel and no source archive.", file=sys.stderr)
        return 2
    with served(folder) as address:
        command = [address if word == INDEX else word for word in words[1:]]
        return subprocess.run(command, env=without_proxy(os.environ)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
