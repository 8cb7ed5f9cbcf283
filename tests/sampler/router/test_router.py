"""Several samplers behind one: same tokens, groups together, each swaps on its own."""

import asyncio

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny import OTHER, PARAMS, SECTION, SPEC, make_sampler, request

from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.delivery import FunctionLink


def on_device(index: int, **changes: object) -> Sampler:
    mesh = Mesh(np.array(jax.devices()[index]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    settings = SamplerSettings(one_thread=True)
    return Sampler((SPEC, PARAMS), section=SECTION, mesh=mesh, settings=settings, **changes)


@pytest.fixture
def router():
    router = Router([on_device(i) for i in range(2)])
    yield router
    router.close()


def groups(count: int, members: int = 3) -> list:
    return [
        request(g, request_id=f"g{g}/m{m}", key=(g, m))
        for g in range(count)
        for m in range(members)
    ]


@pytest.mark.full
def test_tokens_do_not_depend_on_the_sampler_that_drew_them(router) -> None:
    one = make_sampler()
    for a, b in zip(router.generate(groups(8)), one.generate(groups(8)), strict=True):
        assert a.request_id == b.request_id and a.token_ids.tolist() == b.token_ids.tolist()
    one.close()
    done = [s.stats().requests_done for s in router.samplers]
    assert sum(done) == 24 and all(n and n % 3 == 0 for n in done), "each group stays together"
    assert router.stats().requests_done == 24


@pytest.mark.full
def test_a_prefix_comes_back_to_where_it_was(router) -> None:
    given = request(40, token_ids=np.arange(40, dtype=np.int32))
    for _ in range(4):
        router.generate([given])
    assert router.stats().prefix_hit_tokens == 3 * 32
    assert sorted(s.stats().requests_done for s in router.samplers) == [0, 4]


@pytest.mark.full
def test_a_router_is_a_generate_with_cancellation(router) -> None:
    async def some() -> list:
        futures = router.submit_many(groups(4))
        futures[0].cancel()
        rest = await asyncio.gather(*futures[1:])
        return [rest, await router.submit(request(50))]

    rest, one = asyncio.run(some())
    assert len(rest) == 11 and len(one.token_ids)
    assert router.num_waiting == 0


@pytest.mark.full
def test_each_sampler_swaps_on_its_own_and_live_means_all() -> None:
    live: list[int] = []
    channel = WeightChannel(
        [FunctionLink(lambda p, d=d: jax.device_put(p, d)) for d in jax.devices()[:2]],
        on_live=live.append,
    )
    router = Router([on_device(i, weights=channel.subscribe()) for i in range(2)])
    router.start()
    channel.publish(1, OTHER)
    channel.wait_live(1, 30)
    assert live == [1]
    for done in router.generate(groups(4)):
        assert set(done.versions.tolist()) == {1}
    channel.publish(2, PARAMS)
    channel.wait_live(2, 30)
    assert VersionedParams(version=2, params=None).version == channel.live_version
    router.close()
