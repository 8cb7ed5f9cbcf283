"""Every code block of README and docs is run, loaded or checked against what it names."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from jaxrl_async.command.entry_point import COMMANDS
from jaxrl_async.config.load import load

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
LANGUAGES = {"bash", "python", "yaml", "json", "toml", "text"}
PARTNERS = {
    "python.md": "a policy of the page's own name: tests/test_docs.py",
    "own_model.md": "the hub: notebooks/your_own_model.ipynb",
    "README.md": "as docs/python.md",
    "evaluation.md": "a policy: tests/test_docs.py",
    "coming_from.md": "scripts that train, and other libraries: tests/test_docs.py",
    "gemma-3-4b-it": "a model with a tower: tests/api/test_asker.py",
    "import openai": "a server: tests/endpoint/test_served.py",
    "JAXRL_MODEL": "a served policy, each client in its environment: tests/clients",
    "import httpx": "a run with agents outside: tests/endpoint/test_external_agents.py",
    "policy = Policy.from_pretrained": "an adapter: tests/parity/test_peft.py",
    "from jaxrl_async.model.adapter_stack": "several adapters: tests/sampler/test_adapters.py",
}
"""Blocks of Python that need another side, by page or some words, and who runs what they do."""
if importlib.util.find_spec("jetstream") is None:
    PARTNERS["interop.jetstream import"] = "an engine's interface: tests/interop"


def blocks() -> list[tuple[str, str, str]]:
    """Return page, language and text of every block."""
    return [
        (page.name, language, text)
        for page in PAGES
        for language, text in re.findall(
            r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        )
    ]


def of(language: str) -> list[tuple[str, str]]:
    return [(page, text) for page, found, text in blocks() if found == language]


def commands() -> list[tuple[str, str, list[str]]]:
    """Return page, module and words of each command line of this package in a block."""
    found = []
    for page, text in of("bash"):
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            words = shlex.split(line, comments=True)
            for place, word in enumerate(words):
                if word.startswith("jaxrl_async.") and words[place - 1] == "-m":
                    found.append((page, word, words[place + 1 :]))
                elif word == "jaxrl-async" and place == 0 and len(words) > 1:
                    name = words[1]
                    module = COMMANDS[name].module if name in COMMANDS else ""
                    found.append((page, f"jaxrl_async.{module}".rstrip("."), words[2:]))
    return found


@cache
def help_of(module: str) -> str:
    name = next((n for n, c in COMMANDS.items() if f"jaxrl_async.{c.module}" == module), None)
    command = [module] if name is None else ["jaxrl_async", name]
    words = [sys.executable, "-m", *command, "--help"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout


def test_every_block_says_its_language() -> None:
    assert {language for _, language, _ in blocks()} == LANGUAGES


@pytest.mark.parametrize(("page", "text"), of("json"))
def test_json_is_json(page: str, text: str) -> None:
    assert json.loads(text)


@pytest.mark.parametrize(("page", "text"), of("toml"))
def test_toml_is_toml(page: str, text: str) -> None:
    assert tomllib.loads(text)


@pytest.mark.parametrize(("page", "text"), of("yaml"))
def test_settings_are_those_of_a_configuration(page: str, text: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.yaml").write_text("data: {jsonl: {path: c.jsonl}}\n", "utf-8")
    load(yaml.safe_load(text))


def test_python_that_needs_no_other_side_runs(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    ran = []
    for page, text in of("python"):
        ast.parse(text)
        if not any(page == name or name in text for name in PARTNERS):
            names: dict = {"__name__": page}
            exec(text, names)
            ran.append(page)
    assert len(ran) >= 8


@pytest.mark.exhaustive
def test_commands_have_the_options_and_files_that_are_written() -> None:
    assert len(commands()) > 20
    for page, module, words in commands():
        assert importlib.util.find_spec(module), (page, module)
        for word in words:
            if word.startswith("--") and len(word) > 2:
                assert word.partition("=")[0] in help_of(module), (page, module, word)
            if word.startswith(("configs/", "benchmarks/")) and "*" not in word:
                assert (ROOT / word).exists(), (page, word)
            if word.startswith("recipe:"):
                assert (ROOT / "configs" / f"{word.removeprefix('recipe:')}.yaml").is_file(), word
