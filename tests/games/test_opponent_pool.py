"""Samplers of fixed weights that share programs and a few places."""

import asyncio

import jax
import numpy as np
import pytest
from endpoint_rig import tiny_policy

from jaxrl_async.config.schema import SamplerSection
from jaxrl_async.errors import Closed
from jaxrl_async.games.opponent_pool import FrozenPool
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, build_setup
from jaxrl_async.types import Request

SECTION = SamplerSection(slots=4, max_length=32, max_new_tokens=8)
TIME_S = 100.0


def request(number: int) -> Request:
    return Request(
        request_id=f"r{number}", token_ids=np.arange(3, dtype=np.int32) + number % 4,
        max_new_tokens=8, key=(number, 0),
    )  # fmt: skip


@pytest.mark.full
def test_many_keys_in_few_places_draw_what_a_sampler_of_each_draws() -> None:
    spec, params = tiny_policy()
    weights = [jax.tree.map(lambda x, k=k: x * (1 + k / 4), params) for k in range(3)]
    setup = build_setup(spec, SECTION, None, 5, SamplerSettings())
    pool = FrozenPool(setup, lambda key: weights[key], most=2)

    async def sampled(number: int) -> list[int]:
        async with pool.lease(number % 3) as sampler:
            return (await sampler.submit(request(number))).token_ids.tolist()

    async def all_drawn() -> list[list[int]]:
        async with asyncio.timeout(TIME_S):
            return list(await asyncio.gather(*(sampled(n) for n in range(12))))

    found = asyncio.run(all_drawn())
    assert pool.loads >= 3
    for key in range(3):
        with Sampler((spec, weights[key]), section=SECTION, seed=5) as alone:
            wanted = alone.generate([request(n) for n in range(key, 12, 3)])
        assert [c.token_ids.tolist() for c in wanted] == found[key::3]
    pool.close()
    pool.close()
    with pytest.raises(Closed):
        asyncio.run(all_drawn())


@pytest.mark.full
def test_weights_that_cannot_be_loaded_fail_their_lease_and_are_tried_again() -> None:
    spec, params = tiny_policy()
    tries: list[int] = []

    def load(key: int) -> object:
        tries.append(key)
        if len(tries) == 1:
            raise OSError("gone")
        return params

    setup = build_setup(spec, SECTION, None, 5, SamplerSettings())
    pool = FrozenPool(setup, load, most=1)

    async def leased() -> int:
        async with asyncio.timeout(TIME_S), pool.lease(3) as sampler:
            return sampler.version

    with pytest.raises(OSError, match="gone"):
        asyncio.run(leased())
    assert asyncio.run(leased()) == 3 and tries == [3, 3]
    pool.close()
