"""Fixes for orbax: memory that each checkpoint would leak, and errors that it prints."""

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

ORBAX_WRITES = "orbax.checkpoint._src.serialization.tensorstore_utils"
"""The module of orbax that is patched; its name is private."""

log = logging.getLogger(__name__)


def fix_orbax() -> None:
    """Keep orbax from asking TensorStore for JSON, which TensorStore then never frees.

    Each key and value that `to_json` and `experimental_collect_matching_metrics` return has one
    reference too many (seen in tensorstore 0.1.76 to 0.1.86). Orbax calls them once for each array
    and twice for each checkpoint: a checkpoint of 16 arrays leaked 30 KB. It needs neither result:
    the first equals its argument, the second goes into its log. Orbax's own log, which repeats each
    error with every traceback, is silenced, too. A second call does nothing.
    """
    logging.getLogger("absl").addFilter(_is_not_of_orbax)
    _silence_late_work()
    try:
        orbax: Any = importlib.import_module(ORBAX_WRITES)
        real, _ = orbax.ts, orbax.get_tensorstore_raw_bytes
    except (ImportError, AttributeError) as error:
        log.warning("this version of orbax cannot be patched, checkpoints may leak: %s", error)
        return
    if not isinstance(real, _Replaced):
        orbax.ts = _Replaced(real, KvStore=_Replaced(real.KvStore, Spec=_Spec))
        orbax.get_tensorstore_raw_bytes = lambda direction=None: 0


def _silence_late_work() -> None:
    """Keep threads of a failed save or restore from printing tracebacks.

    Orbax closes its event loop at the first read or write that fails; those that end later cannot
    report to it, and Python would print "Event loop is closed" for each, even at exit. A second
    call does nothing.
    """
    before = sys.unraisablehook
    if isinstance(before, _SilentHook):
        return
    sys.unraisablehook = _SilentHook(before)


class _SilentHook:
    """Python's hook for unraisable errors, without those from orbax's closed loops."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        late = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
        log.debug("late end of a failed save or restore") if late else self._before(unraisable)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Return whether a line of absl's log comes from another package: orbax raises what it logs."""
    return "orbax" not in Path(record.pathname).parts


class _Replaced:
    """A module or a class with some of its names replaced."""

    def __init__(self, real: object, **others: object) -> None:
        self._real = real
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Spec(dict[str, Any]):
    """A KvStore's spec as JSON, which TensorStore accepts in place of its own type."""

    def to_json(self) -> dict[str, Any]:
        """Return the spec as a plain dict."""
        return dict(self)
