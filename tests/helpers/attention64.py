"""Attention and its gradients in float64 NumPy, from the formulas; and packed rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.testing.interpreted import interpreted_kernels


class Attention64(NamedTuple):
    """What attention gives [B, T, H, K], and the gradients of an upstream projection of it."""

    out: Any
    dq: Any
    dk: Any
    dv: Any
    dsinks: Any  # [H]; zeros without sinks


def attention64(
    q: Any, k: Any, v: Any, seen: Any, upstream: Any, *, cap: float = 0.0, sinks: Any = None
) -> Attention64:
    """Attend head by head; seen [B, t, T] bool, upstream [B, t, H, K]."""
    q, k, v, upstream = (np.asarray(x, np.float64) for x in (q, k, v, upstream))
    (B, _, H, K), group = q.shape, q.shape[2] // k.shape[2]
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dsinks = np.zeros(H)
    for b in range(B):
        for h in range(H):
            n = h // group
            raw = q[b, :, h] @ k[b, :, n].T / np.sqrt(K)
            scores = cap * np.tanh(raw / cap) if cap else raw
            odds = np.where(seen[b], np.exp(scores), 0.0)
            sink = 0.0 if sinks is None else np.exp(np.float64(sinks[h]))
            total = odds.sum(axis=1, keepdims=True) + sink
            share = odds / np.where(total > 0, total, 1.0)
            out[b, :, h] = share @ v[b, :, n]
            dv[b, :, n] += share.T @ upstream[b, :, h]
            inner = upstream[b, :, h] @ v[b, :, n].T
            expected = (share * inner).sum(axis=1, keepdims=True)
            slope = share * (inner - expected)
            if cap:
                slope = slope * (1 - (scores / cap) ** 2)
            dq[b, :, h] = slope @ k[b, :, n] / np.sqrt(K)
            dk[b, :, n] += slope.T @ q[b, :, h] / np.sqrt(K)
            if sinks is not None:
                dsinks[h] -= (sink / total * expected).sum()
    return Attention64(out, dq, dk, dv, dsinks)


def packed_mask(segments: Any, window: int = 0) -> Any:
    """Which key a query of a packed row sees, pair by pair: [B, T, T] bool."""
    B, T = segments.shape
    seen = np.zeros((B, T, T), bool)
    for b in range(B):
        for t in range(T):
            for s in range(t + 1):
                near = not window or t - s < window
                seen[b, t, s] = near and segments[b, t] > 0 and segments[b, t] == segments[b, s]
    return seen


def tree_mask(rows: int, length: int, branches: Any, window: int = 0) -> Any:
    """The same for rows of branches (row, first own place, places of all tokens)."""
    seen = np.zeros((rows, length, length), bool)
    for row, start, path in branches:
        for at, place in enumerate(path):
            if place >= start:
                seen[row, place, path[max(0, at + 1 - window) if window else 0 : at + 1]] = True
    return seen


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


def row_of(lengths: list[int], T: int) -> list[int]:
    """The segment ids of a row: segments of these lengths, and padding."""
    ids = [n for n, length in enumerate(lengths, 1) for _ in range(length)]
    return (ids + [0] * T)[:T]


def arrays(T: int, *, H: int = 4, N: int = 2, K: int = 16, B: int = 2) -> tuple[Any, ...]:
    rng = np.random.default_rng(T + K)
    q, k, v, up = (rng.normal(size=(B, T, n, K)).astype(np.float32) for n in (H, N, N, H))
    return q, k, v, up


def got(function: Any, q: Any, k: Any, v: Any, up: Any, sinks: Any = None) -> Attention64:
    """The kernels' outputs and gradients, with zeros in place of outputs without upstream."""
    given = tuple(map(jnp.asarray, (q, k, v))) + (() if sinks is None else (jnp.asarray(sinks),))
    with interpreted_kernels():
        out, pull = jax.vjp(jax.jit(function), *given)
        grads = pull(jnp.asarray(up, out.dtype))
    real = np.any(up != 0, axis=(2, 3))[..., None, None]
    none = np.zeros(q.shape[2]) if sinks is None else grads[3]
    return Attention64(np.where(real, out, 0), *grads[:3], none)


def assert_close(got: Attention64, wanted: Attention64, atol: float = 5e-6) -> None:
    for name, a, b in zip(Attention64._fields, got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=atol * max(1, np.abs(b).max()), err_msg=name)
