"""A configuration's text while it is loaded: parsed strictly, with the line of each key.

    text --yaml--> tree + line of each key        and a list of problems

Needs no JAX.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxrl_async.errors import ConfigError

MAX_BYTES = 2**18
"""Maximum size of a configuration file."""
MAX_DEPTH = 16
"""Maximum nesting of a configuration file."""
MAX_NODES = 10_000
"""Maximum number of keys and values of a configuration file; each alias counts as its target."""
MAX_INTEGER = 2**63
"""Integers of this size or above are refused for every setting."""
COMMAND_LINE = "command line"

KeyPath = tuple[str, ...]
Tree = dict[str, Any]


@dataclass
class Draft:
    """A configuration while it is loaded: the raw tree, the lines of its keys, its problems."""

    file: str
    tree: Tree = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)  # line of each key in the file, from 1
    overridden: set[KeyPath] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)  # warnings that were logged
    # settings of sections that a former switch made null, for a later source that has the section
    switched_off: dict[KeyPath, Tree] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """Return where a key was set: on the command line, or in which line of the file."""
        if any(path[:end] in self.overridden for end in range(1, len(path) + 1)):
            return COMMAND_LINE
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return f"{self.file}, line {self.lines[path[:end]]}"
        return f"{self.file} with the {COMMAND_LINE}" if self.overridden else self.file

    def _path_of(self, sentence: str) -> KeyPath:
        """Return the longest key path that was set and that a sentence begins with; (): none. Names
        in it may have dots and hyphens."""
        paths = [path for path in (*self.lines, *self.overridden) if path]
        matching = (p for p in paths if re.match(re.escape(".".join(p)) + r"(?![\w-])", sentence))
        return max(matching, key=len, default=())

    def add_problem(self, path: KeyPath, sentence: str) -> None:
        """Add a problem with the key at `path`; (): with the key that it begins with."""
        self.problems.append(f"{self.where(path or self._path_of(sentence))}: {sentence}")


def read_draft(path: Path) -> Draft:
    """Read a configuration file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}. Give the path of a YAML file."
        ) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{path}: longer than {MAX_BYTES:,} bytes. Give the path of a configuration in YAML."
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}). Save it as UTF-8."
        ) from None
    draft = Draft(file=str(path))
    tree = parse_yaml(text, draft.file, draft)
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold sections (run:, model:, ...), not {shown(tree)}.")
    draft.tree = tree or {}
    return draft


def parse_yaml(text: str, where: str, draft: Draft | None = None) -> Any:
    """Parse YAML; raise ConfigError for duplicate keys, merge keys, cycles and deep nesting."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        for path, line in _keys(node, where, (), counter=itertools.count(1)):
            if draft is not None:
                draft.lines[path] = line
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = " Indent with spaces." if "'\\t'" in str(error.problem) else ""
        raise ConfigError(
            f"{where}{position}: not valid YAML: {error.problem or error.context}.{hint}"
        ) from None
    except ConfigError:
        raise
    except (
        yaml.YAMLError,
        ValueError,
        ArithmeticError,
        RecursionError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # PyYAML does not catch the errors of its constructors
        reason = (
            "nested too deeply"
            if isinstance(error, RecursionError)
            else " ".join(str(error).split())
        )
        raise ConfigError(f"{where}: not valid YAML: {reason}.") from None


def _keys(
    node: yaml.Node,
    where: str,
    path: KeyPath,
    seen: frozenset[int] = frozenset(),
    depth: int = 0,
    *,
    counter: Iterator[int],
) -> Iterator[tuple[KeyPath, int]]:
    """Yield path and line of each key below `node`; raise ConfigError for refused kinds of YAML.

    counter: counts the nodes; an alias counts as all nodes of its target.
    """
    line = node.start_mark.line + 1
    if next(counter) > MAX_NODES:
        raise ConfigError(
            f"{where}, line {line}: more than {MAX_NODES:,} keys and values, each alias "
            "counting as its target. This is not a configuration: correct the path."
        )
    if id(node) in seen or depth > MAX_DEPTH:
        raise ConfigError(f"{where}, line {line}: nested more than {MAX_DEPTH} deep. Flatten it.")
    seen |= {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _keys(item, where, (*path, "[]"), seen, depth + 1, counter=counter)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where}, line {line}: not valid YAML: a key that is not text.")
        name = str(key.value)
        dotted = ".".join((*path, name))
        if name == "<<":
            raise ConfigError(
                f"{where}, line {line}: merging with << is not supported. Write it out."
            )
        if name in first:
            raise ConfigError(
                f"{where}, line {line}: {dotted} is given twice, first in line {first[name]}. "
                "Remove one."
            )
        first[name] = line
        yield (*path, name), line
        yield from _keys(value, where, (*path, name), seen, depth + 1, counter=counter)


def shown(value: object) -> str:
    """Return a value for a message: short, on one line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= MAX_INTEGER:
        return "a very long number"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except ValueError:
        return "a very long number"
    return text if len(text) <= 80 else text[:77] + "..."
