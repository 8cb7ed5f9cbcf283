"""The text of a growing row of tokens: what can be sent already, and where a stop string ends it.
Pure.

    tokens  │ He  llo  wor  ld  <half a character>
    window  │          └──────────────────┘          decoded again when tokens come
    text    │ Hello wor|ld                           sent up to where nothing can change it

A stop string ends an answer at the first token with which the text contains it, however the tokens
came: one by one, in blocks or all at once.
"""

import codecs
from collections.abc import Callable, Sequence

HALF = "�"
"""What a decoder writes for bytes that are no character (yet)."""

Decode = Callable[[Sequence[int]], str]
"""Turns token ids to text; special tokens give none."""


TextBytes = Callable[[int], bytes]
"""Gives the bytes that a token adds to a text."""


class Characters:
    """Counts the characters of growing bytes: UTF-8, with a HALF for what is no character."""

    def __init__(self) -> None:
        """Begin without bytes."""
        self._count = 0  # of the characters that no further byte changes
        self._open = b""  # what follows them

    def place(self, new: bytes) -> int:
        """Take more bytes; return the number of the character that the first one is in."""
        place = self._count
        if new:
            place += len((self._open + new[:1]).decode("utf-8", "replace")) - 1
        whole, used = codecs.utf_8_decode(self._open + new, "replace", False)
        self._count, self._open = self._count + len(whole), (self._open + new)[used:]
        return place


class TextFlow:
    """The text of one answer while its tokens come."""

    def __init__(
        self, decode: Decode, stops: Sequence[str] = (), bytes_of: TextBytes | None = None
    ) -> None:
        """Begin without tokens.

        Args:
            decode: see Decode.
            stops: strings that end the answer.
            bytes_of: see TextBytes; None: a text is more than the bytes of its tokens.
        """
        self._bytes_of, self._characters = bytes_of, Characters()
        self._decode, self._stops = decode, tuple(stops)
        self._longest_stop = max(map(len, self._stops), default=0)
        self._ids: list[int] = []
        self._start = self._settled = 0  # the window's first token; first token not in `text`
        self.text = ""  # of the settled tokens
        self.stop: str | None = None  # the stop string that has ended it
        self.count: int | None = None  # tokens up to the end that the stop string makes

    def feed(self, token_ids: Sequence[int]) -> None:
        """Take more tokens; those behind a stop string are left out."""
        if not self._stops:
            self._take(token_ids)
        for token in token_ids if self._stops else ():  # which one completes a stop string?
            if self.count is not None:
                return
            known = len(self.text)
            self._take([token])
            self.stop = self._found(max(0, known - self._longest_stop))
            self.count = None if self.stop is None else len(self._ids)

    def places(self, token_ids: Sequence[int]) -> list[int]:
        """Take more tokens, of which `text` is not asked; return where in the text each begins, in
        characters: of a part of a character, where that character does. Without bytes_of, all of a
        row of bytes that are no character are where the first one is."""
        if self._bytes_of is not None:
            return [self._characters.place(self._bytes_of(int(token))) for token in token_ids]
        found = []
        for token in token_ids:
            found.append(len(self.text))
            self._take([token])
        return found

    def _take(self, token_ids: Sequence[int]) -> None:
        """Take more tokens; their text waits while it ends with half a character."""
        self._ids.extend(int(i) for i in token_ids)
        new = self._decode(self._ids[self._start :])
        if new.endswith(HALF) or self._settled == len(self._ids):
            return
        self.text += new[len(self._decode(self._ids[self._start : self._settled])) :]
        self._start, self._settled = self._settled, len(self._ids)

    def _found(self, start: int) -> str | None:
        """Return the stop string that comes first in the text from here on."""
        places = [(self.text.find(s, start), s) for s in self._stops]
        return min((found for found in places if found[0] >= 0), default=(0, None))[1]

    def sendable(self) -> str:
        """Return the beginning of the text that no further token changes: without what may become a
        stop string, and without what follows bytes that are no characters."""
        text = self.text
        if self.stop is not None:
            return before_stop(text, self.stop)
        if HALF in text:
            return text[: text.find(HALF)]
        return text[: len(text) - self.held]

    @property
    def held(self) -> int:
        """Number of characters at the text's end that may become a stop string."""
        return max((_overlap(self.text, stop) for stop in self._stops), default=0)

    def whole(self) -> str:
        """Return the text of all tokens so far, the stop string and what follows it left out."""
        text = self._decode(self._ids)
        return text if self.stop is None else before_stop(text, self.stop)


def before_stop(text: str, stop: str) -> str:
    """Return what comes before a stop string; everything if it is not there."""
    place = text.find(stop)
    return text if place < 0 else text[:place]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text with which the stop string begins."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
