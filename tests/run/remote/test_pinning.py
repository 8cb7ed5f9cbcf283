"""Which chips and cores each process of a machine sees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.config.schema import AxesSection, MeshSection
from jaxrl_async.errors import MeshError
from jaxrl_async.run.remote.pinning import Place, place_of_sampler, place_of_trainer


def mesh(trainer: int, sampler: int, samplers: int) -> MeshSection:
    return MeshSection(
        trainer=AxesSection(fsdp=trainer),
        sampler=AxesSection(tensor=sampler),
        samplers=samplers,
        samplers_in="processes",
    )


def places(section: MeshSection, platform: str, cores: int = 8) -> list[Place]:
    given = [place_of_sampler(section, platform, i, range(cores)) for i in range(section.samplers)]
    return [place_of_trainer(section, platform), *given]


@pytest.mark.parametrize(
    ("platform", "variable"), [("gpu", "CUDA_VISIBLE_DEVICES"), ("tpu", "TPU_VISIBLE_CHIPS")]
)
@pytest.mark.parametrize("shape", [(1, 1, 3), (4, 2, 2), (2, 1, 2)])
def test_each_chip_belongs_to_one_process(
    platform: str, variable: str, shape: tuple[int, int, int]
) -> None:
    trainer, sampler, samplers = shape
    seen = [place.environment[variable].split(",") for place in places(mesh(*shape), platform)]
    assert [len(chips) for chips in seen] == [trainer, *[sampler] * samplers]
    every = [int(chip) for chips in seen for chip in chips]
    assert every == list(range(trainer + sampler * samplers))


def test_processes_of_a_tpu_host_have_ports_of_their_own_and_a_shape() -> None:
    made = places(mesh(2, 1, 2), "tpu")
    assert len({p.environment["TPU_MESH_CONTROLLER_PORT"] for p in made}) == 3
    bounds = [p.environment["TPU_CHIPS_PER_PROCESS_BOUNDS"] for p in made]
    assert bounds == ["1,2,1", "1,1,1", "1,1,1"]


def test_a_number_of_chips_that_no_process_can_have_is_named() -> None:
    with pytest.raises(MeshError, match=r"mesh.sampler has 3 devices.*1, 2, 4 or 8"):
        places(mesh(1, 3, 1), "tpu")


@given(cores=st.integers(1, 64), samplers=st.integers(1, 40))
def test_samplers_share_the_cores_of_a_cpu_and_leave_some_to_the_trainer(
    cores: int, samplers: int
) -> None:
    made = places(mesh(1, 1, samplers), "cpu", cores)[1:]
    taken = [core for place in made for core in place.cores]
    assert all(place.cores for place in made) and set(taken) <= set(range(cores))
    if cores > samplers:
        assert len(set(taken)) == len(taken) < cores, "each its own, and one is left"
        assert len({len(place.cores) for place in made}) == 1
