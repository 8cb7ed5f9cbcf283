"""Every token's experts, as the sampler chose them: wherever its KV came from."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from tiny import Script

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.model.decoder import TokenRows, init_params, token_states
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.ports.weights import FIXED_WEIGHTS, WeightSource
from jaxrl_async.sampler.partial import branches, load_partial, save_partial
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import Completion, Partial, Request, VersionedParams

VOCAB, LAYERS, CHOSEN, EXPERTS = 48, 2, 2, 4
SHAPE = {"layers": LAYERS, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 16}
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(
        **SHAPE, family="qwen3_moe", experts=EXPERTS, experts_per_token=CHOSEN
    ),
    VOCAB,
)  # fmt: skip
TIGHT = 13 * 8 * 2 * LAYERS * 2 * 8 * 4 / 2**20
"""MiB of 13 pages: far less than four sequences can fill."""
SECTION = schema.SamplerSection(
    slots=4, max_length=64, max_new_tokens=32, block=4, page_tokens=8, kv_memory_mib=TIGHT
)


def marked(version: int) -> Params:
    """Weights whose experts say which version chose them: 0 1 of even versions, 2 3 of odd ones.

    The first hidden feature is a positive constant, which the router of odd versions looks at."""
    params = init_params(SPEC, jax.random.key(version))
    layers = dict(params["layers"])
    layers["o"] = layers["o"].at[..., 0].set(0)
    layers["down"] = layers["down"].at[..., 0].set(0)
    router = np.zeros(layers["router"].shape, np.float32)
    router[:, 0, 2:] = version % 2
    layers["router"] = jax.numpy.asarray(router)
    return {**params, "layers": layers, "embed": params["embed"].at[:, 0].set(3.0)}


PARAMS = init_params(SPEC, jax.random.key(0))
ON_PAGES = {"attention": "ragged", "kv_memory_mib": 16 * TIGHT}
"""A TPU's, whose heads are padded to 128."""
ROUTING = SamplerSettings(keep_routing=True)


def sampler_of(
    params: Params = PARAMS, weights: WeightSource = FIXED_WEIGHTS, **settings: Any
) -> Sampler:
    section = SECTION.model_copy(update=settings)
    return Sampler((SPEC, params), section=section, weights=weights, settings=ROUTING)


@pytest.fixture(scope="module", params=[{}, pytest.param(ON_PAGES, marks=pytest.mark.exhaustive)])
def sampler(request) -> Iterator[Sampler]:
    one = sampler_of(**request.param)
    yield one
    one.close()


def req(number: int, prompt: Any = None, **changes: Any) -> Request:
    random = np.random.default_rng(number)
    if prompt is None:
        prompt = random.integers(0, VOCAB, 12 + number % 5)
    base: dict[str, Any] = {"max_new_tokens": 9, "stop_token_ids": (), "key": (number, 0)}
    ids = np.asarray(prompt, np.int32)
    return Request(request_id=f"g{number}/m0/t0", token_ids=ids, **{**base, **changes})


@partial(jax.jit, static_argnums=0)
def changed(spec: ModelSpec, params: Params, ids: Any, experts: Any) -> Any:
    positions = jax.numpy.arange(ids.shape[1])[None]
    segments = positions < 0
    tokens = TokenRows(ids, positions, segments + 1, expert_ids=experts)
    return token_states(spec, params, tokens).changed


def assert_chosen(request: Request, done: Completion, params: Params = PARAMS) -> None:
    """The experts are those that a forward pass over the whole sequence chooses freely."""
    ids = np.concatenate([request.token_ids, done.token_ids])
    experts = done.expert_ids
    assert experts is not None and experts.dtype == np.int8
    assert experts.shape == (len(ids) - 1, LAYERS, CHOSEN)
    assert experts.min() >= 0 and experts.max() < EXPERTS
    whole = np.full((1, 64, LAYERS, CHOSEN), -1, np.int8)
    whole[0, : len(experts)] = experts
    row = np.zeros((1, 64), np.int32)
    row[0, : len(ids)] = ids
    assert not np.asarray(changed(SPEC, params, row, whole))[0, : len(ids)].any()


@pytest.mark.full
def test_a_group_that_shares_its_prefill_tells_the_experts_of_prompt_and_answer(sampler):
    prompt = np.arange(5, 26)  # two full pages and a copied one
    requests = [req(i, prompt, max_new_tokens=3 + 5 * i) for i in range(4)]
    for request, done in zip(requests, sampler.generate(requests), strict=True):
        assert_chosen(request, done)
    assert len({done.expert_ids.tobytes() for done in sampler.generate(requests)}) == 4


@pytest.mark.full
def test_pages_found_in_the_prefix_store_bring_their_experts(sampler):
    first = req(0)
    (done,) = sampler.generate([first])
    turn = req(1, np.concatenate([first.token_ids, done.token_ids, [7, 8, 9]]))
    (later,) = sampler.generate([turn])
    assert sampler.stats().prefix_hit_tokens > 0
    assert_chosen(turn, later)


@pytest.mark.full
def test_experts_survive_preemption_and_sequences_that_take_over_rows(sampler):
    requests = [req(i, max_new_tokens=20 + i) for i in range(10)]
    for request, done in zip(requests, sampler.generate(requests), strict=True):
        assert_chosen(request, done)
    assert sampler.stats().preempted > 0


@pytest.mark.parametrize("with_kv", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_saved_requests_and_their_branches_go_on_with_their_experts(sampler, tmp_path, with_kv):
    request = req(3, max_new_tokens=30)
    (whole,) = sampler.generate([request])
    future = sampler.start_many([request])[0]
    while not future.done():
        saved = sampler.save(request.request_id, with_kv=with_kv)
        if len(saved.token_ids):
            break
    assert 0 < len(saved.token_ids) < 30, "saved in the middle"
    future.result()
    save_partial(saved, tmp_path / "saved")
    loaded = load_partial(tmp_path / "saved")
    assert loaded.expert_ids.dtype == np.int8
    assert len(loaded.expert_ids) == len(request.token_ids) + len(saved.token_ids) - 1
    (resumed,) = sampler.resume([loaded])
    np.testing.assert_array_equal(resumed.expert_ids, whole.expert_ids)
    for branch in sampler.resume(branches(loaded, 3)):
        assert_chosen(request, branch)
    unknown = replace(loaded, expert_ids=None)  # of a sampler that returned none: made again
    np.testing.assert_array_equal(sampler.resume([unknown])[0].expert_ids, whole.expert_ids)


MODES = ("continue", "recompute", "restart", "drain")
SWAPS = [(mode, memory) for mode in MODES for memory in (TIGHT, None)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "memory"),
    [SWAPS[0], *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in SWAPS[1:])],
)
def test_a_tokens_experts_are_of_the_version_that_drew_the_next_one(mode, memory):
    """The same for KV that is made again by newer weights: what drew a token is what counts."""
    source = Script([VersionedParams(version=v, params=marked(v)) for v in (1, 2, 3)], after=3)
    one = sampler_of(
        marked(0), source, on_new_weights=mode, kv_memory_mib=memory, prefix_cache=False
    )
    requests = [req(i, max_new_tokens=24) for i in range(7)]
    requests += [req(9, requests[0].token_ids, max_new_tokens=24)]
    finished = one.generate(requests)
    assert one.stats().swaps > 0 and (memory is None or one.stats().preempted > 0)
    one.close()
    for request, done in zip(requests, finished, strict=True):
        first = len(request.token_ids) - 1
        odd = (done.expert_ids >= 2).all(axis=(1, 2))
        even = (done.expert_ids < 2).all(axis=(1, 2))
        assert (odd | even).all()
        assert odd[first:].tolist() == (done.versions % 2 == 1).tolist()
    if mode in ("continue", "recompute"):
        assert any(len(set(d.versions.tolist())) > 1 for d in finished)


@pytest.mark.full
def test_without_keep_routing_nothing_is_told_and_a_dense_model_has_nothing_to_tell():
    plain = Sampler((SPEC, PARAMS), section=SECTION)
    routing = sampler_of()
    request = req(5)
    (plain_done,), (done,) = plain.generate([request]), routing.generate([request])
    plain.close()
    routing.close()
    assert plain_done.expert_ids is None
    assert plain_done.token_ids.tolist() == done.token_ids.tolist()
    # the programs differ, and XLA may fuse the one otherwise than the other
    np.testing.assert_allclose(plain_done.logprobs, done.logprobs, rtol=1e-6)
    dense = ModelSpec.from_architecture(schema.ArchitectureSection(**SHAPE), VOCAB)
    with pytest.raises(ConfigError, match="the qwen3 model is dense"):
        Sampler((dense, init_params(dense, jax.random.key(0))), settings=ROUTING)


def test_a_saved_request_of_which_nothing_was_drawn_tells_all_its_experts(sampler):
    request = req(6)
    (whole,) = sampler.generate([request])
    nothing = np.zeros(0, np.int32)
    empty = Partial(
        request=request, token_ids=nothing, logprobs=nothing.astype(np.float32),
        versions=nothing, seed=sampler.seed, expert_ids=np.zeros((0, LAYERS, CHOSEN), np.int8),
    )  # fmt: skip
    np.testing.assert_array_equal(sampler.resume([empty])[0].expert_ids, whole.expert_ids)


@pytest.mark.parametrize(
    "wrong", [lambda e: e[:-1], lambda e: e + EXPERTS, lambda e: e.astype(np.float32)]
)
def test_experts_that_no_sampler_told_are_refused(sampler, wrong):
    one = req(7, max_new_tokens=12)
    done = sampler.generate([one])[0]
    saved = Partial(
        request=one,
        token_ids=done.token_ids[:4],
        logprobs=done.logprobs[:4],
        versions=done.versions[:4],
        seed=sampler.seed,
        expert_ids=wrong(done.expert_ids[: len(one.token_ids) + 3]),
    )
    with pytest.raises(RolloutError, match="expert_ids"):
        sampler.resume([saved])
