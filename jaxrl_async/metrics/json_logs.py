"""Write the log of a process: lines for people, or (run.logs) each line as one JSON object in the
format of Cloud Logging.

    logging ──> LineForPeople ──> stderr        2026-11-29 14:05:09 warning: 3 records skipped

In JSON:

    logging ──> EntryHandler ──────────────────────────┐
    print, Console, tracebacks ──> LineStream, by line ┴──> stdout or stderr as they were

Output of native code on file descriptor 2 (XLA, libtpu) stays text.
"""

import io
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from jaxrl_async.errors import shown

log = logging.getLogger(__name__)

LOGS_VARIABLE = "JAXRL_ASYNC_LOGS"
"""Environment variable of a sampler process: json or text."""
FORMS = ("text", "json")
"""The formats of a log."""
LABELS = "logging.googleapis.com/labels"
"""Cloud Logging's name for the labels of an entry."""
INDENT = "    "
"""Indent of a message's further lines."""
OWN = "jaxrl_async"
"""Prefix of the loggers whose INFO messages are written, too."""

_labels: dict[str, str] = {}
_active = False


def entry(message: str, severity: str, at_s: float | None = None) -> str:
    """Return one entry as JSON: severity, message, time in RFC 3339, and the labels."""
    at_s = time.time() if at_s is None else at_s
    second, parts = int(at_s), time.gmtime(int(at_s))
    at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', parts)}.{int((at_s - second) * 1e6):06}Z"
    return json.dumps(
        {"severity": severity, "message": message, "time": at, LABELS: dict(_labels)},
        ensure_ascii=False,
    )


def add_labels(**labels: str) -> None:
    """Add labels to all later entries; no effect if logs are text."""
    if _active:
        _labels.update(labels)


def signal_line(text: str) -> bytes:
    """Return the bytes that a signal handler may write to file descriptor 2 to log `text`."""
    line = entry(text, "WARNING") if _active else f"\n{text}"
    return f"{line}\n".encode()


@contextmanager
def logs_as(form: str, **labels: str) -> Iterator[None]:
    """Write JSON inside the `with` if the form is "json". A nested call only adds labels. In both
    forms messages are formatted by EscapedRecord.

    labels: of each entry.
    """
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(EscapedRecord)
    try:
        with _write_as(form, **labels):
            yield
    finally:
        logging.setLogRecordFactory(before)


# ---- lines for people

DATE = "%Y-%m-%d %H:%M:%S"
"""Format of the time in lines for people."""


@contextmanager
def lines_for_people(info_of: str = "") -> Iterator[None]:
    """Write messages to stderr inside the `with`, as lines with the time and without names of
    modules: warnings, and what the logger `info_of` and those below it report ("": none).

    For a process of this package's own: where logging has been set up before, nothing changes.
    """
    root, own = logging.getLogger(), logging.getLogger(OWN)
    if root.handlers:
        yield
        return
    handler = StderrHandler()
    handler.setFormatter(LineForPeople())
    handler.addFilter(
        lambda record: (
            record.levelno >= logging.WARNING
            or (info_of != "" and f"{record.name}.".startswith(f"{info_of}."))
        )
    )
    level, factory = own.level, logging.getLogRecordFactory()
    root.addHandler(handler)
    own.setLevel(logging.INFO)
    logging.setLogRecordFactory(EscapedRecord)
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)
        own.setLevel(level)
        root.removeHandler(handler)


class StderrHandler(logging.StreamHandler[Any]):
    """Writes to what sys.stderr is at that moment: a live display replaces it for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """The current stderr."""
        return sys.stderr


class LineForPeople(logging.Formatter):
    """The time, the level of a warning or an error, and the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        is_warning = record.levelno >= logging.WARNING
        level = f"{record.levelname.lower()}: " if is_warning else ""
        return f"{self.formatTime(record, DATE)} {level}{record.message}"


# ---- JSON


class EscapedRecord(logging.LogRecord):
    """A record whose message may quote programs and other received text: it cannot imitate another
    line of the log, nor control a terminal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info:
            self.exc_text = shown(logging.Formatter().formatException(self.exc_info), INDENT)

    def getMessage(self) -> str:
        """Return the message with its further lines indented, and a space for each control
        character."""
        return shown(super().getMessage(), INDENT)


@contextmanager
def _write_as(form: str, **labels: str) -> Iterator[None]:
    global _active
    if form != "json":
        yield
        return
    if _active:
        add_labels(**labels)
        yield
        return
    _labels.update(labels)
    out, err = sys.stdout, sys.stderr
    root, own = logging.getLogger(), logging.getLogger(OWN)
    handlers, level = root.handlers[:], own.level
    root.handlers[:] = [EntryHandler(err)]
    own.setLevel(logging.INFO)
    streams = LineStream(out, "INFO"), LineStream(err, "ERROR")
    sys.stdout, sys.stderr = streams
    _active = True
    try:
        yield
    finally:
        for stream in streams:
            stream.end()
        sys.stdout, sys.stderr = out, err
        root.handlers[:] = handlers
        own.setLevel(level)
        _active = False
        _labels.clear()


def print_exception() -> bool:
    """Write the current exception as one entry; return False, and do nothing, if logs are
    text."""
    if _active:
        log.critical("this process ends with an exception", exc_info=True)
    return _active


class LineStream(io.TextIOBase):
    """A text stream whose lines become entries. Usable from any thread."""

    def __init__(self, stream: TextIO, severity: str) -> None:
        """Write to `stream`, which is never closed here."""
        self._stream, self._severity = stream, severity
        self._lock, self._rest = threading.Lock(), ""

    def write(self, text: str) -> int:
        """Write the complete lines; the rest waits for its end. Of a line that overwrites itself (a
        progress bar), the last state is written, as on a screen."""
        with self._lock:
            pending = self._rest + text
            *lines, rest = (line.rstrip("\r").rpartition("\r")[2] for line in pending.split("\n"))
            self._rest = rest + "\r" * pending.endswith("\r")
            for line in filter(str.strip, lines):
                _write_entry(self._stream, line, self._severity)
        return len(text)

    def flush(self) -> None:
        """Flush the complete lines."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def end(self) -> None:
        """Write the remaining text, too."""
        if self._rest.strip():
            self.write("\n")

    def fileno(self) -> int:
        """Return the file descriptor of the underlying stream."""
        return self._stream.fileno()

    @property
    def buffer(self) -> Any:
        """The underlying byte stream; bytes written to it do not become entries."""
        return self._stream.buffer

    def writable(self) -> bool:
        """Return True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8, as JSON requires."""
        return "utf-8"


class EntryHandler(logging.Handler):
    """Writes each record as an entry, with its traceback in the message."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
            level = record.levelname if record.levelname in _KNOWN else "DEFAULT"
            _write_entry(self._stream, text, level, record.created)
        except Exception:
            self.handleError(record)


_KNOWN = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _write_entry(stream: TextIO, text: str, severity: str, at_s: float | None = None) -> None:
    with suppress(OSError, ValueError):  # a log that cannot be written does not end a run
        stream.write(entry(text, severity, at_s) + "\n")
        stream.flush()
