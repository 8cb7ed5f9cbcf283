"""The critic: a decoder with a value head that learns the returns, beside the policy's own update.

    values(params, batch) ──> advantages and returns, by the caller ──> update(state, batch, ...)

Values lie where log-probs do: at t, of the state that token t is drawn in.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxrl_async.algorithms.aggregate import token_mean
from jaxrl_async.algorithms.objective import Totals
from jaxrl_async.config import schema
from jaxrl_async.mesh import NO_DEVICE_LOCK, Rules, whole
from jaxrl_async.model.attention import decoder_settings
from jaxrl_async.model.heads import head_table, token_values
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.pack import micro_batches, split
from jaxrl_async.trainer.update import Params, TrainState, Updater, rows_per_micro_batch
from jaxrl_async.types import BoolArray, FloatArray, PackedBatch


class ValueLoss(NamedTuple):
    """What value_loss gives."""

    loss: Array  # [rows, length] float32, 0 outside the mask
    clipped: Array  # [rows, length] bool, tokens whose gradient the bound cut off


def value_loss(
    values: Array, old_values: Array, returns: Array, mask: Array, *, clip: float | None = 0.2
) -> ValueLoss:
    """max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2; [rows, length] each.

    Schulman et al. 2017 (arXiv:1707.06347), eq. 9, with the bound of OpenAI Baselines' ppo2
    (Engstrom et al. 2020, arXiv:2005.12729, sec. 3). clip null: the plain squared error.
    """
    values, returns = jnp.where(mask, values, 0.0), jnp.where(mask, returns, 0.0)
    plain = (values - returns) ** 2
    if clip is None:
        return ValueLoss(plain / 2, jnp.zeros_like(mask))
    old = jnp.where(mask, old_values, 0.0)
    bounded = (jnp.clip(values, old - clip, old + clip) - returns) ** 2
    return ValueLoss(jnp.maximum(plain, bounded) / 2, mask & (bounded > plain))


def explained_variance(values: FloatArray, returns: FloatArray, mask: BoolArray) -> float:
    """1 - Var(R - v) / Var(R) over the mask: 1 is perfect, 0 no better than a constant.

    NaN where the returns do not vary, or something is not finite.
    """
    wanted, found = returns[mask].astype(np.float64), values[mask].astype(np.float64)
    if not len(wanted) or not np.isfinite([wanted, found]).all() or not wanted.var():
        return float("nan")
    return float(1 - (wanted - found).var() / wanted.var())


class CriticBatch(NamedTuple):
    """A micro-batch; [rows, length] each."""

    token_ids: Any
    positions: Any
    segment_ids: Any
    mask: Any
    old_values: Any  # float32, when the returns were made
    returns: Any  # float32
    weights: Any  # float32, 1 / learnt tokens of the step


class CriticStep:
    """Holds the compiled update of a critic. Owned by the trainer's thread."""

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
        clip: float | None = 0.2,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: str = "none",
        attention: str = "auto",
    ) -> None:
        """clip: of value_loss. The other arguments as TrainStep's."""
        self._spec, self._clip, self._row_length = spec, clip, row_length
        self._decoder = decoder_settings(
            mesh, spec.head_dim, dtype=dtype, attention=attention, remat=remat
        )
        self._updater = Updater(
            head_table(spec, "value"),
            mesh,
            rules,
            self._loss,
            trainer=trainer,
            learning_rate=learning_rate,
            total_steps=total_steps,
            param_dtype=param_dtype,
        )
        self.micro_rows = rows_per_micro_batch(
            trainer.micro_batch_tokens, row_length, self._updater.num_row_shards
        )
        self.state_shardings = self._updater.state_shardings
        self._values = jax.jit(self._values_of, out_shardings=self._updater.batch_sharding)

    def init(self, params: Params) -> TrainState:
        """A fresh state around a copy of params; model.heads.with_head makes them of a policy's."""
        return self._updater.init(params)

    def values(
        self,
        params: Params,
        batch: PackedBatch,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
    ) -> tuple[FloatArray, FloatArray]:
        """Of the state before each token, 0 where a segment starts; and, at each segment's last
        token, of the state after it, 0 elsewhere. [rows, length] float32 each, in the batch's own
        order."""
        parts = []
        for micro in self._micros(batch):
            with device_lock:
                found = self._values(params, self._updater.put(micro))
                parts.append([whole(a) for a in found])
        before, after = (
            np.concatenate(a)[: len(batch.token_ids)] for a in zip(*parts, strict=True)
        )
        return before, after

    def update(
        self,
        state: TrainState,
        batch: PackedBatch,
        values: FloatArray,
        returns: FloatArray,
        *,
        weights: FloatArray | None = None,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
        at: float | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step towards the returns; the state given is donated.

        values: of `values` when the returns were made, which the clip is around. weights: of each
        token, where the batch is a part of a step; null: their mean. at: as TrainStep.update's. A
        non-finite loss or gradient leaves the state as it was, and critic/skipped is 1.
        """
        assert batch.token_ids.shape[1] == self._row_length, "packed for another row length"
        micros = self._micros(batch, values, returns, weights)
        state, stats = self._updater.update(state, micros, None, device_lock, at)
        explained = explained_variance(values, returns, batch.mask)
        told = {} if np.isnan(explained) else {"critic/explained_variance": explained}
        return state, {k.replace("train/", "critic/"): v for k, v in stats.items()} | told

    def _micros(
        self,
        batch: PackedBatch,
        values: FloatArray | None = None,
        returns: FloatArray | None = None,
        weights: FloatArray | None = None,
    ) -> list[CriticBatch]:
        """Host micro-batches; values and returns that are not given are 0."""
        empty = np.zeros(batch.mask.shape, np.float32)
        extra = [
            split(np.asarray(a, np.float32), self.micro_rows, 0.0)
            for a in (
                empty if values is None else values,
                empty if returns is None else returns,
                token_mean(batch) if weights is None else weights,
            )
        ]
        return [
            CriticBatch(m.token_ids, m.positions, m.segment_ids, m.mask, *of_micro)
            for m, *of_micro in zip(micro_batches(batch, self.micro_rows), *extra, strict=True)
        ]

    # ---- inside jit

    def _values_of(self, params: Params, micro: CriticBatch) -> tuple[Array, Array]:
        arrays = (micro.token_ids, micro.positions, micro.segment_ids)
        return token_values(self._spec, params, *arrays, **self._decoder)

    def _loss(self, params: Params, micro: CriticBatch, _: Any) -> tuple[Array, Totals]:
        values, _ = self._values_of(params, micro)
        token = value_loss(values, micro.old_values, micro.returns, micro.mask, clip=self._clip)
        loss = jnp.sum(jnp.where(micro.mask, micro.weights * token.loss, 0.0))
        count = jnp.sum(micro.mask)
        means = {
            "critic/clip_share": (jnp.sum(token.clipped), count),
            "critic/value_mean": (jnp.sum(jnp.where(micro.mask, values, 0.0)), count),
            "critic/return_mean": (jnp.sum(jnp.where(micro.mask, micro.returns, 0.0)), count),
        }
        sums = {"train/loss": loss, "train/tokens": count}
        return loss, jax.lax.stop_gradient(Totals(sums, means, {}, {}))
