"""Shards put together in host memory: the same bits as with jax.device_put, whatever the meshes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transport_rig import same_bits

from jaxrl_async.config import schema
from jaxrl_async.config.schema import AxesSection
from jaxrl_async.mesh import SAMPLER_RULES, TRAINER_RULES, make_slices, shardings
from jaxrl_async.model.spec import Weight
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.local import Push, reshards_on_host

SIZES = [((4,), (4,)), ((2, 2), (4,)), ((2,), (2, 2)), ((4,), (2,)), ((2, 2), (1,)), ((1,), (2, 2)),
         ((2,), (6,)), ((6,), (2,)), ((3,), (3,)), ((2, 2), (2, 2))]  # fmt: skip
"""Shapes of the trainer's and of the sampler's mesh."""

EXPERTS = {
    "norm": Weight(shape=(8,), axes=("embed",), init="ones", hf="n"),
    "up": Weight(shape=(4, 8, 12), axes=("expert", "embed", "mlp"), init="ones", hf="u"),
    "down": Weight(shape=(4, 12, 8), axes=("expert", "mlp", "embed"), init="ones", hf="d"),
    "embed": Weight(shape=(16, 8), axes=("vocab", "embed"), init="ones", hf="e"),
}


def random_specs(rng, mesh, shapes):
    """Shard some axes of each array over some axes of the mesh, in any order."""

    def spec(shape):
        names = [[] for _ in shape]
        for name in rng.permutation(mesh.axis_names):
            if shape and rng.random() < 0.75:
                names[rng.integers(len(shape))].append(str(name))
        return NamedSharding(mesh, PartitionSpec(*[tuple(n) or None for n in names]))

    return {name: spec(shape) for name, shape in shapes.items()}


def in_8_bits(params):
    """Another tree: numbers in 8 bits and their scales."""
    made = {}
    for name, w in params.items():
        scale = jnp.maximum(jnp.abs(w).max(), 1e-6) / 127
        made[name] = {"q": jnp.round(w / scale).astype(jnp.int8), "scale": scale}
    return made


def assert_same(moved, reference, target):
    for a, b, goal in zip(*map(jax.tree.leaves, (moved, reference, target)), strict=True):
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(goal, a.ndim)
        assert same_bits(a, b)
        for shard in a.addressable_shards:
            assert same_bits(shard.data, np.asarray(b)[shard.index])


def check_random(seed, dtype=None, convert=None):
    rng = np.random.default_rng(seed)
    shapes = {"s": (), "v": (36,), "m": (36, 144), "l": (12, 24, 36), "big": (144, 576)}
    there, here = SIZES[seed % len(SIZES)]
    devices = rng.permutation(jax.devices())
    first, count = int(np.prod(there)), int(np.prod(here))
    source_mesh = Mesh(devices[:first].reshape(there), tuple("ab"[: len(there)]))
    target_mesh = Mesh(devices[first : first + count].reshape(here), tuple("xy"[: len(here)]))
    source, target = (random_specs(rng, mesh, shapes) for mesh in (source_mesh, target_mesh))
    params = jax.device_put(
        {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}, source
    )
    reference = params
    if dtype is not None:
        reference = jax.tree.map(lambda x: x.astype(dtype), params)
    if convert is not None:
        reference = jax.jit(convert)(params)
        source, target = (
            {n: {"q": s, "scale": NamedSharding(s.mesh, PartitionSpec())} for n, s in side.items()}
            for side in (source, target)
        )
    push = Push(source, target, dtype=dtype, convert=convert)
    assert_same(push(params), reference, target)
    assert_same(push(params), reference, target)


@pytest.mark.parametrize("seed", range(len(SIZES)))
def test_random_shards_become_random_others(seed):
    check_random(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10, 40))
def test_random_shards_become_many_random_others(seed):
    check_random(seed)


@pytest.mark.full
@pytest.mark.parametrize(
    "seed",
    [1, 2, 4, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in range(10, 20))],
)
@pytest.mark.parametrize("how", [{"dtype": jnp.bfloat16}, {"convert": in_8_bits}])
def test_a_cast_and_a_conversion_arrive_in_the_samplers_shards(seed, how):
    check_random(seed, **how)


@pytest.mark.full
@pytest.mark.parametrize(
    ("trainer", "sampler"),
    [
        ({"fsdp": 2, "expert": 2}, {"tensor": 2, "expert": 2}),
        ({"data": 2, "tensor": 2}, {"tensor": 4}),
        ({"fsdp": 2}, {"data": 2, "expert": 2}),
        ({"fsdp": 2, "tensor": 2}, {"data": 2}),
    ],
)
@pytest.mark.parametrize("on_host", [False, True])
def test_experts_and_copies_arrive_both_ways(trainer, sampler, on_host):
    slices = make_slices(
        schema.MeshSection(trainer=AxesSection(**trainer), sampler=AxesSection(**sampler))
    )
    source = shardings(EXPERTS, slices.trainer, TRAINER_RULES)
    target = shardings(EXPERTS, slices.sampler, SAMPLER_RULES)
    rng = np.random.default_rng(0)
    params = jax.device_put(
        {n: rng.normal(size=w.shape).astype(np.float32) for n, w in EXPERTS.items()}, source
    )
    moved = Push(source, target, dtype=jnp.bfloat16, on_host=on_host)(params)
    assert_same(moved, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), target)


@pytest.mark.full
@pytest.mark.parametrize(("there", "here"), [((2, 2), (4,)), ((2,), (2, 2)), ((2, 2), (2,))])
def test_versions_on_their_way_and_those_that_are_held_stay_as_they_were(there, here):
    """The source is donated at once, `finish` comes later, and memory is used again meanwhile."""
    rng = np.random.default_rng(len(there))
    devices = np.array(jax.devices())
    first, count = int(np.prod(there)), int(np.prod(here))
    meshes = (
        Mesh(devices[:first].reshape(there), tuple("ab"[: len(there)])),
        Mesh(devices[first : first + count].reshape(here), tuple("xy"[: len(here)])),
    )
    shapes = {"v": (32,), "big": (256, 512), "m": (4, 128, 128)}
    sides = [random_specs(rng, mesh, shapes) for mesh in meshes]
    sides[0]["big"] = NamedSharding(meshes[0], PartitionSpec(None, "a"))
    sides[1]["big"] = NamedSharding(meshes[1], PartitionSpec("x"))
    push = Push(*sides)

    @partial(jax.jit, donate_argnums=0, out_shardings=sides[0])
    def moved_on(params, loops):
        slow = jax.lax.fori_loop(0, loops, lambda _, y: y @ y, jnp.eye(200))
        return jax.tree.map(lambda w: w + slow[0, 0], params)

    params = jax.device_put({n: np.zeros(s, np.float32) for n, s in shapes.items()}, sides[0])
    under_way, held = {}, {}
    for turn, loops in enumerate(rng.integers(0, 20, 16).astype(np.int32)):
        under_way[turn] = push.move(push.cast(params))
        params = moved_on(params, loops)
        if len(under_way) == 3:
            taken = int(rng.choice(list(under_way)))
            held[taken] = push.finish(under_way.pop(taken))
            if len(held) == 3:
                del held[int(rng.choice(list(held)))]
        for seen, weights in held.items():
            assert all((np.asarray(w) == seen).all() for w in weights.values())


def test_only_this_process_cpus_share_the_hosts_memory():
    class Chip:
        platform, process_index = "tpu", 0

    class Elsewhere:
        platform, process_index = "cpu", 1

    assert reshards_on_host(jax.devices())
    assert not reshards_on_host([*jax.devices(), Chip()])
    assert not reshards_on_host([Elsewhere(), *jax.devices()])


def test_the_channel_gives_out_what_was_put_together_and_lets_its_source_go():
    slices = make_slices(
        schema.MeshSection(trainer=AxesSection(fsdp=2, tensor=2), sampler=AxesSection(tensor=4))
    )
    source = shardings(EXPERTS, slices.trainer, TRAINER_RULES)
    target = shardings(EXPERTS, slices.sampler, SAMPLER_RULES)
    channel = WeightChannel([Push(source, target)], checksum=True)
    end = channel.subscribe()
    for version in range(1, 4):
        numbers = {n: np.full(w.shape, version, np.float32) for n, w in EXPERTS.items()}
        params = jax.device_put(numbers, source)
        channel.publish(version, params)
        jax.tree.map(lambda x: x.delete(), params)  # the next step has donated them
        update = end.poll(wait=True)
        assert update.version == version
        assert_same(update.params, numbers, target)
        end.live(version)
