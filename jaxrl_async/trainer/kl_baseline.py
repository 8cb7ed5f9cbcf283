"""KTO's baseline: the KL from the reference, estimated on answers to other prompts."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_async.algorithms.preference_losses import kl_baseline
from jaxrl_async.mesh import NO_DEVICE_LOCK, DeviceGuard, batch_sharding, put
from jaxrl_async.model.spec import Params
from jaxrl_async.trainer.objectives.preference_objective import PreferenceData, PreferenceObjective
from jaxrl_async.trainer.pack_pairs import micro_batches_of
from jaxrl_async.trainer.update import Update, is_queue_full
from jaxrl_async.trainer.update_programs import Frozen


class BaselinePass:
    """The compiled baseline of a preference update. Owned by the trainer's thread."""

    def __init__(self, step: Update[PreferenceObjective]) -> None:
        settings = step.settings
        self._objective, self._micro_rows = step.objective, step.micro_rows
        self._mesh, self._rows = settings.mesh, batch_sharding(settings.mesh, settings.rules)
        replicated = NamedSharding(settings.mesh, PartitionSpec())
        self._log_ratio_sum = jax.jit(self._log_ratio_of, out_shardings=replicated)

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        data: PreferenceData,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
    ) -> PreferenceData:
        """Return the data with the baseline of its mismatched pairs against the reference."""
        if data.mismatched is None or frozen.reference is None:
            return data
        total: Any = jnp.float32(0)
        for index, micro in enumerate(micro_batches_of(data.mismatched, self._micro_rows)):
            with device_lock:
                on_devices = put(micro, self._rows)
                total += self._log_ratio_sum(params, frozen, on_devices)
                if device_lock is not NO_DEVICE_LOCK or is_queue_full(self._mesh, index):
                    jax.block_until_ready(total)
        return data._replace(baseline=kl_baseline(total, data.mismatched.num_answers))

    def _log_ratio_of(self, trained: Params, frozen: Frozen, micro: dict[str, Array]) -> Array:
        """Sum the answers' log-ratios to the reference."""
        policy = self._objective.logprobs(trained, frozen, micro)
        ratio = policy - self._objective.logprobs(frozen.reference, frozen, micro)
        return jnp.sum(jnp.where(micro["mask"], ratio, 0.0))
