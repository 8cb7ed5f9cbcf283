"""Attention on KV cache pages for NVIDIA GPUs: a Pallas kernel, compiled by Triton.

Each program of the kernel has some queries of one sequence, in a few heads that share a kv head. It
loops over the visible keys, a block at a time, with the softmax of flash attention (Dao et al.
2022, arXiv:2205.14135). Pages are read in place, and the cost of a row is proportional to its
tokens or its window. If the programs are too few for the device, the keys of a query are divided
among several programs, whose sums are combined afterwards (Dao et al. 2023, "Flash-Decoding").

    plan    the queries of each program, see query_blocks.py
    pages   [P, G, 2 N, W]: key and value of kv head 0, of kv head 1, ...; for latent attention
            [P, G, 1, W], keys that are also values
    new     [t, 2 N, W]: keys and values of the queries' own tokens, for layers with a window, whose
            pages do not hold all tokens of a chunk

A head's width is processed in parts of 2^n columns, since Triton supports no other shapes: 576 is
512 and 64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh, PartitionSpec

from jaxrl_async.model.kernels import PLAIN, Scoring
from jaxrl_async.model.query_blocks import plan_of

UNSEEN = -1e30
"""Score of a key that is not visible, and the maximum over no keys: finite, to avoid NaN."""
LEAST = 16
"""Minimum rows and columns of a product on tensor cores."""
LARGEST = 64
"""Maximum rows and keys of a product."""
ROW_BYTES = 16 * 2**10
"""Shared memory for a program's queries; their sums take one or two times this in registers."""
KEY_BYTES = 72 * 2**10
"""Shared memory for the keys and values of a program. A program has at most 99 KiB on an L4 or an
RTX card, 163 on an A100 and 227 on an H100. Compiled for an L4, heads of 576 in float32 whose keys
are values take 68 KiB with their queries, and heads of 256 with separate values 49."""
MANY_PROGRAMS = 256
"""Programs that keep a device busy: nearly two per multiprocessor of an H100 (132)."""
MOST_SPLITS = 16
"""Maximum number of programs among which the keys of one query are divided."""


@dataclass(frozen=True, slots=True)
class PageTiles:
    """The size of a program's step in the kernel; all are powers of 2 except `heads`."""

    queries: int  # of one sequence
    heads: int  # that share a kv head
    rows: int  # at least queries * heads
    keys: int
    splits: int  # among which the keys of a query are divided
    warps: int


def tiles(
    tokens: int,
    sequences: int,
    heads: int,
    kv_heads: int,
    head_bytes: int,
    most_keys: int,
    sides: int = 2,
) -> PageTiles:
    """Return the size of a program's step for a call of these shapes; one query per sequence
    (tokens == sequences) is a decode step.

    Args:
        tokens: number of queries of all sequences.
        sequences: number of sequences in the call.
        heads: query heads.
        kv_heads: kv heads.
        head_bytes: bytes of one key.
        most_keys: maximum number of keys of a sequence.
        sides: 2, or 1 if keys are values.

    >>> tiles(256, 256, 16, 8, 256, 2048)
    Tiles(queries=1, heads=2, rows=16, keys=64, splits=1, warps=4)
    >>> tiles(4, 4, 16, 8, 256, 2048).splits, tiles(4, 4, 16, 8, 256, 128).splits
    (8, 1)
    >>> tiles(2048, 64, 16, 8, 256, 2048).queries
    32
    """
    group, decodes = heads // kv_heads, tokens == sequences
    most_rows = _size_of(ROW_BYTES, head_bytes)
    in_one = min(group, most_rows)
    queries = 1 if decodes else max(1, most_rows // _power_of_two(in_one))
    rows = max(LEAST, _power_of_two(queries * in_one))
    keys = _size_of(KEY_BYTES, 2 * sides * head_bytes)  # double-buffered
    splits = 1
    if decodes:
        programs = tokens * kv_heads * -(-group // in_one)
        wanted = _power_of_two(-(-MANY_PROGRAMS // programs))
        splits = max(1, min(wanted, MOST_SPLITS, most_keys // (4 * keys)))
    return PageTiles(queries, in_one, rows, keys, splits, 8 if head_bytes > 512 else 4)


def _size_of(most_bytes: int, each: int) -> int:
    """Return the number of rows, a power of 2 from LEAST to LARGEST, that fit into `most_bytes`."""
    return next(n for n in (LARGEST, 32, LEAST) if n * each <= most_bytes or n == LEAST)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def column_parts(width: int) -> list[slice]:
    """Divide a head's columns into parts whose widths are powers of 2, at least LEAST; the last
    may exceed the width.

    >>> [(s.start, s.stop) for s in column_parts(576)], column_parts(24)
    ([(0, 512), (512, 576)], [slice(0, 16, None), slice(16, 32, None)])
    """
    parts, begin = list[slice](), 0
    while begin < width:
        size = max(LEAST, 1 << (width - begin).bit_length() - 1)
        parts.append(slice(begin, begin + size))
        begin += size
    return parts


def attend_pages(
    q_tHK: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
    new_tCW: Array | None = None,
    *,
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> Array:
    """Attend with queries of several sequences to their KV pages. See kernels.ragged_paged for the
    arguments and the result.

    Any number and width of heads, windows, caps, sinks and page sizes are supported. Scores,
    softmax and sums are in float32; products have XLA's precision on GPUs (TF32 for float32).

    Args:
        q_tHK: queries.
        kv_pages: [P, G, 2 N, W or more], or [P, G, 1, W or more]: keys that are also values.
        kv_lens: tokens of each sequence, including the queries' tokens.
        page_indices: [seqs, pages of a sequence]; entries that no query sees may be any below P.
        cu_q_lens: start of the queries of each sequence.
        num_seqs: number of valid sequences.
        scoring: window and cap.
        sinks_H: see attention.softmax_with_sinks.
        new_tCW: keys and values of the queries' own tokens, in the pages' form. These are then not
            read from the pages; earlier tokens are. None: all tokens are in the pages.
        mesh: heads are divided over tensor if it divides the kv heads, or if all share one kv head;
            everything else is replicated.
        interpret: run in Pallas' interpreter, on any platform, for tests.
    """
    run = partial(_on_a_device, scoring=scoring, interpret=interpret)
    optional = {"sinks": sinks_H, "new": new_tCW}
    inputs = {name: x for name, x in optional.items() if x is not None}
    if mesh is not None and mesh.size > 1:
        of_q, of_kv = _divided(q_tHK.shape[1], kv_pages.shape[2] // 2, mesh.shape["tensor"])
        rows, whole = PartitionSpec(None, of_q), PartitionSpec()
        pages = PartitionSpec(None, None, of_kv)
        others = {"sinks": PartitionSpec(of_q), "new": PartitionSpec(None, of_kv)}
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(rows, pages, *(whole,) * 4, {name: others[name] for name in inputs}),
            out_specs=rows,
            check_vma=False,  # a pallas_call does not declare over which axes its result varies
        )
    return run(q_tHK, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, inputs)


def _divided(heads: int, pairs: int, ways: int) -> tuple[str | None, str | None]:
    """Return the axes that divide query heads and kv heads; pairs: kv heads with separate values,
    0 for latent attention, whose single kv head is replicated."""
    if ways > 1 and heads % ways == 0:
        if pairs and pairs % ways == 0:
            return "tensor", "tensor"
        if pairs <= 1:
            return "tensor", None
    return None, None


def _on_a_device(
    q_tHK: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    inputs: dict[str, Array],
    *,
    scoring: Scoring,
    interpret: bool,
) -> Array:
    """Run the kernel with the heads of one device."""
    t, H, K = q_tHK.shape
    G, C = kv_pages.shape[1:3]
    N = max(1, C // 2)
    S, width = page_indices.shape
    tile = tiles(t, S, H, N, K * kv_pages.dtype.itemsize, width * G, min(C, 2))
    plan = plan_of(t, tile.queries, kv_lens, cu_q_lens, num_seqs)
    head_blocks = -(-(H // N) // tile.heads)
    split = tile.splits > 1
    shape = (tile.splits, t, H) if split else (t, H)
    outs = [jax.ShapeDtypeStruct((*shape, K), jnp.float32 if split else q_tHK.dtype)]
    if split:
        outs += [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2
    run = pl.pallas_call(
        partial(_kernel, names=tuple(inputs), tile=tile, group=H // N, scoring=scoring, width=K),
        grid=(N * head_blocks, len(plan.first), tile.splits),
        out_shape=outs,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=2),
        interpret=interpret,
        name="attend_pages",
    )
    found = run(jnp.stack(plan, axis=1), page_indices, q_tHK, kv_pages, *inputs.values())
    out = _together(*found).astype(q_tHK.dtype) if split else found[0]
    real = jnp.arange(t) < cu_q_lens[num_seqs[0]]
    return jnp.where(real[:, None, None], out, 0)


def _together(out: Array, largest: Array, total: Array) -> Array:
    """Combine the splits' sums of values [splits, t, H, K], each relative to its largest score, and
    their sums of odds [splits, t, H]."""
    share = jnp.exp(largest - jnp.max(largest, axis=0))
    total = jnp.sum(total * share, axis=0)
    return jnp.sum(out * share[..., None], axis=0) / total[..., None]


class _Sums(NamedTuple):
    """The running sums of a program."""

    largest: Array  # [rows] score
    total: Array  # [rows] of the odds
    values: tuple[Array, ...]  # [rows, columns], of each part


Cells = tuple[Array, ...]
"""Indices of cells of a reference, one array or scalar for each axis."""


def _kernel(
    plan_ref: Ref,
    tables_ref: Ref,
    q_ref: Ref,
    pages_ref: Ref,
    *refs: Ref,
    names: tuple[str, ...],
    tile: PageTiles,
    group: int,
    scoring: Scoring,
    width: int,
) -> None:
    inputs, (out_ref, *partial_refs) = dict(zip(names, refs, strict=False)), refs[len(names) :]
    head_blocks = -(-group // tile.heads)
    kv_head, head_block = pl.program_id(0) // head_blocks, pl.program_id(0) % head_blocks
    block, split = pl.program_id(1), pl.program_id(2)
    sequence, first, count, position, begin, end = (plan_ref[block, i] for i in range(6))

    # rows: queries, with the heads of each query adjacent
    row = jnp.arange(tile.rows)
    in_group = head_block * tile.heads + row % tile.heads
    used = (row // tile.heads < count) & (in_group < group)
    query = jnp.where(used, first + row // tile.heads, q_ref.shape[0])  # unused: out of range
    head = kv_head * group + in_group
    at = position + row // tile.heads  # position of each row's query
    parts = column_parts(width)

    def cells_of(ref: Ref, index: Cells, used: Array, part: slice) -> tuple[Any, Array]:
        """Return a part of the columns at each index, [n, columns], and a mask of the valid ones.
        (The interpreter supports only scalars, or arrays of one shape.)"""
        column = jnp.arange(part.stop - part.start) + part.start
        shape = used.shape[0], column.shape[0]
        whole = [i if jnp.ndim(i) == 0 else i[:, None] for i in index]
        arrays = [jnp.broadcast_to(i, shape) for i in (*whole, column[None])]
        return ref.at[tuple(arrays)], used[:, None] & (column < width)[None]

    def load(ref: Ref, index: Cells, used: Array, part: slice) -> Array:
        cells, mask = cells_of(ref, index, used, part)
        return plgpu.load(cells, mask=mask, other=0)

    queries = [load(q_ref, (query, head), used, part) for part in parts]
    sides = min(pages_ref.shape[2], 2)  # 1: keys are values
    key_row, value_row = (2 * kv_head, 2 * kv_head + 1) if sides > 1 else (0, 0)

    def step(
        sums: _Sums, positions: Array, seen: Array, ref: Ref, index: Callable[[Any], Cells]
    ) -> _Sums:
        """Attend to the keys at these positions of the sequence."""
        keys = [load(ref, index(key_row), seen, part) for part in parts]
        scores = sum(plgpu.dot(q, k, trans_b=True) for q, k in zip(queries, keys, strict=True))
        scores = scores * width**-0.5
        if scoring.cap:
            scores = scoring.cap * jnp.tanh(scores / scoring.cap)
        visible = seen[None] & (positions[None] <= at[:, None])
        if scoring.window:
            visible &= positions[None] > at[:, None] - scoring.window
        scores = jnp.where(visible, scores, UNSEEN)
        largest = jnp.maximum(sums.largest, jnp.max(scores, axis=1))
        odds = jnp.where(visible, jnp.exp(scores - largest[:, None]), 0)
        shrunk = jnp.exp(sums.largest - largest)
        shares = odds.astype(q_ref.dtype)
        values = keys
        if sides > 1:
            values = [load(ref, index(value_row), seen, part) for part in parts]
        return _Sums(
            largest,
            sums.total * shrunk + jnp.sum(odds, axis=1),
            tuple(
                old * shrunk[:, None] + plgpu.dot(shares, v)
                for old, v in zip(sums.values, values, strict=True)
            ),
        )

    def over(low: Array, end: Array, sums: _Sums, ref: Ref, index: Callable[..., Cells]) -> _Sums:
        """Attend to this split's part of the keys from position `low` to `end` (exclusive)."""
        blocks = (jnp.maximum(end - low, 0) + tile.keys - 1) // tile.keys
        each = (blocks + tile.splits - 1) // tile.splits

        def body(i: Array, sums: _Sums) -> _Sums:
            positions = low + i * tile.keys + jnp.arange(tile.keys)
            seen = positions < end
            positions = jnp.where(seen, positions, low)
            return step(sums, positions, seen, ref, partial(index, positions))

        return jax.lax.fori_loop(split * each, jnp.minimum((split + 1) * each, blocks), body, sums)

    page_tokens = pages_ref.shape[1]

    def in_pages(positions: Array, cell: Any) -> Cells:
        return tables_ref[sequence, positions // page_tokens], positions % page_tokens, cell

    low = jnp.int32(0)
    if scoring.window:
        low = jnp.maximum(position + 1 - scoring.window, 0)
    none = jnp.full(tile.rows, UNSEEN, jnp.float32), jnp.zeros(tile.rows, jnp.float32)
    if "sinks" in inputs:  # only in the first split
        sinks = plgpu.load(inputs["sinks"].at[head], mask=used, other=0).astype(jnp.float32)
        is_first = used & (split == 0)
        none = jnp.where(is_first, sinks, UNSEEN), jnp.where(is_first, 1.0, 0.0)
    empty = tuple(jnp.zeros((tile.rows, p.stop - p.start), jnp.float32) for p in parts)
    sums = _Sums(*none, empty)
    if "new" in inputs:
        sums = over(low, jnp.minimum(begin, end), sums, pages_ref, in_pages)
        behind = first - position  # index of position 0, if all tokens were among the queries

        def among_new(positions: Array, cell: Any) -> Cells:
            return behind + positions, cell

        sums = over(jnp.maximum(low, begin), end, sums, inputs["new"], among_new)
    else:
        sums = over(low, end, sums, pages_ref, in_pages)

    index: Cells = (query, head)
    if partial_refs:
        index = (jnp.full_like(row, split), *index)
        for ref, x in zip(partial_refs, sums[:2], strict=True):
            plgpu.store(ref.at[index], x, mask=used)
    for part, values in zip(parts, sums.values, strict=True):
        if not partial_refs:
            values = values / jnp.where(used, sums.total, 1)[:, None]
        cells, mask = cells_of(out_ref, index, used, part)
        plgpu.store(cells, values.astype(out_ref.dtype), mask=mask)
