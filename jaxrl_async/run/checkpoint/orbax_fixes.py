"""The host's memory over a long run: what threads and checkpoints would leave behind in it."""

import ctypes
import importlib
import logging
import os
from typing import Any

ORBAX_WRITES = "orbax.checkpoint._src.serialization.tensorstore_utils"
"""Orbax's own module that is mended; not a promised name."""

M_ARENA_MAX = -8
"""Of glibc's malloc.h: what `mallopt` calls the most arenas."""

log = logging.getLogger(__name__)


def limit_arenas() -> None:
    """Let malloc keep few arenas: a quarter of the cores, at least four. glibc gives up to eight to
    each core; each keeps whole pages for the few blocks that live there, so that a run of many
    threads would take more memory than it uses, and slowly go on taking. Does nothing where
    $MALLOC_ARENA_MAX says how many, or malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, max(4, (os.cpu_count() or 1) // 4))


def give_back_memory() -> None:
    """To the system, what malloc keeps of memory that was freed: the copies that make a checkpoint
    leave it scattered over the threads' arenas, and a long run would seem to grow. Does nothing
    where malloc is not glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def mend_orbax() -> None:
    """Keep orbax from asking TensorStore for JSON, which TensorStore then never frees.

    Of what `to_json` and `experimental_collect_matching_metrics` give to Python each key and value
    has one reference too many (seen in tensorstore 0.1.76 to 0.1.86). Orbax asks once for each
    array and twice for each checkpoint, so that one of 16 arrays left 30 KB behind. It needs
    neither answer: the first is what it has just given, the second goes into a line of its log.
    A second call does nothing.
    """
    try:
        orbax: Any = importlib.import_module(ORBAX_WRITES)
        real, _ = orbax.ts, orbax.get_tensorstore_raw_bytes
    except (ImportError, AttributeError) as error:
        log.warning("this version of orbax cannot be mended, checkpoints may leak: %s", error)
        return
    if not isinstance(real, _Instead):
        orbax.ts = _Instead(real, KvStore=_Instead(real.KvStore, Spec=_Spec))
        orbax.get_tensorstore_raw_bytes = lambda direction=None: 0


class _Instead:
    """A module or a class, but for some of its names."""

    def __init__(self, real: Any, **others: Any) -> None:
        self._real = real
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Spec(dict[str, Any]):
    """A KvStore's spec as JSON, which TensorStore takes wherever it takes its own type."""

    def to_json(self) -> dict[str, Any]:
        """The same, as a plain dict."""
        return dict(self)
