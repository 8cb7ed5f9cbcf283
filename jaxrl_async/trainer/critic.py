"""The critic: a decoder with a value head that learns the returns, in a separate update.

values(params, batch) ──> advantages and returns, by the caller ──> step.update(state, data)
"""

from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from jaxrl_async.mesh import NO_DEVICE_LOCK, DeviceGuard, batch_sharding, put, whole
from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.heads import token_values
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.critic_objective import CriticObjective
from jaxrl_async.trainer.pack import micro_batches
from jaxrl_async.trainer.update import Update
from jaxrl_async.types import FloatArray, PackedBatch


class ValuePass:
    """The compiled values of a packed batch. Owned by the trainer's thread."""

    def __init__(
        self, spec: ModelSpec, decoder: DecoderSettings, settings: LearningSettings
    ) -> None:
        self._spec, self._decoder, self._sizes = spec, decoder, settings.micro_sizes()
        self._rows = batch_sharding(settings.mesh, settings.rules)
        self._values = jax.jit(self._values_of, out_shardings=self._rows)

    def __call__(
        self, params: Params, batch: PackedBatch, device_lock: DeviceGuard = NO_DEVICE_LOCK
    ) -> tuple[FloatArray, FloatArray]:
        """Return the values of the states before and after tokens.

        [rows, length] float32 each, in the batch's order. The first: of the state before each
        token, 0 where a segment starts. The second: of the state after each segment's last token, 0
        elsewhere.
        """
        parts = []
        for micro in micro_batches(batch, self._sizes):
            arrays = (micro.token_ids, micro.positions, micro.segment_ids)
            with device_lock:
                values = self._values(params, *put(arrays, self._rows))
                parts.append([whole(a) for a in values])
        before, after = (
            np.concatenate(a)[: len(batch.token_ids)] for a in zip(*parts, strict=True)
        )
        return before, after

    def _values_of(self, params: Params, *arrays: Array) -> tuple[Array, Array]:
        return token_values(self._spec, params, TokenRows(*arrays), self._decoder)


class Critic(NamedTuple):
    """A critic's two programs."""

    step: Update[CriticObjective]
    values: ValuePass


def make_critic(
    spec: ModelSpec,
    settings: LearningSettings,
    *,
    learning_rate: float,
    total_steps: int,
    clip: float | None = 0.2,
) -> Critic:
    """Make the update and the values of a critic of this architecture.

    clip: bound of algorithms.value_loss. Raises ConfigError.
    """
    decoder = settings.decoder(spec)
    objective = CriticObjective(spec, decoder, clip)
    step = Update(objective, settings, learning_rate=learning_rate, total_steps=total_steps)
    return Critic(step, ValuePass(spec, decoder, settings))
