"""The GPU's attention kernels, interpreted, against float64 NumPy: outputs and gradients."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from attention64 import (
    arrays,
    assert_close,
    attention64,
    got,
    packed_mask,
    row_of,
    tree_mask,
    trees,
)
from builders import mesh_of
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.model import gpu_flash
from jaxrl_async.model.attention import PART_ATTENTION, TREE_PARTS, visible_until
from jaxrl_async.model.kernels import PLAIN, Scoring, per_shard
from jaxrl_async.model.layout import Layout

pytestmark = pytest.mark.full

SINKS = np.array([0.3, -1.0, 2.0, 0.0], np.float32)


@pytest.mark.parametrize(
    ("T", "K", "scoring", "sinks"),
    [
        (100, 16, PLAIN, None),
        (37, 24, Scoring(window=9), None),
        (300, 8, Scoring(window=40), None),
        (70, 16, Scoring(cap=1.5), None),
        (65, 40, Scoring(window=20, cap=3.0), SINKS),
    ],
)
def test_flash_and_its_gradient_equal_float64(T, K, scoring, sinks):
    """Rows of many segments, lengths that are no multiple of a block, widths that are no power."""
    q, k, v, up = arrays(T, K=K)
    segments = np.array([row_of([T // 3, 1, T // 4], T), row_of([T], T)], np.int32)
    up = up * (segments > 0)[..., None, None]
    seen = packed_mask(segments, scoring.window)
    wanted = attention64(q, k, v, seen, up, cap=scoring.cap, sinks=sinks)
    wanted = wanted._replace(out=wanted.out * (segments > 0)[..., None, None])

    def flash(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        return gpu_flash.flash(q, k, v, jnp.asarray(segments), scoring, *sinks)

    assert_close(got(flash, q, k, v, up, sinks), wanted)


@pytest.mark.parametrize(("T", "scoring"), [(90, PLAIN), (90, Scoring(window=7))])
def test_flash_of_shared_prefixes_equals_float64(T, scoring):
    q, k, v, segments, positions, branches = trees(T)
    until = visible_until(positions, segments)
    extent = jnp.stack([until, jnp.asarray(positions)], axis=-1) if scoring.window else until
    up = np.random.default_rng(3).normal(size=q.shape) * (segments > 0)[..., None, None]
    wanted = attention64(q, k, v, tree_mask(2, T, branches, scoring.window), up)

    def tree(q: Any, k: Any, v: Any) -> Any:
        return gpu_flash.tree_flash(q, k, v, extent, scoring)

    assert_close(got(tree, q, k, v, up), wanted)


@pytest.mark.parametrize("shares", [False, True])
def test_flash_on_a_mesh_that_divides_the_rows_equals_float64(shares):
    """Each device has queries of two parts of its rows, and half of the heads."""
    T = 64
    q, k, v, segments, positions, branches = trees(T)
    up = np.random.default_rng(4).normal(size=q.shape) * (segments > 0)[..., None, None]
    mesh = mesh_of(context=2, tensor=2)
    layout, extent, part = Layout(mesh), jnp.asarray(segments), PART_ATTENTION["flash"]
    seen = packed_mask(segments)
    if shares:
        extent, part = visible_until(positions, segments), TREE_PARTS["flash"]
        seen = tree_mask(2, T, branches)
    whole = gpu_flash.tree_flash if shares else gpu_flash.flash
    sharded = per_shard(whole, mesh, part)

    def in_order(q: Any, k: Any, v: Any) -> Any:
        given = (layout.unfold(layout.flat(x), 2) for x in (q, k, v, extent))
        return layout.rows(layout.fold(sharded(*given)), 2)

    assert_close(got(in_order, q, k, v, up), attention64(q, k, v, seen, up))


@given(st.lists(st.integers(1, 9), max_size=6))
def test_a_segment_ends_where_its_last_token_is_and_padding_sees_itself(lengths):
    ends = np.cumsum(lengths)
    wanted = [int(e) for e, n in zip(ends, lengths, strict=True) for _ in range(n)]
    wanted += range(sum(lengths) + 1, 57)
    assert gpu_flash.segment_ends(jnp.asarray([row_of(lengths, 56)]))[0].tolist() == wanted


def test_blocks_that_see_nothing_of_each_other_are_left_out():
    """Eight segments of a block each: a block of queries reads its own keys alone. A window reads
    the block that it reaches into."""
    T, block = 8 * 128, 128
    segments = jnp.asarray([row_of([128] * 8, T)])
    ends, indices = gpu_flash.segment_ends(segments), jnp.arange(T, dtype=jnp.int32)
    how = partial(gpu_flash.How, 1.0, contiguous=True, block=block)
    own = [[i, i + 1] for i in range(8)]
    for found in gpu_flash._ranges(gpu_flash.Mask(indices, ends, None, None), how(PLAIN)):
        assert found[0].tolist() == own
    whole = gpu_flash.Mask(indices, jnp.full_like(ends, T), indices[None], indices[None])
    of_queries, of_keys = gpu_flash._ranges(whole, how(Scoring(window=100)))
    assert of_queries[0].tolist() == [[max(0, i - 1), i + 1] for i in range(8)]
    assert of_keys[0].tolist() == [[i, min(8, i + 2)] for i in range(8)]


def test_bfloat16_is_as_close_as_its_rounding():
    q, k, v, up = arrays(80, K=32)
    q, k, v, up = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (q, k, v, up))
    segments = np.array([row_of([50, 30], 80), row_of([80], 80)], np.int32)
    wanted = attention64(q, k, v, packed_mask(segments), up)

    def flash(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
        return gpu_flash.flash(q, k, v, jnp.asarray(segments))

    assert_close(got(flash, q, k, v, up), wanted, atol=0.02)
