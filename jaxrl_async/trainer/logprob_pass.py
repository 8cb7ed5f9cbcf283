"""Forward passes over a packed batch before its update: what another model says of its tokens.

Used with the policy's own weights (the proximal log-probs), the reference's and a teacher's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxrl_async.algorithms.columns import for_other_models
from jaxrl_async.mesh import NO_DEVICE_LOCK, batch_sharding, put, whole
from jaxrl_async.model.attention import decoder_settings
from jaxrl_async.model.divergence import logprobs_at, top_logprobs
from jaxrl_async.model.logprobs import replayed_logprobs
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.pack import micro_batches, split
from jaxrl_async.trainer.update import Params
from jaxrl_async.types import FloatArray, IntArray, PackedBatch


class LogprobPass:
    """Compiled log-probs of one kind of model on one mesh. Owned by the trainer's thread."""

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        *,
        micro_rows: int,
        chunk: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_vocab: int | None = None,
        dtype: Any = jnp.float32,
        attention: str = "auto",
    ) -> None:
        """temperature: the sampler's (0 counts as 1); top_k: what `top` gives, of ids below
        top_vocab; null: of all."""
        self.spec, self._micro_rows, self._top_k = spec, micro_rows, top_k
        self._top_vocab = top_vocab
        self._rows = batch_sharding(mesh)
        self._settings = decoder_settings(
            mesh,
            spec.head_dim,
            dtype=dtype,
            attention=attention,
            chunk=chunk,
            temperature=temperature or 1.0,
        )
        self._logprobs = jax.jit(self._logprobs_of, out_shardings=self._rows)
        self._top = jax.jit(self._top_of, out_shardings=self._rows)
        self._at = jax.jit(self._logprobs_at, out_shardings=self._rows)

    def logprobs(
        self,
        params: Params,
        batch: PackedBatch,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
        *,
        replays: bool = False,
    ) -> FloatArray:
        """[rows, length] float32 of each token; 0 where a segment starts and in padding.

        replays: tokens go through the batch's experts, where it has them. Of the policy's own
        weights, which the update compares with; any other model chooses for itself.
        """
        if not replays:
            batch = for_other_models(batch)
        return self._over(self._logprobs, params, batch, device_lock)[0]

    def top(
        self,
        params: Params,
        batch: PackedBatch,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
    ) -> tuple[IntArray, FloatArray]:
        """The top_k likeliest tokens at each place and their log-probs; [rows, length, k] each."""
        ids, logprobs = self._over(self._top, params, for_other_models(batch), device_lock)
        return ids, logprobs

    def logprobs_at(
        self,
        params: Params,
        batch: PackedBatch,
        ids: IntArray,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
    ) -> FloatArray:
        """Log-probs of ids [rows, length, k], each at its place, as `top` gives its own."""
        return self._over(self._at, params, for_other_models(batch), device_lock, ids)[0]

    def _over(
        self,
        program: Callable[..., Any],
        params: Params,
        batch: PackedBatch,
        device_lock: AbstractContextManager[Any],
        column: NDArray[Any] | None = None,
    ) -> Sequence[NDArray[Any]]:
        """column: [rows, length, ...] that the program takes in place of batch.kept."""
        parts = []
        micros = micro_batches(batch, self._micro_rows)
        columns = [m.kept for m in micros] if column is None else split(column, self._micro_rows, 0)
        for micro, last in zip(micros, columns, strict=True):
            tokens = (micro.token_ids, micro.positions, micro.segment_ids)
            arrays = (*tokens, last, micro.expert_ids)
            with device_lock:
                found = program(params, *put(arrays, self._rows))
                parts.append([whole(a) for a in jax.tree.leaves(found)])
        num_rows = len(batch.token_ids)
        return [np.concatenate(column)[:num_rows] for column in zip(*parts, strict=True)]

    # ---- inside jit

    def _logprobs_of(
        self,
        params: Params,
        ids: Array,
        positions: Array,
        segments: Array,
        kept: Array | None,
        experts: Array | None,
    ) -> Array:
        arrays = (ids, positions, segments, experts)
        return replayed_logprobs(self.spec, params, *arrays, kept=kept, **self._settings)[0]

    def _top_of(
        self, params: Params, ids: Array, positions: Array, segments: Array, *_: Array | None
    ) -> tuple[Array, Array]:
        arrays = (ids, positions, segments)
        k, vocab = self._top_k, self._top_vocab
        return top_logprobs(self.spec, params, *arrays, k=k, vocab=vocab, **self._settings)

    def _logprobs_at(
        self, params: Params, ids: Array, positions: Array, segments: Array, chosen: Array, _: None
    ) -> Array:
        arrays = (ids, positions, segments)
        return logprobs_at(self.spec, params, *arrays, chosen, **self._settings)
