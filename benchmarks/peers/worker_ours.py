"""Run our sampler in a process of its own, like its peers.

argv[2]: most samplers, each on one CPU device; argv[3]: sampler.matmul; argv[4]: folder of JAX's
compilation cache. In huge pages, as the package's own commands.
"""

import sys

from jaxrl_async.huge_pages import start_with_huge_pages

if __name__ == "__main__":
    start_with_huge_pages()  # before JAX is there

import jax
from worker import Generate, serve

FEW = 16
"""Sequences below which one sampler computes alone, so that weights are read once."""


def load(folder: str) -> tuple[Generate, str]:
    """Make one sampler, or several behind a router; new ones for each concurrency."""
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    jax.config.update("jax_num_cpu_devices", count)
    matmul = sys.argv[3] if len(sys.argv) > 3 else "full"
    if len(sys.argv) > 4:
        jax.config.update("jax_compilation_cache_dir", sys.argv[4])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    import numpy as np
    from jax.sharding import Mesh

    import jaxrl_async
    from jaxrl_async.config import schema
    from jaxrl_async.model.policy import Policy
    from jaxrl_async.sampler.router.router import Router
    from jaxrl_async.sampler.sampler import Sampler
    from jaxrl_async.sampler.setup import SamplerSettings
    from jaxrl_async.types import Request

    policy = Policy.from_pretrained(folder)
    made: dict[int, Router] = {}

    def router(concurrency: int) -> Router:
        if concurrency not in made:
            while made:
                made.popitem()[1].close()
            used = 1 if concurrency < FEW else count
            section = schema.SamplerSection(
                slots=max(1, concurrency // used),
                reserve=1.0,
                max_length=192,
                max_new_tokens=160,
                block=32,
                matmul=matmul,
            )
            meshes = [
                Mesh(np.array([d]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
                for d in jax.devices()[:used]
            ]
            made[concurrency] = Router(
                [
                    Sampler(
                        policy,
                        section=section,
                        mesh=mesh,
                        settings=SamplerSettings(one_thread=used > 1),
                    )
                    for mesh in meshes
                ]
            )
        return made[concurrency]

    def generate(prompts: list[list[int]], lengths: list[int], concurrency: int) -> int:
        requests = [
            Request(
                request_id=f"r{i}",
                token_ids=np.array(prompt, np.int32),
                max_new_tokens=n,
                key=(i, 0),
                forced_length=n,
            )
            for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        sampler = router(concurrency)
        before = sampler.stats().row_steps
        sampler.generate(requests)
        return int(sampler.stats().row_steps - before)

    return generate, jaxrl_async.__version__


if __name__ == "__main__":
    serve(load)
