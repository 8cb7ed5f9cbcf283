"""Preference losses of a policy, such as DPO.

    pack_preference ──> micro-batches of whole pairs ──> sums over answers ──> loss per pair

Denominators are of the whole step: packing and micro-batches only change the order of a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxrl_async.algorithms.objective import Totals
from jaxrl_async.algorithms.preference_losses import (
    PairInputs,
    PreferenceLossFn,
    needs_baseline,
    preference_loss,
    summed_pairs,
)
from jaxrl_async.config import schema
from jaxrl_async.errors import DataError
from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.logprobs import TokenLogprobs, token_logprobs
from jaxrl_async.model.lora import Lora, joined, trained_table
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.trainer.learning_settings import LearningSettings, MicroSizes
from jaxrl_async.trainer.pack_pairs import PreferenceBatch, max_pairs, micro_batches_of
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import Frozen, Passes


class PreferenceData(NamedTuple):
    """Training data of a preference loss."""

    batch: PreferenceBatch
    mismatched: PreferenceBatch | None = None  # pairs that estimate KTO's baseline
    baseline: Array | None = None  # [] float32, KTO's, from trainer.kl_baseline


class PairContext(NamedTuple):
    """The values that all micro-batches of a step share."""

    weight: Any  # [] float32, 2 / answers of the step
    baseline: Array | None = None  # [] float32, for kto


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """The mean preference loss of a PreferenceData's pairs, with a frozen reference."""

    spec: ModelSpec
    decoder: DecoderSettings
    loss_of: PreferenceLossFn
    lora: Lora | None = None
    prefix: ClassVar[str] = "train"
    rows_are_independent: ClassVar[bool] = False

    @property
    def table(self) -> dict[str, Any]:
        return trained_table(self.spec, self.lora)

    def micro_batches(
        self, data: PreferenceData, sizes: MicroSizes
    ) -> Sequence[dict[str, NDArray[Any]]]:
        return micro_batches_of(data.batch, sizes.most)

    def context(self, data: PreferenceData) -> PairContext:
        if not needs_baseline(self.loss_of):
            check_whole(data.batch)
        return PairContext(answer_weight(data.batch), data.baseline)

    def loss(
        self, trainable: Params, frozen: Frozen, micro: dict[str, Array], context: PairContext
    ) -> tuple[Array, Totals]:
        policy = self._passed(trainable, frozen, micro)
        chosen, rejected = answer_sums(policy.logprobs, micro)
        lengths = answer_lengths(micro)
        x = PairInputs(chosen, rejected, *lengths, baseline=context.baseline)
        if frozen.reference is not None:
            still = frozen._replace(noise=None)
            logprobs = jax.lax.stop_gradient(self.logprobs(frozen.reference, still, micro))
            of_reference = answer_sums(logprobs, micro)
            x = x._replace(reference_chosen=of_reference[0], reference_rejected=of_reference[1])
        loss, totals = summed_pairs(self.loss_of(x), *lengths, context.weight)
        return loss, totals._replace(load=policy.load)

    def measures(
        self, trainable: Params, frozen: Frozen, micro: dict[str, Array], context: PairContext
    ) -> Totals:
        return self.loss(trainable, frozen, micro, context)[1]

    def probe(self, trainable: Params, frozen: Frozen, tokens: TokenRows) -> Array:
        params = joined(self.lora, frozen.base, trainable)
        return token_logprobs(self.spec, params, tokens, self.decoder).logprobs

    def report(self, data: PreferenceData, frozen: Frozen, passes: Passes) -> dict[str, float]:
        baseline = data.baseline
        known = {} if baseline is None else {"preference/kl_baseline": float(baseline)}
        return pair_measures(data.batch) | known

    def logprobs(self, part: Params, frozen: Frozen, micro: dict[str, Array]) -> Array:
        """Return the log-probs of a micro-batch's tokens under an adapter or whole weights; inside
        jit."""
        return self._passed(part, frozen, micro).logprobs

    def _passed(self, part: Params, frozen: Frozen, micro: dict[str, Array]) -> TokenLogprobs:
        params = joined(self.lora, frozen.base, part, frozen.noise)
        rows = TokenRows.of(micro, micro["mask"])
        return token_logprobs(self.spec, params, rows, self.decoder)


def preference_update(
    spec: ModelSpec,
    settings: LearningSettings,
    loss: schema.Choice,
    *,
    learning_rate: float,
    total_steps: int,
) -> Update[PreferenceObjective]:
    """Make the update of a policy with a registered preference loss. Raises ConfigError."""
    objective = PreferenceObjective(
        spec, settings.decoder(spec), preference_loss.resolve(loss), settings.lora
    )
    return Update(objective, settings, learning_rate=learning_rate, total_steps=total_steps)


# ---- shared with reward models


def answer_weight(batch: PreferenceBatch) -> np.float32:
    """Return 2 / answers of the step: 1 / pairs if every pair has both answers."""
    return np.float32(2 / max(batch.num_answers, 1))


def answer_sums(values: Array, micro: dict[str, Array]) -> tuple[Array, Array]:
    """Sum over the tokens of each chosen and each rejected answer, by the pair's slot.

    values [rows, length] -> [max_pairs] twice; 0 if an answer is missing. Values outside the mask
    are ignored.
    """
    num_slots = max_pairs(values.shape[1], values.shape[0])
    cells = jnp.where(micro["mask"], 2 * micro["slots"] + ~micro["is_chosen"], 2 * num_slots)
    masked = jnp.where(micro["mask"], values, 0.0)
    sums = jax.ops.segment_sum(masked.reshape(-1), cells.reshape(-1), 2 * num_slots + 1)
    both = sums[:-1].reshape(num_slots, 2)
    return both[:, 0], both[:, 1]


def answer_lengths(micro: dict[str, Array]) -> tuple[Array, Array]:
    """Count the tokens of each chosen and each rejected answer, in the order of `answer_sums`."""
    return answer_sums(jnp.ones_like(micro["mask"], jnp.float32), micro)


def check_whole(batch: PreferenceBatch) -> None:
    """Raise DataError if a pair has only one answer."""
    if batch.num_answers != 2 * batch.num_pairs:
        raise DataError(
            f"{2 * batch.num_pairs - batch.num_answers} of {batch.num_pairs} preference pairs have "
            "one answer only, from which only the loss kto can learn. Set it, or give records with "
            "chosen and rejected."
        )


def pair_measures(batch: PreferenceBatch) -> dict[str, float]:
    """Report the number of pairs, and the share of tokens that are not padding."""
    return {
        "preference/pairs": float(batch.num_pairs),
        "train/packing": float(np.count_nonzero(batch.segment_ids) / batch.segment_ids.size),
    }
