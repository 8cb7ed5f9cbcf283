"""Log-probs of whole sequences on the sampler's chips, against float64 and the trainer's pass."""

import jax
import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec
from whole_rows import row_states

from jaxrl_async.scorers.logprob_model import LogprobModel

pytestmark = pytest.mark.full

VOCAB, K = 24, 4
SPEC = tiny_spec(VOCAB)
PARAMS = jax.tree.map(lambda p: 2 * p, tiny_params(SPEC))


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(x / x.sum(-1, keepdims=True), np.float64)


def in_float64(ids: np.ndarray, temperature: float) -> np.ndarray:
    """The distribution of each token but the first, [n - 1, vocab]."""
    row = ids[None].astype(np.int32)
    arrays = (row, np.arange(len(ids), dtype=np.int32)[None], np.ones_like(row))
    hidden = np.asarray(row_states(SPEC, PARAMS, *arrays), np.float64)[0, :-1]
    return softmax(hidden @ np.asarray(PARAMS["embed"].T, np.float64) / temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("top_k", [0, K])
def test_sequences_of_any_length_have_their_log_probs(top_k: int, temperature: float) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (3, 41, 1, 17)]
    model = LogprobModel(
        SPEC, PARAMS, mesh_of(), top_k=top_k, temperature=temperature, dtype="float32", chunk=16
    )
    for ids, (logprobs, top_ids, likely) in zip(sequences, model(sequences), strict=True):
        expected = np.log(in_float64(ids, temperature)) if len(ids) > 1 else np.zeros((0, VOCAB))
        assert np.isnan(logprobs[0]) and logprobs.shape == (len(ids),)
        own = expected[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(logprobs[1:], own, rtol=1e-5, atol=2e-5)
        order = np.argsort(-expected, axis=-1)[:, :top_k]
        assert top_ids.shape == likely.shape == (len(ids), top_k)
        np.testing.assert_array_equal(top_ids[1:], order)
        best = np.take_along_axis(expected, order, -1)
        np.testing.assert_allclose(likely[1:], best, rtol=1e-5, atol=2e-5)


def test_several_devices_give_the_same() -> None:
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (9, 33, 5)]
    one = LogprobModel(SPEC, PARAMS, mesh_of(), top_k=K, dtype="float32")(sequences)
    two = LogprobModel(SPEC, PARAMS, mesh_of(fsdp=2, tensor=2), top_k=K, dtype="float32")(sequences)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a.logprobs[1:], b.logprobs[1:], atol=1e-5)
        np.testing.assert_array_equal(a.top_ids, b.top_ids)
