"""Pool of host memory for repeated weight transfers; blocks return to the pool automatically when
unused.

Fresh memory from the kernel costs more than the copy into it, so blocks are reused. On a CPU, JAX
does not copy aligned host memory but uses it as the array's memory. A block is therefore free only
when nothing refers to it any more: no view here, no jax.Array, no computation.
"""

import mmap
import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = mmap.PAGESIZE
SMALL_BYTES = 1 << 16
"""Minimum size of pooled arrays, bytes."""


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """Return the unsigned integer dtype of the same size: NumPy copies its native types many times
    faster than bfloat16."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


class BufferPool:
    """Blocks of page-aligned memory, by size. Thread-safe."""

    def __init__(self, spare: int = 2) -> None:
        """Create an empty pool. It keeps at most `spare` free blocks of a size in addition to one
        per block in use."""
        self._spare = spare
        self._free: dict[int, list[mmap.mmap]] = {}
        self._in_use: dict[int, int] = {}
        self._lock = threading.RLock()  # a finalizer may run inside `take`

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array with arbitrary contents."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size < SMALL_BYTES:
            return np.empty(shape, dtype)
        with self._lock:
            free = self._free.get(size)
            block = free.pop() if free else None
            self._in_use[size] = self._in_use.get(size, 0) + 1
        if block is None:
            block = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(block, np.uint8)  # all views refer to this array
        weakref.finalize(raw, self._give_back, size, block).atexit = False
        return raw.view(dtype).reshape(shape)

    @property
    def in_use_bytes(self) -> int:
        """Bytes of all blocks that are referenced."""
        with self._lock:
            return sum(size * count for size, count in self._in_use.items())

    def _give_back(self, size: int, block: mmap.mmap) -> None:
        with self._lock:
            self._in_use[size] -= 1
            free = self._free.setdefault(size, [])
            if len(free) < self._in_use[size] + self._spare:
                free.append(block)
