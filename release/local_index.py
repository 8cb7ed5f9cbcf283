"""Serve a folder of archives as a package index on this machine while a command runs.

python release/local_index.py dist pip install --extra-index-url INDEX jaxrl_async

INDEX stands for the address of the index, which is the simple one of PEP 503. It has only what is
in the folder; dependencies come from the usual index.
"""

import html
import os
import re
import subprocess
import sys
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


def write_index(folder: Path) -> list[str]:
    """Write the pages of a folder's archives into FOLDER/simple; return the projects' names."""
    found: dict[str, list[Path]] = defaultdict(list)
    for archive in archives_in(folder):
        found[project_of(archive.name)].append(archive)
    links = {
        name: [
            f'<a href="../../{html.escape(a.name)}#sha256={checksum(a)}">{html.escape(a.name)}</a>'
            for a in archives
        ]
        for name, archives in found.items()
    }
    links[""] = [f'<a href="{name}/">{name}</a>' for name in found]
    for name, lines in links.items():
        (own := folder / SIMPLE / name).mkdir(parents=True, exist_ok=True)
        page = "<!DOCTYPE html><html><body>\n" + "<br>\n".join(lines) + "\n</body></html>\n"
        (own / "index.html").write_text(page, encoding="utf-8")
    return sorted(found)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine; yield the address of its index."""
    handler = partial(Quiet, directory=str(folder))
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
    if not write_index(folder):
        print(f"local_index.py: {folder} has no wheel and no source archive.", file=sys.stderr)
        return 2
    with served(folder) as address:
        command = [address if word == INDEX else word for word in words[1:]]
        return subprocess.run(command, env=without_proxy(os.environ)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
