"""lm-eval's log-likelihoods through the endpoint are those of transformers."""

import math
from pathlib import Path

import jax
import pytest
from chat_tokenizers import QWEN3, byte_tokenizer
from clients_rig import started
from endpoint_rig import KEY, SECTION, SHAPE, closed, serve

from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.sampler import Sampler

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("mode", ["loglikelihood", "loglikelihood_in_batches"])
def test_log_likelihoods_are_those_of_transformers(tmp_path: Path, mode: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = byte_tokenizer(QWEN3)
    spec = ModelSpec.from_architecture(SHAPE, -(-tokenizer.vocab_size // 8) * 8)
    policy = Policy(spec, init_params(spec, jax.random.key(3)), tokenizer)
    policy.save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64
    ).eval()
    driven = started("lm_eval", "clients-older", tmp_path / "driver")
    try:
        with Sampler(policy, section=SECTION) as sampler:
            rig = serve(sampler, tokenizer)
            scored = driven(mode, rig.endpoint.address, KEY, "tiny")
            closed(rig)
    finally:
        driven.close()
    assert len(scored) == 5, "each choice of each question"
    for context, choice, logprob, is_greedy in scored:
        ids = torch.tensor([tokenizer.encode(context + choice).tolist()])
        before = len(tokenizer.encode(context))
        with torch.no_grad():
            logits = model(ids).logits[0, before - 1 : -1]
        rows = torch.log_softmax(logits, -1)
        wanted = rows.gather(1, ids[0, before:, None]).sum().item()
        assert math.isclose(logprob, wanted, rel_tol=0, abs_tol=1e-5), (context, choice)
        assert is_greedy == bool((rows.argmax(1) == ids[0, before:]).all())
