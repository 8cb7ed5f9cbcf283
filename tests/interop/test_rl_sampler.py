"""Our sampler by the protocol of RL samplers, driven as Tunix drives tpu-inference's."""

import asyncio
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config.schema import ArchitectureSection, SamplerSection
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.errors import RolloutError, WeightsError
from jaxrl_async.interop.rl_requests import checked_request_of
from jaxrl_async.interop.rl_sampler import RLSampler
from jaxrl_async.model.decoder import hidden_states, init_params, output_head
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.request_checks import RequestCheck, RequestLimits
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import Request, SamplingParams

TOKENIZER = addition_tokenizer()
SPEC = ModelSpec.from_architecture(
    ArchitectureSection(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64),
    TOKENIZER.vocab_size,
)
ROOM = RequestLimits(max_length=32, max_new_tokens=16, vocab=TOKENIZER.vocab_size)
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
class NewerParams(Params):
    """With fields that a later version may have."""

    routed_experts_prompt_start: int = 0
    contrast: float = 0.5


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


def checked(given: Any) -> Request:
    """A request as the sampler gets it."""
    one = checked_request_of(given, {}, 1, TOKENIZER, usual_length=8, keeps_experts=True)
    (found,) = RequestCheck(ROOM, iter([7])).checked([one.request])
    assert isinstance(found, Request)
    return replace(found, key=one.request.key)


def logprobs(params: Any, prompt: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """The log-prob of each sampled token, by the decoder's whole forward pass."""
    tokens = jnp.asarray(np.concatenate([prompt, sampled]))[None]
    where = jnp.arange(tokens.shape[1])[None]
    hidden = hidden_states(SPEC, params, tokens, where, jnp.ones_like(tokens))[0]
    table = jax.nn.log_softmax(hidden @ output_head(SPEC, params))
    return np.asarray(table)[np.arange(len(prompt) - 1, len(tokens[0]) - 1), sampled]


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


@pytest.mark.full
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


@pytest.mark.full
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
            (None, 1, "not a tree like get_target_state"),
            ({"embed": params["embed"]}, 1, "not a tree like get_target_state"),
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


@pytest.mark.full
def test_the_example_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text("utf-8")
    (text,) = re.findall(
        r"^```python\n([^`]*draw_and_renew.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(text, names)
    sync = SyncRequest(policy_version=1, weights=policy(1).params)
    (found,) = asyncio.run(names["draw_and_renew"](policy(0), ["1+1="], sync))
    assert found.error is None and set(found.versions.tolist()) == {0}


def test_a_seed_zero_included_gives_the_same_tokens_again(drive) -> None:
    """Without one each request has its own; -1 is vLLM's word for none."""

    async def story(sampler: RLSampler):
        def ask(seed: int | None):
            params = Params(seed=seed, max_tokens=12)
            return SamplingRequest(prompt=[1, 2, 3], sampling_params=params)

        requests = [ask(s) for s in (0, 0, 5, 5, None, None, -1, -1, 2**31)]
        return await sampler.sample(requests)

    *found, wide = drive(story)
    assert all(f.error is None for f in found)
    tokens = [tuple(f.token_ids.tolist()) for f in found]
    assert tokens[0] == tokens[1] and tokens[2] == tokens[3]
    assert len(set(tokens)) == 6
    assert wide.error.message.startswith("seed must be a whole number from 0 to 2147483647")


@pytest.mark.full
def test_min_p_leaves_only_the_likely_tokens(drive) -> None:
    """With 0.999 only the likeliest token is left, at any temperature: the greedy one."""

    async def story(sampler: RLSampler):
        prompt = [1, 2, 3]
        return await sampler.sample(
            [
                {"prompt": prompt, "sampling_params": {"temperature": 0.0}},
                {"prompt": prompt, "sampling_params": {"min_p": 0.999, "temperature": 2.0}},
                {"prompt": prompt},
            ],
            return_logprobs=True,
        )

    greedy, narrow, free = drive(story)
    assert narrow.token_ids.tolist() == greedy.token_ids.tolist() != free.token_ids.tolist()
    np.testing.assert_allclose(narrow.logprobs, 0.0, atol=1e-6)


def test_stop_token_ids_end_an_answer_beside_the_tokenizers_own(drive) -> None:
    async def story(sampler: RLSampler):
        def ask(**params: Any):
            return {"prompt": [1, 2, 3], "sampling_params": {"seed": 3, "max_tokens": 12, **params}}

        (whole,) = await sampler.sample(ask(ignore_eos=True))
        own, eos = whole.token_ids.tolist(), TOKENIZER.eos_ids[0]
        stop = next(t for t in own[1:] if t not in TOKENIZER.eos_ids)
        cut, both, wrong = await sampler.sample(
            [
                ask(stop_token_ids=[stop], ignore_eos=True),
                ask(stop_token_ids=[stop, eos]),
                ask(stop_token_ids=["x"]),
            ]
        )
        return own, stop, cut, both, wrong

    own, stop, cut, both, wrong = drive(story)
    assert len(own) == 12, "ignore_eos"
    assert cut.token_ids.tolist() == own[: own.index(stop) + 1] and cut.finish_reason == "stop"
    ends = min(own.index(t) for t in (stop, *TOKENIZER.eos_ids) if t in own)
    assert both.token_ids.tolist() == own[: ends + 1] and both.finish_reason == "stop"
    assert "stop_token_ids must be" in wrong.error.message


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"n": 4}, "n is 4, which is not served: send the request several times"),
        ({"best_of": 2}, "best_of is 2"),
        ({"presence_penalty": 0.5}, "presence_penalty is 0.5, which is not served"),
        ({"frequency_penalty": -0.1}, "frequency_penalty is -0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
        ({"min_tokens": 2}, "min_tokens is 2"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"stop": ["\n"]}, "pass the tokens' ids as stop_token_ids"),
        ({"stop_sequences": "x"}, "pass the tokens' ids as stop_token_ids"),
        ({"prompt_logprobs": 0}, "prompt_logprobs is 0"),
        ({"logprobs": 5}, "logprobs is 5"),
        ({"return_logits": True}, "return_logits is True"),
        ({"beam_size": 4}, "beam_size is 4"),
        ({"temprature": 0.5}, "temprature is 0.5, but this sampler has no such parameter"),
        ({"max_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ({"max_tokens": 0}, "max_new_tokens must be a whole number from 1"),
        ({"temperature": "hot"}, "sampling.temperature must be a finite number"),
        ({"top_k": -2}, "sampling.top_k must be a whole number"),
        ({"min_p": 1.0}, "sampling.min_p must be at least 0 and below 1"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"routed_experts_prompt_start": 3}, "from 0 to 2, the prompt's length"),
        (NewerParams(contrast=0.7), "contrast is 0.7, but this sampler has no such"),
        (NewerParams(contrast=np.array([0.5, 0.7])), "contrast is array([0.5, 0.7])"),
        (SimpleNamespace(max_tokens=3, typical_p=0.5), "typical_p is 0.5, but this sampler has"),
        ("hot", "'hot', neither a record of sampling parameters nor a mapping"),
    ],
)
def test_what_is_not_served_is_refused_by_name(params: Any, says: str) -> None:
    with pytest.raises(RolloutError) as refused:
        checked({"prompt": [1, 2], "sampling_params": params})
    assert says in str(refused.value)


def test_parameters_beside_sampling_params_are_refused() -> None:
    with pytest.raises(RolloutError, match=r"^temperature, top_p: put sampling parameters into"):
        checked({"prompt": [1, 2], "temperature": 0.5, "top_p": 0.9})
    with pytest.raises(RolloutError, match=r"^temperature: put sampling parameters into"):
        checked(SimpleNamespace(prompt=[1, 2], temperature=0.0))


def test_fields_of_a_request_that_nobody_knows_are_refused() -> None:
    @dataclass(kw_only=True)
    class Tuned(SamplingRequest):
        metadata: dict = field(default_factory=dict)
        adapter: str = ""

    plain = Tuned(prompt=[1, 2], metadata={"episode": 3})
    assert checked(plain).token_ids.tolist() == [1, 2]
    for given, says in (
        (
            {"prompt": [1, 2], "lora_request": "mine"},
            "lora_request is 'mine', but requests to this sampler",
        ),
        (replace(plain, adapter="mine"), "adapter is 'mine', but requests to this sampler"),
    ):
        with pytest.raises(RolloutError) as refused:
            checked(given)
        assert says in str(refused.value)


def test_a_token_beyond_32_bits_is_refused_and_not_wrapped() -> None:
    with pytest.raises(RolloutError, match=f"token ids must be from 0 to .* but {2**32 + 1} is"):
        checked([2**32 + 1, 2])


def test_what_asks_for_nothing_is_no_reason_to_refuse() -> None:
    """vLLM's own defaults, and an unchanged field that nobody knows."""
    neutral = {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0,
        "stop": [], "bad_words": [], "min_tokens": 0, "skip_special_tokens": True, "seed": None,
        "prompt_logprobs": None, "detokenize": False, "top_k": -1, "logprobs": 1, "extra": False,
    }  # fmt: skip
    for params in (neutral, NewerParams(), None):
        one = checked({"prompt": [1, 2], "sampling_params": params})
        assert one.sampling == SamplingParams() and one.key is None
        assert one.stop_token_ids == tuple(TOKENIZER.eos_ids)


@pytest.mark.full
def test_experts_are_returned_where_the_sampler_keeps_them_and_refused_elsewhere() -> None:
    architecture = ArchitectureSection(
        layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=16, experts=4, experts_per_token=2
    )
    spec = ModelSpec.from_architecture(architecture, TOKENIZER.vocab_size)
    mixture = Policy(spec, init_params(spec, jax.random.key(0)), TOKENIZER)
    params = {"return_routed_experts": True, "routed_experts_prompt_start": 2, "max_tokens": 3}
    ask = {"prompt": [1, 2, 3], "sampling_params": params | {"ignore_eos": True}}

    async def answer(settings: SamplerSettings):
        sampler = RLSampler(mixture, section=SECTION, settings=settings)
        try:
            return (await sampler.sample([ask]))[0]
        finally:
            await sampler.stop()

    refused = asyncio.run(answer(SamplerSettings()))
    assert "SamplerSettings(keep_routing=True)" in refused.error.message
    response = asyncio.run(answer(SamplerSettings(keep_routing=True)))
    assert response.error is None and response.routed_experts.shape == (3 + 3 - 1 - 2, 2, 2)
