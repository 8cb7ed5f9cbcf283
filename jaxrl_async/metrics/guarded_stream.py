"""Text streams that never raise: a broken pipe, a full disk or a closed terminal does not end a
run.

The first failed write is logged once; from then on nothing is written.
"""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

log = logging.getLogger(__name__)


class GuardedStream(io.TextIOBase):
    """A stream that ignores failures. Usable from any thread. Attributes that it does not define
    (reconfigure, name, mode, line_buffering and others) are the wrapped stream's."""

    def __init__(self, stream: TextIO | None, name: str, *, owns: bool = False) -> None:
        """Guard a stream.

        Args:
            stream: the stream to write to; None: the process has none, and nothing is written.
            name: for the log.
            owns: this package owns the process, and so its file descriptor. Once it cannot be
                written, it is redirected to the null device for all other writers, too.
        """
        nowhere = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        self._stream: TextIO = nowhere if stream is None else stream
        self._name, self._owns = name, owns
        self.broken = stream is None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, if that is still possible."""
        if not self.broken:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:
                if isinstance(error, UnicodeEncodeError):
                    self._written_plainly(text)
                else:
                    self._give_up(error)
        return len(text)

    def _written_plainly(self, text: str) -> None:
        """Write characters outside of the stream's encoding as escapes."""
        encoding = getattr(self._stream, "encoding", None) or "ascii"
        plain = text.encode(encoding, "backslashreplace").decode(encoding)
        try:
            self._stream.write(plain)
        except (OSError, ValueError) as error:
            self._give_up(error)

    def flush(self) -> None:
        """Flush, if that is still possible."""
        if not self.broken:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.broken = True  # first: the log may be written to this stream
        if self._owns:
            with contextlib.suppress(OSError, ValueError):
                descriptor = self.fileno()
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
        log.warning(
            "%s can no longer be written (%s: %s): nothing is shown there from now on; the run "
            "continues",
            self._name,
            type(error).__name__,
            error,
        )

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        try:
            return not self.broken and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return the file descriptor. Raises OSError if the stream has none."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    def detach(self) -> Any:
        """Return the underlying byte stream, without detaching it, since the run still writes
        here."""
        self.flush()
        return self.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """The stream's error handler for characters outside of its encoding."""
        return getattr(self._stream, "errors", None)

    @property
    def newlines(self) -> Any:  # type: ignore[override]
        """The stream's."""
        return getattr(self._stream, "newlines", None)

    @property
    def buffer(self) -> Any:
        """The underlying byte stream, which is not guarded."""
        return self._stream.buffer


@contextmanager
def guarded_output() -> Iterator[None]:
    """Guard stdout and stderr of a process that this package owns, inside the `with`."""
    before = sys.stdout, sys.stderr
    guarded = tuple(
        GuardedStream(stream, name, owns=stream is fixed)
        for stream, fixed, name in (
            (sys.stdout, sys.__stdout__, "stdout"),
            (sys.stderr, sys.__stderr__, "stderr"),
        )
    )
    sys.stdout, sys.stderr = guarded
    try:
        yield
    finally:
        for stream in guarded:
            stream.flush()
        sys.stdout, sys.stderr = before
