"""The queries of each program of a kernel on pages: one of a decode step, or a block of a prompt's.
Shared by the kernels for TPUs and GPUs."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class QueryPlan(NamedTuple):
    """The queries of each block of programs, [blocks] int32 each."""

    sequence: Array
    first: Array  # index of the first query among the queries of all sequences
    queries: Array  # number of queries, maybe 0
    position: Array  # position of the first query in its sequence
    begin: Array  # position of the sequence's first query
    end: Array  # position after the last query; 0: the block has no queries, and reads nothing


def plan_of(
    tokens: int, queries: int, kv_lens: Array, cu_q_lens: Array, num_seqs: Array
) -> QueryPlan:
    """Divide the queries of sequences into blocks of at most `queries`."""
    S = kv_lens.shape[0]
    lengths = jnp.where(jnp.arange(S) < num_seqs[0], cu_q_lens[1:] - cu_q_lens[:-1], 0)
    blocks_of = (lengths + queries - 1) // queries
    ends = jnp.cumsum(blocks_of, dtype=jnp.int32)
    block = jnp.arange(min(tokens, tokens // queries + S), dtype=jnp.int32)
    sequence = jnp.sum(ends <= block[:, None], axis=1, dtype=jnp.int32).clip(0, S - 1)
    done = (block - (ends - blocks_of)[sequence]) * queries
    count = jnp.clip(lengths[sequence] - done, 0, queries)
    count = jnp.where(block < ends[-1], count, 0)
    begin = (kv_lens - lengths)[sequence]
    position = begin + done
    end = jnp.where(count > 0, position + count, 0)
    return QueryPlan(sequence, cu_q_lens[sequence] + done, count, position, begin, end)
