"""Which pages of the KV cache are free, and how many holders each of the others has. Host code.

A page is held by every slot whose table names it, and once by the prefix store if it is stored. A
page without holders is free. A page with several holders is never written: it is copied first.
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
        """Pages without a holder."""
        return len(self._free)

    @property
    def used_share(self) -> float:
        """Held pages over all pages."""
        return 1.0 - len(self._free) / self.count

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages with one holder each; None, taking none, if too few are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to each page; it must have one already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each page; free the pages that have none left."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """Return how many holders a page has."""
        return self._holders[page]

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the counts and the free list match the holders' pages."""
        expected = [0] * self.count
        for pages in held:
            for page in pages:
                expected[page] += 1
        assert expected == self._holders, "holders do not add up"
        free = [page for page in range(self.count) if not expected[page]]
        assert sorted(self._free) == free, "the free list is not what nobody holds"
