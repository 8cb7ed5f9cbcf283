"""The text of a growing row of tokens: the part that can be sent, and its end at a stop string.
Pure.

    tokens  │ He  llo  wor  ld  <half a character>
    window  │          └──────────────────┘          decoded again when tokens arrive
    text    │ Hello wor|ld                           sent up to where it cannot change any more

A stop string ends an answer at the first token with which the text contains it, regardless of
whether tokens arrive one by one, in blocks or all together.
"""

import codecs
from collections.abc import Callable, Sequence

HALF = "�"
"""Replacement character that a decoder writes for invalid or incomplete bytes."""

Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text; special tokens are dropped."""


TextBytes = Callable[[int], bytes]
"""Returns the bytes that a token adds to a text."""


class Characters:
    """Counts the characters of growing UTF-8 bytes, with a HALF for invalid bytes."""

    def __init__(self) -> None:
        """Start without bytes."""
        self._count = 0  # number of characters that no further byte changes
        self._open = b""  # the bytes after them

    def offset(self, new: bytes) -> int:
        """Process more bytes; return the index of the character that contains the first one."""
        offset = self._count
        if new:
            offset += len((self._open + new[:1]).decode("utf-8", "replace")) - 1
        whole, used = codecs.utf_8_decode(self._open + new, "replace", False)
        self._count, self._open = self._count + len(whole), (self._open + new)[used:]
        return offset


class TextFlow:
    """The text of one answer while its tokens arrive."""

    def __init__(
        self, decode: Decode, stops: Sequence[str] = (), bytes_of: TextBytes | None = None
    ) -> None:
        """Start without tokens.

        Args:
            decode: see Decode.
            stops: strings that end the answer.
            bytes_of: see TextBytes; None: a text is not just the bytes of its tokens.
        """
        self._bytes_of, self._characters = bytes_of, Characters()
        self._decode, self._stops = decode, tuple(stops)
        self._longest_stop = max(map(len, self._stops), default=0)
        self._ids: list[int] = []
        self._start = self._settled = 0  # the window's first token; first token not in `text`
        self.text = ""  # of the settled tokens
        self.stop: str | None = None  # the stop string that ended it
        self.count: int | None = None  # number of tokens up to the stop string's end

    def feed(self, token_ids: Sequence[int]) -> None:
        """Process more tokens; those after a stop string are dropped."""
        if not self._stops:
            self._take(token_ids)
        for token in token_ids if self._stops else ():  # find the one that completes a stop string
            if self.count is not None:
                return
            known = len(self.text)
            self._take([token])
            self.stop = self._first_stop(max(0, known - self._longest_stop))
            self.count = None if self.stop is None else len(self._ids)

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Process more tokens without updating `text`; return the text offset of each, in
        characters. A token inside a character has that character's offset. Without bytes_of, all
        tokens of a run of invalid bytes have the first one's offset."""
        if self._bytes_of is not None:
            return [self._characters.offset(self._bytes_of(int(token))) for token in token_ids]
        offsets = []
        for token in token_ids:
            offsets.append(len(self.text))
            self._take([token])
        return offsets

    def _take(self, token_ids: Sequence[int]) -> None:
        """Process more tokens; their text is delayed while it ends with half a character."""
        self._ids.extend(int(i) for i in token_ids)
        new = self._decode(self._ids[self._start :])
        if new.endswith(HALF) or self._settled == len(self._ids):
            return
        self.text += new[len(self._decode(self._ids[self._start : self._settled])) :]
        self._start, self._settled = self._settled, len(self._ids)

    def _first_stop(self, start: int) -> str | None:
        """Return the first stop string in the text from `start`."""
        offsets = [(self.text.find(s, start), s) for s in self._stops]
        return min((pair for pair in offsets if pair[0] >= 0), default=(0, None))[1]

    def sendable(self) -> str:
        """Return the part of the text that no further token changes: without a possible start of a
        stop string, and without text after invalid bytes."""
        text = self.text
        if self.stop is not None:
            return text.partition(self.stop)[0]
        if HALF in text:
            return text.partition(HALF)[0]
        return text[: len(text) - self.held]

    @property
    def held(self) -> int:
        """Number of characters at the text's end that may become a stop string."""
        return max((overlap(self.text, stop) for stop in self._stops), default=0)

    def whole(self) -> str:
        """Return the text of all tokens so far, without the stop string and the text after it."""
        text = self._decode(self._ids)
        return text if self.stop is None else text.partition(self.stop)[0]


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the stop string."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
