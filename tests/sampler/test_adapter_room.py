"""The memory of places for adapters, and samplers that cannot have them."""

import jax
import pytest
from tiny import PARAMS, SECTION, SPEC, request

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.mesh import make_mesh
from jaxrl_async.model.adapter_stack import AdapterRoom
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, build_setup, kv_plan, roomy_section

pytestmark = pytest.mark.full

ROOM = AdapterRoom(places=3, rank=4)


@pytest.mark.parametrize("tensor", [0, 2])
@pytest.mark.parametrize("matmul", ["full", "bfloat16"])
def test_places_take_what_was_counted_for_them(tensor: int, matmul: str, caplog) -> None:
    mesh = make_mesh(schema.AxesSection(tensor=2), jax.devices()[:2]) if tensor else None
    section = SECTION.model_copy(update={"matmul": matmul})
    caplog.set_level("INFO")
    setup = build_setup(SPEC, section, mesh, 0, SamplerSettings(adapters=ROOM))
    assert "of places for 3 adapters up to rank 4" in caplog.text
    stack = jax.tree.leaves(setup.engine.programs.empty_adapters())
    parts = [part.data.nbytes for x in stack for part in x.addressable_shards]
    assert setup.plan.places_bytes == sum(parts) > 0


def test_places_take_their_part_of_the_memory_that_is_given() -> None:
    plain = kv_plan(SPEC, SECTION, "float32")
    mib = 2 * plain.kv_bytes / 2**20
    section = SECTION.model_copy(update={"kv_memory_mib": mib})
    with_places = kv_plan(SPEC, section, "float32", ROOM)
    taken = with_places.kv_bytes + with_places.places_bytes
    assert mib * 2**20 - with_places.page_bytes < taken <= mib * 2**20
    assert with_places.pages < kv_plan(SPEC, section, "float32").pages
    wide = AdapterRoom(places=64, rank=64)
    with pytest.raises(ConfigError, match=r"next to .* MiB of places for adapters.*AdapterRoom"):
        kv_plan(SPEC, section, "float32", wide)
    usual, roomy = (roomy_section(SPEC, "float32", room) for room in (None, wide))
    assert kv_plan(SPEC, roomy, "float32", wide).pages == kv_plan(SPEC, usual, "float32").pages


def test_a_router_of_several_samplers_draws_with_no_adapter_of_one() -> None:
    settings = SamplerSettings(adapters=ROOM)
    for count, message in ((2, "loaded into one sampler"), (1, "'a' is not loaded here")):
        made = [Sampler((SPEC, PARAMS), section=SECTION, settings=settings) for _ in range(count)]
        with Router(made) as router, pytest.raises(RolloutError, match=message):
            router.start_many([request(0, adapter="a")])
