"""Which devices and cores each process of a machine takes: all different, none left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.config.schema import MeshSection
from jaxrl_async.errors import MeshError
from jaxrl_async.run.pinning import chips_of_trainer, devices_of_sampler


def mesh_of(trainer: int, sampler: int, samplers: int) -> MeshSection:
    return MeshSection.model_validate(
        {
            "trainer": {"fsdp": trainer},
            "sampler": {"tensor": sampler},
            "samplers": samplers,
            "samplers_in": "processes",
        }
    )


def test_chips_of_a_tpu_host_belong_to_one_process_each():
    mesh = mesh_of(4, 2, 2)
    trainer = chips_of_trainer(mesh)
    samplers = [devices_of_sampler(mesh, "tpu", i, cores=[0]).environment for i in (0, 1)]
    assert trainer["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    assert trainer["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
    assert [s["TPU_VISIBLE_CHIPS"] for s in samplers] == ["4,5", "6,7"]
    assert {s["TPU_CHIPS_PER_PROCESS_BOUNDS"] for s in samplers} == {"1,2,1"}
    assert {s["TPU_PROCESS_BOUNDS"] for s in (trainer, *samplers)} == {"1,1,1"}
    assert len({s["TPU_MESH_CONTROLLER_PORT"] for s in (trainer, *samplers)}) == 3


def test_a_number_of_chips_that_no_process_can_have_is_refused():
    with pytest.raises(MeshError, match=r"mesh\.trainer has 3 devices.*1, 2, 4 or 8"):
        chips_of_trainer(mesh_of(3, 1, 1))
    with pytest.raises(MeshError, match=r"mesh\.sampler has 6 devices"):
        devices_of_sampler(mesh_of(1, 6, 1), "tpu", 0, cores=[0])


def test_gpus_are_the_visible_ones():
    mesh = mesh_of(1, 1, 2)
    free = [devices_of_sampler(mesh, "gpu", i, cores=[0]).environment for i in (0, 1)]
    assert free == [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "2"}]
    visible = devices_of_sampler(mesh, "gpu", 1, cores=[0], gpus=["4", "5", "GPU-8f"])
    assert visible.environment == {"CUDA_VISIBLE_DEVICES": "GPU-8f"}
    with pytest.raises(MeshError, match="CUDA_VISIBLE_DEVICES has 2"):
        devices_of_sampler(mesh, "gpu", 1, cores=[0], gpus=["4", "5"])


@pytest.mark.full
@given(st.lists(st.integers(0, 300), min_size=1, max_size=70, unique=True), st.integers(1, 9))
def test_cores_are_shared_out_evenly_and_the_trainer_keeps_some(cores, samplers):
    mesh = mesh_of(1, 1, samplers)
    shares = [
        devices_of_sampler(mesh, "cpu", i, cores=sorted(cores)).cores for i in range(samplers)
    ]
    assert len({len(share) for share in shares}) == 1 and all(shares)
    taken = [core for share in shares for core in share]
    assert set(taken) <= set(cores)
    if len(cores) > samplers:
        assert len(set(taken)) == len(taken) < len(cores)
