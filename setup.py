"""Describe the package by README.md, with its links as addresses; pyproject.toml has all else.

An index shows the description without the repository's files, where `docs/index.md` leads nowhere.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def with_addresses(page: str, repository: str, version: str) -> str:
    """Return a page of Markdown whose links lead to the repository's files of a version.

    Code blocks stay as they are. A version between two releases has no tag: HEAD stands for it.
    """
    tree = "HEAD" if "dev" in version else f"v{version}"
    raw = repository.replace("//github.com/", "//raw.githubusercontent.com/")

    def addressed(link: re.Match[str]) -> str:
        target = link["target"]
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        where = f"{raw}/{tree}" if link["picture"] else f"{repository}/blob/{tree}"
        file = f"README.md{target}" if target.startswith("#") else target
        return f"{link['picture']}[{link['text']}]({where}/{file})"

    parts = re.split(r"(^```.*?^```$)", page, flags=re.MULTILINE | re.DOTALL)
    return "".join(p if p.startswith("```") else LINK.sub(addressed, p) for p in parts)


def description() -> str:
    """Return README.md as the package describes itself."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]
    package = (HERE / "jaxrl_async/__init__.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    assert version is not None, "jaxrl_async/__init__.py says its version"
    readme = (HERE / "README.md").read_text("utf-8")
    return with_addresses(readme, project["urls"]["Repository"], version[1])


if __name__ == "__main__":  # also while an archive is built
    setup(long_description=description(), long_description_content_type="text/markdown")
