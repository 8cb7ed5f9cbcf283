"""The critic's objective: squared error of its values from the returns, with PPO's bound.

Values are aligned with log-probs: at t, of the state in which token t is sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_async.algorithms.aggregate import token_mean
from jaxrl_async.algorithms.objective import Totals
from jaxrl_async.algorithms.value_loss import explained_variance, value_loss
from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.heads import head_table, token_values
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.trainer.learning_settings import MicroSizes
from jaxrl_async.trainer.pack import micro_batches, split
from jaxrl_async.trainer.update_programs import Frozen, Passes
from jaxrl_async.types import FloatArray, PackedBatch


class CriticData(NamedTuple):
    """A critic's training data; arrays are [rows, length] float32."""

    batch: PackedBatch
    values: FloatArray  # at the time of the returns: the bound is around them
    returns: FloatArray
    weights: FloatArray | None = None  # of tokens, for a part of a step; None: their mean


class CriticBatch(NamedTuple):
    """A micro-batch; [rows, length] each."""

    token_ids: Any
    positions: Any
    segment_ids: Any
    mask: Any
    old_values: Any  # float32, at the time of the returns
    returns: Any  # float32
    weights: Any  # float32, 1 / trained tokens of the step


@dataclass(frozen=True, slots=True)
class CriticObjective:
    """The value loss of a CriticData's trained tokens."""

    spec: ModelSpec
    decoder: DecoderSettings
    clip: float | None = 0.2  # bound of value_loss
    prefix: ClassVar[str] = "critic"
    rows_are_independent: ClassVar[bool] = True

    @property
    def table(self) -> dict[str, Any]:
        return head_table(self.spec, "value")

    def micro_batches(self, data: CriticData, sizes: MicroSizes) -> Sequence[CriticBatch]:
        weights = token_mean(data.batch) if data.weights is None else data.weights
        extra = [
            split(np.asarray(a, np.float32), sizes, 0.0)
            for a in (data.values, data.returns, weights)
        ]
        return [
            CriticBatch(m.token_ids, m.positions, m.segment_ids, m.mask, *of_micro)
            for m, *of_micro in zip(micro_batches(data.batch, sizes), *extra, strict=True)
        ]

    def context(self, data: CriticData) -> None:
        return None

    def loss(
        self, trainable: Params, frozen: Frozen, micro: CriticBatch, context: None
    ) -> tuple[Array, Totals]:
        tokens = TokenRows.of(micro._asdict())
        values, _ = token_values(self.spec, trainable, tokens, self.decoder)
        token = value_loss(values, micro.old_values, micro.returns, micro.mask, clip=self.clip)
        loss = jnp.sum(jnp.where(micro.mask, micro.weights * token.loss, 0.0))
        count = jnp.sum(micro.mask)
        means = {
            "critic/clip_share": (jnp.sum(token.clipped), count),
            "critic/value_mean": (jnp.sum(jnp.where(micro.mask, values, 0.0)), count),
            "critic/return_mean": (jnp.sum(jnp.where(micro.mask, micro.returns, 0.0)), count),
        }
        sums = {"critic/loss": loss, "critic/tokens": count}
        return loss, jax.lax.stop_gradient(Totals(sums, means, {}, {}))

    def measures(
        self, trainable: Params, frozen: Frozen, micro: CriticBatch, context: None
    ) -> Totals:
        return self.loss(trainable, frozen, micro, context)[1]

    def probe(self, trainable: Params, frozen: Frozen, tokens: TokenRows) -> Array:
        return token_values(self.spec, trainable, tokens, self.decoder)[0]

    def report(self, data: CriticData, frozen: Frozen, passes: Passes) -> dict[str, float]:
        explained = explained_variance(data.values, data.returns, data.batch.mask)
        return {} if np.isnan(explained) else {"critic/explained_variance": explained}
