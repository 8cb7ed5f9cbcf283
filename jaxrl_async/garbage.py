"""Python's garbage collector, kept off what a long loop has before it begins."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Have the collector look at nothing but what is made inside the `with`.

    Half a million objects (modules, traced programs, the parts of a run) are there before, for
    good. A full collection goes through all of them, a tenth to half a second in which no thread
    runs Python: nobody takes an update's result or the next decode block's. Whatever nobody refers
    to any more is freed as before; only cycles that earlier objects are part of stay until the end,
    with all that they refer to. Where somebody has frozen objects already (`gc.freeze`), this does
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
