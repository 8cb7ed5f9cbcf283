"""Fixes for host memory that threads, and orbax's checkpoints, would leak over a long run."""

import ctypes
import importlib
import logging
import os
from typing import Any

ORBAX_WRITES = "orbax.checkpoint._src.serialization.tensorstore_utils"
"""The module of orbax that is patched; its name is private."""

M_ARENA_MAX = -8
"""The parameter of glibc's `mallopt` for the maximum number of arenas (malloc.h)."""

log = logging.getLogger(__name__)


def limit_arenas() -> None:
    """Limit malloc to a quarter as many arenas as cores, at least four.

    glibc allows eight for each core, and an arena keeps whole pages for the few blocks that live in
    it: the memory of a run with many threads would grow slowly beyond what it uses. Does nothing if
    $MALLOC_ARENA_MAX is set or malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, max(4, (os.cpu_count() or 1) // 4))


def mend_orbax() -> None:
    """Keep orbax from asking TensorStore for JSON, which TensorStore then never frees.

    Each key and value that `to_json` and `experimental_collect_matching_metrics` return has one
    reference too many (seen in tensorstore 0.1.76 to 0.1.86). Orbax calls them once for each array
    and twice for each checkpoint: a checkpoint of 16 arrays leaked 30 KB. It needs neither result:
    the first is what it has just passed in, the second goes into its log. A second call does
    nothing.
    """
    try:
        orbax: Any = importlib.import_module(ORBAX_WRITES)
        real, _ = orbax.ts, orbax.get_tensorstore_raw_bytes
    except (ImportError, AttributeError) as error:
        log.warning("this version of orbax cannot be patched, checkpoints may leak: %s", error)
        return
    if not isinstance(real, _Replaced):
        orbax.ts = _Replaced(real, KvStore=_Replaced(real.KvStore, Spec=_Spec))
        orbax.get_tensorstore_raw_bytes = lambda direction=None: 0


class _Replaced:
    """A module or a class with some of its names replaced."""

    def __init__(self, real: Any, **others: Any) -> None:
        self._real = real
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Spec(dict[str, Any]):
    """A KvStore's spec as JSON, which TensorStore takes wherever it takes its own type."""

    def to_json(self) -> dict[str, Any]:
        """Return the spec as a plain dict."""
        return dict(self)
