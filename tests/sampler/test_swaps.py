"""New weights while sequences run: what each mode does to them, and what it costs."""

import threading

import jax
import numpy as np
import pytest
from tiny import OTHER, PARAMS, SPEC, Script, make_sampler, request
from whole_rows import logprobs_of

from jaxrl_async.ports.weights import FixedWeights
from jaxrl_async.types import SamplingParams, VersionedParams

pytestmark = pytest.mark.full


def long_request(number: int = 5, **changes: object):
    greedy = SamplingParams(temperature=0.0)
    base = {"max_new_tokens": 24, "sampling": greedy, "stop_token_ids": ()}
    prompt = np.arange(1, 18, dtype=np.int32) + number
    return request(number, **{"token_ids": prompt, **base, **changes})


def forward_logprobs(params, prompt: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    return logprobs_of(SPEC, params, np.concatenate([prompt, sampled]))[len(prompt) :]


def one_swap(mode: str, **changes: object):
    """Swap from PARAMS (version 0) to OTHER (version 3) in mid-sequence."""
    source = Script([VersionedParams(version=3, params=OTHER)], after=3)
    sampler = make_sampler(weights=source, on_new_weights=mode, **changes)
    wishes_ = [long_request(1), long_request(2), long_request(3)]
    done = sampler.generate(wishes_)
    # an idle sampler polls no script: one more request lets a drained swap happen
    last = sampler.generate([long_request(4)])[0]
    stats = sampler.stats()
    sampler.close()
    assert source.went_live == [3] and stats.swaps == 1
    assert set(last.versions.tolist()) == {3}
    return wishes_, done, stats


def old_tokens(req) -> list[int]:
    sampler = make_sampler()
    tokens = sampler.generate([req])[0].token_ids.tolist()
    sampler.close()
    return tokens


def test_recompute_keeps_the_tokens_and_makes_their_kv_again() -> None:
    requests, done, stats = one_swap("recompute")
    assert stats.recomputed_tokens >= sum(len(w.token_ids) for w in requests)
    for req, c in zip(requests, done, strict=True):
        swap = c.versions.tolist().index(3)
        assert 0 < swap < 24
        assert c.token_ids[:swap].tolist() == old_tokens(req)[:swap]
        new = forward_logprobs(OTHER, req.token_ids, c.token_ids)
        old = forward_logprobs(PARAMS, req.token_ids, c.token_ids)
        np.testing.assert_allclose(c.logprobs[:swap], old[:swap], atol=1e-5)
        np.testing.assert_allclose(c.logprobs[swap:], new[swap:], atol=1e-5)


def test_continue_keeps_the_kv_so_later_tokens_see_a_mixture() -> None:
    requests, done, stats = one_swap("continue")
    assert stats.recomputed_tokens == 0
    for req, c in zip(requests, done, strict=True):
        swap = c.versions.tolist().index(3)
        assert c.token_ids[:swap].tolist() == old_tokens(req)[:swap]
        new = forward_logprobs(OTHER, req.token_ids, c.token_ids)
        assert np.abs(c.logprobs[swap:] - new[swap:]).max() > 1e-3, "not a pure forward pass"


def test_drain_lets_running_sequences_end_on_the_old_weights() -> None:
    requests, done, _ = one_swap("drain")
    for req, c in zip(requests, done, strict=True):
        assert set(c.versions.tolist()) == {0}
        assert c.token_ids.tolist() == old_tokens(req)


def test_restart_draws_everything_again_by_the_new_weights() -> None:
    requests, done, stats = one_swap("restart")
    assert stats.restarted == 3 and stats.discarded_tokens > 0
    for req, c in zip(requests, done, strict=True):
        assert set(c.versions.tolist()) == {3}
        new = forward_logprobs(OTHER, req.token_ids, c.token_ids)
        np.testing.assert_allclose(c.logprobs, new, atol=1e-5)


def test_a_later_request_never_sees_kv_of_older_weights() -> None:
    source = Script([], after=0)
    sampler = make_sampler(weights=source)
    req = long_request(6, max_new_tokens=4)
    sampler.generate([req])
    assert sampler.stats().prefix_hit_tokens == 0
    sampler.generate([req])
    assert sampler.stats().prefix_hit_tokens == 16, "same weights: the first page is found"
    source.updates.append(VersionedParams(version=1, params=OTHER))
    done = sampler.generate([req])[0]
    assert sampler.stats().prefix_hit_tokens == 16, "other weights: nothing is"
    sampler.close()
    new = forward_logprobs(OTHER, req.token_ids, done.token_ids)
    np.testing.assert_allclose(done.logprobs, new, atol=1e-5)


@pytest.mark.exhaustive
def test_nor_that_of_a_group_which_the_swap_met_in_mid_answer() -> None:
    """Its members shared one prefill; each second turn, and whoever comes with their prompt."""
    source = Script([], after=3)
    sampler = make_sampler(weights=source, page_tokens=8)
    prompt = np.arange(24, dtype=np.int32)
    plain = {"token_ids": prompt, "sampling": SamplingParams(), "stop_token_ids": ()}
    group = [request(m, max_new_tokens=16, key=(1, m), **plain) for m in range(3)]
    source.updates.append(VersionedParams(version=1, params=OTHER))
    firsts = sampler.generate(group)
    assert all(set(c.versions.tolist()) == {0, 1} for c in firsts)
    turns = [
        request(10 + m, **{**plain, "token_ids": np.concatenate([prompt, c.token_ids, [5]])})
        for m, c in enumerate(firsts)
    ]
    later = [*turns, request(20, **plain)]
    for req, done in zip(later, sampler.generate(later), strict=True):
        assert set(done.versions.tolist()) == {1}
        new = forward_logprobs(OTHER, req.token_ids, done.token_ids)
        np.testing.assert_allclose(done.logprobs, new, atol=1e-5)
    sampler.close()


def test_a_later_turn_prefills_only_what_is_new() -> None:
    sampler = make_sampler()
    first = long_request(7, max_new_tokens=20)
    done = sampler.generate([first])[0]
    before = sampler.stats().prefill_tokens
    so_far = np.concatenate([first.token_ids, done.token_ids, [3, 4, 5]]).astype(np.int32)
    turn = request(7, token_ids=so_far, max_new_tokens=5, sampling=SamplingParams())
    again = sampler.generate([turn])[0]
    assert sampler.stats().prefill_tokens - before == len(so_far) - 32, "two full pages were kept"
    sampler.close()
    np.testing.assert_allclose(
        again.logprobs, forward_logprobs(PARAMS, so_far, again.token_ids), atol=1e-5
    )


class Flood(FixedWeights):
    """New weights, the same numbers, at every poll."""

    def __init__(self, most: int) -> None:
        self.version, self.most, self.live_versions = 0, most, []

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        if wait or self.version == self.most:
            return None
        self.version += 1
        return VersionedParams(version=self.version, params=PARAMS)

    def live(self, version: int) -> None:
        self.live_versions.append(version)


def test_a_swap_at_every_block_changes_nothing_and_compiles_nothing() -> None:
    quiet = make_sampler()
    requests = [request(i, max_new_tokens=24, stop_token_ids=()) for i in range(12)]
    wanted = quiet.generate(requests)
    quiet.close()
    sampler = make_sampler(weights=Flood(10_000), prefix_cache=False)
    first = sampler.generate(requests)
    compiled = sampler.stats().compiled_programs
    arrays = len(jax.live_arrays())
    for done in (first, sampler.generate(requests), sampler.generate(requests)):
        for a, b in zip(done, wanted, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            steps = np.diff(a.versions)
            assert (steps >= 0).all() and a.versions[-1] > a.versions[0]
    stats = sampler.stats()
    assert stats.compiled_programs == compiled, "no recompilation"
    assert stats.swaps >= stats.blocks - 3, "one a block, but for the first of each call"
    assert len(jax.live_arrays()) <= arrays + 8, "old weights are given back"
    sampler.close()


def test_a_block_of_another_version_follows_each_swap() -> None:
    """With a swap before every block, versions change exactly at block boundaries."""
    sampler = make_sampler(weights=Flood(10_000))
    done = sampler.generate([long_request(8)])[0]
    sampler.close()
    changes = (np.flatnonzero(np.diff(done.versions)) + 1).tolist()
    assert changes == list(range(5, 24, 4)), "a block's first token has the logits before it"


@pytest.mark.parametrize("mode", ["drain", "recompute"])
def test_weights_for_an_idle_sampler_are_taken_at_once(mode) -> None:
    went_live = threading.Event()

    class Source(Script):
        def attach(self, wake: threading.Event) -> None:
            self.wake = wake

        def live(self, version: int) -> None:
            went_live.set()

    source = Source([], after=0)
    sampler = make_sampler(weights=source, on_new_weights=mode)
    sampler.generate([long_request(9)])
    source.updates.append(VersionedParams(version=1, params=OTHER))
    source.wake.set()
    assert went_live.wait(10)
    sampler.close()
