"""Whole sequences through the trainer's decoder, compiled once for each shape."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_async.model.decoder import ON_ONE_DEVICE, DecoderSettings, TokenRows, hidden_states
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.spec import ModelSpec

row_states = jax.jit(hidden_states, static_argnames="spec")
"""Compiled: else each call loads its loops anew."""


@partial(jax.jit, static_argnames=("spec", "settings"))
def row_logprobs(
    spec: ModelSpec, params: Any, tokens: TokenRows, settings: DecoderSettings = ON_ONE_DEVICE
) -> jax.Array:
    """Return [rows, length] log-probs of each token of packed rows."""
    return token_logprobs(spec, params, tokens, settings).logprobs


def logprobs_of(
    spec: ModelSpec, params: Any, ids: np.ndarray, settings: DecoderSettings = ON_ONE_DEVICE
) -> np.ndarray:
    """Return [n] log-probs of each token of one sequence, in a row of full 32s."""
    row = np.zeros((1, -(-len(ids) // 32) * 32), np.int32)
    row[0, : len(ids)] = ids
    there = (np.arange(row.shape[1]) < len(ids)).astype(np.int32)[None]
    tokens = TokenRows(row, np.arange(row.shape[1], dtype=np.int32)[None] * there, there)
    return np.asarray(row_logprobs(spec, params, tokens, settings))[0, : len(ids)]
