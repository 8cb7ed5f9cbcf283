"""Our sampler by the protocol of RL samplers, driven as Tunix drives tpu-inference's."""

import asyncio
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config.schema import ArchitectureSection, SamplerSection
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.errors import WeightsError
from jaxrl_async.interop.rl_sampler import RLSampler
from jaxrl_async.model.decoder import hidden_states, init_params, output_head
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec

TOKENIZER = addition_tokenizer()
SPEC = ModelSpec.from_architecture(
    ArchitectureSection(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64),
    TOKENIZER.vocab_size,
)
SECTION = SamplerSection(slots=4, max_length=32, max_new_tokens=16, block=4)


@runtime_checkable
class Protocol18(Protocol):
    """The methods of Tunix' Sampler, as it publishes them."""

    def initialize(self) -> None: ...
    async def start(self, **kwargs): ...
    async def stop(self, **kwargs): ...
    async def pause(self, **kwargs): ...
    async def resume(self, **kwargs): ...
    async def get_mesh(self, **kwargs): ...
    async def sample(self, sampling_requests, **kwargs): ...
    def get_target_state(self): ...
    async def get_weight_sync_metadata(self, **kwargs): ...
    async def bind_weight_sync(self, sync_request=None, **kwargs): ...
    async def pre_weight_sync(self, sync_request=None, **kwargs): ...
    async def weight_sync(self, sync_request=None, **kwargs): ...
    async def post_weight_sync(self, sync_request=None, **kwargs): ...
    async def abort_weight_sync(self, sync_request=None, **kwargs): ...
    async def get_transfer_status(self, req_id, **kwargs): ...
    async def migrate_kv_cache(self, source_server_id, target_server_id, token_ids, **kwargs): ...
    async def get_load_info(self, **kwargs): ...


@dataclass(kw_only=True)
class Params:
    """As Tunix' SamplingParams."""

    max_tokens: int = 8
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    return_logprobs: bool = False
    return_logits: bool = False
    return_routed_experts: bool = False
    beam_size: int | None = None


@dataclass(kw_only=True)
class SamplingRequest:
    prompt: Any
    request_id: str = ""
    sampling_params: Params | None = None


@dataclass(kw_only=True)
class SyncRequest:
    """As Tunix' WeightSyncRequest."""

    policy_version: int = 0
    weights: Any = None
    req_id: str = ""
    extra_config: dict = field(default_factory=dict)


def policy(seed: int) -> Policy:
    return Policy(SPEC, init_params(SPEC, jax.random.key(seed)), TOKENIZER)


def logprobs(params: Any, prompt: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """The log-prob of each drawn token, by the decoder's whole forward pass."""
    tokens = jnp.asarray(np.concatenate([prompt, drawn]))[None]
    where = jnp.arange(tokens.shape[1])[None]
    hidden = hidden_states(SPEC, params, tokens, where, jnp.ones_like(tokens))[0]
    table = jax.nn.log_softmax(hidden @ output_head(SPEC, params))
    return np.asarray(table)[np.arange(len(prompt) - 1, len(tokens[0]) - 1), drawn]


@pytest.fixture
def drive():
    made: list[RLSampler] = []

    def run(story):
        async def whole():
            sampler = RLSampler(policy(0), section=SECTION)
            made.append(sampler)
            try:
                return await story(sampler)
            finally:
                await sampler.stop()

        return asyncio.run(whole())

    return run


def test_it_has_all_methods_of_the_protocol() -> None:
    assert isinstance(RLSampler(policy(0), section=SECTION), Protocol18)


def test_three_phases_bring_new_weights_and_versions_say_which(drive) -> None:
    new = policy(1).params
    ask = SamplingRequest(
        prompt=np.array([1, 2, 3]), request_id="a", sampling_params=Params(return_logprobs=True)
    )

    async def story(sampler: RLSampler):
        (before,) = await sampler.sample([ask])
        sync = SyncRequest(policy_version=7, weights=new, req_id="t7")
        assert await sampler.get_transfer_status("t7") == "MISSING"
        await sampler.pre_weight_sync(sync)
        held = asyncio.create_task(sampler.sample(ask))
        await asyncio.sleep(0.05)
        assert not held.done() and await sampler.get_transfer_status("t7") == "IN_PROGRESS"
        assert await sampler.weight_sync(sync) == 7
        assert (await sampler.get_weight_sync_metadata())["policy_version"] == 0, "not in use yet"
        await sampler.post_weight_sync(sync)
        assert await sampler.get_transfer_status("t7") == "SUCCESS"
        assert (await sampler.get_weight_sync_metadata())["policy_version"] == 7
        (after,) = await held
        return before, after

    before, after = drive(story)
    for found, params, version in ((before, policy(0).params, 0), (after, new, 7)):
        assert found.request_id == "a" and found.error is None
        assert set(found.versions.tolist()) == {version}
        expected = logprobs(params, np.array([1, 2, 3]), found.token_ids)
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
        assert found.cumulative_logprob == pytest.approx(expected.sum(), abs=1e-3)
        assert found.text == TOKENIZER.decode(found.token_ids)


def test_a_transfer_that_is_aborted_changes_nothing(drive) -> None:
    async def story(sampler: RLSampler):
        sync = SyncRequest(policy_version=3, weights=policy(1).params, req_id="x")
        await sampler.pre_weight_sync(sync)
        await sampler.weight_sync(sync)
        await sampler.abort_weight_sync(sync)
        assert await sampler.get_transfer_status("x") == "ABORTED"
        with pytest.raises(WeightsError, match="no new weights"):
            await sampler.post_weight_sync(sync)
        (found,) = await sampler.sample("1+1=", max_tokens=4)
        return found

    assert set(drive(story).versions.tolist()) == {0}


def test_weights_that_do_not_fit_are_refused_by_name(drive) -> None:
    params = policy(1).params

    async def story(sampler: RLSampler):
        wrong = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        for weights, version, says in (
            (None, 1, "no tree like get_target_state"),
            ({"embed": params["embed"]}, 1, "no tree like get_target_state"),
            (wrong, 1, "bfloat16"),
            (params, -1, "do not follow version 0"),
        ):
            with pytest.raises(WeightsError, match=says):
                await sampler.weight_sync(SyncRequest(policy_version=version, weights=weights))

    drive(story)


def test_requests_that_cannot_be_served_fail_alone(drive) -> None:
    async def story(sampler: RLSampler):
        requests = [
            SamplingRequest(prompt=[1, 2], request_id="good"),
            SamplingRequest(prompt=[1] * 40, request_id="long"),
            SamplingRequest(prompt=[1, 2], request_id="beams", sampling_params=Params(beam_size=4)),
            {"prompt": "1+1=", "sampling_params": {"max_tokens": 3, "top_k": -1}},
            SamplingRequest(prompt=object(), request_id="odd"),
        ]
        load = await sampler.get_load_info()
        assert load.num_requests_running == 0
        return await sampler.sample(requests)

    good, long, beams, mapping, odd = drive(story)
    assert good.error is None and mapping.error is None and 1 <= len(mapping.token_ids) <= 3
    assert "40 tokens" in long.error.message and long.finish_reason == "error"
    assert "beam_size" in beams.error.message and not beams.error.retryable
    assert "neither a text nor" in odd.error.message


def test_the_example_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sampler.md").read_text("utf-8")
    (text,) = re.findall(
        r"^```python\n([^`]*draw_and_renew.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(text, names)
    sync = SyncRequest(policy_version=1, weights=policy(1).params)
    (found,) = asyncio.run(names["draw_and_renew"](policy(0), ["1+1="], sync))
    assert found.error is None and set(found.versions.tolist()) == {0}
