"""What became of each group: one JSON line per fate, appended once and never changed.

{"fate": "admitted", "group": 5, "version": 3}
{"fate": "trained", "group": 5, "prompt": 17, "version": 4, "oldest": 3, "lengths": [12, 9],
 "use": 1}
{"fate": "returned", "group": 5, "version": 4, "oldest": 3}
{"fate": "dropped", "group": 6, "prompt": 18, "reason": "failed"}
{"fate": "retired", "group": 5, "version": 6, "uses": 1}
{"fate": "resumed", "version": 7, "next_group": 9}

`version` is what was live at admission, or what the step improved; `oldest` is of the group's
tokens; `lengths` are drawn tokens per episode. A group dropped by the trainer, or for lack of a
signal (at the live version), has all of these; so has one that was cancelled because it had become
too old, with its lengths so far. `use` counts a group's steps: 1, 2, ... up to
buffer.reuse; one that grows too old before is retired after so many `uses`. A group is returned
if the step that it was taken for was not made: that use does not count. A resumed run moves the
lines from after its checkpoint to ledger.superseded.jsonl and continues with `resumed`: numbers
from next_group on are given again, and earlier lines about them no longer count. With several
processes, where group k of process i of n is k n + i, those are the numbers from places[i] on.
`python -m jaxrl_async.audit RUN` adds everything up.
"""

import json
from pathlib import Path
from typing import Any, TextIO


class Ledger:
    """Appends to a file line by line, so that a killed run keeps all; without a path keeps nothing.

    Owned by the buffer and written under its lock. With `keep` the lines are kept for `take`
    instead, which may be called from another thread.
    """

    def __init__(self, path: Path | None = None, *, keep: bool = False) -> None:
        self._file: TextIO | None = None
        self.lines = 0  # in the file, or kept so far
        self._keep, self._lines, self._given = keep, list[dict[str, Any]](), 0
        if path is not None:
            self._file = path.open("a+", encoding="utf-8", buffering=1)
            self._file.seek(0)
            self.lines = sum(1 for _ in self._file)

    def write(self, fate: str, **facts: Any) -> None:
        """Write one line: the fate (admitted, trained, dropped, retired) and its facts."""
        if self._keep:
            self._lines.append({"fate": fate, **facts})
            self.lines += 1
        if self._file is not None:
            self._file.write(json.dumps({"fate": fate, **facts}) + "\n")
            self.lines += 1

    def take(self, until: int | None = None) -> list[dict[str, Any]]:
        """Return the lines kept since the last call, oldest first. until: only those written while
        `lines` was at most this."""
        # The buffer may append meanwhile: those lines are left for the next call.
        count = len(self._lines) if until is None else max(0, until - self._given)
        lines = self._lines[:count]
        del self._lines[:count]
        self._given += len(lines)
        return lines

    def close(self) -> None:
        """Close the file; what is written afterwards is lost. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
