"""Which queries each program of a kernel on pages has: one of a decode step, or some of a prompt's.
Of TPUs and GPUs alike."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Plan(NamedTuple):
    """Which queries each block of programs has, [blocks] int32 each."""

    sequence: Array
    first: Array  # query, of all sequences' together
    queries: Array  # how many; 0: the block has none
    position: Array  # of the first query in its sequence
    begin: Array  # position of the sequence's first query
    end: Array  # position behind the last query's; 0: the block has no queries, and reads nothing


def plan_of(tokens: int, queries: int, kv_lens: Array, cu_q_lens: Array, num_seqs: Array) -> Plan:
    """Divide the queries of sequences into blocks of at most so many."""
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
    return Plan(sequence, cu_q_lens[sequence] + done, count, position, begin, end)
