"""The ledger of groups: one JSON line per event, appended once and never changed.

{"fate": "admitted", "group": 5, "version": 3}
{"fate": "trained", "group": 5, "prompt": 17, "version": 4, "oldest": 3, "lengths": [12, 9],
 "use": 1}
{"fate": "returned", "group": 5, "version": 4, "oldest": 3}
{"fate": "dropped", "group": 6, "prompt": 18, "reason": "failed"}
{"fate": "retired", "group": 5, "version": 6, "uses": 1}
{"fate": "resumed", "version": 7, "next_group": 9}

`version` is the live version at admission, or the version that the step updated. `oldest` is the
version of the group's oldest tokens, and `lengths` are generated tokens per episode. A group
dropped by the trainer, or for lack of a signal (at the live version), has all of these. So does a
group that was cancelled because it became too old, with its lengths so far. `use` counts a group's
steps: 1, 2, ... up to buffer.reuse; a group that becomes too old before that is retired after
`uses` steps. If the run has several tasks, trained and dropped groups have `task`, its name. A
group is returned if the step that took it was not completed: that use does not
count. A resumed run moves the lines after its checkpoint to ledger.superseded.jsonl and continues
with `resumed`: numbers from next_group on are reassigned, and earlier lines about them no longer
count. With n processes, group k of process i has the number k n + i, and places[i] is the first
reassigned number of process i. `python -m jaxrl_async.audit RUN` sums everything up.
"""

import json
from pathlib import Path
from typing import Any, TextIO


class Ledger:
    """Appends to a file line by line, so a killed run loses no lines; keeps nothing without a path.

    Owned by the buffer and written under its lock. With `keep`, the lines are kept in memory for
    `take`, which may be called from another thread.
    """

    def __init__(self, path: Path | None = None, *, keep: bool = False) -> None:
        self._file: TextIO | None = None
        self.lines = 0  # in the file, or kept in memory so far
        self._keep, self._lines, self._num_taken = keep, list[dict[str, Any]](), 0
        if path is not None:
            self._file = path.open("a+", encoding="utf-8", buffering=1)
            self._file.seek(0)
            self.lines = sum(1 for _ in self._file)

    def write(self, fate: str, **facts: object) -> None:
        """Write one line: the fate (admitted, trained, dropped, retired) and its details."""
        if self._keep:
            self._lines.append({"fate": fate, **facts})
            self.lines += 1
        if self._file is not None:
            self._file.write(json.dumps({"fate": fate, **facts}) + "\n")
            self.lines += 1

    def take(self, until: int | None = None) -> list[dict[str, Any]]:
        """Return the lines kept since the last call, oldest first. until: include only lines
        written while `lines` was at most this."""
        # The buffer may append concurrently: these lines are left for the next call.
        count = len(self._lines) if until is None else max(0, until - self._num_taken)
        lines = self._lines[:count]
        del self._lines[:count]
        self._num_taken += len(lines)
        return lines

    def close(self) -> None:
        """Close the file; later writes are lost. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
