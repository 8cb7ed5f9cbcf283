"""google-jetstream's own base class, driven as its orchestrator does: prefill, insert, generate."""

import importlib.util

import jax
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.errors import MissingExtraError
from jaxrl_async.interop import jetstream
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Request, SamplingParams

pytestmark = pytest.mark.full

INSTALLED = importlib.util.find_spec("jetstream") is not None
needs_jetstream = pytest.mark.skipif(
    not INSTALLED, reason="needs google-jetstream, slim (docs/engines.md)"
)

SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64), 48
)
WINDOWED = ModelSpec.from_architecture(
    schema.ArchitectureSection(
        family="gemma3_text", layers=6, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64, window=5
    ),
    48,
)
"""Five of six layers have a window, which hides pages before an answer ends."""
GREEDY = SamplingParams(temperature=0.0)


@needs_jetstream
@pytest.mark.parametrize(
    ("spec", "tokens_per_step", "steps"), [(SPEC, 1, 12), (SPEC, 4, 12), (WINDOWED, 4, 96)]
)
def test_a_jetstream_engine_samples_what_our_sampler_samples(
    spec: ModelSpec, tokens_per_step: int, steps: int
) -> None:
    policy = Policy(spec, init_params(spec, jax.random.key(0)))
    engine = jetstream.make_engine(
        policy,
        slots=3,
        max_length=128,
        max_new_tokens=steps,
        tokens_per_step=tokens_per_step,
        sampling=GREEDY,
    )
    assert isinstance(engine, jetstream.engine_api().Engine)
    prompts = [np.arange(5, dtype=np.int32), np.arange(20, 29, dtype=np.int32)]
    params, state = engine.load_params(), engine.init_decode_state()
    for slot, prompt in ((2, prompts[0]), (0, prompts[1])):
        prefix = engine.prefill(
            params=params,
            padded_tokens=np.pad(prompt, (0, 16 - len(prompt))),
            true_length=len(prompt),
        )
        state = engine.insert(prefix, state, slot)
    sampled: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(steps // tokens_per_step + 1):
        state, result = engine.generate(params, state)
        result.copy_to_host_async()
        result = result.convert_to_numpy()
        for slot, tokens in sampled.items():
            data = result.get_result_at_slot(slot)
            tokens += data.tokens[0][data.valid[0].astype(bool)].tolist()
            assert data.lengths[0] == len(tokens)
    sampler = Sampler(
        policy, section=schema.SamplerSection(slots=2, max_length=128, max_new_tokens=steps)
    )
    requests = [
        Request(request_id=str(i), token_ids=p, max_new_tokens=steps, sampling=GREEDY)
        for i, p in enumerate(prompts)
    ]
    ours = [c.token_ids.tolist() for c in sampler.generate(requests)]
    sampler.close()
    assert [sampled[2], sampled[0], sampled[1]] == [*ours, []]


@pytest.mark.skipif(INSTALLED, reason="google-jetstream is installed")
def test_without_jetstream_the_extra_is_named() -> None:
    with pytest.raises(MissingExtraError, match="jetstream"):
        jetstream.engine_api()
