"""Which pages of the KV cache are free, and how many hold each of the others. Pure host code.

A page is held by every slot whose table names it and once by the prefix store. It is free again
when nobody holds it. Pages that several hold are never written: who needs to write copies first.
"""

from collections import deque
from collections.abc import Iterable, Sequence


class Pages:
    """A free list with reference counts. Owned by the sampler's thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(count))
        self._holders = [0] * count

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used_share(self) -> float:
        """Pages held over all pages."""
        return 1.0 - len(self._free) / self.count

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one holder each; None, and nothing taken, where too few are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each page; it must have one already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer for each page; the last one frees it."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """How many hold this page."""
        return self._holders[page]

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """AssertionError unless counts and free list are exactly what these holders' pages say."""
        expected = [0] * self.count
        for pages in held:
            for page in pages:
                expected[page] += 1
        assert expected == self._holders, "holders do not add up"
        free = [page for page in range(self.count) if not expected[page]]
        assert sorted(self._free) == free, "the free list is not what nobody holds"
