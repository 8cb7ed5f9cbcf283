"""Whether micro-batches fit what is packed: the last one of an update is filled up with padding."""

import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)

UPDATES = 8
"""Updates that are looked at before anything is said."""
MOST_PADDING = 0.2
"""Share of the computed rows that may be padding before it is said."""
LEAST_SAVED = 0.1
"""Share of the computed rows that another size must save to be advised."""


def padded(rows: int, size: int) -> int:
    """Return the rows of whole micro-batches of `size` rows that hold `rows`.

    >>> padded(8, 7)
    14
    """
    return -(-rows // size) * size


def fitting_size(rows: Sequence[int], most: int, multiple: int) -> int:
    """Return the size of micro-batches, rows, with which updates of so many rows compute fewest;
    of equal ones the largest.

    most: today's size. A size is a multiple of `multiple`, and at least half of today's unless each
    update fits in a micro-batch of a smaller one.

    >>> fitting_size([64, 64], 42, 1), fitting_size([8, 8], 7, 2), fitting_size([3, 1], 32, 1)
    (32, 4, 3)
    """
    least = min(-(-most // 2), padded(max(rows), multiple))
    sizes = range(most, least - 1, -multiple)
    return min(sizes, key=lambda size: sum(padded(n, size) for n in rows))


class RowFit:
    """What a run's updates were packed into; says once if much of their rows is padding."""

    def __init__(self, size: int, multiple: int, row_length: int) -> None:
        """size: rows of a micro-batch, a multiple of `multiple`; row_length: tokens."""
        self._size, self._multiple, self._row_length = size, multiple, row_length
        self._rows: list[int] = []

    def note(self, rows: int) -> None:
        """Note the rows of an update; after UPDATES of them, log what would fit better."""
        if len(self._rows) < UPDATES:
            self._rows.append(max(rows, 1))
            if len(self._rows) == UPDATES:
                self._advise()

    def _advise(self) -> None:
        size = fitting_size(self._rows, self._size, self._multiple)
        held = sum(self._rows)
        now, then = (sum(padded(n, s) for n in self._rows) for s in (self._size, size))
        if now - held <= MOST_PADDING * now or now - then <= LEAST_SAVED * now:
            return
        log.warning(
            "%.0f %% of the rows that an update computes are empty: on average it fills %.1f rows,"
            " and a micro-batch has %d. With trainer.micro_batch_tokens=%d (rows: %d)"
            " %.0f %% are empty.",
            100 * (1 - held / now),
            held / len(self._rows),
            self._size,
            size * self._row_length,
            size,
            100 * (1 - held / then),
        )
