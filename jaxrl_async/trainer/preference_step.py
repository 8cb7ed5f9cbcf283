"""Updates from preferences: of a policy (dpo and its kin), and of a reward model.

    pack_preference ──> micro-batches of whole pairs ──> sums over answers ──> loss per pair

Both report preference/* and are shells around update.Updater; every denominator is the whole
step's, so that packing and micro-batches only change the order of a sum.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxrl_async.algorithms.objective import Totals
from jaxrl_async.algorithms.preferences import (
    PairInputs,
    bradley_terry,
    kl_baseline,
    needs_baseline,
    preference_loss,
    summed,
)
from jaxrl_async.config import schema
from jaxrl_async.data.preferences import PreferencePair
from jaxrl_async.errors import DataError
from jaxrl_async.mesh import NO_DEVICE_LOCK, Rules
from jaxrl_async.model.attention import decoder_settings
from jaxrl_async.model.heads import head_table, sequence_scores
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.trainer.pack_pairs import (
    PreferenceBatch,
    max_pairs,
    micro_batches_of,
    pack_preference,
)
from jaxrl_async.trainer.update import Params, TrainState, Updater, rows_per_micro_batch


class PairContext(NamedTuple):
    """What holds for every micro-batch of a step; on the devices."""

    weight: Any  # [] float32, 2 / answers of the step
    reference_params: Params | None = None
    baseline: Array | None = None  # [] float32, for kto


class PreferenceStep:
    """Holds the compiled update of a policy by a preference loss. Owned by the trainer's thread."""

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        rules: Rules,
        *,
        loss: schema.Choice,
        trainer: schema.TrainerSection,
        learning_rate: float,
        row_length: int,
        total_steps: int,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: str = "none",
        attention: str = "auto",
    ) -> None:
        """loss: a registered preference loss. The other arguments as TrainStep's. Raises
        ConfigError."""
        self._spec = spec
        self._loss_of = preference_loss.resolve(loss)
        self._decoder = decoder_settings(
            mesh,
            spec.head_dim,
            dtype=dtype,
            attention=attention,
            remat=remat,
            chunk=trainer.logprob_chunk,
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
            whole_rows=False,
        )
        self.state_shardings = self._updater.state_shardings
        self.micro_rows = pair_rows(trainer, row_length, self._updater.num_row_shards)
        self._row_length = row_length
        self._log_ratio_sum = jax.jit(self._log_ratio_of, out_shardings=self._updater.replicated)

    def init(self, params: Params) -> TrainState:
        """A fresh state around a copy of params (any placement): the caller's arrays stay valid."""
        return self._updater.init(params)

    def pack(self, pairs: Sequence[PreferencePair]) -> PreferenceBatch:
        """Rows for `update`. Raises DataError where a pair does not fit."""
        return pack_preference(pairs, self._row_length, self.micro_rows)

    def update(
        self,
        state: TrainState,
        batch: PreferenceBatch,
        *,
        reference_params: Params | None = None,
        mismatched: PreferenceBatch | None = None,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
        at: float | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on all pairs; the state given is donated.

        reference_params: frozen weights on this mesh; dpo, ipo and kto need them. mismatched: what
        kto's baseline is estimated on, `pack` of data.preferences.mismatched. at: as
        TrainStep.update's. A non-finite loss or gradient leaves the state as it was, and
        train/skipped is 1.
        """
        context = self._context(state.params, batch, reference_params, mismatched, device_lock)
        micros = micro_batches_of(batch, self.micro_rows)
        state, stats = self._updater.update(state, micros, context, device_lock, at)
        return state, stats | _told_of(batch, context)

    def measure(
        self,
        params: Params,
        batch: PreferenceBatch,
        *,
        reference_params: Params | None = None,
        mismatched: PreferenceBatch | None = None,
    ) -> dict[str, float]:
        """Loss, accuracy and margins of held-out pairs; nothing is learnt."""
        context = self._context(params, batch, reference_params, mismatched, NO_DEVICE_LOCK)
        micros = micro_batches_of(batch, self.micro_rows)
        return self._updater.measure(params, micros, context) | _told_of(batch, context)

    def _context(
        self,
        params: Params,
        batch: PreferenceBatch,
        reference_params: Params | None,
        mismatched: PreferenceBatch | None,
        device_lock: AbstractContextManager[Any],
    ) -> PairContext:
        if not needs_baseline(self._loss_of):
            _check_whole(batch)
        context = PairContext(answer_weight(batch), reference_params)
        if mismatched is None or reference_params is None:
            return context
        total: Any = jnp.float32(0)
        for index, micro in enumerate(micro_batches_of(mismatched, self.micro_rows)):
            with device_lock:
                total += self._log_ratio_sum(params, self._updater.put(micro), context)
                if device_lock is not NO_DEVICE_LOCK or self._updater.is_full(index):
                    jax.block_until_ready(total)
        return context._replace(baseline=kl_baseline(total, mismatched.num_answers))

    # ---- inside jit

    def _objective(
        self, params: Params, micro: dict[str, Array], context: PairContext
    ) -> tuple[Array, Totals]:
        chosen, rejected = answer_sums(self._logprobs(params, micro), micro)
        lengths = answer_sums(jnp.ones_like(micro["mask"], jnp.float32), micro)
        x = PairInputs(chosen, rejected, *lengths, baseline=context.baseline)
        if context.reference_params is not None:
            logprobs = self._logprobs(context.reference_params, micro)
            of_reference = answer_sums(jax.lax.stop_gradient(logprobs), micro)
            x = x._replace(reference_chosen=of_reference[0], reference_rejected=of_reference[1])
        return summed(self._loss_of(x), *lengths, context.weight)

    def _log_ratio_of(self, params: Params, micro: dict[str, Array], context: PairContext) -> Array:
        """Sum over answers of their log-ratio to the reference."""
        policy = self._logprobs(params, micro)
        ratio = policy - self._logprobs(context.reference_params, micro)
        return jnp.sum(jnp.where(micro["mask"], ratio, 0.0))

    def _logprobs(self, params: Params, micro: dict[str, Array]) -> Array:
        logprobs, _ = token_logprobs(self._spec, params, *_inputs(micro), **self._decoder)
        return logprobs


class RewardStep:
    """Holds the compiled update of a reward model. Owned by the trainer's thread."""

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
        margin: float = 0.0,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: str = "none",
        attention: str = "auto",
    ) -> None:
        """margin: by how much the chosen answer is to be better. The others as TrainStep's."""
        self._spec, self._margin, self._row_length = spec, margin, row_length
        self._decoder = decoder_settings(
            mesh, spec.head_dim, dtype=dtype, attention=attention, remat=remat
        )
        self._updater = Updater(
            head_table(spec, "reward"),
            mesh,
            rules,
            self._objective,
            trainer=trainer,
            learning_rate=learning_rate,
            total_steps=total_steps,
            param_dtype=param_dtype,
            whole_rows=False,
        )
        self.state_shardings = self._updater.state_shardings
        self.micro_rows = pair_rows(trainer, row_length, self._updater.num_row_shards)

    def init(self, params: Params) -> TrainState:
        """A fresh state around a copy of params; model.heads.with_head makes them of a policy's."""
        return self._updater.init(params)

    def pack(self, pairs: Sequence[PreferencePair]) -> PreferenceBatch:
        """Rows for `update`. Raises DataError where a pair does not fit."""
        return pack_preference(pairs, self._row_length, self.micro_rows)

    def update(
        self,
        state: TrainState,
        batch: PreferenceBatch,
        *,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
        at: float | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on all pairs, which must be whole; the state given is donated.

        at: as TrainStep.update's. A non-finite loss or gradient leaves the state as it was, and
        train/skipped is 1.
        """
        _check_whole(batch)
        context = PairContext(answer_weight(batch))
        micros = micro_batches_of(batch, self.micro_rows)
        state, stats = self._updater.update(state, micros, context, device_lock, at)
        return state, stats | _told_of(batch, context)

    def measure(self, params: Params, batch: PreferenceBatch) -> dict[str, float]:
        """Loss, accuracy and margins of held-out pairs; nothing is learnt."""
        _check_whole(batch)
        context = PairContext(answer_weight(batch))
        micros = micro_batches_of(batch, self.micro_rows)
        return self._updater.measure(params, micros, context) | _told_of(batch, context)

    # ---- inside jit

    def _objective(
        self, params: Params, micro: dict[str, Array], context: PairContext
    ) -> tuple[Array, Totals]:
        scores = sequence_scores(self._spec, params, *_inputs(micro), **self._decoder)
        lengths = answer_sums(jnp.ones_like(micro["mask"], jnp.float32), micro)
        loss = bradley_terry(*answer_sums(scores, micro), margin=self._margin)
        return summed(loss, *lengths, context.weight)


def answer_weight(batch: PreferenceBatch) -> np.float32:
    """2 / answers of the step: 1 / pairs where none is alone."""
    return np.float32(2 / max(batch.num_answers, 1))


def _check_whole(batch: PreferenceBatch) -> None:
    if batch.num_answers != 2 * batch.num_pairs:
        raise DataError(
            f"{2 * batch.num_pairs - batch.num_answers} of {batch.num_pairs} preference pairs have "
            "one answer only, from which only the loss kto can learn. Set it, or give records with "
            "chosen and rejected."
        )


def answer_sums(values: Array, micro: dict[str, Array]) -> tuple[Array, Array]:
    """Sums over the tokens of each chosen and of each rejected answer, by the pair's place.

    values [rows, length] -> [max_pairs] twice; 0 where there is no such answer. What lies outside
    the mask may be anything.
    """
    num_places = max_pairs(values.shape[1], values.shape[0])
    slots = jnp.where(micro["mask"], 2 * micro["places"] + ~micro["is_chosen"], 2 * num_places)
    kept = jnp.where(micro["mask"], values, 0.0)
    sums = jax.ops.segment_sum(kept.reshape(-1), slots.reshape(-1), 2 * num_places + 1)
    both = sums[:-1].reshape(num_places, 2)
    return both[:, 0], both[:, 1]


def pair_rows(trainer: schema.TrainerSection, row_length: int, num_row_shards: int) -> int:
    """rows_per_micro_batch, but two at least: both answers of a pair may be as long as a row."""
    tokens = max(trainer.micro_batch_tokens, 2 * row_length)
    return rows_per_micro_batch(tokens, row_length, num_row_shards)


def _inputs(micro: dict[str, Array]) -> tuple[Array, Array, Array]:
    return micro["token_ids"], micro["positions"], micro["segment_ids"]


def _told_of(batch: PreferenceBatch, context: PairContext) -> dict[str, float]:
    told = {
        "preference/pairs": float(batch.num_pairs),
        "train/packing": float(np.count_nonzero(batch.segment_ids) / batch.segment_ids.size),
    }
    if context.baseline is not None:
        told["preference/kl_baseline"] = float(context.baseline)
    return told
