"""Forward passes over a packed batch before its update: log-probs of its tokens.

They run with the policy's weights (the proximal log-probs), the reference's or a teacher's.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxrl_async.algorithms.columns import for_other_models
from jaxrl_async.mesh import NO_DEVICE_LOCK, DeviceGuard, batch_sharding, put, whole
from jaxrl_async.model.decoder import TokenRows
from jaxrl_async.model.divergence import logprobs_at, top_logprobs
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.pack import micro_batches, split
from jaxrl_async.types import FloatArray, IntArray, PackedBatch


class LogprobPass:
    """Compiled log-probs of one architecture on one mesh. Owned by the trainer's thread."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: LearningSettings,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_vocab: int | None = None,
    ) -> None:
        """Declare the programs; each is compiled at its first call.

        Args:
            temperature: the sampler's; 0 counts as 1.
            top_k: number of tokens that `top` returns.
            top_vocab: `top` returns only ids below it; None: any.
        """
        self.spec, self._sizes = spec, settings.micro_sizes()
        self._top_k, self._top_vocab = top_k, top_vocab
        self._rows = batch_sharding(settings.mesh)
        self._decoder = replace(settings.decoder(spec, temperature), remat="none")
        self._logprobs = jax.jit(self._logprobs_of, out_shardings=self._rows)
        self._top = jax.jit(self._top_of, out_shardings=self._rows)
        self._at = jax.jit(self._logprobs_at, out_shardings=self._rows)

    def logprobs(
        self,
        params: Params,
        batch: PackedBatch,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
        *,
        replays: bool = False,
    ) -> FloatArray:
        """Return each token's log-prob, [rows, length] float32; 0 where a segment starts and in
        padding.

        replays: route tokens to the batch's experts, if it has any. For the policy's weights, since
        the update does the same; any other model uses its own router.
        """
        if not replays:
            batch = for_other_models(batch)
        return self._over(self._logprobs, params, batch, device_lock)[0]

    def lower(self, params: Params, tokens: TokenRows) -> Any:
        """Lower the program of `logprobs` for a micro-batch; the arguments are shapes."""
        return self._logprobs.lower(params, tokens)

    def top(
        self,
        params: Params,
        batch: PackedBatch,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
    ) -> tuple[IntArray, FloatArray]:
        """Return the top_k likeliest tokens at each position and their log-probs, [rows, length, k]
        each."""
        ids, logprobs = self._over(self._top, params, for_other_models(batch), device_lock)
        return ids, logprobs

    def logprobs_at(
        self,
        params: Params,
        batch: PackedBatch,
        ids: IntArray,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
    ) -> FloatArray:
        """Return the log-probs of ids [rows, length, k], each at its position."""
        return self._over(self._at, params, for_other_models(batch), device_lock, ids)[0]

    def _over(
        self,
        program: Callable[..., object],
        params: Params,
        batch: PackedBatch,
        device_lock: DeviceGuard,
        *columns: NDArray[np.generic],
    ) -> Sequence[NDArray[Any]]:
        """Run the program on each micro-batch. columns: [rows, length, ...], its last arguments."""
        parts = []
        micros = micro_batches(batch, self._sizes)
        of_micros = [split(column, self._sizes, 0) for column in columns]
        for micro, *rest in zip(micros, *of_micros, strict=True):
            tokens = TokenRows(
                micro.token_ids, micro.positions, micro.segment_ids, micro.kept, micro.expert_ids,
                micro.image_begins, micro.embeddings, None, micro.task_ids,
            )  # fmt: skip
            with device_lock:
                arrays = program(params, *put((tokens, *rest), self._rows))
                parts.append([whole(a) for a in jax.tree.leaves(arrays)])
        num_rows = len(batch.token_ids)
        return [np.concatenate(column)[:num_rows] for column in zip(*parts, strict=True)]

    # ---- inside jit

    def _logprobs_of(self, params: Params, tokens: TokenRows) -> Array:
        return token_logprobs(self.spec, params, tokens, self._decoder).logprobs

    def _top_of(self, params: Params, tokens: TokenRows) -> tuple[Array, Array]:
        k, vocab = self._top_k, self._top_vocab
        return top_logprobs(self.spec, params, tokens, self._decoder, k=k, vocab=vocab)

    def _logprobs_at(self, params: Params, tokens: TokenRows, chosen: Array) -> Array:
        return logprobs_at(self.spec, params, tokens, chosen, self._decoder)


class ProbePass:
    """The trainer's compiled log-probs of one sequence, for comparison with a sampler's."""

    def __init__(self, spec: ModelSpec, settings: LearningSettings) -> None:
        self._spec, self._copies = spec, settings.num_row_shards
        self._decoder = replace(settings.decoder(spec), remat="none")
        replicated = NamedSharding(settings.mesh, PartitionSpec())
        self._probe = jax.jit(self._probe_logprobs, out_shardings=replicated)

    def __call__(self, params: Params, token_ids: IntArray) -> Array:
        """Return untempered log-probs of token_ids[1:], each given the tokens before it.

        [n - 1] float32 on the mesh. Does not wait; compiles for each new n.
        """
        return self._probe(params, np.asarray(token_ids, np.int32))

    def _probe_logprobs(self, params: Params, token_ids: Array) -> Array:
        tokens = TokenRows.copies(token_ids, self._copies)
        return token_logprobs(self._spec, params, tokens, self._decoder).logprobs[0, 1:]
