"""Run by test_attention.py in a process with an NVIDIA GPU: cuDNN's attention and its gradient.

Prints the largest differences from the reference in float32, as JSON.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.model.attention import reference, sequence_attention


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
        chosen = sequence_attention("cudnn", dtype=jnp.bfloat16, head_dim=K)
        got = outputs(jax.jit(chosen), q, k, v, segments)
        with jax.default_matmul_precision("highest"):
            exact = outputs(reference, *(x.astype(jnp.float32) for x in (q, k, v)), segments)
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, exact, strict=True):
            errors[f"{name} {T}x{H}x{N}x{K}"] = float(np.abs(a - b).max())
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
