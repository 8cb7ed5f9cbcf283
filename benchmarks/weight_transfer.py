"""Time the push of weights from the trainer's mesh to the sampler's, beside jax.device_put.

    1 -> 1                              one device to another
    fsdp 2 x tensor 2 -> tensor 4       four devices to four others, other shard boundaries

`caller` is how long the call blocks the trainer's thread while the step that makes the weights
still runs (its time is `step`); `median`, `least`, `most` are from the moment the weights are ready
until the last array is on the sampler's mesh.

    --remote                            to samplers in processes of their own (about 200 MB)

Then the times are from the offer until the last sampler has every array, checked; `gbytes_per_s` is
what all have received by that, `of_memory_copy` the same beside np.copyto, and `offer_ms` the
trainer's copy to host memory and its checksums. `cpu_s` counts all processes.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common import (
    MODELS,
    Row,
    columns,
    force_cpu_devices,
    make_params,
    measure,
    options,
    parser,
    report,
    spread,
)
from remote_transfer import remote_rows

from jaxrl_async.config import schema
from jaxrl_async.mesh import SAMPLER_RULES, TRAINER_RULES, make_slices, shardings
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.weights.local import Push

MESHES = {
    "1 -> 1": schema.MeshSection(),
    "fsdp2 x tensor2 -> tensor4": schema.MeshSection(
        trainer=schema.AxesSection(fsdp=2, tensor=2), sampler=schema.AxesSection(tensor=4)
    ),
}


def main() -> None:
    """Measure every row and print them."""
    commands = parser(__doc__ or "")
    commands.add_argument("--remote", action="store_true", help="to samplers in other processes")
    args = options(commands)
    if args.remote:
        report("weight_transfer", remote_rows(args), args)
        return
    force_cpu_devices(8)
    rows = [
        {"model": model, "meshes": name, "way": way} | row
        for model in args.models
        for name, mesh in MESHES.items()
        for way, row in both_ways(MODELS[model], mesh, args).items()
    ]
    report("weight_transfer", rows, args)


def both_ways(
    spec: ModelSpec, mesh: schema.MeshSection, args: argparse.Namespace
) -> dict[str, Row]:
    """Time push and device_put with the same weights and meshes."""
    slices = make_slices(mesh)
    table = weight_table(spec)
    source = shardings(table, slices.trainer, TRAINER_RULES)
    target = shardings(table, slices.sampler, SAMPLER_RULES)
    params = jax.block_until_ready(jax.device_put(make_params(spec), source))
    ways: dict[str, Callable[[Any], Any]] = {
        "push": Push(source, target),
        "device_put": lambda tree: jax.device_put(tree, target),
    }
    return {name: one_row(way, params, source, args.repeats) for name, way in ways.items()}


def one_row(way: Callable[[Any], Any], params: Any, source: Any, repeats: int) -> Row:
    """Time a whole transfer, and the call while a step still runs."""
    taken = measure(lambda: jax.block_until_ready(way(params)), repeats)
    step = jax.jit(_slow_copy, out_shardings=source)
    step_s = measure(lambda: jax.block_until_ready(step(params)), repeats)
    caller_s = []
    for _ in range(repeats):
        made = step(params)
        start = time.perf_counter()
        moved = way(made)
        caller_s.append(time.perf_counter() - start)
        jax.block_until_ready(moved)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {
        "mbytes": size / 1e6,
        "gbytes_per_s": size / taken.median / 1e9,
        **columns(taken, "ms", 1e3),
        "caller_ms": spread(caller_s).median * 1e3,
        "step_ms": step_s.median * 1e3,
    }


def _slow_copy(params: Any) -> Any:
    """Return the same weights after some work, which stands in for a train step."""
    x = jnp.eye(512) * 0.5
    x = jax.lax.fori_loop(0, 40, lambda _, y: y @ x + y * 0.5, x)
    nothing = jnp.minimum(jnp.abs(x).sum(), 0.0)
    return jax.tree.map(lambda p: p + nothing.astype(p.dtype), params)


if __name__ == "__main__":
    main()
