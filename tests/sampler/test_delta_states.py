"""Samplers of models with gated delta nets draw by what the trainer's decoder computes."""

import asyncio
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from builders import tiny_params, tiny_spec
from tiny import Script
from whole_rows import logprobs_of

from jaxrl_async.config import schema
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.cache import init_pages
from jaxrl_async.model.delta_layer import empty_states
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import kv_plan
from jaxrl_async.types import Completion, Partial, Request, SamplingParams, VersionedParams

pytestmark = pytest.mark.full

SPECS = {  # eps: the smaller, the more the two forms of the rule differ by rounding
    family: dataclasses.replace(
        tiny_spec(40, family=family, layers=4, experts=experts, head_dim=8, tied=False),
        norm_eps=1e-3,
    )
    for family, experts in (("qwen3_next", 4), ("qwen3_5_text", 0), ("qwen3_5_moe_text", 4))
}
SECTION = schema.SamplerSection(
    slots=4, max_length=64, max_new_tokens=24, block=4, page_tokens=8, prefill_chunk=13
)


def requests(count: int, **changes: Any) -> list[Request]:
    """Groups of three to a prompt, of uneven lengths, some longer than a round of prefill."""
    rng, found = np.random.default_rng(0), list[Request]()
    prompts = [rng.integers(0, 40, n).astype(np.int32) for n in (3, 29, 14, 1, 8, 33)]
    for i in range(count):
        base = {
            "request_id": f"g{i // 3}/m{i % 3}/t0",
            "token_ids": prompts[i // 3 % len(prompts)],
            "max_new_tokens": 3 + 7 * i % 22,
            "forced_length": 3 + 7 * i % 22,
            "sampling": SamplingParams(),
            "key": (i, 0),
        }
        found.append(Request(**{**base, **changes}))
    return found


def check(spec: ModelSpec, params: Params, asked: list[Request], done: list[Completion]) -> None:
    for request, answer in zip(asked, done, strict=True):
        ids = np.concatenate([request.token_ids, answer.token_ids])
        wanted = logprobs_of(spec, params, ids)[len(request.token_ids) :]
        # The two forms of the rule round differently, by 5e-5 at one token without AVX-512.
        np.testing.assert_allclose(answer.logprobs, wanted, atol=1e-4, err_msg=request.request_id)


def sampled(spec: ModelSpec, asked: list[Request], **settings: Any) -> list[Completion]:
    source = settings.pop("weights", None)
    kept = {} if source is None else {"weights": source}
    section = SECTION.model_copy(update=settings)
    sampler = Sampler((spec, tiny_params(spec)), section=section, **kept)
    try:
        done = sampler.generate(asked)
        sampler.between_blocks(sampler.loop.batch.check_integrity)
        return done
    finally:
        sampler.close()


@pytest.mark.parametrize(
    ("family", "settings", "count"),
    [
        ("qwen3_next", {"reserve": 1.0}, 9),
        *(
            pytest.param(family, settings, 18, marks=[pytest.mark.full, pytest.mark.exhaustive])
            for family, settings in (
                ("qwen3_5_text", {}),
                ("qwen3_5_moe_text", {"reserve": 1.0}),
                ("qwen3_next", {"kv_memory_mib": 0.06}),
                ("qwen3_5_text", {"attention": "ragged", "block": 3}),
                ("qwen3_next", {"prefill_chunk": 100, "cpu_kernels": False}),
            )
        ),
    ],
)
def test_log_probs_of_groups_are_the_trainers(
    family: str, settings: dict[str, Any], count: int
) -> None:
    """Slots are used again, prompts take several rounds, rows are taken over, pages run out."""
    spec, asked = SPECS[family], requests(count)
    check(spec, tiny_params(spec), asked, sampled(spec, asked, **settings))


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["continue", "recompute", "drain", "restart"])
def test_new_weights_leave_right_states(policy: str) -> None:
    """Tokens are drawn by the states that their version makes; only continue mixes them."""
    spec, asked = SPECS["qwen3_5_text"], requests(9)
    other = tiny_params(spec, seed=7)
    source = Script([VersionedParams(version=1, params=other)], after=2)
    done = sampled(spec, asked, weights=source, on_new_weights=policy)
    versions = {0: tiny_params(spec), 1: other}
    seen = set()
    for request, answer in zip(asked, done, strict=True):
        ids = np.concatenate([request.token_ids, answer.token_ids])
        begin = len(request.token_ids)
        of_each = {v: logprobs_of(spec, p, ids)[begin:] for v, p in versions.items()}
        seen |= set(answer.versions.tolist())
        for t, version in enumerate(answer.versions.tolist()):
            # continue: what was computed of the sequence before, its prompt's too, is the old one's
            if not version or policy != "continue":
                assert abs(answer.logprobs[t] - of_each[version][t]) < 4e-5, (request.request_id, t)
    assert seen == {0, 1}, "new weights came while answers were drawn"


@pytest.mark.exhaustive
def test_a_saved_request_goes_on_without_its_kv() -> None:
    spec, (request,) = SPECS["qwen3_next"], requests(1, max_new_tokens=20, forced_length=20)
    (whole,) = sampled(spec, [request])
    sampler = Sampler((spec, tiny_params(spec)), section=SECTION)

    async def begun() -> Partial:
        future = sampler.submit_many([request])[0]
        while (partial := sampler.save(request.request_id)).token_ids.size == 0:
            await asyncio.sleep(0)
        future.cancel()
        return partial

    partial = asyncio.run(begun())
    sampler.close()
    assert 0 < len(partial.token_ids) < 20 and partial.kv is None
    other = Sampler((spec, tiny_params(spec)), section=SECTION)
    (again,) = other.resume([partial])
    other.close()
    assert again.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(again.logprobs, whole.logprobs, atol=4e-5)


def test_states_take_their_part_of_the_memory() -> None:
    """With a budget, for given slots and for as many as fit; layers with states have no pages."""
    spec = SPECS["qwen3_next"]
    one = sum(x.nbytes for x in jax.tree.leaves(empty_states(spec, 1)))
    for slots in (None, 8):
        section = SECTION.model_copy(update={"kv_memory_mib": 0.5, "slots": slots})
        plan = kv_plan(spec, section, "float32")
        held = plan.kv_bytes + (plan.slots + plan.reserve) * one
        assert 0.8 * 2**19 < held <= 2**19, (slots, plan)
    pages = init_pages(spec, plan.layout, plan.pages, plan.page_tokens, "float32")
    assert sum(x.nbytes for x in jax.tree.leaves(pages)) == plan.kv_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(SPECS))
def test_a_sampler_over_two_devices_keeps_the_same_states(family: str) -> None:
    spec, asked = SPECS[family], requests(6)
    mesh = make_slices(schema.MeshSection(sampler=schema.AxesSection(tensor=2))).sampler
    sampler = Sampler((spec, tiny_params(spec)), section=SECTION, mesh=mesh)
    done = sampler.generate(asked)
    sampler.close()
    check(spec, tiny_params(spec), asked, done)
