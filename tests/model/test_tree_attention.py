"""Attention over contexts that share prefixes: each token sees what it sees in a row of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of

from jaxrl_async.model import kernels
from jaxrl_async.model.attention import (
    PART_ATTENTION,
    TREE_PARTS,
    reference,
    sequence_attention,
    tree_reference,
    tree_splash,
    visible_until,
)
from jaxrl_async.model.kernels import per_shard, seen_in_tree
from jaxrl_async.model.layout import Layout
from jaxrl_async.testing.interpreted import interpreted_kernels


def trees(T: int, *, B: int = 2, H: int = 4, N: int = 2, K: int = 16) -> tuple[Any, ...]:
    """q, k, v, segments and positions of rows of branches, with padding behind them; and for each
    branch its row, its first own place, and the places of all of its tokens."""
    rng = np.random.default_rng(T + B)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, K)), np.float32) for n in (H, N, N))
    segments, positions = np.zeros((2, B, T), np.int32)
    branches = []
    for row in range(B):
        path, start = np.zeros(0, np.int64), 0
        for segment in range(1, 8):
            end = start + int(rng.integers(1, max(2, T // 7)))
            left = int(rng.integers(len(path))) if len(path) and segment != 5 else 0
            path = np.concatenate([path[:left], np.arange(start, end)])
            segments[row, start:end], positions[row, start:end] = (
                segment,
                np.arange(left, len(path)),
            )
            branches.append((row, start, path))
            start = end
    return q, k, v, segments, positions, branches


def outputs_and_gradients(function: Any, q: Any, k: Any, v: Any, until: Any, real: Any) -> Any:
    """The output at real tokens, and the gradients of a random projection of it."""
    out, pull = jax.vjp(lambda *x: function(*x, until), q, k, v)
    real = np.asarray(real)[..., None, None]
    upstream = np.random.default_rng(9).normal(size=out.shape) * real
    return [np.asarray(x) for x in (out * real, *pull(jnp.asarray(upstream, out.dtype)))]


def test_a_branch_sees_what_it_sees_alone():
    """The same attention of whole contexts, each in a row of its own, is the reference."""
    q, k, v, segments, positions, branches = trees(40)
    out = tree_reference(q, k, v, visible_until(positions, segments))
    assert sum(positions[row, start] > 0 for row, start, _ in branches) >= 5
    for row, start, path in branches:
        ones = jnp.ones((1, len(path)), jnp.int32)
        alone = reference(*(x[row, path][None] for x in (q, k, v)), ones)[0]
        own = path >= start
        np.testing.assert_allclose(out[row, path[own]], alone[own], atol=1e-6)


def test_rows_without_branches_see_what_segments_see():
    q, k, v, segments, _, _ = trees(40)
    firsts = np.stack([np.searchsorted(row, row) for row in np.where(segments, segments, 99)])
    until = visible_until(np.where(segments, np.arange(40) - firsts, 0), segments)
    out, wanted = (f(q, k, v, x) for f, x in ((tree_reference, until), (reference, segments)))
    real = segments > 0
    np.testing.assert_array_equal(np.asarray(out)[real], np.asarray(wanted)[real])


@pytest.mark.parametrize("T", [24, pytest.param(300, marks=pytest.mark.exhaustive), 640])
def test_splash_of_trees_and_its_gradient_equal_the_reference(T):
    q, k, v, segments, positions, _ = trees(T, H=2, N=1, K=8)
    inputs = q, k, v, visible_until(positions, segments), segments > 0
    expected = outputs_and_gradients(tree_reference, *inputs)
    with interpreted_kernels():
        got = outputs_and_gradients(jax.jit(tree_splash), *inputs)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("T", [23, 24])
def test_the_call_to_cudnn_with_trees_says_what_the_reference_says(T):
    q, k, v, segments, positions, _ = trees(T)
    inputs = q, k, v, visible_until(positions, segments), segments > 0

    def cudnn(q: Any, k: Any, v: Any, until: Any) -> Any:
        seen = seen_in_tree(until, jnp.arange(T))
        return kernels.cudnn_causal(q, k, v, seen, implementation="xla")

    expected = outputs_and_gradients(tree_reference, *inputs)
    for a, b in zip(outputs_and_gradients(cudnn, *inputs), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["reference", pytest.param("splash", marks=pytest.mark.exhaustive)]
)
def test_trees_on_a_mesh_that_divides_the_rows_equal_the_reference(name):
    q, k, v, segments, positions, _ = trees(64)
    mesh = mesh_of(context=2, tensor=2)
    until = visible_until(positions, segments)
    expected = outputs_and_gradients(tree_reference, q, k, v, until, segments > 0)
    layout = Layout(mesh)
    sharded = per_shard(tree_reference, mesh, TREE_PARTS[name])

    def in_order(q: Any, k: Any, v: Any, until: Any) -> Any:
        given = (layout.unfold(layout.flat(x), 2) for x in (q, k, v, until))
        return layout.rows(layout.fold(sharded(*given)), 2)

    with interpreted_kernels():
        got = outputs_and_gradients(jax.jit(in_order), q, k, v, until, segments > 0)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_every_attention_has_a_form_for_trees():
    assert TREE_PARTS.keys() == PART_ATTENTION.keys()
    assert sequence_attention("auto", shares_prefixes=True) is tree_reference
