"""Decoding attention on pages with a custom TPU kernel, for cases that JAX's kernel does not
support (kernels.ragged_paged): heads wider than a register, and sinks with a window.

A block of pages [B, G, 2 N, W] is one matrix of B G 2 N rows, keys and values of all heads, in the
stored layout. The scores of all queries with all rows are one product; scores with values and with
other heads' keys are masked. The softmax shares are shifted from each key's column to the next
column, its value's, and multiplied by the same matrix. Nothing is rearranged, at the price of
redundant multiplications: for few queries the MXU's time is the time to load the matrix once.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from jaxrl_async.model.kernels import PLAIN, Scoring, head_ways

MASKED = -1e30
"""Score of keys that are not visible."""
BUFFER_BYTES = 2**20
"""Approximate bytes of a block of pages; two blocks are buffered."""


def attend_wide_pages(
    q_RHK: Array,
    pages: Array,
    lengths: Array,
    tables: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
    *,
    mesh: Mesh | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """Attend with one query of each row to the tokens in its pages: [R, H, K].

    Args:
        q_RHK: [R, H, K], of the pages' type.
        pages: [P, G, 2 N, W]: key and value of kv head 0, of kv head 1, ...; zeros after K.
        lengths: [R] int32, tokens of each row in its pages, including its query's; at least 1.
        tables: [R, T] int32, each row's pages in order.
        scoring: window and cap.
        sinks_H: [H], see attention.softmax_with_sinks; None: no sinks.
        mesh: heads are divided over tensor; None: one device.
        interpret: pallas_call's argument.
    """
    sinks = jnp.full(q_RHK.shape[1], MASKED) if sinks_H is None else sinks_H
    call = partial(_call, window=scoring.window, cap=scoring.cap, interpret=interpret)
    if mesh is not None and mesh.size > 1:
        heads = "tensor" if head_ways(pages, mesh) > 1 else None
        by_head = PartitionSpec(None, heads)
        call = jax.shard_map(
            call,
            mesh=mesh,
            in_specs=(
                by_head, PartitionSpec(None, None, heads), PartitionSpec(), PartitionSpec(),
                PartitionSpec(heads),
            ),
            out_specs=by_head,
            check_vma=False,
        )  # fmt: skip
    out: Array = call(q_RHK, pages, lengths, tables, sinks.astype(jnp.float32))
    return out


def _call(
    q: Array,
    pages: Array,
    lengths: Array,
    tables: Array,
    sinks: Array,
    *,
    window: int,
    cap: float,
    interpret: bool | pltpu.InterpretParams,
) -> Array:
    R, H, K = q.shape
    _, G, rows, W = pages.shape
    page_bytes = G * rows * W * pages.dtype.itemsize
    count = max(1, min(tables.shape[1], BUFFER_BYTES // page_bytes))
    q = jnp.pad(q, ((0, 0), (0, 0), (0, W - K)))
    blocks = -(-lengths // (count * G))
    slots = (jnp.cumsum(blocks) - blocks) % 2  # slot of each row's first block

    def one_row(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, H, width), lambda r, *_: (r, 0, 0))

    out = pl.pallas_call(
        partial(_attend, scale=K**-0.5, window=window, cap=cap),
        name="decode_on_pages",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(R,),
            in_specs=[
                one_row(W),
                pl.BlockSpec((H, 1), lambda r, *_: (0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=one_row(W),
            scratch_shapes=[
                pltpu.VMEM((2, count, G, rows, W), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((R, H, W), q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
    )(lengths, blocks, slots, tables, q, sinks[:, None], pages)
    return out[..., :K]


Index = Array | int
"""A number of a row, a page or a block."""
Sums = tuple[Array, Array, Array]
"""The largest score so far, the sum of the odds, and of the weighted values."""


def move_pages(
    pages: Ref,
    number_of: Callable[[Index], Array],
    end: Array,
    buffers: Ref,
    arrivals: Ref,
    block: Index,
    slot: Index,
    *,
    start: bool,
) -> None:
    """Start copying a block's pages of a sequence, or wait for them; inside a kernel.

    Args:
        pages: in HBM, [P, G, ...].
        number_of: returns the number of the sequence's page with an index.
        end: tokens of the sequence; pages after them are not copied.
        buffers: in VMEM, [slots, pages of a block, G, ...].
        arrivals: semaphores, [slots].
        block: index of the block in the sequence.
        slot: of the buffers.
        start: False: wait.
    """
    _, count, G = buffers.shape[:3]
    for j in range(count):
        page = block * count + j

        @pl.when(page * G < end)
        def move_page(j: int = j, page: Index = page) -> None:
            source = pages.at[number_of(page)]
            copy = pltpu.make_async_copy(source, buffers.at[slot, j], arrivals.at[slot])
            if start:
                copy.start()
            else:
                copy.wait()


def _attend(
    lengths: Ref,
    blocks: Ref,
    slots: Ref,
    tables: Ref,
    q: Ref,
    sinks: Ref,
    pages: Ref,
    out: Ref,
    buffers: Ref,
    arrivals: Ref,
    *,
    scale: float,
    window: int,
    cap: float,
) -> None:
    """Attend for one row; the copy of its first block has already started."""
    r, R = pl.program_id(0), pl.num_programs(0)
    _, count, G, rows, W = buffers.shape
    H = q.shape[0]
    tokens, columns = count * G, count * G * rows
    length = lengths[r]

    def move(row: Index, block: Index, slot: Index, *, start: bool) -> None:
        held = (pages, lambda page: tables[row, page], lengths[row], buffers, arrivals)
        move_pages(*held, block, slot, start=start)

    @pl.when(r == 0)
    def begin() -> None:
        buffers[...] = jnp.zeros_like(buffers)  # parts without a page must be finite
        move(0, 0, 0, start=True)

    column = jax.lax.broadcasted_iota(jnp.int32, (H, columns), 1)
    head = jax.lax.broadcasted_iota(jnp.int32, (H, columns), 0)
    is_key = jax.lax.rem(column, rows) == jax.lax.div(head, H // (rows // 2)) * 2

    def one(b: Array, so_far: Sums) -> Sums:
        largest, total, sums = so_far
        slot = (slots[r] + b) & 1
        more = b + 1 < blocks[r]

        @pl.when(more)
        def fetch_next() -> None:
            move(r, b + 1, 1 - slot, start=True)

        @pl.when(~more & (r + 1 < R))
        def fetch_of_next_row() -> None:
            move(r + 1, 0, 1 - slot, start=True)

        move(r, b, slot, start=False)
        kv = buffers[slot].reshape(columns, W)
        scores = jax.lax.dot_general(
            q[...], kv, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        scores *= scale
        if cap:
            scores = cap * jnp.tanh(scores / cap)
        token = b * tokens + jax.lax.div(column, rows)
        seen = is_key & (token < length)
        if window:
            seen &= token >= length - window
        scores = jnp.where(seen, scores, MASKED)
        new = jnp.maximum(largest, jnp.max(scores, axis=1, keepdims=True))
        odds = jnp.where(seen, jnp.exp(scores - new), 0.0)
        kept = jnp.exp(largest - new)
        shares = pltpu.roll(odds, 1, 1).astype(kv.dtype)
        more_sums = jnp.dot(shares, kv, preferred_element_type=jnp.float32)
        total = total * kept + jnp.sum(odds, axis=1, keepdims=True)
        return new, total, sums * kept + more_sums

    start = (sinks[...], jnp.ones((H, 1), jnp.float32), jnp.zeros((H, W), jnp.float32))
    _, total, sums = jax.lax.fori_loop(0, blocks[r], one, start)
    out[...] = (sums / total).astype(out.dtype)
