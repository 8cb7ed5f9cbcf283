"""Read the text of any run's configuration as short texts by dotted names."""

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

MAX_CONFIG_BYTES = 2**20
"""Maximum size of a configuration that is read, bytes."""
MAX_SETTINGS = 5000
"""Maximum number of settings of a run that are compared."""
MAX_TEXT = 200
"""Maximum length of a setting's text."""
MAX_BRACKETS, MAX_DASHES = 5000, 50
"""Maximum numbers of brackets, and of lists that begin within lists, of a configuration."""
TAGS_SETTING = "metrics.tags"
"""The setting with a run's tags."""
LONG_NUMBER = "a long number"
"""Text of a number of more than 30 digits."""
MAX_TAGS, MAX_TAG = 20, 40
"""Maximum number of tags of a run, and of characters of a tag."""


class _ShortTexts(reprlib.Repr):
    """Shortens values; Python refuses to write very long numbers in full."""

    def repr_int(self, x: int, level: int) -> str:
        return LONG_NUMBER if abs(x) >= 10**30 else repr(x)


_short = _ShortTexts()
_short.maxlevel, _short.maxlist, _short.maxdict, _short.maxtuple = 3, 12, 12, 12
_short.maxstring = _short.maxother = _short.maxlong = 120
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parsed(text: str) -> Mapping[str, Any]:
    """Return a configuration; {} if it is damaged, or nested as none is."""
    nested = text.count("[") + text.count("{") > MAX_BRACKETS or text.count("- - ") > MAX_DASHES
    if len(text) > MAX_CONFIG_BYTES or nested:
        return {}
    try:
        loader = _Loader(text)
        try:
            tree = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def settings_of(tree: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the dotted names and short texts of a configuration's settings, MAX_SETTINGS at
    most."""
    waiting: list[tuple[str, Any]] = [("", tree)]
    count = 0
    while waiting and count < MAX_SETTINGS:
        name, value = waiting.pop()
        if isinstance(value, Mapping) and value and name.count(".") < 12:
            keys = map(text_of, value)
            inner = [
                (f"{name}.{key}" if name else key, inner_value)
                for key, inner_value in zip(keys, value.values(), strict=True)
            ]
            waiting += reversed(inner[:MAX_SETTINGS])
            continue
        count += 1
        yield name[:MAX_TEXT], text_of(value)


def text_of(value: object) -> str:
    """Return a setting's value as in YAML, shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return value[:MAX_TEXT]
    return _short.repr(value)[:MAX_TEXT]


def tags_in(text: str) -> list[str]:
    """Return the tags of a configuration."""
    section = parsed(text).get("metrics")
    tags = section.get("tags") if isinstance(section, Mapping) else None
    return cleaned(tags) if isinstance(tags, list) else []


def cleaned(tags: Sequence[object]) -> list[str]:
    """Return tags in bounds, without empty ones."""
    texts = (text_of(tag).strip()[:MAX_TAG] for tag in tags[: 10 * MAX_TAGS])
    return [text for text in texts if text][:MAX_TAGS]
