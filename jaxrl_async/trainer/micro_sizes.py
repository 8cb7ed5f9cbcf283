"""How the rows of an update are divided into micro-batches: few sizes are compiled, little of them
is padding.

    sizes  32, 8, 2        28 rows  ->  8 8 8 2 2        30 rows  ->  32        70 rows  ->  32 32 8
"""

from dataclasses import dataclass
from itertools import product

STEP = 4
"""Each size is this part of the next larger one."""
MAX_SIZES = 3
"""Sizes of micro-batches, each a program of its own."""
MOST_EMPTY = 0.1
"""Share of the computed rows that may be padding if that takes fewer micro-batches."""


@dataclass(frozen=True, slots=True)
class MicroSizes:
    """The numbers of rows that micro-batches of one program may have, the largest first."""

    sizes: tuple[int, ...]

    @classmethod
    def up_to(cls, most: int, multiple: int = 1) -> "MicroSizes":
        """Return the sizes from `most` down, each a multiple of `multiple`, as `most` must be.

        >>> MicroSizes.up_to(32), MicroSizes.up_to(6, 2), MicroSizes.up_to(1)
        (MicroSizes(sizes=(32, 8, 2)), MicroSizes(sizes=(6, 2)), MicroSizes(sizes=(1,)))
        """
        sizes = [most]
        while len(sizes) < MAX_SIZES and sizes[-1] > multiple:
            sizes.append(max(multiple, round(sizes[-1] / STEP / multiple) * multiple))
        return cls(tuple(sizes))

    @property
    def most(self) -> int:
        """Rows of the largest micro-batch."""
        return self.sizes[0]

    def cover(self, rows: int) -> tuple[int, ...]:
        """Return the micro-batches that hold so many rows, the largest first; at least one.

        Of those with at most MOST_EMPTY of the computed rows empty the fewest, else those with the
        fewest empty rows. A function of its arguments alone: a resumed run divides as before.

        >>> MicroSizes((32, 8, 2)).cover(28), MicroSizes((32, 8, 2)).cover(30)
        ((8, 8, 8, 2, 2), (32,))
        """
        whole, rest = divmod(max(rows, 1), self.most)
        if not rest:
            return (self.most,) * whole

        def cost(counts: tuple[int, ...]) -> tuple[float, int, int]:
            held = sum(n * size for n, size in zip(counts, self.sizes, strict=True))
            if held < rest:
                return (float("inf"), 0, 0)
            computed = whole * self.most + held
            empty = (held - rest) / computed
            return (0.0 if empty <= MOST_EMPTY else empty, sum(counts), held)

        numbers = (range(-(-self.most // size) + 1) for size in self.sizes[1:])
        counts = min(product(range(2), *numbers), key=cost)
        ends = (size for n, size in zip(counts, self.sizes, strict=True) for _ in range(n))
        return (*(self.most for _ in range(whole)), *ends)
