"""On-disk cache of judge scores, one JSON object per line. Needs no JAX."""

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)

Scores = tuple[tuple[float, ...], ...]
"""One row for each answer of a question, one number from 0 to 1 for each criterion."""
MOST_KEPT = 100_000
"""Maximum number of cached questions, about 40 MB; the oldest are dropped."""


def question_key(body: Mapping[str, object]) -> str:
    """Return the cache key of a call, from its model, messages and all settings."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


class JudgeCache:
    """Scores by question, in memory and, once `open` was called, in a file. Thread safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Scores] = OrderedDict()
        self._lock = threading.Lock()
        self._file: TextIO | None = None

    def open(self, path: Path) -> None:
        """Load a file's scores, and append to the file from now on. A torn line is skipped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            early, torn = self._known, 0
            self._known = OrderedDict()
            if path.exists():
                with path.open(encoding="utf-8", errors="replace") as lines:
                    for line in lines:
                        torn += not self._remember_line(line)
            if torn:
                log.warning("%s: skipped %d unreadable lines", path, torn)
            self._file = path.open("a", encoding="utf-8")
            if path.stat().st_size and torn:
                self._file.write("\n")
            for key, scores in early.items():
                if key not in self._known:
                    self._remember(key, scores)
                    self._write(key, scores)

    def get(self, key: str) -> Scores | None:
        """Return the scores of a question; None: not cached."""
        with self._lock:
            return self._known.get(key)

    def put(self, key: str, scores: Scores) -> None:
        """Store the scores of a question."""
        with self._lock:
            self._remember(key, scores)
            self._write(key, scores)

    def close(self) -> None:
        """Stop writing to the file. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    # ---- parts, under the lock

    def _remember(self, key: str, scores: Scores) -> None:
        self._known[key] = scores
        while len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)

    def _remember_line(self, line: str) -> bool:
        """Return whether the line held a question and its scores."""
        try:
            entry = json.loads(line)
            key, rows = entry["key"], entry["scores"]
            scores = tuple(tuple(float(number) for number in row) for row in rows)
        except (ValueError, LookupError, TypeError, RecursionError):
            return False
        if not isinstance(key, str) or not all(
            0 <= number <= 1 for row in scores for number in row
        ):
            return False
        self._remember(key, scores)
        return True

    def _write(self, key: str, scores: Scores) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"key": key, "scores": scores}) + "\n")
            self._file.flush()
