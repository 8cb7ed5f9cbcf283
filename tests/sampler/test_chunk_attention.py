"""Attention of a prefill's chunk to the tokens before it, in every number type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.model.cache import attend_chunk

pytestmark = pytest.mark.full


def expected(q, k, v, visible, context, seen):
    """In float64, one query and head after another."""
    B, T, H, K = q.shape
    N, out = k.shape[2], np.zeros(q.shape)
    for b, t, h in np.ndindex(B, T, H):
        n = h // (H // N)
        keys = np.concatenate([context[0][b, n].T[seen[b, t]], k[b, visible[b, t], n]])
        values = np.concatenate([context[1][b, n][seen[b, t]], v[b, visible[b, t], n]])
        scores = keys @ q[b, t, h] * K**-0.5
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [1, 4])
def test_several_rows_attend_to_what_was_before_them(dtype: str, rows: int, length: int) -> None:
    """In bfloat16 XLA's CPU programs refused two rows and more of several heads each."""
    rng, heads, size, columns = np.random.default_rng(0), (6, 3), 8, 5
    shapes = {
        "q": (rows, length, heads[0], size),
        "k": (rows, length, heads[1], size),
        "v": (rows, length, heads[1], size),
        "keys": (rows, heads[1], size, columns),
        "values": (rows, heads[1], columns, size),
    }
    made = {n: jnp.asarray(rng.normal(size=s), dtype) for n, s in shapes.items()}
    wide = {n: np.asarray(x, np.float64) for n, x in made.items()}
    visible = np.broadcast_to(np.tri(length, dtype=bool), (rows, length, length))
    seen = rng.random((rows, length, columns)) < 0.7
    q, k, v, *context = made.values()
    got = jax.jit(attend_chunk)(q, k, v, visible, tuple(context), seen)
    q, k, v, *context = wide.values()
    right = expected(q, k, v, visible, tuple(context), seen)
    np.testing.assert_allclose(
        np.asarray(got, np.float64), right, atol=2e-5 if dtype == "float32" else 0.05
    )
