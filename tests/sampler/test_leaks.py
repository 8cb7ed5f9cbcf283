"""Ten thousand requests leave no page, slot, thread or host memory behind."""

import gc
import threading

import numpy as np
import pytest
from tiny import make_sampler, request

pytestmark = [pytest.mark.full, pytest.mark.exhaustive]


def test_ten_thousand_requests_leave_nothing_behind(resident_mib) -> None:
    threads = threading.active_count()
    sampler = make_sampler(slots=64, block=8, max_new_tokens=8, max_length=48, prefill_chunk=512)
    prompts = [request(i).token_ids for i in range(500)]

    def round_of(number: int, count: int) -> None:
        requests = [
            request(
                i,
                request_id=f"{number}/{i}",
                token_ids=np.roll(prompts[i % 500], number),
                max_new_tokens=1 + i % 8,
                key=(number, i),
            )
            for i in range(count)
        ]
        assert len(sampler.generate(requests)) == count

    for number in range(3):  # every program is compiled, every pool is filled
        round_of(number, 1000)
    gc.collect()
    before = resident_mib()
    for number in range(3, 10):
        round_of(number, 1000)
    gc.collect()
    grown = resident_mib() - before
    stats = sampler.stats()
    assert stats.requests_done == 10_000
    assert (
        not sampler.loop.batch.admitted
        and not sampler.loop.batch.queue
        and not sampler.loop.finished
    )
    sampler.between_blocks(sampler.loop.batch.check_integrity)
    cache = sampler.loop.batch.cache
    assert cache.pages.num_free + len(cache.prefixes.held) == cache.pages.count
    assert grown < 64, f"host memory grew by {grown:.0f} MiB"
    sampler.close()
    assert threading.active_count() <= threads
