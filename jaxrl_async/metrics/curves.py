"""Draw a curve as one line of text: one block per column, its height the mean of the values."""

from collections.abc import Sequence

import numpy as np

BLOCKS = "▁▂▃▄▅▆▇█"


def curve(values: Sequence[float], width: int) -> str:
    """Return the curve of finite values, oldest first, in at most `width` columns.

    The lowest column has the lowest block, the highest column the highest block; equal values all
    have the lowest. A column of several values shows their mean.
    """
    shown = np.asarray(values, np.float64)
    shown = shown[np.isfinite(shown)]
    if not len(shown) or width < 1:
        return ""
    columns = np.array([part.mean() for part in np.array_split(shown, min(width, len(shown)))])
    least, most = columns.min(), columns.max()
    share = (columns - least) / (most - least) if most > least else np.zeros(len(columns))
    return "".join(BLOCKS[round(x * (len(BLOCKS) - 1))] for x in share)
