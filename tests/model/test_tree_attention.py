"""Attention over contexts that share prefixes: each token sees what it sees in a row of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention64 import trees
from builders import mesh_of

from jaxrl_async.model.attention import (
    PART_ATTENTION,
    TREE_PARTS,
    reference,
    sequence_attention,
    tree_reference,
    tree_splash,
    visible_until,
)
from jaxrl_async.model.kernels import per_shard
from jaxrl_async.model.layout import Layout
from jaxrl_async.testing.interpreted import interpreted_kernels

pytestmark = pytest.mark.full


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
