"""Maximum likelihood of given answers: supervised fine-tuning.

pack_pairs ──> micro-batches ──> cross entropy, a mean over the step's answer tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.algorithms.aggregate import any_in_sequence, first_tokens, token_mean
from jaxrl_async.algorithms.losses import TokenInputs
from jaxrl_async.algorithms.objective import Totals, supervised_loss
from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.logprobs import greedy_matches, token_logprobs
from jaxrl_async.model.lora import Lora, joined, trained_table
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.trainer.flops import packing_measures, train_flops
from jaxrl_async.trainer.learning_settings import LearningSettings, MicroSizes
from jaxrl_async.trainer.pack import micro_batches, split
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import Frozen, Passes
from jaxrl_async.types import PackedBatch

COLUMNS = ("token_ids", "positions", "segment_ids", "mask")
"""Columns of a PackedBatch that are sent to the devices, in addition to token weights."""
OF_IMAGES = ("image_begins", "embeddings")
"""Further columns of a batch with images."""


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """The mean cross entropy of a PackedBatch's trained tokens."""

    spec: ModelSpec
    decoder: DecoderSettings
    lora: Lora | None = None
    prefix: ClassVar[str] = "train"
    rows_are_independent: ClassVar[bool] = True

    @property
    def table(self) -> dict[str, Any]:
        return trained_table(self.spec, self.lora)

    def micro_batches(self, data: PackedBatch, sizes: MicroSizes) -> Sequence[dict[str, Any]]:
        weights = split(token_mean(data), sizes, 0.0)
        names = COLUMNS if data.image_begins is None else COLUMNS + OF_IMAGES
        return [
            {"weights": w, **{name: getattr(micro, name) for name in names}}
            for micro, w in zip(micro_batches(data, sizes), weights, strict=True)
        ]

    def context(self, data: PackedBatch) -> None:
        return None

    def loss(
        self, trainable: Params, frozen: Frozen, micro: dict[str, Array], context: None
    ) -> tuple[Array, Totals]:
        params = joined(self.lora, frozen.base, trainable, frozen.noise)
        rows = TokenRows.of(micro, micro["mask"])
        policy = token_logprobs(self.spec, params, rows, self.decoder)
        nothing = jnp.zeros_like(policy.logprobs)
        x = TokenInputs(
            policy_logprobs=policy.logprobs,
            behavior_logprobs=nothing,
            advantages=nothing,
            mask=micro["mask"],
            versions=jnp.zeros_like(micro["token_ids"]),
            entropy=jax.lax.stop_gradient(policy.entropy),
        )
        loss, totals = supervised_loss(x, micro["weights"])
        return loss, totals._replace(load=policy.load)

    def measures(
        self, trainable: Params, frozen: Frozen, micro: dict[str, Array], context: None
    ) -> Totals:
        """Add the accuracy of greedy decoding to the loss's measures.

        sft/accuracy: share of answers that match in every token. sft/token_accuracy: share of
        tokens that match, each given the correct ones before it.
        """
        _, totals = self.loss(trainable, frozen, micro, context)
        mask, segments = micro["mask"], micro["segment_ids"]
        forward = replace(self.decoder, remat="none")
        params = joined(self.lora, frozen.base, trainable)
        matches = greedy_matches(self.spec, params, TokenRows.of(micro), forward)
        ends = first_tokens(mask, segments)  # one token of each answer
        right = ends & ~any_in_sequence(~matches, mask, segments)
        means = {
            "sft/accuracy": (jnp.sum(right), jnp.sum(ends)),
            "sft/token_accuracy": (jnp.sum(matches & mask), jnp.sum(mask)),
        }
        return totals._replace(means=totals.means | means)

    def probe(self, trainable: Params, frozen: Frozen, tokens: TokenRows) -> Array:
        params = joined(self.lora, frozen.base, trainable)
        return token_logprobs(self.spec, params, tokens, self.decoder).logprobs

    def report(self, data: PackedBatch, frozen: Frozen, passes: Passes) -> dict[str, float]:
        packing = packing_measures(data, passes.rows, passes.number)
        flops = train_flops(self.spec, data, reference=False, lora=self.lora)
        return packing | {"train/flops": flops}


def supervised_update(
    spec: ModelSpec,
    settings: LearningSettings,
    *,
    learning_rate: float,
    total_steps: int,
) -> Update[SupervisedObjective]:
    """Make the update of a policy on given answers. Raises ConfigError."""
    return Update(
        SupervisedObjective(spec, settings.decoder(spec), settings.lora),
        settings,
        learning_rate=learning_rate,
        total_steps=total_steps,
    )
