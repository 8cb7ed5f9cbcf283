"""What became of each prompt: one JSON line per fate, appended once and never changed."""

import json
from pathlib import Path
from typing import Any, TextIO


class Ledger:
    """Appends to a file; without a path it keeps nothing. Written under the buffer's lock."""

    def __init__(self, path: Path | None = None) -> None:
        self._file: TextIO | None = path.open("a", encoding="utf-8") if path else None

    def write(self, fate: str, **facts: Any) -> None:
        """One line: the fate (admitted, trained, dropped) and its facts."""
        if self._file is not None:
            self._file.write(json.dumps({"fate": fate, **facts}) + "\n")

    def flush(self) -> None:
        """Make what was written visible to readers."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Flush and close; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
