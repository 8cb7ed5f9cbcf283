"""The endpoint over several samplers, and over a policy of experts."""

import base64
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from endpoint_rig import SECTION, Rig, closed, serve, tiny_policy
from jax.sharding import Mesh

from jaxrl_async.config import schema
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import Request, SamplingParams

pytestmark = pytest.mark.exhaustive


def on_device(index: int) -> Sampler:
    mesh = Mesh(np.array(jax.devices()[index]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    return Sampler(tiny_policy(), section=SECTION, mesh=mesh, seed=5)


def streamed(rig: Rig, seed: int) -> tuple[str, list[int]]:
    """The text and the tokens of a streamed answer."""
    text, tokens = "", list[int]()
    for chunk in rig.chat(seed=seed, max_tokens=40, stream=True):
        text += chunk.choices[0].delta.content or ""
        tokens += getattr(chunk.choices[0], "token_ids", None) or []
    return text, tokens


def test_streams_over_two_samplers_are_what_one_of_them_samples():
    router = Router([on_device(0), on_device(1)])
    rig = serve(router, byte_tokenizer(CHATML))
    try:
        with ThreadPoolExecutor(8) as clients:
            found = list(clients.map(lambda seed: streamed(rig, seed), range(16)))
        assert all(s.stats().requests_done for s in router.samplers), "both have sampled"
        prompt = rig.chat(seed=0, max_tokens=1).prompt_token_ids
        requests = [
            Request(
                request_id=f"direct{seed}",
                token_ids=np.array(prompt, np.int32),
                max_new_tokens=40,
                stop_token_ids=rig.tokenizer.eos_ids,
                key=(seed, 0),
                sampling=SamplingParams(),
            )
            for seed in range(16)
        ]
        for (text, tokens), done in zip(found, router.generate(requests), strict=True):
            assert tokens == done.token_ids.tolist()
            assert text == rig.service.served.chat.message(done.token_ids, ())["content"]
    finally:
        closed(rig)
        router.close()


def test_experts_come_with_the_tokens_that_they_sampled():
    size = tiny_policy()[0].vocab
    shape = schema.ArchitectureSection(
        layers=2, width=16, heads=2, kv_heads=1, head_dim=8, mlp=32, family="qwen3_moe",
        experts=4, experts_per_token=2,
    )  # fmt: skip
    spec = ModelSpec.from_architecture(shape, size)
    policy = (spec, init_params(spec, jax.random.key(3)))
    settings = SamplerSettings(keep_routing=True)
    with Sampler(policy, section=SECTION, settings=settings, seed=5) as sampler:
        rig = serve(sampler, byte_tokenizer(CHATML))
        try:
            prompt = list(range(5, 25))
            (done,) = sampler.generate(
                [
                    Request(
                        request_id="direct",
                        token_ids=np.array(prompt, np.int32),
                        max_new_tokens=9,
                        stop_token_ids=rig.tokenizer.eos_ids,
                        key=(4, 0),
                    )
                ]
            )
            for start in (0, 20):
                params = {"max_tokens": 9, "seed": 4, "routed_experts_prompt_start": start}
                body = {"token_ids": prompt, "sampling_params": params}
                reply = rig.http.post("/inference/v1/generate", json=body)
                choice = reply.json()["choices"][0]
                experts = choice["routed_experts"]
                found = np.frombuffer(base64.b64decode(experts["data"]), experts["dtype"])
                assert choice["token_ids"] == done.token_ids.tolist()
                assert experts["start"] == start and done.expert_ids is not None
                found = found.reshape(experts["shape"])
                np.testing.assert_array_equal(found, done.expert_ids[start:])
                assert found.shape == (len(done.expert_ids) - start, 2, 2)
        finally:
            closed(rig)
