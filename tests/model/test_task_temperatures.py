"""Log-probs at the temperature of each token's task, against the formula in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_params, tiny_spec

from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.logprobs import (
    HeadSettings,
    blocked_logprobs,
    chunked_logprobs,
    token_logprobs,
    wanted_logprobs,
)

pytestmark = pytest.mark.full

TOKENS, WIDTH, VOCAB = 13, 8, 24
SPEC = tiny_spec(VOCAB, width=16, heads=2, kv_heads=1, mlp=24)


@pytest.fixture(scope="module")
def inputs() -> tuple[Any, ...]:
    """Hidden states, head, targets and temperatures."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(TOKENS, WIDTH)) * 2
    targets = rng.integers(0, VOCAB, TOKENS)
    warm = rng.choice([0.5, 0.9, 1.7], TOKENS)
    head = rng.normal(size=(WIDTH, VOCAB))
    return jnp.float32(hidden), jnp.float32(head), jnp.int32(targets), jnp.float32(warm)


def exact(inputs: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Log-probs, entropies, and the gradient of the log-probs' sum by the hidden states."""
    hidden, head, targets, warm = (np.asarray(x, np.float64) for x in inputs)
    logits = hidden @ head / warm[:, None]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    probs, chosen = np.exp(logprobs), targets.astype(int)
    slope = (np.eye(VOCAB)[chosen] - probs) @ head.T / warm[:, None]
    return logprobs[np.arange(TOKENS), chosen], -(probs * logprobs).sum(-1), slope


def of_wanted(hidden: Any, head: Any, targets: Any, *, chunk: int, temperatures: Any) -> Any:
    wanted = jnp.ones(TOKENS, bool)
    how = HeadSettings(chunk)
    return wanted_logprobs(hidden, head, targets, wanted, how, None, temperatures)


WAYS = {
    "chunked": partial(chunked_logprobs, chunk=5),  # padded: 13 tokens are no multiple
    "wanted": partial(of_wanted, chunk=5),
    "blocked": partial(blocked_logprobs, blocks=4),
}


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_entropies_and_gradients_are_at_each_tokens_temperature(
    inputs: tuple[Any, ...], way: str
) -> None:
    hidden, head, targets, warm = inputs

    def total(hidden: Any, head: Any) -> Any:
        logprobs, entropy = WAYS[way](hidden, head, targets, temperatures=warm)
        return logprobs.sum(), (logprobs, entropy)

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, (logprobs, entropy)), (slope, of_head) = run(hidden, head)
    wanted = exact(inputs)
    np.testing.assert_allclose(logprobs, wanted[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, wanted[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope, wanted[2], rtol=1e-4, atol=1e-5)
    assert np.isfinite(of_head).all(), "tokens of padding have no temperature"


def test_a_packed_rows_tokens_have_the_temperature_of_the_task_that_they_belong_to() -> None:
    params = tiny_params(SPEC)
    rng = np.random.default_rng(1)
    ids = jnp.int32(rng.integers(0, VOCAB, (1, 12)))
    positions = jnp.int32([[*range(6), *range(6)]])
    segments = jnp.int32([[1] * 6 + [2] * 6])
    tasks = jnp.int32([[0] * 6 + [1] * 6])
    settings = DecoderSettings(temperatures=(0.5, 2.0))
    rows = TokenRows(ids, positions, segments, task_ids=tasks)
    both = token_logprobs(SPEC, params, rows, settings)
    for segment, temperature in ((1, 0.5), (2, 2.0)):
        alone = token_logprobs(
            SPEC, params, rows._replace(task_ids=None), DecoderSettings(temperature=temperature)
        )
        there = np.asarray(segments)[0] == segment
        for found, wanted in ((both.logprobs, alone.logprobs), (both.entropy, alone.entropy)):
            np.testing.assert_allclose(found[0, there], wanted[0, there], rtol=1e-5, atol=1e-6)
