"""Time the push of weights from the trainer's mesh to the sampler's, beside jax.device_put.

    1 -> 1                              one device to another
    fsdp 2 x tensor 2 -> tensor 4       four devices to four others, other shard boundaries

    push                                as a run does it, the private copy for resharding included
    push by collectives                 as between accelerators, where that is another way
    device_put

`caller` is how long the trainer's thread is blocked while the step that makes the weights still
runs (its time is `step`), median and least; `median`, `least`, `most` are from the moment the
weights are ready until the last array is on the sampler's mesh, and those in `cpu_ms` count all
threads meanwhile. The ways take turns.

    --remote                            to samplers in processes of their own (about 200 MB)

Then the times are from the offer until the last sampler has every array, checked; `gbytes_per_s` is
what all have received by that, `of_memory_copy` the same beside np.copyto, and `offer_ms` the
trainer's copy to host memory and its checksums. `cpu_s` counts all processes.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from common import (
    MODELS,
    Row,
    columns,
    cpu_s,
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
from jaxrl_async.weights.local import Push, reshards_on_host

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
    force_cpu_devices(8, collectives=True)
    rows = [
        {"model": model, "meshes": name, "way": way} | row
        for model in args.models
        for name, mesh in MESHES.items()
        for way, row in all_ways(MODELS[model], mesh, args).items()
    ]
    report("weight_transfer", rows, args)


class Way(NamedTuple):
    """A transfer in two parts."""

    begin: Callable[[Any], Any]  # on the trainer's thread
    finish: Callable[[Any], Any]  # on the sampler's, once that has arrived


def all_ways(spec: ModelSpec, mesh: schema.MeshSection, args: argparse.Namespace) -> dict[str, Row]:
    """Time push and device_put with the same weights and meshes, in turns."""
    slices = make_slices(mesh)
    table = weight_table(spec)
    source = shardings(table, slices.trainer, TRAINER_RULES)
    target = shardings(table, slices.sampler, SAMPLER_RULES)
    params = jax.block_until_ready(jax.device_put(make_params(spec), source))
    push = Push(source, target)
    ways = {"push": pushed(push)}
    if not push.is_cast(params) and reshards_on_host(jax.devices()):
        ways["push by collectives"] = pushed(Push(source, target, on_host=False))
    ways["device_put"] = Way(lambda tree: jax.device_put(tree, target), lambda moved: moved)
    return timed(ways, params, source, args.repeats)


def pushed(push: Push) -> Way:
    """Return a push in its two parts."""
    return Way(lambda p: push.move(p if push.is_cast(p) else push.cast(p)), push.finish)


def timed(ways: dict[str, Way], params: Any, source: Any, repeats: int) -> dict[str, Row]:
    """Time whole transfers, and their begin while a step still runs."""
    step = jax.jit(_slow_copy, out_shardings=source)
    step_s = measure(lambda: jax.block_until_ready(step(params)), repeats)
    moved = {name: transferred(way, params) for name, way in ways.items()}  # a sampler holds a set
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            cpu, start = cpu_s(), time.perf_counter()
            moved[name] = transferred(way, params)
            wall_s, used_s = time.perf_counter() - start, cpu_s() - cpu
            made = step(params)
            start = time.perf_counter()
            begun = way.begin(made)
            taken[name].append((wall_s, used_s, time.perf_counter() - start))
            jax.block_until_ready((made, begun))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    rows = {}
    for name, seen in taken.items():
        wall, cpu_time, caller = (spread(times) for times in zip(*seen, strict=True))
        rows[name] = {
            "mbytes": size / 1e6,
            "gbytes_per_s": size / wall.median / 1e9,
            **columns(wall, "ms", 1e3),
            **columns(cpu_time, "cpu_ms", 1e3),
            "caller_ms": caller.median * 1e3,
            "caller_least_ms": caller.least * 1e3,
            "step_ms": step_s.median * 1e3,
        }
    return rows


def transferred(way: Way, params: Any) -> Any:
    """Transfer the weights, and wait for them."""
    return jax.block_until_ready(way.finish(jax.block_until_ready(way.begin(params))))


def _slow_copy(params: Any) -> Any:
    """Return the same weights after some work, which stands in for a train step."""
    x = jnp.eye(512) * 0.5
    x = jax.lax.fori_loop(0, 40, lambda _, y: y @ x + y * 0.5, x)
    nothing = jnp.minimum(jnp.abs(x).sum(), 0.0)
    return jax.tree.map(lambda p: p + nothing.astype(p.dtype), params)


if __name__ == "__main__":
    main()
