"""Latent attention (latent.py) on pages with a custom TPU kernel, for decode steps and prompts.

All heads share one key per token, which is also the value. A page is therefore a matrix [G, W] of
its tokens, which fills the tiles of a TPU's memory. A program of the kernel has some queries of one
sequence in all heads, as one matrix, and loops over blocks of the pages that they see, with the
softmax of flash attention (Dao et al. 2022, arXiv:2205.14135). Programs run one after the other;
while one computes, the next block, or the next program's first block, is copied.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from jaxrl_async.model.kernels import PLAIN, Scoring
from jaxrl_async.model.query_blocks import plan_of
from jaxrl_async.model.tpu_pages import Index, move_pages

MASKED = -1e30
"""Score of keys that are not visible."""
BUFFER_BYTES = 2**20
"""Approximate bytes of a block of pages; two blocks are buffered."""
MOST_ROWS = 512
"""Maximum rows of a program's matrix of queries in all heads, if one query has fewer."""
SCORES = 2**18
"""Approximate maximum number of scores of a program with a block of pages."""
ROWS_OF_TILE = 16
"""Rows that fill a tile of numbers of 16 bits, and two of 32."""


def attend_latent_pages(
    q_tHK: Array,
    pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
    *,
    rank: int,
    mesh: Mesh | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """Attend with queries of several sequences to their pages: [t, H, rank], 0 after the last
    query. See kernels.ragged_paged for the arguments.

    Args:
        q_tHK: queries, of the pages' type.
        pages: [P, G, W]: a key of K numbers for each token, padded with zeros to a multiple of 128.
        kv_lens: tokens of each sequence, including its queries.
        page_indices: [seqs, pages of a sequence].
        cu_q_lens: start of the queries of each sequence.
        num_seqs: number of valid sequences.
        scoring: must be PLAIN: no model with latent attention has a window or a cap.
        sinks_H: must be None.
        rank: width of the value, which is the first part of the key.
        mesh: heads are divided over tensor, if divisible; None: one device.
        interpret: pallas_call's argument.
    """
    assert scoring == PLAIN and sinks_H is None, "latent attention has no windows, caps or sinks"
    call = partial(_call, rank=rank, interpret=interpret)
    if mesh is not None and mesh.size > 1:
        divides = q_tHK.shape[1] % mesh.shape["tensor"] == 0
        by_head = PartitionSpec(None, "tensor" if divides else None)
        call = jax.shard_map(
            call,
            mesh=mesh,
            in_specs=(by_head, *(PartitionSpec(),) * 5),
            out_specs=by_head,
            check_vma=False,
        )
    out = call(q_tHK, pages, kv_lens, page_indices, cu_q_lens, num_seqs)
    real = jnp.arange(q_tHK.shape[0]) < cu_q_lens[num_seqs[0]]
    return jnp.where(real[:, None, None], out, 0)


def _call(
    q: Array,
    pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    *,
    rank: int,
    interpret: bool | pltpu.InterpretParams,
) -> Array:
    t, H, K = q.shape
    _, G, W = pages.shape
    heads = -(-H // ROWS_OF_TILE) * ROWS_OF_TILE
    queries = 1 if t == len(kv_lens) else max(1, min(t, MOST_ROWS // heads))
    page_bytes = G * W * pages.dtype.itemsize
    most = min(BUFFER_BYTES // page_bytes, SCORES // (queries * heads * G), page_indices.shape[1])
    count, values = max(1, most), min(W, -(-rank // 128) * 128)
    plan = plan_of(t, queries, kv_lens, cu_q_lens, num_seqs)
    blocks = -(-plan.end // (count * G))
    slots = (jnp.cumsum(blocks) - blocks) % 2  # slot of each program's first block
    q = jnp.pad(q, ((0, queries - 1), (0, heads - H), (0, W - K)))
    rows = queries * heads
    out = pl.pallas_call(
        partial(_attend, scale=K**-0.5),
        name="latent_on_pages",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(len(blocks),),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((2, queries, heads, W), q.dtype),
                pltpu.VMEM((2, count, G, W), pages.dtype),
                pltpu.VMEM((queries, heads, values), q.dtype),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, values), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:2], values), q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
    )(plan.sequence, plan.first, plan.position, plan.end, blocks, slots, page_indices, q, pages)
    return out[:t, :H, :rank]


def _attend(
    sequences: Ref,
    firsts: Ref,
    positions: Ref,
    ends: Ref,
    blocks: Ref,
    slots: Ref,
    tables: Ref,
    q: Ref,
    pages: Ref,
    out: Ref,
    queries: Ref,
    buffers: Ref,
    result: Ref,
    largest: Ref,
    total: Ref,
    sums: Ref,
    of_queries: Ref,
    of_pages: Ref,
    of_result: Ref,
    *,
    scale: float,
) -> None:
    """Attend for one program; the copies of its queries and first block have already started.
    Programs with queries come first. Queries after a sequence's last one belong to the next
    sequence, whose program overwrites their result later."""
    i, last = pl.program_id(0), pl.num_programs(0) - 1
    _, count, G, W = buffers.shape
    n, heads, values = result.shape
    tokens = count * G
    after = jnp.minimum(i + 1, last)
    more_programs = (i < last) & (blocks[after] > 0)

    def copy_queries(program: Index) -> Any:
        mine = q.at[pl.ds(firsts[program], n)]
        return pltpu.make_async_copy(mine, queries.at[program & 1], of_queries.at[program & 1])

    def copy_result(program: Index) -> Any:
        return pltpu.make_async_copy(result, out.at[pl.ds(firsts[program], n)], of_result)

    def move(program: Index, block: Index, slot: Index, *, start: bool) -> None:
        table = (pages, lambda page: tables[sequences[program], page], ends[program])
        move_pages(*table, buffers, of_pages, block, slot, start=start)

    @pl.when((i == 0) & (blocks[0] > 0))
    def begin() -> None:
        buffers[...] = jnp.zeros_like(buffers)  # parts without a page must be finite
        copy_queries(0).start()
        move(0, 0, 0, start=True)

    def one(b: Array, _: None) -> None:
        slot = (slots[i] + b) & 1
        more = b + 1 < blocks[i]

        @pl.when(more)
        def fetch_next() -> None:
            move(i, b + 1, 1 - slot, start=True)

        @pl.when(~more & more_programs)
        def fetch_of_next_program() -> None:
            copy_queries(after).start()
            move(after, 0, 1 - slot, start=True)

        move(i, b, slot, start=False)
        kv = buffers[slot].reshape(tokens, W)
        own = queries[i & 1].reshape(n * heads, W)
        scores = jax.lax.dot_general(
            own, kv, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        token = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) + b * tokens
        row = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        seen = token <= positions[i] + jax.lax.div(row, heads)
        scores = jnp.where(seen, scores * scale, MASKED)
        new = jnp.maximum(largest[...], jnp.max(scores, axis=1, keepdims=True))
        odds = jnp.exp(scores - new)  # each query sees a token of the first block: 0 where MASKED
        kept = jnp.exp(largest[...] - new)
        largest[...] = new
        total[...] = total[...] * kept + jnp.sum(odds, axis=1, keepdims=True)
        sums[...] = sums[...] * kept + jnp.dot(
            odds.astype(kv.dtype), kv[:, :values], preferred_element_type=jnp.float32
        )

    @pl.when(blocks[i] > 0)
    def attend() -> None:
        largest[...] = jnp.full_like(largest, MASKED)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)
        copy_queries(i).wait()
        jax.lax.fori_loop(0, blocks[i], one, None)

        @pl.when(i > 0)
        def wait_for_the_result_before() -> None:
            copy_result(i - 1).wait()

        result[...] = (sums[...] / total[...]).astype(result.dtype).reshape(n, heads, values)
        copy_result(i).start()

        @pl.when(~more_programs)
        def end() -> None:
            copy_result(i).wait()
