"""Keep in files how a run was started (starts.jsonl), and what it says: the lines of its console
and its messages in the log (run.log).

    Console ──> RunLog.line ──┐
    logging ──> RunLog.emit ──┴─ held until the folder is known ──> RUN/run.log
"""

import json
import logging
import os
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from jaxrl_async import __version__
from jaxrl_async.errors import JaxrlError, shown
from jaxrl_async.metrics.json_logs import INDENT, OWN

LOG_FILE, STARTS_FILE = "run.log", "starts.jsonl"
"""Names of the files in the run's folder."""
MAX_HELD = 10_000
"""Lines that are held while the folder is not known; the first ones are dropped, which is said."""

log = logging.getLogger(__name__)


class RunLog(logging.Handler):
    """The log of a run as a file. A context: inside, this package's messages are kept. Usable from
    any thread. A file that can no longer be written does not end a run: that is logged once."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[str] = []
        self._dropped = 0
        self._file: TextIO | None = None
        self._is_broken = False

    def __enter__(self) -> "RunLog":
        logging.getLogger(OWN).addHandler(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            whole = "" if isinstance(error, JaxrlError) else f"\n{_traceback((kind, error, trace))}"
            self.line(f"ended by {type(error).__name__}: {error}{whole}", "ERROR")
        logging.getLogger(OWN).removeHandler(self)
        self.close()

    def open(self, folder: Path) -> None:
        """Append to run.log in the run's folder from now on, first the lines that were held."""
        assert self.lock is not None
        with self.lock:
            if self._dropped:
                self._held.insert(0, f"({self._dropped} earlier lines were dropped)\n")
            try:
                self._file = (folder / LOG_FILE).open("a", encoding="utf-8", errors="replace")
                self._file.write("".join(self._held))
                self._file.flush()
            except OSError as error:
                self._give_up(error)
            self._held.clear()

    def line(self, text: str, level: str = "INFO") -> None:
        """Keep a line of the console."""
        self._keep(time.time(), level, text)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message, with its traceback. A message that no other handler takes is passed to
        logging's last resort, as if this handler did not exist."""
        text = record.getMessage()
        if record.exc_info:
            text += f"\n{record.exc_text or _traceback(record.exc_info)}"
        self._keep(record.created, record.levelname, text)
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and self._is_alone(record.name):
            last.handle(record)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        assert self.lock is not None
        with self.lock:
            file, self._file = self._file, None
            self._is_broken = True
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.warning("%s may lack its last lines: %s", LOG_FILE, error)
        super().close()

    def _keep(self, at_s: float, level: str, text: str) -> None:
        at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_s))
        line = f"{at} {level:<7} {shown(text.rstrip(), INDENT)}\n"
        assert self.lock is not None
        with self.lock:
            if self._is_broken:
                return
            if self._file is None:
                self._held.append(line)
                if len(self._held) > MAX_HELD:
                    del self._held[0]
                    self._dropped += 1
                return
            try:
                self._file.write(line)
                self._file.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_broken = True  # first: the message below comes here, too
        log.warning(
            "%s can no longer be written (%s): the run continues without it", LOG_FILE, error
        )

    def _is_alone(self, name: str) -> bool:
        """Return whether a logger's records reach no other handler."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


def _traceback(of: Any) -> str:
    return logging.Formatter().formatException(of)


def record_start(folder: Path) -> None:
    """Append a line to starts.jsonl in the run's folder: when, where and by which command this
    process starts or resumes the run."""
    words = [os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]] if sys.orig_argv else sys.argv
    start = {
        "started": time.time(),  # seconds since 1970
        "host": socket.gethostname(),
        "process": os.getpid(),
        "folder": os.getcwd(),
        "command": shlex.join(words),
        "jaxrl_async": __version__,
        "python": sys.version.partition(" ")[0],
    }
    with (folder / STARTS_FILE).open("a", encoding="utf-8", errors="replace") as file:
        file.write(json.dumps(start) + "\n")
