"""The policy's objective: the loss of a step's packed tokens and their columns.

host    aggregate(batch) ──> weights ──> micro-batches
device  PolicyForward ──> TokenInputs ──> algorithms.objective.policy_loss
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_async.algorithms.aggregate import AggregateFn, aggregate
from jaxrl_async.algorithms.columns import COLUMNS, Columns, DeviceBatch, Source, names_of
from jaxrl_async.algorithms.losses import TokenInputs
from jaxrl_async.algorithms.objective import (
    SAME_FACTORS,
    Coefficients,
    Recipe,
    TaskFactors,
    Totals,
    completed,
    make_recipe,
    policy_loss,
    supervised_loss,
)
from jaxrl_async.config import schema
from jaxrl_async.later import Later
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
from jaxrl_async.model.lora import Lora, joined, trained_table
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.trainer.flops import packing_measures, train_flops
from jaxrl_async.trainer.learning_settings import LearningSettings, MicroSizes
from jaxrl_async.trainer.pack import micro_batches, split
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import Frozen, Passes
from jaxrl_async.types import BoolArray, FloatArray, PackedBatch

if TYPE_CHECKING:
    from jaxrl_async.algorithms import loss_components
    from jaxrl_async.trainer import distill
else:
    loss_components = Later("jaxrl_async.algorithms.loss_components")
    distill = Later("jaxrl_async.trainer.distill")

IN_LOSS = tuple(name for name in DeviceBatch._fields if COLUMNS[name].in_loss)
"""Columns of a micro-batch that a loss may read unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyForward:
    """Runs the policy on a micro-batch, with a reference and a teacher; inside jit."""

    spec: ModelSpec
    decoder: DecoderSettings  # its temperature is the sampler's
    teacher_spec: ModelSpec
    teacher_divergence: Divergence
    whole_kl: bool  # whether the KL to the reference is over the whole vocabulary
    has_entropy: bool  # whether the entropy carries a gradient
    # of each of the policy's tokens, 8 to a byte, whether a teacher's tokenizer has it not; b"":
    # these are not compared
    unmatched: bytes = b""
    unmatched_weight: float = 0.0  # of that comparison
    lora: Lora | None = None  # the trained adapter; None: all weights are trained

    def __call__(
        self, trainable: Params, frozen: Frozen, micro: DeviceBatch
    ) -> tuple[TokenInputs, TokenDivergence]:
        """Return the inputs of a loss, and the policy's pass that they are from.

        The policy runs once: its pass also computes the divergences of whole distributions.
        """
        frozen = self.whole(frozen)
        policy = (self.spec, joined(self.lora, frozen.base, trainable, frozen.noise))
        tokens = TokenRows.of(micro._asdict(), self._loss_mask(micro))
        if micro.teacher_ids is not None and micro.teacher_logprobs is not None:
            spans = None
            if micro.teacher_spans is not None and micro.teacher_span_logprobs is not None:
                spans = distill.TeacherSpans(micro.teacher_spans, micro.teacher_span_logprobs)
            top = distill.TeacherTop(
                micro.teacher_ids, micro.teacher_logprobs, micro.teacher_weights, spans
            )
            passed = distill.distill_rows(
                *policy, tokens, top, self.teacher_divergence, self.decoder, self._unmatched
            )
            x = self._inputs(passed, micro)._replace(teacher_divergence=passed.divergence)
        elif frozen.teacher is not None:
            teacher = FrozenPolicy(self.teacher_spec, frozen.teacher)
            measure = self.teacher_divergence
            passed = chunked_over_vocab(*policy, tokens, teacher, measure, self.decoder)
            x = self._inputs(passed, micro)._replace(teacher_divergence=passed.divergence)
        elif frozen.reference is not None and self.whole_kl:
            reference = FrozenPolicy(self.spec, frozen.reference)
            passed = chunked_over_vocab(*policy, tokens, reference, reverse_kl, self.decoder)
            x = self._inputs(passed, micro)._replace(reference_divergence=passed.divergence)
        else:
            alone = token_logprobs(*policy, tokens, self.decoder)
            nothing = jnp.zeros_like(alone.logprobs)
            passed = TokenDivergence(alone.logprobs, alone.entropy, nothing, *alone[2:])
            x = self._inputs(passed, micro)
        return self._compared(x, frozen, micro), passed

    @property
    def _unmatched(self) -> "distill.Unmatched | None":
        if not self.unmatched:
            return None
        bits = np.unpackbits(np.frombuffer(self.unmatched, np.uint8), count=self.spec.vocab)
        return distill.Unmatched(jnp.asarray(bits, bool), self.unmatched_weight)

    @staticmethod
    def _loss_mask(micro: DeviceBatch) -> Array:
        """Return the tokens whose log-probs the loss reads, [rows, length] bool."""
        mask = micro.mask
        if micro.supervised_weights is not None:
            mask |= micro.supervised_weights > 0
        if micro.component_weights is not None:
            mask |= jnp.any(micro.component_weights > 0, axis=-1)
        return mask

    def whole(self, frozen: Frozen) -> Frozen:
        """Return the frozen weights; adapters of reference and teacher are joined to the base."""
        if frozen.base is None:
            return frozen
        others = (frozen.reference, frozen.teacher)
        reference, teacher = (
            None if params is None else joined(self.lora, frozen.base, params) for params in others
        )
        return frozen._replace(reference=reference, teacher=teacher)

    def _inputs(self, passed: TokenDivergence, micro: DeviceBatch) -> TokenInputs:
        entropy = passed.entropy if self.has_entropy else jax.lax.stop_gradient(passed.entropy)
        columns = {name: getattr(micro, name) for name in IN_LOSS}
        return TokenInputs(policy_logprobs=passed.logprobs, entropy=entropy, **columns)

    def _compared(self, x: TokenInputs, frozen: Frozen, micro: DeviceBatch) -> TokenInputs:
        """Add the reference's log-probs, unless they are known or not needed."""
        known = micro.reference_logprobs is not None
        if known or frozen.reference is None or self.whole_kl:
            return x
        tokens = TokenRows.of(micro._asdict(), self._loss_mask(micro))
        tokens = tokens._replace(expert_ids=None)  # it uses its own router
        reference = token_logprobs(self.spec, frozen.reference, tokens, self.decoder)
        return x._replace(reference_logprobs=jax.lax.stop_gradient(reference.logprobs))


PACKED = tuple(name for name in names_of(Source.PACK) if COLUMNS[name].on_device)
"""Columns of a PackedBatch that are sent to the devices."""


class PolicyData(NamedTuple):
    """A policy's training data."""

    batch: PackedBatch
    columns: Columns | None = None  # in addition to the batch's
    version: int = 0  # of the trained weights, to distinguish fresh from stale tokens
    coefficients: Coefficients | None = None  # None: the algorithm's at the start of the run


class PolicyContext(NamedTuple):
    """The values that all micro-batches of an update share."""

    version: Any  # [] int32, of the trained weights
    coefficients: Coefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The recipe's loss of a PolicyData's trained tokens, with a reference and a teacher."""

    forward: PolicyForward
    recipe: Recipe
    aggregate: AggregateFn
    supervised_coefficient: float = 0.0  # of mixed-in demonstrations
    num_lags: int = 0  # lags whose divergence is reported
    factors: TaskFactors = SAME_FACTORS  # of terms of the loss, by task
    prefix: ClassVar[str] = "train"
    rows_are_independent: ClassVar[bool] = True

    @property
    def spec(self) -> ModelSpec:
        """The policy's architecture."""
        return self.forward.spec

    @property
    def table(self) -> dict[str, Any]:
        return trained_table(self.spec, self.forward.lora)

    # ---- host

    def weights(
        self, batch: PackedBatch, times: int = 1, columns: Columns | None = None
    ) -> Columns:
        """Return the columns of the tokens' weights in the loss; [rows, length, ...] each.

        Args:
            batch: the whole step.
            times: factor of all weights: the number of parts in which a step is trained. The mean
                of the parts' gradients is then the step's.
            columns: in addition to the batch's.
        """
        weights: Columns = {"weights": self.aggregate(batch)}
        if self.supervised_coefficient:
            weights["supervised_weights"] = supervised_weights(batch, self.supervised_coefficient)
        if parts := self.recipe.components:
            rewards = (columns or {}).get("rewards")
            weights["component_weights"] = loss_components.component_weights(
                parts, batch, rewards, self.aggregate
            )
        return {name: w * np.float32(times) for name, w in weights.items()}

    def micro_batches(self, data: PolicyData, sizes: MicroSizes) -> Sequence[DeviceBatch]:
        columns = data.columns or {}
        if "weights" not in columns:
            columns = columns | self.weights(data.batch, columns=columns)
        parts = {k: split(column, sizes, COLUMNS[k].fill) for k, column in columns.items()}
        return [
            DeviceBatch(
                **{name: getattr(micro, name) for name in PACKED},
                **{name: of_micro[index] for name, of_micro in parts.items()},
            )
            for index, micro in enumerate(micro_batches(data.batch, sizes))
        ]

    def context(self, data: PolicyData) -> PolicyContext:
        numbers = self.recipe.coefficients if data.coefficients is None else data.coefficients
        kl, entropy, losses = numbers
        own = tuple(np.float32(c) for c in losses)
        return PolicyContext(
            np.int32(data.version), Coefficients(np.float32(kl), np.float32(entropy), own)
        )

    def probe(self, trainable: Params, frozen: Frozen, tokens: TokenRows) -> Array:
        forward = self.forward
        params = joined(forward.lora, frozen.base, trainable)
        return token_logprobs(forward.spec, params, tokens, forward.decoder).logprobs

    def report(self, data: PolicyData, frozen: Frozen, passes: Passes) -> dict[str, float]:
        refers = frozen.reference is not None
        lora = self.forward.lora
        flops = train_flops(self.spec, data.batch, reference=refers, lora=lora)
        shares = self.forward.decoder.shares_prefixes
        packing = packing_measures(data.batch, passes.rows, passes.number, shares_prefixes=shares)
        return packing | {"train/flops": flops}

    # ---- inside jit

    def loss(
        self, trainable: Params, frozen: Frozen, micro: DeviceBatch, context: PolicyContext
    ) -> tuple[Array, Totals]:
        x, passed = self.forward(trainable, frozen, micro)
        loss, totals = policy_loss(
            self.recipe,
            x,
            micro.weights,
            context.version,
            context.coefficients,
            component_weights=micro.component_weights,
            num_lags=self.num_lags,
            factors=self._factors(micro),
        )
        totals = totals._replace(load=passed.load)
        if micro.expert_ids is not None and passed.changed is not None:
            layers = len(self.spec.routed_layers)
            routing = routing_measures(micro.expert_ids, micro.segment_ids, passed.changed, layers)
            totals.means.update(routing)
        if micro.supervised_weights is None:
            return loss, totals
        given = x._replace(mask=micro.supervised_weights > 0)
        part, of_part = supervised_loss(given, micro.supervised_weights)
        count = jnp.sum(micro.supervised_weights)
        totals.means["supervised/loss"] = (of_part.sums["train/loss"], count)
        totals.sums["supervised/tokens"] = of_part.sums["train/tokens"]
        totals.sums["train/loss"] += of_part.sums["train/loss"]
        return loss + part, totals

    def component_loss(
        self,
        trainable: Params,
        frozen: Frozen,
        micro: DeviceBatch,
        context: PolicyContext,
        index: int,
    ) -> Array:
        """Return a micro-batch's share of one loss component's term, with its coefficient.

        index: of the component.
        """
        assert micro.component_weights is not None, "the recipe has components"
        x, _ = self.forward(trainable, frozen, micro)
        one = slice(index, index + 1)
        return jnp.float32(
            loss_components.component_terms(
                self.recipe.components[one],
                completed(x, context.version),
                micro.component_weights[..., one],
                context.coefficients.losses[one],
            ).loss
        )

    def _factors(self, micro: DeviceBatch) -> TaskFactors:
        """Return the factors of each token, [rows, length]; those that are None stay so."""
        task_ids = micro.task_ids
        if task_ids is None:
            return SAME_FACTORS
        return TaskFactors(
            *(None if f is None else jnp.asarray(f, jnp.float32)[task_ids] for f in self.factors)
        )

    def measures(
        self, trainable: Params, frozen: Frozen, micro: DeviceBatch, context: PolicyContext
    ) -> Totals:
        return self.loss(trainable, frozen, micro, context)[1]


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
    factors: TaskFactors = SAME_FACTORS,
    tasks: Sequence[str] = (),
    unmatched: BoolArray | None = None,
) -> Update[PolicyObjective]:
    """Make the update of a policy by the algorithm.

    Args:
        temperature: the sampler's; 0 counts as 1.
        teacher_spec: None: the policy's.
        num_lags: lags whose divergence is reported.
        factors: of terms of the loss, by the index of a task.
        tasks: names of the run's several tasks.
        unmatched: [vocab] tokens that a teacher's tokenizer has not; None: these are not compared.

    Raises:
        ConfigError: the algorithm names an unknown function or argument, or the attention cannot
            run on the mesh.
    """
    section = teacher or schema.TeacherSection(source="self")
    recipe = make_recipe(algorithm, teacher, tasks)
    forward = PolicyForward(
        spec=spec,
        decoder=settings.decoder(spec, temperature),
        teacher_spec=teacher_spec or spec,
        teacher_divergence=divergence_of(section.kind, section.beta),
        whole_kl=recipe.whole_kl,
        has_entropy=recipe.sees_entropy,
        unmatched=b"" if unmatched is None else np.packbits(unmatched).tobytes(),
        unmatched_weight=section.unmatched_weight,
        lora=settings.lora,
    )
    objective = PolicyObjective(
        forward=forward,
        recipe=recipe,
        aggregate=aggregate.resolve(algorithm.aggregate),
        supervised_coefficient=algorithm.supervised_coefficient,
        num_lags=num_lags,
        factors=factors,
    )
    return Update(
        objective,
        settings,
        learning_rate=algorithm.learning_rate,
        total_steps=total_steps,
    )


def routing_measures(
    expert_ids: Array, segment_ids: Array, changed: Array, layers: int
) -> dict[str, tuple[Array, Array]]:
    """Count the tokens with known experts, and the tokens that the router would send elsewhere.

    changed: as in decoder.TokenStates. layers: number of layers with experts.
    """
    real = segment_ids > 0
    known = real & jnp.all(expert_ids[:, :, 0] >= 0, axis=-1)
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
