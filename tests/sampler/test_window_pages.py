"""Where every layer has a window, pages behind it are given back, and nothing else changes."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.model.decoder import TokenRows, init_params
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.batch.renewal import recompute
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Partial, Request

VOCAB, WINDOW, PAGE = 40, 6, 4
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(
        family="mistral", layers=2, width=16, heads=4, kv_heads=2, head_dim=8, mlp=24, window=WINDOW
    ),
    VOCAB,
)
POLICY = Policy(
    SPEC,
    jax.tree.map(
        lambda w: w + 0.3 * jax.random.normal(jax.random.key(w.size), w.shape),
        init_params(SPEC, jax.random.key(0)),
    ),
)
MIB_OF_A_PAGE = SPEC.layers * 2 * PAGE * SPEC.kv_heads * SPEC.head_dim * 4 / 2**20


def sampler_of(pages: int) -> Sampler:
    section = schema.SamplerSection(
        slots=2, reserve=0, max_length=64, max_new_tokens=56, block=2, page_tokens=PAGE,
        kv_memory_mib=(pages + 0.5) * MIB_OF_A_PAGE,
    )  # fmt: skip
    return Sampler(POLICY, section=section)


def wish(number: int) -> Request:
    prompt = np.random.default_rng(number).integers(0, VOCAB, 6).astype(np.int32)
    return Request(request_id=f"r{number}", token_ids=prompt, max_new_tokens=50, key=(number, 0))


@pytest.mark.exhaustive
def test_two_long_answers_fit_the_pages_of_their_windows():
    """Each has 14 pages of tokens, of which it needs four at a time."""
    sampler = sampler_of(16)
    done = sampler.generate([wish(0), wish(1)])
    sampler.between_blocks(sampler.loop.batch.check_integrity)
    assert sampler.loop.batch.pages.count == 16 and sampler.stats().preempted == 0
    sampler.close()
    for number, one in enumerate(done):
        assert len(one.token_ids) == 50
        ids = np.concatenate([wish(number).token_ids, one.token_ids])[None]
        rows = TokenRows(*map(jnp.asarray, (ids, np.arange(56)[None], np.ones_like(ids))))
        trained = token_logprobs(SPEC, POLICY.params, rows).logprobs[0, 6:]
        np.testing.assert_allclose(one.logprobs, trained, atol=1e-5, rtol=0)


def saved_in_flight(sampler: Sampler) -> Partial:
    """Start two requests and return the first once its first pages were given to the other."""
    sampler.start_many([wish(0), wish(1)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        partial = sampler.save("r0", stop=False, with_kv=True)
        if len(partial.token_ids) and partial.kv is None:
            return partial
    raise AssertionError("no page was given back in a minute")


@pytest.mark.exhaustive
def test_a_request_without_its_first_pages_is_saved_and_computed_again():
    first = sampler_of(16)
    (whole,) = first.generate([wish(0)])
    saved = saved_in_flight(first)
    first.between_blocks(lambda: recompute(first.loop.batch))
    first.between_blocks(first.loop.batch.check_integrity)
    first.close()
    second = sampler_of(16)
    (done,) = second.resume([saved])
    second.between_blocks(second.loop.batch.check_integrity)
    second.close()
    assert done.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(done.logprobs, whole.logprobs, atol=1e-5)
