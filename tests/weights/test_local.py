"""The push: right values on the right devices, never through the host."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.config import schema
from jaxrl_async.config.schema import AxesSection
from jaxrl_async.errors import MeshError, WeightsError
from jaxrl_async.mesh import SAMPLER_RULES, TRAINER_RULES, make_slices, shardings
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.weights.local import Push
from jaxrl_async.weights.manifest import compare, manifest_of

SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64), 48
)
PARAMS = jax.tree.map(np.asarray, init_params(SPEC, jax.random.key(0)))
SLICES = {
    "1 to 1": schema.MeshSection(),
    "fsdp 2 x tensor 2 to tensor 4": schema.MeshSection(
        trainer=AxesSection(fsdp=2, tensor=2), sampler=AxesSection(tensor=4)
    ),
    "4 to 2": schema.MeshSection(
        trainer=AxesSection(fsdp=2, tensor=2), sampler=AxesSection(tensor=2)
    ),
    "2 to 4": schema.MeshSection(trainer=AxesSection(fsdp=2), sampler=AxesSection(tensor=4)),
    "4 to 1": schema.MeshSection(trainer=AxesSection(fsdp=4)),
    "colocated": schema.MeshSection(
        trainer=AxesSection(fsdp=4), sampler=AxesSection(tensor=4), colocated=True
    ),
}


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", SLICES)
def test_weights_arrive_whole_and_the_trainers_thread_never_reads_them(
    name: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the sampler's, where shards are not put together in host memory."""
    slices = make_slices(SLICES[name])
    table = weight_table(SPEC)
    source = shardings(table, slices.trainer, TRAINER_RULES)
    target = shardings(table, slices.sampler, SAMPLER_RULES)
    params, push = jax.device_put(PARAMS, source), Push(source, target, on_host=on_host)
    gathers = 0
    value = ArrayImpl._value

    def counted(array: ArrayImpl) -> np.ndarray:
        nonlocal gathers
        gathers += 1
        return value.fget(array)

    with monkeypatch.context() as patch:
        patch.setattr(ArrayImpl, "_value", property(counted))
        begun = push.move(push.cast(params))
        assert gathers == 0
        moved = jax.block_until_ready(push.finish(begun))
    assert on_host or gathers == 0
    jax.tree.map(np.testing.assert_array_equal, moved, PARAMS)
    for array, sharding in zip(jax.tree.leaves(moved), jax.tree.leaves(target), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


def test_the_source_may_be_donated_right_after_the_push() -> None:
    slices = make_slices(schema.MeshSection())
    source = shardings(weight_table(SPEC), slices.trainer, TRAINER_RULES)
    push = Push(source, shardings(weight_table(SPEC), slices.sampler, SAMPLER_RULES))
    scale = jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p), donate_argnums=0)
    params = jax.device_put(PARAMS, source)
    for turn in range(5):
        moved = push(params)
        params = scale(params)
        jax.tree.map(lambda m, p, n=turn: np.testing.assert_array_equal(m, p * 2**n), moved, PARAMS)


def test_only_weights_that_need_no_cast_leave_for_other_devices_as_they_are() -> None:
    table = weight_table(SPEC)

    def is_cast(name: str, **more: Any) -> bool:
        slices = make_slices(SLICES[name])
        source = shardings(table, slices.trainer, TRAINER_RULES)
        push = Push(source, shardings(table, slices.sampler, SAMPLER_RULES), **more)
        return push.is_cast(jax.device_put(PARAMS, source))

    assert is_cast("1 to 1") and is_cast("1 to 1", dtype=jnp.float32)
    assert not is_cast("1 to 1", dtype=jnp.bfloat16)
    assert not is_cast("1 to 1", convert=lambda params: params)
    assert not is_cast("fsdp 2 x tensor 2 to tensor 4")
    assert not is_cast("colocated"), "the sampler would hold what the trainer donates"


@pytest.mark.parametrize("under_way", [False, True])
def test_large_weights_arrive_as_they_were_though_the_source_is_donated_at_once(
    under_way: bool,
) -> None:
    """Also while the program that makes them still runs."""
    here, there = jax.devices()[:2]
    source, target = (
        {"w": NamedSharding(Mesh(np.array([d]), ("x",)), PartitionSpec())} for d in (here, there)
    )
    push = Push(source, target)
    loops = 20 if under_way else 0

    @partial(jax.jit, donate_argnums=0)
    def moved_on(params: Any) -> Any:
        slow = jax.lax.fori_loop(0, loops, lambda _, y: y @ y, jnp.eye(300))
        return {"w": params["w"] + slow[0, 0]}

    params = {"w": jax.device_put(jnp.zeros((1500, 1500)), here)}
    for turn in range(8):
        assert push.is_cast(params)
        sent = push(params)
        params = moved_on(params)
        assert (np.asarray(sent["w"]) == turn).all()


@pytest.mark.full
@pytest.mark.parametrize(("trainers", "samplers"), [(1, 1), (2, 4), (4, 2)])
def test_what_was_sent_stays_as_it_was_through_later_updates(trainers: int, samplers: int) -> None:
    """Arrays of all sizes, of updates short and long, each donated right after its push."""
    rng = np.random.default_rng(trainers)
    devices = np.array(jax.devices())
    meshes = (
        Mesh(devices[:trainers], ("x",)),
        Mesh(devices[trainers : trainers + samplers], ("x",)),
    )
    sizes = {
        f"w{i}": (8 * int(rng.choice([1, 8, 64])), int(rng.choice([8, 512]))) for i in range(9)
    }
    specs = {n: PartitionSpec(*[(), ("x",), (None, "x")][i % 3]) for i, n in enumerate(sizes)}
    source, target = (
        {n: NamedSharding(mesh, spec) for n, spec in specs.items()} for mesh in meshes
    )
    push = Push(source, target)

    @partial(jax.jit, donate_argnums=0)
    def moved_on(params: Any, loops: Any) -> Any:
        slow = jax.lax.fori_loop(0, loops, lambda _, y: y @ y, jnp.eye(200))
        return jax.tree.map(lambda w: w + slow[0, 0], params)

    params, sent = jax.device_put({n: np.zeros(s) for n, s in sizes.items()}, source), []
    for loops in rng.integers(0, 20, 12).astype(np.int32):
        sent.append(push(params))
        params = moved_on(params, loops)
        seen = int(rng.integers(len(sent)))
        assert all((np.asarray(w) == seen).all() for w in sent[seen].values())
    for turn, weights in enumerate(sent):
        assert all((np.asarray(w) == turn).all() for w in weights.values())


def test_the_push_casts_to_the_samplers_type() -> None:
    slices = make_slices(schema.MeshSection())
    source = shardings(weight_table(SPEC), slices.trainer, TRAINER_RULES)
    target = shardings(weight_table(SPEC), slices.sampler, SAMPLER_RULES)
    moved = Push(source, target, dtype=jnp.bfloat16)(jax.device_put(PARAMS, source))
    assert {x.dtype for x in jax.tree.leaves(moved)} == {jnp.dtype(jnp.bfloat16)}


def test_sizes_that_do_not_divide_are_refused() -> None:
    slices = make_slices(
        schema.MeshSection(trainer=AxesSection(fsdp=3), sampler=AxesSection(tensor=2))
    )
    table = weight_table(SPEC)
    with pytest.raises(MeshError, match="multiple"):
        Push(
            shardings(table, slices.trainer, TRAINER_RULES),
            shardings(table, slices.sampler, SAMPLER_RULES),
        )


def test_a_manifest_names_the_array_that_differs() -> None:
    other = {**PARAMS, "final_norm": jnp.zeros(7)}
    with pytest.raises(WeightsError, match="final_norm"):
        compare(manifest_of(PARAMS), manifest_of(other))
    compare(manifest_of(PARAMS), manifest_of(jax.eval_shape(lambda: PARAMS)))
