"""Training of a reward model on preference pairs: the Bradley-Terry loss of their scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jax import Array
from numpy.typing import NDArray

from jaxrl_async.algorithms.objective import Totals
from jaxrl_async.algorithms.preference_losses import bradley_terry, summed_pairs
from jaxrl_async.model.decoder import DecoderSettings, TokenRows, TokenStates, token_states
from jaxrl_async.model.heads import HEAD, final_scores, head_table
from jaxrl_async.model.lora import Lora, adapter_table, joined
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.trainer.learning_settings import LearningSettings, MicroSizes
from jaxrl_async.trainer.objectives.preference_objective import (
    PairContext,
    answer_lengths,
    answer_sums,
    answer_weight,
    check_whole,
    pair_measures,
)
from jaxrl_async.trainer.pack_pairs import PreferenceBatch, micro_batches_of
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import Frozen, Passes


@dataclass(frozen=True, slots=True)
class RewardObjective:
    """The mean loss of a PreferenceBatch's pairs, which must have both answers."""

    spec: ModelSpec
    decoder: DecoderSettings
    margin: float = 0.0  # by which the chosen score must exceed the other
    lora: Lora | None = None
    prefix: ClassVar[str] = "train"
    rows_are_independent: ClassVar[bool] = False

    @property
    def table(self) -> dict[str, Any]:
        whole = head_table(self.spec, "reward")
        return (
            whole
            if self.lora is None
            else {**adapter_table(self.spec, self.lora), HEAD: whole[HEAD]}
        )

    def micro_batches(
        self, data: PreferenceBatch, sizes: MicroSizes
    ) -> Sequence[dict[str, NDArray[Any]]]:
        return micro_batches_of(data, sizes.most)

    def context(self, data: PreferenceBatch) -> PairContext:
        check_whole(data)
        return PairContext(answer_weight(data))

    def loss(
        self, trainable: Params, frozen: Frozen, micro: dict[str, Array], context: PairContext
    ) -> tuple[Array, Totals]:
        scores, states = self._scored(trainable, frozen, TokenRows.of(micro))
        lengths = answer_lengths(micro)
        each = bradley_terry(*answer_sums(scores, micro), margin=self.margin)
        loss, totals = summed_pairs(each, *lengths, context.weight)
        return loss, totals._replace(load=states.load)

    def measures(
        self, trainable: Params, frozen: Frozen, micro: dict[str, Array], context: PairContext
    ) -> Totals:
        return self.loss(trainable, frozen, micro, context)[1]

    def probe(self, trainable: Params, frozen: Frozen, tokens: TokenRows) -> Array:
        return self._scored(trainable, frozen, tokens)[0]

    def _scored(
        self, trainable: Params, frozen: Frozen, tokens: TokenRows
    ) -> tuple[Array, TokenStates]:
        """Return the scores of each row's sequences, and the states that they are computed from."""
        params = joined(self.lora, frozen.base, trainable, frozen.noise)
        states = token_states(self.spec, params, tokens, self.decoder)
        return final_scores(states, params, tokens, self.decoder), states

    def report(self, data: PreferenceBatch, frozen: Frozen, passes: Passes) -> dict[str, float]:
        return pair_measures(data)


def reward_update(
    spec: ModelSpec,
    settings: LearningSettings,
    *,
    learning_rate: float,
    total_steps: int,
    margin: float = 0.0,
) -> Update[RewardObjective]:
    """Make the update of a reward model of this architecture. Raises ConfigError.

    margin: by which the chosen score must exceed the other.
    """
    objective = RewardObjective(spec, settings.decoder(spec), margin, settings.lora)
    return Update(objective, settings, learning_rate=learning_rate, total_steps=total_steps)
