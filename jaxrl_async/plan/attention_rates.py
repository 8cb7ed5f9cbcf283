"""Shares of the peak that attention kernels reach in training, from published measurements.

Nothing here was measured by this project. The times of splash attention on TPUs are from tokamax,
whose kernel is based on JAX's, tuned for each shape (github.com/openxla/tokamax,
data/autotuning/GENERATION/ pallas_mosaic_tpu_flash_attention.json, read November 2026): causal,
bfloat16, forward with what the backward pass needs, 16,384 tokens in rows of T, heads of K, 2,048
columns in all. FLOPs count the causal half.

v5e has no published times. It uses v5p's shares, and so does v4: a TensorCore of each of the three
has four matrix units of 128 x 128 (cloud.google.com/tpu/docs). The matrix units of v6e and tpu7x
are 256 x 256, which heads of 128 half fill.

The backward kernels use the forward kernel's share. Where both are published they are faster, on
tpu7x by 21 to 24 % at T = 8,192 (the same folder, ..._vjp.json: 4.711 ms for 2.5 times the FLOPs of
2.342 ms; splash_attention/microbenchmarks.pdf of the same repository: 30.2 % against 24.9 %). But
on chips whose two TensorCores are one device their grid is not divided between the two (a comment
in JAX's kernel says why), and the one published time is 3.7 ms on v5p, 35 % of the peak: with the
gradient 5.6 ms, forward alone 1.9 ms or 27 %, for 2 rows, 110 heads of 128, T = 2,048, JAX's kernel
in blocks of 512 (github.com/apple/axlearn, commit a5f0b46,
common/flash_attention/tpu_attention_benchmark.py). On these chips that share is the maximum.

NVIDIA cards: FlashAttention-3's authors timed on an H100 (arxiv.org/abs/2407.08608, figure 5, heads
of 128, forward) cuDNN at 595 to 617 TFLOP/s for rows of 2,048 and more, 0.6 of the peak, and Triton
at 390, 0.4. The backward passes are assumed at five sixths of that. The other cards use the same
shares.
"""

from bisect import bisect_right
from math import log2

from jaxrl_async.plan.chips import CHIPS

LENGTHS = (1024, 2048, 4096, 8192, 16384)
FORWARD_MS = {
    "v5p": {
        64: (1.449, 1.796, 2.642, 4.013, 6.730),
        128: (0.914, 1.008, 1.476, 2.158, 3.485),
        256: (0.697, 0.894, 1.231, 1.868, 3.199),
    },
    "v6e": {
        64: (1.812, 2.326, 3.259, 4.933, 8.051),
        128: (1.279, 1.543, 2.006, 2.830, 4.304),
        256: (0.770, 0.905, 1.163, 1.651, 2.503),
    },
    "tpu7x": {
        64: (1.497, 1.968, 2.887, 4.416, 7.414),
        128: (0.884, 1.114, 1.577, 2.342, 3.809),
        256: (0.592, 0.727, 0.990, 1.381, 2.175),
    },
}
"""Milliseconds by generation, head width, and LENGTHS."""
TOKENS, COLUMNS = 16384, 2048
SAME_MATRIX_UNITS = {"v4": "v5p", "v5e": "v5p"}
BACKWARD_MOST = {"v4": 0.35, "v5p": 0.35}
CUDNN_SHARES = (0.6, 0.5)
"""Forward and backward shares; below, the same for this package's own Triton kernels:"""
TRITON_SHARES = (0.4, 0.33)


def splash_share(generation: str, length: int, width: int, *, backward: bool = False) -> float:
    """Return the share of a generation's peak for rows of `length` and heads of `width`.

    Interpolates between measured lengths by their logarithms; outside, takes the nearest. For
    other widths, takes the next narrower one that was measured.

    >>> [round(splash_share(g, 8192, 128), 3) for g in ("v5e", "v5p", "v6e")]
    [0.555, 0.555, 0.212]
    """
    if backward:
        most = BACKWARD_MOST.get(generation, 1.0)
        return min(most, splash_share(generation, length, width))
    measured = SAME_MATRIX_UNITS.get(generation, generation)
    times = FORWARD_MS[measured]
    took = times[max((w for w in times if w <= width), default=min(times))]
    share = {T: _share(measured, T, ms) for T, ms in zip(LENGTHS, took, strict=True)}
    index = bisect_right(LENGTHS, length)
    if index in (0, len(LENGTHS)):
        return share[LENGTHS[max(index - 1, 0)]]
    low, high = LENGTHS[index - 1 : index + 1]
    part = log2(length / low)  # measured lengths double
    return share[low] * (1 - part) + share[high] * part


def card_share(kernel: str, *, backward: bool = False) -> float:
    """Return the share of an NVIDIA card's peak that an attention kernel reaches."""
    forward, back = CUDNN_SHARES if kernel.startswith("cudnn") else TRITON_SHARES
    return back if backward else forward


def _share(generation: str, length: int, milliseconds: float) -> float:
    flops = 2 * TOKENS * COLUMNS * length
    return flops / (milliseconds * 1e-3) / CHIPS[generation].peak_flops
