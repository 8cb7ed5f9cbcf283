"""The policy's objective: a step's packed tokens, and what else is known of them.

host    aggregate(batch) ──> weights ──> micro-batches
device  one pass over the policy ──> TokenInputs ──> algorithms.objective.policy_loss
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_async.algorithms.aggregate import AggregateFn, aggregate
from jaxrl_async.algorithms.columns import COLUMNS, Columns, ColumnSource, DeviceBatch, names_of
from jaxrl_async.algorithms.losses import TokenInputs
from jaxrl_async.algorithms.objective import (
    Coefficients,
    Recipe,
    Totals,
    make_recipe,
    policy_loss,
    supervised_loss,
)
from jaxrl_async.config import schema
from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.divergence import (
    Divergence,
    FrozenPolicy,
    TokenDivergence,
    chunked_over_vocab,
    divergence_of,
    reverse_kl,
)
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.trainer.distill import TeacherTop, distill_rows
from jaxrl_async.trainer.flops import packing_measures, train_flops
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.pack import micro_batches, split
from jaxrl_async.trainer.update import Frozen, Params, Passes, Update
from jaxrl_async.types import FloatArray, PackedBatch

PACKED = tuple(name for name in names_of(ColumnSource.PACK) if COLUMNS[name].on_device)
"""Columns of a PackedBatch that travel to the devices."""
IN_LOSS = tuple(name for name in DeviceBatch._fields if COLUMNS[name].in_loss)
"""Columns of a micro-batch that a loss may look at as they are."""


class PolicyData(NamedTuple):
    """What a policy learns from."""

    batch: PackedBatch
    columns: Columns | None = None  # None: nothing is known beside the batch
    version: int = 0  # of the weights that learn, to tell fresh tokens from stale ones
    coefficients: Coefficients | None = None  # None: the algorithm's at the start of the run


class PolicyContext(NamedTuple):
    """What holds for all micro-batches of an update."""

    version: Any  # [] int32, of the weights that learn
    coefficients: Coefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The recipe's loss of a PolicyData's learnt tokens, beside a reference and a teacher."""

    spec: ModelSpec
    decoder: DecoderSettings  # its temperature is the sampler's
    recipe: Recipe
    aggregate: AggregateFn
    teacher_spec: ModelSpec
    teacher_divergence: Divergence
    supervised_coefficient: float = 0.0  # of worked answers mixed in
    num_lags: int = 0  # lags whose divergence is reported
    prefix: ClassVar[str] = "train"
    rows_are_independent: ClassVar[bool] = True

    @property
    def table(self) -> dict[str, Any]:
        return weight_table(self.spec)

    # ---- host

    def weights(self, batch: PackedBatch, times: int = 1) -> Columns:
        """Return the columns that say what each token counts in the loss; [rows, length] each.

        times: number of parts of a step that are learnt one after the other, so that the mean of
        their gradients is the step's.
        """
        weights: Columns = {"weights": self.aggregate(batch)}
        if self.supervised_coefficient:
            weights["supervised_weights"] = supervised_weights(batch, self.supervised_coefficient)
        return {name: w * np.float32(times) for name, w in weights.items()}

    def micro_batches(self, data: PolicyData, rows: int) -> Sequence[DeviceBatch]:
        columns = data.columns or {}
        if "weights" not in columns:
            columns = columns | self.weights(data.batch)
        parts = {k: split(column, rows, COLUMNS[k].fill) for k, column in columns.items()}
        return [
            DeviceBatch(
                **{name: getattr(micro, name) for name in PACKED},
                **{name: of_micro[index] for name, of_micro in parts.items()},  # type: ignore[arg-type]
            )
            for index, micro in enumerate(micro_batches(data.batch, rows))
        ]

    def context(self, data: PolicyData) -> PolicyContext:
        numbers = self.recipe.coefficients if data.coefficients is None else data.coefficients
        return PolicyContext(
            np.int32(data.version), Coefficients(*(np.float32(c) for c in numbers))
        )

    def report(self, data: PolicyData, frozen: Frozen, passes: Passes) -> dict[str, float]:
        refers = frozen.reference is not None
        flops = train_flops(self.spec, data.batch, reference=refers)
        return packing_measures(data.batch, passes.rows, passes.number) | {"train/flops": flops}

    # ---- inside jit

    def loss(
        self, trainable: Params, frozen: Frozen, micro: DeviceBatch, context: PolicyContext
    ) -> tuple[Array, Totals]:
        x, changed = self._inputs(trainable, frozen, micro)
        x = self._compared(x, frozen, micro)
        loss, totals = policy_loss(
            self.recipe,
            x,
            micro.weights,
            context.version,
            context.coefficients,
            num_lags=self.num_lags,
        )
        if micro.expert_ids is not None and changed is not None:
            totals.means.update(routing_measures(micro.expert_ids, micro.segment_ids, changed))
        if micro.supervised_weights is None:
            return loss, totals
        given = x._replace(mask=micro.supervised_weights > 0)
        part, of_part = supervised_loss(given, micro.supervised_weights)
        count = jnp.sum(micro.supervised_weights)
        totals.means["supervised/loss"] = (of_part.sums["train/loss"], count)
        totals.sums["supervised/tokens"] = of_part.sums["train/tokens"]
        totals.sums["train/loss"] += of_part.sums["train/loss"]
        return loss + part, totals

    def measures(
        self, trainable: Params, frozen: Frozen, micro: DeviceBatch, context: PolicyContext
    ) -> Totals:
        return self.loss(trainable, frozen, micro, context)[1]

    def _inputs(
        self, trainable: Params, frozen: Frozen, micro: DeviceBatch
    ) -> tuple[TokenInputs, Array | None]:
        """Run the policy once, with the divergence that needs whole distributions.

        And, if experts are replayed, count the layers that would have sent each token elsewhere.
        """
        policy, tokens = (self.spec, trainable), rows_of_batch(micro)
        has_entropy, measure = self.recipe.has_entropy, self.teacher_divergence
        if micro.teacher_ids is not None and micro.teacher_logprobs is not None:
            top = TeacherTop(micro.teacher_ids, micro.teacher_logprobs)
            passed = distill_rows(*policy, tokens, top, measure, self.decoder)
            return inputs_of(passed, micro, has_entropy, teacher=True), passed.changed
        if frozen.teacher is not None:
            other = FrozenPolicy(self.teacher_spec, frozen.teacher)
            passed = chunked_over_vocab(*policy, tokens, other, measure, self.decoder)
            return inputs_of(passed, micro, has_entropy, teacher=True), passed.changed
        if frozen.reference is not None and self.recipe.whole_kl:
            other = FrozenPolicy(self.spec, frozen.reference)
            passed = chunked_over_vocab(*policy, tokens, other, reverse_kl, self.decoder)
            x = inputs_of(passed, micro, has_entropy)
            return x._replace(reference_divergence=passed.divergence), passed.changed
        alone = token_logprobs(*policy, tokens, self.decoder)
        nothing = jnp.zeros_like(alone.logprobs)
        passed = TokenDivergence(alone.logprobs, alone.entropy, nothing, alone.changed)
        return inputs_of(passed, micro, has_entropy), passed.changed

    def _compared(self, x: TokenInputs, frozen: Frozen, micro: DeviceBatch) -> TokenInputs:
        """Add the reference's log-probs, if they are to be taken here."""
        known = micro.reference_logprobs is not None
        if known or frozen.reference is None or self.recipe.whole_kl:
            return x
        tokens = rows_of_batch(micro)._replace(expert_ids=None)  # it chooses for itself
        reference = token_logprobs(self.spec, frozen.reference, tokens, self.decoder)
        return x._replace(reference_logprobs=jax.lax.stop_gradient(reference.logprobs))


def policy_update(
    spec: ModelSpec,
    settings: LearningSettings,
    algorithm: schema.AlgorithmSection,
    *,
    total_steps: int,
    temperature: float = 1.0,
    teacher: schema.TeacherSection | None = None,
    teacher_spec: ModelSpec | None = None,
    num_lags: int = 0,
) -> Update[PolicyObjective]:
    """Make the update of a policy by the algorithm.

    Args:
        temperature: the sampler's; 0 counts as 1.
        teacher_spec: None: the policy's.
        num_lags: lags whose divergence is reported.

    Raises:
        ConfigError: the algorithm names an unknown function or argument, or the attention cannot
            run on the mesh.
    """
    section = teacher or schema.TeacherSection()
    objective = PolicyObjective(
        spec=spec,
        decoder=settings.decoder(spec, temperature),
        recipe=make_recipe(algorithm, teacher),
        aggregate=aggregate.resolve(algorithm.aggregate),
        teacher_spec=teacher_spec or spec,
        teacher_divergence=divergence_of(section.kind, section.beta),
        supervised_coefficient=algorithm.supervised_coefficient,
        num_lags=num_lags,
    )
    return Update(
        objective, settings, learning_rate=algorithm.learning_rate, total_steps=total_steps
    )


def rows_of_batch(micro: DeviceBatch) -> TokenRows:
    """Return what a decoder reads of a micro-batch."""
    return TokenRows(
        micro.token_ids, micro.positions, micro.segment_ids, micro.kept, micro.expert_ids
    )


def inputs_of(
    passed: TokenDivergence, micro: DeviceBatch, has_entropy: bool, *, teacher: bool = False
) -> TokenInputs:
    """Put together what a loss may look at. teacher: the divergence is the teacher's."""
    return TokenInputs(
        policy_logprobs=passed.logprobs,
        entropy=passed.entropy if has_entropy else jax.lax.stop_gradient(passed.entropy),
        teacher_divergence=passed.divergence if teacher else None,
        **{name: getattr(micro, name) for name in IN_LOSS},
    )


def routing_measures(
    expert_ids: Array, segment_ids: Array, changed: Array
) -> dict[str, tuple[Array, Array]]:
    """Count the tokens whose experts are known, and those that the router would send elsewhere.

    changed: as in decoder.TokenStates.
    """
    real = segment_ids > 0
    known = real & jnp.all(expert_ids[:, :, 0] >= 0, axis=-1)
    layers = expert_ids.shape[2]
    count = jnp.sum(known)
    return {
        "routing/replayed_share": (count, jnp.sum(real)),
        "routing/changed_share": (jnp.sum(jnp.where(known, changed, 0)), count * layers),
        "routing/changed_token_share": (jnp.sum(known & (changed > 0)), count),
    }


def supervised_weights(batch: PackedBatch, coefficient: float) -> FloatArray:
    """Return coefficient / number of supervised tokens on each of them; [rows, length] float32."""
    count = max(int(batch.supervised.sum()), 1)
    return np.where(batch.supervised, coefficient / count, 0.0).astype(np.float32)
