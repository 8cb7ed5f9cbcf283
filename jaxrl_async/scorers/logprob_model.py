"""Log-probs of whole sequences by a model on this process's devices, for teachers and references
that compute while groups wait for their rewards."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxrl_async.mesh import NO_DEVICE_LOCK, TRAINER_RULES, DeviceGuard, batch_sharding, num_shards
from jaxrl_async.model.decoder import TokenRows, settings_on
from jaxrl_async.model.divergence import top_logprobs
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.scorers.reward_model import padded_rows
from jaxrl_async.types import FloatArray, IntArray


class SequenceLogprobs(NamedTuple):
    """Log-probs of a sequence's n tokens, each given the tokens before it. The first token's are
    NaN, with ids of 0."""

    logprobs: FloatArray  # [n] float32
    top_ids: IntArray  # [n, k] int32, likeliest first
    top_logprobs: FloatArray  # [n, k] float32


class LogprobModel:
    """Computes log-probs of token sequences.

    Usable from any thread; runs one program at a time under `device_lock`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: Params,
        mesh: Mesh,
        *,
        top_k: int = 0,
        temperature: float = 1.0,
        dtype: DTypeLike,
        attention: str = "auto",
        chunk: int = 1024,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
    ) -> None:
        """Compile nothing yet: each shape is compiled at its first call.

        Args:
            spec: of the decoder.
            params: its weights, on the mesh.
            mesh: the devices.
            top_k: number of likeliest tokens at each position; 0: none.
            temperature: divides the logits; 0 counts as 1.
            dtype: of the computation.
            attention: as model.attention.
            chunk: tokens of a device whose logits are computed at a time.
            device_lock: shared with everything that runs programs on these devices.
        """
        self._params, self._device_lock, self._top_k = params, device_lock, top_k
        self._num_row_shards = num_shards(mesh, TRAINER_RULES, "batch")
        self._sharding, self._parts = batch_sharding(mesh), 2 * mesh.shape["context"]
        settings = replace(
            settings_on(mesh, spec, dtype=dtype, attention=attention),
            temperature=temperature or 1.0,
            chunk=chunk,
        )

        def passed(params: Params, token_ids: Array, positions: Array, segment_ids: Array) -> Any:
            tokens = TokenRows(token_ids, positions, segment_ids)
            logprobs = token_logprobs(spec, params, tokens, settings).logprobs
            if not top_k:
                return (logprobs,)
            return (logprobs, *top_logprobs(spec, params, tokens, settings, k=top_k))

        self._passed = jax.jit(passed, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, sequences: Sequence[IntArray]) -> list[SequenceLogprobs]:
        """Return the log-probs of each sequence; at least one, of at least one token.

        Rows and lengths are padded to powers of two, so only few programs are compiled.
        """
        rows = padded_rows(sequences, self._num_row_shards, self._parts)
        with self._device_lock:
            inputs = jax.device_put(rows, self._sharding)
            results = [np.asarray(a) for a in self._passed(self._params, *inputs)]  # waits
        if not self._top_k:
            empty = np.zeros((*rows[0].shape, 0))
            results += [empty.astype(np.int32), empty.astype(np.float32)]
        return [
            _without_first(*(of_rows[row, : len(sequence)] for of_rows in results))
            for row, sequence in enumerate(sequences)
        ]


def _without_first(
    logprobs: FloatArray, top_ids: IntArray, top_logprobs: FloatArray
) -> SequenceLogprobs:
    """Return a row's values, with NaN for the first token, which follows nothing."""
    logprobs, top_logprobs = logprobs.copy(), top_logprobs.copy()
    logprobs[0], top_logprobs[0] = np.nan, np.nan
    return SequenceLogprobs(logprobs, top_ids, top_logprobs)
