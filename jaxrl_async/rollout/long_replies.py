"""Truncation of environment replies that are certainly too long to fit. Pure.

"line 1 ... line 900000"  ──>  "line 1 ... (5,983,616 characters are cut) ... line 900000"
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_async.types import Message

LEAST_SHOWN = 64
"""Minimum number of characters that are kept of each text."""
MAX_DEPTH = 8
"""Maximum nesting depth of texts in a message, such as in content parts and tool calls."""


def chars_of(messages: Sequence[Message]) -> int:
    """Return the total number of characters in the texts of messages."""
    return sum(map(len, _texts(list(messages), MAX_DEPTH)))


def long_texts(messages: Sequence[Message], least: int) -> list[str]:
    """Return the texts of messages with more characters than `least`."""
    return [text for text in _texts(list(messages), MAX_DEPTH) if len(text) > least]


def fitted(
    messages: Sequence[Message], most_chars: int, kept_chars: int
) -> tuple[list[Message], int]:
    """Return messages that may fit, and the number of characters that were cut.

    Args:
        messages: messages of one reply.
        most_chars: maximum total characters; in longer messages, the long texts are cut.
        kept_chars: total characters that are kept of them, from their heads and tails.
    """
    sizes = [len(text) for text in _texts(list(messages), MAX_DEPTH)]
    if sum(sizes) <= most_chars:
        return list(messages), 0
    each = max(kept_chars // len(sizes), LEAST_SHOWN)
    cut = sum(size - each for size in sizes if size > each)
    return [_cut(message, each, MAX_DEPTH) for message in messages], cut


def cut_text(text: str, most: int) -> str:
    """Return the head and tail of a text with more than `most` characters, `most` in total."""
    if len(text) <= most:
        return text
    head = most - most // 2
    left_out = len(text) - most
    return f"{text[:head]}... ({left_out:,} characters are cut) ...{text[len(text) - most // 2 :]}"


def _texts(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner, depth - 1)


def _cut(value: object, most: int, depth: int) -> Any:
    if isinstance(value, str):
        return cut_text(value, most)
    if not depth:
        return value
    if isinstance(value, Mapping):
        return {name: _cut(inner, most, depth - 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(inner, most, depth - 1) for inner in value]
    return value
