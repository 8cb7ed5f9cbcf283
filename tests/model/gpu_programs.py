"""Run by test_attention.py in a process with an NVIDIA GPU: attention by cuDNN, where the card has
it for packed rows, and by our own kernels, products by group, and their gradients.

Prints the largest differences from the reference in float32, as JSON.
"""

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.model.attention import obstacle, reference, sequence_attention
from jaxrl_async.model.grouped import grouped_product
from jaxrl_async.model.kernels import PLAIN, Scoring


def outputs(function: Any, q: Any, k: Any, v: Any, segments: Any) -> list[Any]:
    """The output and the three gradients, in float32."""
    real = (segments > 0)[..., None, None]

    def projected(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out = function(q, k, v, segments) * real
        return jnp.sin(out.astype(jnp.float32)).sum() / out.shape[1], out

    grads, out = jax.jit(jax.grad(projected, (0, 1, 2), has_aux=True))(q, k, v)
    return [np.asarray(x, np.float32) for x in (out, *grads)]


def main() -> None:
    errors = {}
    for T, H, N, K in ((256, 8, 2, 64), (100, 4, 4, 128)):
        keys = jax.random.split(jax.random.key(T), 3)
        q, k, v = (
            jax.random.normal(key, (2, T, n, K), jnp.bfloat16)
            for key, n in zip(keys, (H, N, N), strict=True)
        )
        segments = jnp.tile(jnp.repeat(jnp.array([1, 2, 3, 0]), T // 4), (2, 1))
        for scoring, kernel in itertools.product((PLAIN, Scoring(window=30)), ("cudnn", "flash")):
            if obstacle(kernel, jax.devices()[0], jnp.bfloat16, K):
                continue
            chosen = sequence_attention(kernel, dtype=jnp.bfloat16, head_dim=K)
            got = outputs(lambda *x, f=chosen, s=scoring: f(*x, s), q, k, v, segments)
            with jax.default_matmul_precision("highest"):
                wide = (x.astype(jnp.float32) for x in (q, k, v))
                exact = outputs(lambda *x, s=scoring: reference(*x, s), *wide, segments)
            for name, a, b in zip(("out", "dq", "dk", "dv"), got, exact, strict=True):
                case = f"{kernel} {name} {T}x{H}x{N}x{K} {scoring.window}"
                errors[case] = float(np.abs(a - b).max())
    print(json.dumps(errors | products()))


def products() -> dict[str, float]:
    """Products by group, one of them empty, relative to the largest number."""
    sizes = np.array([300, 0, 1, 150], np.int32)
    rows, matrices, cotangent = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate(((500, 96), (4, 96, 160), (500, 160)))
    )
    out, pull = jax.vjp(
        lambda r, m: grouped_product(r, m, jnp.asarray(sizes), jnp.float32), rows, matrices
    )
    got = [np.asarray(x, np.float64) for x in (out, *pull(cotangent.astype(jnp.float32)))]
    r, m, c = (np.asarray(x, np.float64) for x in (rows, matrices, cotangent))
    exact = [np.zeros(x.shape) for x in (c, r, m)]
    for group, end in enumerate(np.cumsum(sizes)):
        part = slice(end - sizes[group], end)
        exact[0][part], exact[1][part] = r[part] @ m[group], c[part] @ m[group].T
        exact[2][group] = r[part].T @ c[part]
    return {
        f"grouped {name}": float(np.abs(a - b).max() / np.abs(b).max())
        for name, a, b in zip(("out", "rows", "matrices"), got, exact, strict=True)
    }


if __name__ == "__main__":
    main()
