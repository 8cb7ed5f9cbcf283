"""Updates by maximum likelihood of given answers: supervised fine-tuning.

    pack_pairs ──> micro-batches ──> cross entropy, a mean over the step's answer tokens

A shell around update.Updater, as preference_step's are, with the same methods.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxrl_async.algorithms.aggregate import token_mean
from jaxrl_async.algorithms.losses import TokenInputs
from jaxrl_async.algorithms.objective import Totals, summarize, supervised_objective
from jaxrl_async.algorithms.segments import first_tokens, sequence_any
from jaxrl_async.config import schema
from jaxrl_async.mesh import NO_DEVICE_LOCK, Rules
from jaxrl_async.model.attention import decoder_settings
from jaxrl_async.model.logprobs import greedy_matches, token_logprobs
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.trainer.pack import micro_batches, pack_pairs, split
from jaxrl_async.trainer.step import packing_measures, train_flops
from jaxrl_async.trainer.update import Params, TrainState, Updater, rows_per_micro_batch
from jaxrl_async.types import BoolArray, IntArray, PackedBatch

COLUMNS = ("token_ids", "positions", "segment_ids", "mask")
"""What of a PackedBatch travels to the devices, beside the weights of its tokens."""


class SupervisedStep:
    """Holds the compiled update of a policy by given answers. Owned by the trainer's thread."""

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        rules: Rules,
        *,
        trainer: schema.TrainerSection,
        learning_rate: float,
        row_length: int,
        total_steps: int,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: str = "none",
        attention: str = "auto",
    ) -> None:
        """The arguments as TrainStep's. Raises ConfigError."""
        self._spec, self._row_length, self._remat = spec, row_length, remat
        self._decoder = decoder_settings(
            mesh, spec.head_dim, dtype=dtype, attention=attention, chunk=trainer.logprob_chunk
        )
        self._updater = Updater(
            weight_table(spec),
            mesh,
            rules,
            self._objective,
            trainer=trainer,
            learning_rate=learning_rate,
            total_steps=total_steps,
            param_dtype=param_dtype,
        )
        self.state_shardings = self._updater.state_shardings
        self.micro_rows = rows_per_micro_batch(
            trainer.micro_batch_tokens, row_length, self._updater.num_row_shards
        )
        self._measured = jax.jit(self._measures, out_shardings=self._updater.replicated)

    def init(self, params: Params) -> TrainState:
        """A fresh state around a copy of params (any placement): the caller's arrays stay valid."""
        return self._updater.init(params)

    def pack(self, pairs: Sequence[tuple[IntArray, BoolArray]]) -> PackedBatch:
        """Rows for `update`. Raises DataError where a pair does not fit."""
        return pack_pairs(pairs, self._row_length)

    def update(
        self,
        state: TrainState,
        batch: PackedBatch,
        *,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
        at: float | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on all pairs; the state given is donated.

        at: as TrainStep.update's. A non-finite loss or gradient leaves the state as it was, and
        train/skipped is 1.
        """
        micros = self._micros(batch)
        state, stats = self._updater.update(state, micros, None, device_lock, at)
        stats |= packing_measures(batch, self.micro_rows, len(micros))
        return state, stats | {"train/flops": train_flops(self._spec, batch, reference=False)}

    def measure(self, params: Params, batch: PackedBatch) -> dict[str, float]:
        """Of held-out pairs: loss, and what greedy decoding gets right; nothing is learnt.

        sft/accuracy: answers that it gives token for token; sft/token_accuracy: tokens, each after
        the right ones before it.
        """
        totals = [self._measured(params, self._updater.put(m)) for m in self._micros(batch)]
        return summarize(jax.device_get(totals))

    def _micros(self, batch: PackedBatch) -> list[dict[str, Any]]:
        weights = split(token_mean(batch), self.micro_rows, 0.0)
        return [
            {"weights": w, **{name: getattr(micro, name) for name in COLUMNS}}
            for micro, w in zip(micro_batches(batch, self.micro_rows), weights, strict=True)
        ]

    # ---- inside jit

    def _objective(
        self, params: Params, micro: dict[str, Array], context: None
    ) -> tuple[Array, Totals]:
        logprobs, entropy = token_logprobs(
            self._spec, params, *_inputs(micro), **self._decoder, remat=self._remat
        )
        nothing = jnp.zeros_like(logprobs)
        x = TokenInputs(
            policy_logprobs=logprobs,
            behavior_logprobs=nothing,
            advantages=nothing,
            mask=micro["mask"],
            versions=jnp.zeros_like(micro["token_ids"]),
            entropy=jax.lax.stop_gradient(entropy),
        )
        return supervised_objective(x, micro["weights"])

    def _measures(self, params: Params, micro: dict[str, Array]) -> Totals:
        _, totals = self._objective(params, micro, None)
        mask, segments = micro["mask"], micro["segment_ids"]
        matches = greedy_matches(self._spec, params, *_inputs(micro), **self._decoder)
        ends = first_tokens(mask, segments)  # one token of each answer
        right = ends & ~sequence_any(~matches, mask, segments)
        means = {
            "sft/accuracy": (jnp.sum(right), jnp.sum(ends)),
            "sft/token_accuracy": (jnp.sum(matches & mask), jnp.sum(mask)),
        }
        return totals._replace(means=totals.means | means)


def _inputs(micro: dict[str, Array]) -> tuple[Array, Array, Array]:
    return micro["token_ids"], micro["positions"], micro["segment_ids"]
