"""A TPU kernel that samples a token: like XLA's programs of sampling.py, but each row's logits are
read from HBM once, and later passes read them from VMEM.

It processes eight rows at a time, [8, V]. Below, a tile is [8, 128] of them, a chunk TILES tiles.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

LANES = 128
"""Columns of a tile."""
ROWS = 8
"""Rows of a tile."""
TILES = 32
"""Tiles of a chunk: one iteration of a loop."""
LOWEST = -(2**31)
"""A rank below all numbers'."""
MOST_BYTES = 48 * 2**20
"""Maximum VMEM that the kernel requests (chips from v5e on have 64 MiB or more)."""
SMALL = ("TPU v2", "TPU v3", "TPU v4")
"""First words of the kinds of chips with at most 16 MiB of VMEM: too little for eight rows of a
large vocabulary."""
T = TypeVar("T")
Slice = slice | pl.Slice
"""Of rows or columns of a reference, as pl.ds returns it."""
Passed = tuple[Array, Array, Array]
"""The sum so far, where it ended, and its number: see _passed."""


def takes_kernel(device: jax.Device, vocab: int) -> bool:
    """Return whether a device samples by the kernel; others sample by XLA's programs."""
    fits = _bytes_of(vocab, truncated=True) <= MOST_BYTES
    return device.platform == "tpu" and fits and not device.device_kind.startswith(SMALL)


def _bytes_of(vocab: int, *, truncated: bool) -> int:
    """Return the VMEM of the kernel, bytes: two blocks of logits, their ranks, their odds."""
    return (3 + truncated) * ROWS * _padded(vocab) * 4 + 4 * 2**20


def _padded(vocab: int) -> int:
    return -(-vocab // (TILES * LANES)) * TILES * LANES


def sample_by_kernel(
    logits: Array,
    numbers: Array,
    top_k: Array,
    *,
    truncated: bool,
    mesh: Mesh | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array, Array]:
    """Sample a token for each row; all devices of a mesh sample the same.

    Args:
        logits: [S, V] float32.
        numbers: [S, 4] float32: temperature (0: greedy), top-p, the logarithm of min-p, and a
            number in [0, 1).
        top_k: [S, 1] int32.
        truncated: whether top-k, top-p and min-p count.
        mesh: of the program; None: one device.
        interpret: pallas_call's.

    Returns tokens [S] int32, their log-probs [S] float32, and the lowest possible logit [S]
    float32; without truncation, and for greedy rows, all logits are possible.
    """

    def call(logits: Array, numbers: Array, top_k: Array) -> tuple[Array, Array, Array]:
        S, V = logits.shape
        padded = _padded(V)
        tiles = padded // LANES
        memory = [pltpu.VMEM((tiles, ROWS, LANES), jnp.int32)]
        memory += [pltpu.VMEM((tiles, ROWS, LANES), jnp.float32)] if truncated else []
        memory += [pltpu.VMEM((tiles // TILES, ROWS, LANES), jnp.float32)]

        def by_row(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((ROWS, width), lambda i: (i, 0))

        return pl.pallas_call(
            partial(_sample_rows, V, truncated),
            name=TRUNCATED if truncated else PLAIN,
            grid=(pl.cdiv(S, ROWS),),
            in_specs=[by_row(padded), by_row(4), by_row(1)],
            out_specs=[by_row(1)] * 3,
            out_shape=[
                jax.ShapeDtypeStruct((S, 1), t) for t in (jnp.int32, jnp.float32, jnp.float32)
            ],
            scratch_shapes=memory,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",),
                vmem_limit_bytes=_bytes_of(V, truncated=truncated),
            ),
            interpret=interpret,
        )(logits, numbers, top_k)

    if mesh is not None and mesh.size > 1:
        whole = PartitionSpec()
        call = jax.shard_map(
            call, mesh=mesh, in_specs=(whole,) * 3, out_specs=whole, check_vma=False
        )
    tokens, logprobs, floor = call(logits, numbers, top_k)
    return tokens[:, 0], logprobs[:, 0], floor[:, 0]


PLAIN, TRUNCATED = "draw_token", "draw_truncated"
"""The kernel's names in a compiled program."""


def _sample_rows(
    vocab: int,
    truncated: bool,
    logits: Ref,
    numbers: Ref,
    top_k: Ref,
    token: Ref,
    logprob: Ref,
    least: Ref,
    ranks: Ref,
    *memory: Ref,
) -> None:
    """Sample for eight rows. A value of a row is [8, 128], the same in all columns."""
    sums = memory[-1]
    chunks = sums.shape[0]
    lane = jax.lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
    tile_ids = jax.lax.broadcasted_iota(jnp.int32, (TILES, ROWS, LANES), 0)
    in_chunk = tile_ids * LANES + lane
    temperature, share, likely, number = (_wide(numbers[:, i : i + 1]) for i in range(4))
    greedy = temperature == 0
    divisor = jnp.where(greedy, 1.0, temperature)
    lowest = jnp.full((ROWS, LANES), LOWEST, jnp.int32)
    zero, none = jnp.zeros((ROWS, LANES), jnp.float32), jnp.zeros((ROWS, LANES), jnp.int32)

    def over_chunks(one: Callable[[Array, T], T], start: T) -> T:
        end: T = jax.lax.fori_loop(0, chunks, one, start)
        return end

    def of_chunk(c: Array) -> Slice:
        return pl.ds(c * TILES, TILES)

    def logits_of(c: Array) -> tuple[Array, Array]:
        """Return logits [TILES, 8, 128], and whether each belongs to a token."""
        width = TILES * LANES
        row = logits[:, pl.ds(pl.multiple_of(c * width, width), width)]
        tiles = [row[:, t * LANES : (t + 1) * LANES] for t in range(TILES)]
        return jnp.stack(tiles), in_chunk + c * width < vocab

    def rank_chunk(c: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        """Store the ranks of the scaled logits; find each column's maximum, and its tile."""
        largest, where = best
        given, real = logits_of(c)
        rank = _ranked(jnp.where(real, given / divisor, -jnp.inf))
        ranks[of_chunk(c)] = rank
        here = jnp.max(rank, axis=0)
        first = jnp.min(jnp.where(rank == here, tile_ids, TILES), axis=0) + c * TILES
        return jnp.maximum(largest, here), jnp.where(here > largest, first, where)

    largest, where = over_chunks(rank_chunk, (lowest, none))
    best = _across(jnp.max, largest)
    first = _across(jnp.min, jnp.where(largest == best, where * LANES + lane, vocab))
    top = _number(best)
    floor = lowest
    if truncated:
        floor = _floor(ranks, memory[0], best, share, likely, _wide(top_k[:]), over_chunks, vocab)
        floor = jnp.where(greedy, LOWEST, floor)

    def odds_of(rank: Array) -> Array:
        return jnp.where(rank >= floor, jnp.exp(_number(rank) - top), 0.0)

    def sum_chunk(c: Array, total: Array) -> Array:
        mass = jnp.sum(odds_of(ranks[of_chunk(c)]), axis=0)
        sums[c] = mass
        return total + mass

    total = _across(jnp.sum, over_chunks(sum_chunk, zero))
    target = number * total

    def find_chunk(c: Array, found: Passed) -> Passed:
        return _passed(found, _across(jnp.sum, sums[c]), target)

    _, before, chunk = over_chunks(find_chunk, (zero, zero, none))
    chunk = jnp.minimum(chunk, chunks - 1)

    def pick_chunk(c: Array, picked: Array) -> Array:
        return jnp.where(chunk == c, ranks[of_chunk(c)], picked)

    picked = over_chunks(pick_chunk, jnp.full((TILES, ROWS, LANES), LOWEST, jnp.int32))
    found = before, before, none
    for t in range(TILES):
        found = _passed(found, _across(jnp.sum, odds_of(picked[t])), target)
    _, before, tile = found
    tile = jnp.minimum(tile, TILES - 1)
    rank = jnp.max(jnp.where(tile_ids == tile, picked, LOWEST), axis=0)
    mass = odds_of(rank)
    ends = mass
    for shift in (1, 2, 4, 8, 16, 32, 64):
        ends += jnp.where(lane >= shift, pltpu.roll(ends, shift, 1), 0.0)
    passed = _across(jnp.sum, (ends <= target - before).astype(jnp.int32))
    within = jnp.minimum(passed, LANES - 1)
    own = _across(jnp.max, jnp.where(lane == within, rank, LOWEST))
    impossible = _across(jnp.max, jnp.where(lane == within, mass, 0.0)) == 0
    takes_first = greedy | impossible  # the last: rounding at an edge
    sampled = (chunk * TILES + tile) * LANES + within
    token[:] = jnp.where(takes_first, first, sampled)[:, :1]
    own = jnp.where(takes_first, best, own)
    logprob[:] = (_number(own) - top - jnp.log(total))[:, :1]
    if not truncated:
        least[:] = jnp.full((ROWS, 1), -jnp.inf, jnp.float32)
        return

    def least_logit(c: Array, lowest: Array) -> Array:
        given, real = logits_of(c)
        kept = (ranks[of_chunk(c)] >= floor) & real
        return jnp.minimum(lowest, jnp.min(jnp.where(kept, given, jnp.inf), axis=0))

    smallest = _across(jnp.min, over_chunks(least_logit, jnp.full_like(zero, jnp.inf)))
    least[:] = jnp.where(greedy, -jnp.inf, smallest)[:, :1]


def _floor(
    ranks: Ref,
    odds: Ref,
    best: Array,
    share: Array,
    likely: Array,
    k: Array,
    over_chunks: Callable[[Callable[[Array, Array], Array], Array], Array],
    vocab: int,
) -> Array:
    """Compute sampling.likely as the lowest kept rank."""

    def least_kept(
        measure: Callable[[Array, Slice], Array], none: Array, low: Array, limit: Array
    ) -> Array:
        """Compute sampling.least_kept, up to `best`."""

        def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low & high) + ((low ^ high) >> 1)

            def add(c: Array, sums: Array) -> Array:
                here = pl.ds(c * TILES, TILES)
                return sums + jnp.sum(measure(ranks[here] > middle, here), axis=0)

            holds = _across(jnp.sum, over_chunks(add, none)) < limit
            return jnp.where(holds, low, middle + 1), jnp.where(holds, middle, high)

        steps = jnp.where(jnp.any(low < best), 32, 0)
        highest: Array = jax.lax.fori_loop(0, steps, halve, (low, best))[1]
        return highest

    def odds_chunk(c: Array, total: Array) -> Array:
        here = pl.ds(c * TILES, TILES)
        rank = ranks[here]
        mass = jnp.where(rank >= floor, jnp.exp(_number(rank) - top), 0.0)
        odds[here] = mass
        return total + jnp.sum(mass, axis=0)

    top, lowest = _number(best), jnp.full_like(best, LOWEST)
    zero = jnp.zeros_like(share)
    counts = (k > 0) & (k < vocab)
    start = jnp.where(counts, lowest, best)
    floor = least_kept(lambda over, _: over.astype(jnp.int32), jnp.zeros_like(k), start, k)
    floor = jnp.where(counts, floor, lowest)
    limit = share * _across(jnp.sum, over_chunks(odds_chunk, zero))
    start = jnp.where(share < 1, floor, best)
    nucleus = least_kept(lambda over, here: jnp.where(over, odds[here], 0.0), zero, start, limit)
    floor = jnp.where(share < 1, nucleus, floor)
    return jnp.maximum(floor, _ranked(top + likely))


def _wide(column: Array) -> Array:
    """Return a column [8, 1] as [8, 128]."""
    return jnp.broadcast_to(column, (ROWS, LANES))


def _across(reduce: Callable[..., Array], tile: Array) -> Array:
    """Reduce the columns of a tile; return the result in all of them."""
    return _wide(reduce(tile, axis=1, keepdims=True))


def _passed(found: Passed, mass: Array, target: Array) -> Passed:
    """Count the masses that end before the target: (sum so far, their end, their number)."""
    end, before, count = found
    end += mass
    passed = end <= target
    return end, jnp.where(passed, end, before), count + passed.astype(jnp.int32)


def _ranked(numbers: Array) -> Array:
    """Compute sampling.ranks_of."""
    bits = jax.lax.bitcast_convert_type(jnp.where(numbers == 0, 0.0, numbers), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _number(ranks: Array) -> Array:
    """Return the numbers of these ranks."""
    bits = jnp.where(ranks < 0, ranks ^ jnp.int32(0x7FFFFFFF), ranks)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
