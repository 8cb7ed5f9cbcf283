"""Devices in slices, what lies where on them, and taking turns."""

import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from builders import mesh_of, tiny_spec
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxrl_async import host, mesh
from jaxrl_async.config import schema
from jaxrl_async.errors import MeshError
from jaxrl_async.mesh import (
    AXES,
    NO_DEVICE_LOCK,
    SAMPLER_RULES,
    TRAINER_RULES,
    DeviceLock,
    arranged,
    make_slices,
    shardings,
    spec_for,
)
from jaxrl_async.model.spec import weight_table

SPEC = tiny_spec(32, layers=2, width=16, mlp=24)


def section_of(trainer: dict, sampler: dict, **kw: object) -> schema.MeshSection:
    return schema.MeshSection(
        trainer=schema.AxesSection(**trainer), sampler=schema.AxesSection(**sampler), **kw
    )


# ---- slices


def test_the_sampler_takes_the_devices_behind_the_trainers():
    slices = make_slices(section_of({"fsdp": 2, "tensor": 2}, {"data": 2}))
    sizes = dict.fromkeys(AXES, 1)
    assert dict(slices.trainer.shape) == sizes | {"fsdp": 2, "tensor": 2}
    assert dict(slices.sampler.shape) == sizes | {"data": 2}
    assert list(slices.trainer.devices.flat) == jax.devices()[:4]
    assert list(slices.sampler.devices.flat) == jax.devices()[4:6]
    assert not slices.colocated


def test_each_sampler_has_devices_of_its_own():
    slices = make_slices(section_of({"fsdp": 2}, {"tensor": 2}, samplers=3))
    assert [list(m.devices.flat) for m in slices.samplers] == [
        jax.devices()[n : n + 2] for n in (2, 4, 6)
    ]
    assert slices.sampler is slices.samplers[0]


def test_colocated_slices_are_the_same_devices_in_their_own_shapes():
    slices = make_slices(section_of({"fsdp": 4}, {"tensor": 4}, colocated=True))
    assert list(slices.trainer.devices.flat) == list(slices.sampler.devices.flat)
    assert slices.trainer.shape["fsdp"] == slices.sampler.shape["tensor"] == 4
    assert slices.colocated


def test_only_the_devices_given_are_used():
    given = jax.devices()[5:7]
    slices = make_slices(section_of({}, {}), given)
    assert [*slices.trainer.devices.flat, *slices.sampler.devices.flat] == given


def test_too_few_devices_are_named_with_the_way_out():
    with pytest.raises(MeshError) as error:
        make_slices(section_of({"fsdp": 4}, {"tensor": 2}), jax.devices()[:5])
    for part in ("needs 6 devices", "trainer 4", "but there are 5: cpu", "mesh.colocated=true"):
        assert part in str(error.value)


# ---- TPU slices


@dataclass(frozen=True)
class Chip:
    """What a mesh asks of a TPU device."""

    slice_index: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0
    process_index: int = 0


def chips(slices: int, side: int = 4) -> list[Any]:
    places = [(x, y, 0) for y in range(side) for x in range(side)]
    return [Chip(s, place) for s in range(slices) for place in places]


def test_only_data_crosses_slices():
    order = np.random.default_rng(0).permutation(32)
    given = [chips(2)[i] for i in order]  # in any order
    found = arranged(schema.AxesSection(data=4, fsdp=2, tensor=4), given)
    of_slices = np.vectorize(lambda chip: chip.slice_index, otypes=[int])(found.reshape(4, -1))
    assert of_slices.tolist() == [[0] * 8, [0] * 8, [1] * 8, [1] * 8]
    assert {id(c) for c in found.flat} == {id(c) for c in given}


def test_tensor_lies_on_neighbours_of_the_torus():
    given = [chips(1)[i] for i in np.random.default_rng(0).permutation(16)]  # in any order
    found = arranged(schema.AxesSection(fsdp=4, tensor=4), given).reshape(4, 4)
    for row in found:
        assert len({c.coords[0] for c in row}) == 1 or len({c.coords[1] for c in row}) == 1


@pytest.mark.parametrize(
    ("axes", "given", "message"),
    [
        ({"fsdp": 32}, chips(2), "data .* it is 1"),
        ({"data": 3}, [*chips(2)[:2], chips(2)[-1]], "of 2, 1 devices"),
    ],
)
def test_slices_that_cannot_be_divided_over_data_are_refused(axes, given, message):
    with pytest.raises(MeshError, match=message):
        arranged(schema.AxesSection(**axes), given)


def test_devices_with_a_hole_keep_their_order_and_it_is_said(caplog):
    given = [*chips(1)[:3], chips(1)[5]]
    assert arranged(schema.AxesSection(fsdp=4), given).reshape(-1).tolist() == given
    assert "do not follow the slice's torus" in caplog.text


# ---- what lies where


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        pytest.param((16, 4, 8), ("embed", "heads", "head_dim"), ("fsdp", "tensor", None), id="q"),
        pytest.param((8, 64), ("batch", "length"), (("data", "fsdp"), None), id="a batch"),
        pytest.param((16, 3, 8), ("embed", "kv_heads", "head_dim"), ("fsdp", None, None), id="3/2"),
        pytest.param((6, 64), ("batch", "length"), (None, None), id="6 rows on 4"),
        pytest.param((16, 16), ("embed", "embed"), ("fsdp", None), id="an axis serves once"),
        pytest.param((16, 16), ("mlp", None), ("tensor", None), id="no name"),
        pytest.param((16,), ("layers",), (None,), id="no rule"),
    ],
)
def test_each_dimension_goes_to_its_axis_where_that_divides_it(shape, axes, spec):
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    assert spec_for(shape, axes, mesh, TRAINER_RULES) == PartitionSpec(*spec)


def test_an_axis_of_one_device_is_not_named():
    mesh = mesh_of(fsdp=2)
    assert spec_for((8, 4), ("batch", "heads"), mesh, TRAINER_RULES) == PartitionSpec("fsdp", None)


@pytest.mark.full
@given(
    st.lists(st.sampled_from([*TRAINER_RULES, None]), min_size=1, max_size=4),
    st.data(),
    st.sampled_from([(1,) * 5, (2, 2, 1, 1, 2), (1, 2, 2, 2, 1), (8, 1, 1, 1, 1), (1, 1, 4, 2, 1)]),
    st.sampled_from([TRAINER_RULES, SAMPLER_RULES]),
)
def test_every_array_can_be_laid_out(axes, data, sizes, rules):
    shape = [data.draw(st.integers(1, 12)) for _ in axes]
    mesh = mesh_of(**dict(zip(AXES, sizes, strict=True)))
    spec = spec_for(shape, axes, mesh, rules)
    jax.sharding.NamedSharding(mesh, spec).shard_shape(tuple(shape))  # raises where it does not fit


def test_the_trainer_divides_every_matrix_by_all_its_devices():
    mesh = mesh_of(fsdp=2, tensor=2)
    table = weight_table(SPEC)
    laid = shardings(table, mesh, TRAINER_RULES)
    for name, weight in table["layers"].items():
        local = laid["layers"][name].shard_shape(weight.shape)
        ways = np.prod(weight.shape) / np.prod(local)
        assert ways == 4 or weight.init != "normal", name
    assert laid["embed"].spec == PartitionSpec("tensor", "fsdp")


def test_the_sampler_divides_weights_over_tensor_only():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    laid = shardings(weight_table(SPEC), mesh, SAMPLER_RULES)
    named = {name for s in jax.tree.leaves(laid) for name in s.spec if name}
    assert named == {"tensor"}
    assert spec_for((8,), ("batch",), mesh, SAMPLER_RULES) == PartitionSpec(("data", "fsdp"))


def test_shardings_come_in_the_tree_of_the_weights():
    table = weight_table(SPEC)
    laid = shardings(table, mesh_of(tensor=2), SAMPLER_RULES)
    assert laid["layers"].keys() == table["layers"].keys() and laid.keys() == table.keys()


# ---- turns


def test_turns_are_served_in_the_order_of_asking():
    turns, served = DeviceLock(), []

    def take(number: int) -> None:
        with turns:
            served.append(number)

    threads = [threading.Thread(target=take, args=(n,)) for n in range(6)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            wait_for(lambda n=number: len(turns._waiting) == n + 1)
        assert served == []
    for thread in threads:
        thread.join(10)
    assert served == list(range(6))


def test_who_comes_back_at_once_waits_behind_who_was_there():
    """A plain lock would let the holder take it again and again."""
    turns, served = DeviceLock(), []

    def other() -> None:
        with turns:
            served.append("other")

    thread = threading.Thread(target=other)
    with turns:
        thread.start()
        wait_for(lambda: len(turns._waiting) == 1)
    with turns:
        served.append("mine")
    thread.join(10)
    assert served == ["other", "mine"]


def test_only_one_has_the_turn():
    turns, inside, most = DeviceLock(), 0, 0

    def take() -> None:
        nonlocal inside, most
        for _ in range(50):
            with turns:
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == 1 and inside == 0


def test_an_error_ends_the_turn():
    turns = DeviceLock()
    with pytest.raises(KeyError), turns:
        raise KeyError
    with turns:
        pass


def test_no_turns_is_never_waited_for():
    with NO_DEVICE_LOCK, NO_DEVICE_LOCK:
        pass


def wait_for(condition, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("plugins", "driver", "platforms", "message"),
    [
        (["xla_cuda13"], False, None, 1),
        (["xla_cuda12", "xla_cuda13"], False, None, 1),
        (["xla_cuda13"], True, None, 0),  # JAX itself tries it, and says what fails
        (["xla_cuda13"], False, "cpu", 0),
        ([], False, None, 0),
    ],
)
def test_a_cuda_plugin_without_a_driver_is_logged_once(
    tmp_path, monkeypatch, caplog, plugins, driver, platforms, message
):
    for name in plugins:
        (tmp_path / "jax_plugins" / name).mkdir(parents=True)
        (tmp_path / "jax_plugins" / name / "__init__.py").touch()
    (tmp_path / "driver").touch()
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(host, "NVIDIA_FILES", (str(tmp_path / "driver"),) if driver else ("no",))
    monkeypatch.setattr(host, "TPU_FILES", ("no",))
    config = SimpleNamespace(jax_platforms=platforms)
    config.update = lambda name, value: setattr(config, name, value)
    monkeypatch.setattr(mesh.jax, "config", config)
    mesh.skip_absent_accelerators()
    mesh.skip_absent_accelerators()
    assert config.jax_platforms == (None if driver else "cpu")
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(lines) == message
    for line in lines:
        assert all(f"jax-{name.removeprefix('xla_')}-plugin" in line for name in plugins)
        assert "driver is not here (none of /dev/no)" in line and "computes on the CPU" in line
        assert "install the driver" in line and "JAX_PLATFORMS=cpu" in line
