"""Record a run on disk: metrics.jsonl, samples.jsonl, TensorBoard events; how it was started
(starts.jsonl), and what it says, the lines of its console and its messages in the log (run.log).

    Console ──> RunLog.line ──┐
    logging ──> RunLog.emit ──┴─ held until the folder is known ──> RUN/run.log
"""

import importlib
import json
import logging
import math
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

from jaxrl_async import __version__
from jaxrl_async.errors import JaxrlError, MissingExtraError, shown
from jaxrl_async.host import package_versions
from jaxrl_async.metrics.json_logs import INDENT, OWN
from jaxrl_async.metrics.metric import metric_of

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
WARM_START = "warm_start"
"""Folder of the warm start's own metrics, inside the run folder."""
LOG_FILE, STARTS_FILE = "run.log", "starts.jsonl"
"""Names of the files in the run's folder."""
MAX_HELD = 10_000
"""Lines that are held while the folder is not known; the first ones are dropped and counted."""
SUPERSEDED = ".superseded.jsonl"
"""Suffix of the files with lines that a resumed run writes again."""


class MetricsWriter(Protocol):
    """Writer of a run's metrics and samples."""

    writes: bool  # False: it discards all values

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step."""

    def samples(self, step: int, records: Iterable[Mapping[str, object]]) -> None:
        """Write sample episodes."""

    def close(self) -> None:
        """Close the files."""


class Recorder:
    """Appends one line per step and one per sample; usable from any thread.

    Logging a step again (an evaluation after a resume) merges the new values into its line. With
    `resume_step`, lines of later steps and a torn last line are moved to *.superseded.jsonl and
    purged from TensorBoard; lines up to and including that step are kept.
    """

    writes = True

    def __init__(
        self, run_dir: Path, *, tensorboard: bool = True, resume_step: int | None = None
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._board = _open_board(run_dir / "tensorboard", resume_step) if tensorboard else None
        last = math.inf if resume_step is None else resume_step
        for name in (METRICS_FILE, SAMPLES_FILE):
            set_aside(run_dir / name, lambda _, line: "step" in line and line["step"] <= last)
        self._lock = threading.Lock()
        self._metrics = (run_dir / METRICS_FILE).open("ab")
        self._samples = (run_dir / SAMPLES_FILE).open("ab")
        self._last, self._last_at = _last_line(run_dir / METRICS_FILE)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's metrics; step is the version that it produced. Keys must be declared in
        METRICS."""
        for key in values:
            metric_of(key)
        clean = {key: float(values[key]) for key in values}
        with self._lock:
            again = step == self._last.get("step")
            line: dict[str, Any] = {**(self._last if again else {}), **clean}
            line.pop("step", None)
            line = {"step": step, **{k: line[k] for k in sorted(line)}}
            if again:
                self._metrics.truncate(self._last_at)
            self._last, self._last_at = line, self._metrics.seek(0, os.SEEK_END)
            _append(self._metrics, line)
            if self._board is not None:
                for key, value in clean.items():
                    self._board.add_scalar(key, value, step)
                self._board.flush()

    def samples(self, step: int, records: Iterable[Mapping[str, object]]) -> None:
        """Write a step's samples; the report shows their prompt, completion and reward."""
        with self._lock:
            for record in records:
                _append(self._samples, {"step": step, **record})

    def close(self) -> None:
        """Flush to disk and close all files, even if one raises. A second call does nothing."""
        with self._lock, ExitStack() as closing:
            board, self._board = self._board, None
            if board is not None:
                closing.callback(board.close)
            for file in (self._samples, self._metrics):
                if not file.closed:
                    closing.callback(file.close)
                    closing.callback(os.fsync, file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a run's .jsonl file, without torn and unrelated lines (see `is_own`);
    "nan", "inf", "-inf" become floats."""
    return [line for _, line in numbered_lines(path) if line is not None]


def numbered_lines(path: Path) -> list[tuple[int, dict[str, Any] | None]]:
    """Return the number, from 1, and the object of each line of a run's .jsonl file; None for a
    torn or unrelated line. [] if the file does not exist."""
    if not path.exists():
        return []
    return [(number, line) for number, (_, line) in enumerate(_parse_lines(path), 1)]


def is_own(line: object) -> bool:
    """Return whether a run wrote a line: an object with the number of a step, or an outcome of
    a group (ledger.jsonl)."""
    if not isinstance(line, dict):
        return False
    step = line.get("step")
    is_step = isinstance(step, int) and not isinstance(step, bool) and step >= 0
    return is_step if "step" in line else isinstance(line.get("fate"), str)


def encode(record: Mapping[str, Any]) -> str:
    """Encode one line of JSON; a number that is not finite becomes "nan", "inf" or "-inf"."""
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _number(value: object) -> Any:
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def _parse_lines(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Return each line's bytes and object, None for a torn or unrelated line."""
    pairs: list[tuple[bytes, dict[str, Any] | None]] = []
    for raw in path.read_bytes().splitlines(keepends=True):
        value: Any = None
        with suppress(ValueError, RecursionError):
            value = json.loads(raw) if raw.endswith(b"\n") else None
        line = {k: _number(v) for k, v in value.items()} if is_own(value) else None
        pairs.append((raw, line))
    return pairs


def _append(file: BinaryIO, record: Mapping[str, object]) -> None:
    file.write((encode(record) + "\n").encode("utf-8", "replace"))
    file.flush()


def _last_line(path: Path) -> tuple[dict[str, Any], int]:
    """Return the last object of a file and the byte at which it starts."""
    pairs = _parse_lines(path)
    if not pairs:
        return {}, 0
    return pairs[-1][1] or {}, sum(len(raw) for raw, _ in pairs[:-1])


def set_aside(path: Path, keep: Callable[[int, dict[str, Any]], bool]) -> None:
    """Move torn and unrelated lines, and lines for which `keep` (number from 0 among the others,
    object) is false, to *.superseded.jsonl. Unrelated lines are logged."""
    if not path.exists():
        return
    kept: list[bytes] = []
    moved: list[bytes] = []
    foreign: list[int] = []
    own = 0
    for number, (raw, line) in enumerate(_parse_lines(path), 1):
        (kept if line is not None and keep(own, line) else moved).append(raw)
        own += line is not None
        if line is None and raw.endswith(b"\n"):  # otherwise a crash has torn it
            foreign.append(number)
    if foreign:
        log.warning(
            "%s: %d lines were not written by a run (%s): they are moved to %s",
            path,
            len(foreign),
            listed_lines(foreign),
            path.stem + SUPERSEDED,
        )
    if moved:
        with path.with_name(path.stem + SUPERSEDED).open("ab") as file:
            file.writelines(raw if raw.endswith(b"\n") else raw + b"\n" for raw in moved)
        fresh = path.with_name(path.name + ".tmp")
        fresh.write_bytes(b"".join(kept))
        fresh.replace(path)


def listed_lines(numbers: Sequence[int]) -> str:
    """Return the numbers of some lines as text, at most the first five."""
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"line {', '.join(map(str, numbers[:5]))}{more}"


def _open_board(folder: Path, resume_step: int | None) -> Any:
    try:
        module = importlib.import_module("tensorboardX")
    except ImportError as error:
        raise MissingExtraError(
            "metrics.tensorboard=true needs the package tensorboardX, which is not installed. "
            "Run `pip install tensorboardX` or set metrics.tensorboard=false."
        ) from error
    purge = None if resume_step is None else resume_step + 1
    return module.SummaryWriter(str(folder), purge_step=purge, flush_secs=30)


# ---- the log, and how a run was started


class RunLog(logging.Handler):
    """The log of a run as a file. A context: inside, this package's messages from level INFO on are
    kept; what else is shown is as without it. Usable from any thread. A file that can no longer be
    written does not end a run: that is logged once."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[str] = []
        self._dropped = 0
        self._file: TextIO | None = None
        self._is_broken = False
        self._level_before = logging.NOTSET
        self._shown_from: int | None = None  # level that `emit` passes on; None: logging does

    def __enter__(self) -> "RunLog":
        own = logging.getLogger(OWN)
        own.addHandler(self)
        if own.propagate and own.getEffectiveLevel() > logging.INFO:
            self._level_before, self._shown_from = own.level, own.getEffectiveLevel()
            own.setLevel(logging.INFO)
            own.propagate = False  # `emit` passes on what was shown before
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            text = "" if isinstance(error, JaxrlError) else f"\n{_traceback((kind, error, trace))}"
            self.line(f"ended by {type(error).__name__}: {error}{text}", "ERROR")
        own = logging.getLogger(OWN)
        own.removeHandler(self)
        if self._shown_from is not None:
            own.setLevel(self._level_before)
            own.propagate = True
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
        root = logging.getLogger()
        if self._shown_from is not None and record.levelno < self._shown_from:
            return
        if self._shown_from is not None and root.handlers:
            root.handle(record)
            return
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and self._is_unhandled(record.name):
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

    def _is_unhandled(self, name: str) -> bool:
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
        "packages": package_versions(),
    }
    with (folder / STARTS_FILE).open("a", encoding="utf-8", errors="replace") as file:
        file.write(json.dumps(start) + "\n")
