"""For any mix of lengths, arrivals, cancellations, swaps and restarts, a request's tokens are those
it gives alone, and nothing is leaked. Hypothesis makes the mixes."""

import asyncio
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import PARAMS, SPEC, Script, make_sampler, request
from whole_rows import logprobs_of

from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Completion, VersionedParams

PAGES_MIB = 6 * 16 * 2 * 2 * 2 * 8 * 4 / 2**20
"""Of six pages."""
CROWDS = {
    **{mode: {"on_new_weights": mode} for mode in ("continue", "recompute", "drain", "restart")},
    "on a TPU's pages": {  # whose heads are padded to 128
        "attention": "ragged",
        "on_new_weights": "recompute",
        "kv_memory_mib": 16 * PAGES_MIB,
    },
}
pytestmark = pytest.mark.full

arrivals = st.lists(
    st.tuples(
        st.integers(0, 11),  # which request
        st.integers(0, 3),  # awaited requests before it is submitted
        st.booleans(),  # whether it is cancelled
        st.integers(1, 3),  # members of its group
    ),
    min_size=1,
    max_size=9,
)


@pytest.fixture(scope="module")
def crowded() -> Iterator[dict[str, Sampler]]:
    """One sampler for each crowd, with so few pages that sequences are preempted."""
    common = {"kv_memory_mib": PAGES_MIB, "prefill_chunk": 24}
    samplers = {
        crowd: make_sampler(**{**common, **settings}, weights=Script([]))
        for crowd, settings in CROWDS.items()
    }
    yield samplers
    for sampler in samplers.values():
        sampler.close()


@lru_cache(maxsize=64)
def alone(number: int, member: int) -> Completion:
    sampler = roomy()
    return sampler.generate([request(number, key=(number, member))])[0]


@lru_cache(maxsize=1)
def roomy() -> Sampler:
    return make_sampler()


async def play(sampler: Sampler, plan: list, swaps: int) -> list[tuple[int, int, Completion]]:
    """Submit as the plan says; cancelled ones are left out of the answer."""
    source = sampler.weights
    answers, waiting = [], []
    for i, (number, awaited, cancelled, members) in enumerate(plan):
        for _ in range(min(awaited, len(waiting))):
            await waiting[0][2]
            answers.append((*waiting[0][:2], waiting.pop(0)[2].result()))
        group = [request(number, request_id=f"r{i}/m{m}", key=(number, m)) for m in range(members)]
        futures = sampler.submit_many(group)
        if i < swaps:
            version = sampler.version + 1 + len(source.updates)
            source.updates.append(VersionedParams(version=version, params=PARAMS))
        for m, future in enumerate(futures):
            if cancelled and m == members - 1:
                await asyncio.sleep(0.002)
                future.cancel()
            else:
                waiting.append((number, m, future))
    for number, m, future in waiting:
        answers.append((number, m, await future))
    return answers


@pytest.mark.parametrize("crowd", CROWDS)
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(plan=arrivals, swaps=st.integers(0, 4))
def test_a_request_gives_what_it_gives_alone(crowded, crowd, plan, swaps) -> None:
    sampler = crowded[crowd]
    for number, member, done in asyncio.run(play(sampler, plan, swaps)):
        wanted = alone(number, member)
        assert done.token_ids.tolist() == wanted.token_ids.tolist()
        assert done.stop == wanted.stop
        np.testing.assert_allclose(done.logprobs, wanted.logprobs, atol=2e-5)
        assert (np.diff(done.versions) >= 0).all(), "versions never fall"
    asyncio.run(settle(sampler))


async def settle(sampler: Sampler) -> None:
    """Until what was cancelled is gone; then nothing is held but what the store says."""
    while sampler.loop.batch.admitted or sampler.loop.batch.queue:
        await asyncio.sleep(0.005)
    sampler.between_blocks(sampler.loop.batch.check_integrity)
    cache = sampler.loop.batch.cache
    assert cache.pages.num_free + len(cache.prefixes.held) == cache.pages.count


def test_the_crowd_was_preempted_swapped_and_restarted(crowded) -> None:
    """The mixes above did meet what they are there for."""
    stats = {crowd: sampler.stats() for crowd, sampler in crowded.items()}
    assert sum(s.preempted for s in stats.values()) > 0 < stats["on a TPU's pages"].preempted
    assert all(s.swaps > 0 for s in stats.values())
    assert stats["restart"].restarted > 0 and stats["recompute"].recomputed_tokens > 0
    assert sum(s.cancelled for s in stats.values()) > 0
    assert sum(s.prefix_hit_tokens for s in stats.values()) > 0


@pytest.mark.exhaustive
@settings(max_examples=6, deadline=None, derandomize=True)
@given(numbers=st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_log_probs_are_those_of_a_full_forward_pass(numbers) -> None:
    requests = [
        request(n, request_id=f"r{i}", sampling=type(request(n).sampling)())
        for i, n in enumerate(numbers)
    ]
    for req, done in zip(requests, roomy().generate(requests), strict=True):
        logprobs = logprobs_of(SPEC, PARAMS, np.concatenate([req.token_ids, done.token_ids]))
        np.testing.assert_allclose(done.logprobs, logprobs[len(req.token_ids) :], atol=1e-5)
