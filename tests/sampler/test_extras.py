"""What the trainer needs to be exact: sampling masks and log-probs of both distributions."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import PARAMS, SPEC, VOCAB, make_sampler, request
from whole_rows import row_states

from jaxrl_async.model.decoder import output_head
from jaxrl_async.sampler.device.sampling import (
    Controls,
    likely,
    uniforms,
)
from jaxrl_async.types import SamplingParams


def logits_before(prompt: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """[drawn, vocab] float64 logits that each drawn token came from."""
    ids, end = np.zeros((1, 64), np.int32), len(prompt) + len(sampled)
    ids[0, :end] = np.concatenate([prompt, sampled])
    hidden = row_states(SPEC, PARAMS, ids, np.arange(64)[None], np.ones_like(ids))
    logits = np.asarray(hidden @ output_head(SPEC, PARAMS), np.float64)[0]
    return logits[len(prompt) - 1 : end - 1]


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


@pytest.mark.full
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(top_p=0.6),
        SamplingParams(temperature=1.3, min_p=0.1),
        SamplingParams(temperature=0.8),
    ],
)
def test_masks_and_both_log_probs_are_those_of_the_definition(sampling) -> None:
    sampler = make_sampler()
    req = request(31, sampling=sampling, max_new_tokens=16, stop_token_ids=(), extras=True)
    greedy = request(32, sampling=SamplingParams(temperature=0.0, top_k=3), extras=True)
    done, neighbour = sampler.generate([req, greedy])
    sampler.close()
    assert [len(neighbour.kept.of(t)) for t in range(neighbour.kept.num_tokens)] == [VOCAB] * len(
        neighbour.token_ids
    )
    np.testing.assert_allclose(neighbour.logprobs, neighbour.full_logprobs, atol=1e-6)
    assert done.kept is not None and done.full_logprobs is not None
    for t, logits in enumerate(logits_before(req.token_ids, done.token_ids)):
        kept, token = done.kept.of(t), done.token_ids[t]
        scaled = logits / sampling.temperature
        assert token in kept
        truncated = np.full(VOCAB, -np.inf)
        truncated[kept] = scaled[kept]
        assert done.logprobs[t] == pytest.approx(log_softmax(truncated)[token], abs=1e-4)
        assert done.full_logprobs[t] == pytest.approx(log_softmax(logits)[token], abs=1e-4)
        probabilities = np.exp(log_softmax(scaled))
        if sampling.top_k:
            assert kept.tolist() == sorted(np.argsort(-scaled)[: sampling.top_k])
        elif sampling.top_p < 1:
            assert probabilities[kept].sum() >= sampling.top_p
            assert probabilities[kept].sum() - probabilities[kept].min() < sampling.top_p
        elif sampling.min_p:
            wanted = probabilities >= sampling.min_p * probabilities.max()
            assert kept.tolist() == np.flatnonzero(wanted).tolist()
        else:
            assert len(kept) == VOCAB


@pytest.mark.full
def test_a_request_that_truncates_nothing_keeps_every_token_whatever_its_neighbours_ask_for():
    """Logits down to -70: in float32 the likelier tokens already add up to 1 before the tail."""
    logits = jnp.asarray(np.linspace(0, -70, 101)[None].repeat(6, 0), jnp.float32)
    of_slots = Controls(
        temperature=np.ones(6, np.float32),
        top_k=np.array([0, 0, 90, 0, 3, 0], np.int32),
        top_p=np.array([1, 0.5, 1, 1, 1, 0.9], np.float32),
        min_p=np.array([0, 0, 0, 0.1, 0, 0.5], np.float32),
    )
    kept = np.asarray(likely(logits, of_slots))
    assert kept.sum(1).tolist() == [101, 1, 90, 4, 3, 1]
    assert all(row[:n].all() for row, n in zip(kept, kept.sum(1), strict=True)), "the likeliest"


def test_each_key_and_each_position_has_a_number_of_its_own():
    keys = jnp.asarray([[1, 2], [1, 2], [1, 3], [1, 2]], jnp.uint32)
    found = np.asarray(uniforms(keys, jnp.asarray([5, 6, 5, 5])))
    assert found[0] == found[3] and len(set(found.tolist())) == 3
    assert ((found >= 0) & (found < 1)).all()


@pytest.mark.full
def test_masks_are_the_same_where_pages_run_out_and_sequences_go_on_later() -> None:
    requests = [
        request(
            40 + i, max_new_tokens=24, stop_token_ids=(), extras=True,
            sampling=SamplingParams(temperature=0.7, top_p=0.8),
        )
        for i in range(4)
    ]  # fmt: skip
    roomy, crowded = make_sampler(), make_sampler(kv_memory_mib=6 * 16 * 2 * 2 * 2 * 8 * 4 / 2**20)
    for one, other in zip(roomy.generate(requests), crowded.generate(requests), strict=True):
        assert one.kept is not None and other.kept is not None
        np.testing.assert_array_equal(other.token_ids, one.token_ids)
        np.testing.assert_array_equal(other.kept.ids, one.kept.ids)
        np.testing.assert_array_equal(other.kept.starts, one.kept.starts)
    assert crowded.stats().preempted > 0
    roomy.close()
    crowded.close()


@pytest.mark.full
def test_without_asking_nothing_extra_is_carried() -> None:
    sampler = make_sampler()
    done = sampler.generate([request(33)])[0]
    sampler.close()
    assert done.kept is None and done.full_logprobs is None and done.expert_ids is None
