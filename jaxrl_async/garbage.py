"""Keep Python's garbage collector from scanning objects that exist before a long loop begins."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Make the collector ignore all objects that exist before the `with`.

    About half a million objects (modules, traced programs, the parts of a run) exist by then and
    live on. A full collection scans all of them for 0.1 to 0.5 s. No thread runs Python during
    that time, so the results of updates and decode blocks are not processed. Unreferenced objects
    are still freed as before; only cycles that include earlier objects are kept until the end,
    with everything that they refer to. If objects are already frozen (`gc.freeze`), this does
    nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
