"""The forward pass of the policy in its update, with its reference and teacher."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.algorithms.columns import COLUMNS, DeviceBatch
from jaxrl_async.algorithms.losses import TokenInputs
from jaxrl_async.later import Later
from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.divergence import (
    Divergence,
    FrozenPolicy,
    TokenDivergence,
    chunked_over_vocab,
    reverse_kl,
)
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.lora import Lora, joined
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.trainer.update_programs import Frozen

if TYPE_CHECKING:
    from jaxrl_async.trainer import distill
else:
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
    lora: Lora | None = None  # the trained adapter; None: all weights are trained

    def __call__(
        self, trainable: Params, frozen: Frozen, micro: DeviceBatch
    ) -> tuple[TokenInputs, TokenDivergence]:
        """Return the inputs of a loss, and the policy's pass that they are from.

        The policy runs once: its pass also computes the divergences of whole distributions.
        """
        frozen = self.whole(frozen)
        policy = (self.spec, joined(self.lora, frozen.base, trainable, frozen.noise))
        tokens = TokenRows.of(micro._asdict(), self._learnt(micro))
        if micro.teacher_ids is not None and micro.teacher_logprobs is not None:
            top = distill.TeacherTop(micro.teacher_ids, micro.teacher_logprobs)
            passed = distill.distill_rows(
                *policy, tokens, top, self.teacher_divergence, self.decoder
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

    @staticmethod
    def _learnt(micro: DeviceBatch) -> Array:
        """Return the tokens whose log-probs the loss reads, [rows, length] bool."""
        if micro.supervised_weights is None:
            return micro.mask
        return micro.mask | (micro.supervised_weights > 0)

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
        tokens = TokenRows.of(micro._asdict(), self._learnt(micro))
        tokens = tokens._replace(expert_ids=None)  # it uses its own router
        reference = token_logprobs(self.spec, frozen.reference, tokens, self.decoder)
        return x._replace(reference_logprobs=jax.lax.stop_gradient(reference.logprobs))
