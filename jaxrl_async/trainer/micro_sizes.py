"""Sizes of an update's micro-batches: few sizes are compiled, and little padding is computed.

sizes  32, 8, 2        28 rows  ->  8 8 8 2 2        30 rows  ->  32        70 rows  ->  32 32 8
"""

from dataclasses import dataclass
from itertools import product

STEP = 4
"""Quotient of two consecutive sizes."""
MAX_SIZES = 3
"""Maximum number of sizes. Each is compiled separately."""
MOST_EMPTY = 0.1
"""Maximum share of padding rows that is accepted to compute fewer micro-batches."""


@dataclass(frozen=True, slots=True)
class MicroSizes:
    """The possible numbers of rows of a micro-batch, the largest first."""

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
        """Return the sizes of micro-batches that hold these rows, the largest first; at least one.

        The fewest micro-batches with a share of at most MOST_EMPTY padding rows; if none has, those
        with the fewest padding rows. Depends only on the arguments: a resumed run divides rows as
        before.

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
