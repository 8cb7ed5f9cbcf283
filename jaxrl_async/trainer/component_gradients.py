"""Norms of the gradients of loss components (algorithm.losses.NAME.gradient_every).

    the step's micro-batches ──backward pass of one term──> its gradient, summed ──> its norm

An update has the gradient of all terms together. Here each term has one of its own, with its
coefficient, of the whole step at the weights before it, without an adapter's dropout.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_async.algorithms.columns import DeviceBatch
from jaxrl_async.config.algorithm_section import LossSection
from jaxrl_async.errors import is_out_of_memory
from jaxrl_async.mesh import DeviceGuard
from jaxrl_async.model.spec import Params
from jaxrl_async.trainer.objectives.policy_objective import (
    PolicyContext,
    PolicyData,
    PolicyObjective,
)
from jaxrl_async.trainer.update import Update, check_compiler_options
from jaxrl_async.trainer.update_programs import Frozen

log = logging.getLogger(__name__)


class ComponentGradients:
    """Measures the components that ask for it. Owned by the trainer's thread."""

    def __init__(
        self, update: Update[PolicyObjective], sections: Mapping[str, LossSection]
    ) -> None:
        """Declare the programs; XLA compiles one for each component at its first measurement.

        Args:
            update: of the policy.
            sections: all components of its recipe, by name, in order.
        """
        self._update = update
        self._every = {
            name: (index, one.gradient_every)
            for index, (name, one) in enumerate(sections.items())
            if one.gradient_every
        }
        of_params = update.programs.state_shardings.params
        self._zeros = jax.jit(
            lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            out_shardings=of_params,
        )
        self._add = jax.jit(
            self._added,
            static_argnums=(5,),
            donate_argnums=(1,),
            out_shardings=of_params,
            compiler_options=dict(update.settings.trainer.compiler_options) or None,
        )
        self._norm = jax.jit(optax.tree.norm)

    def norms(
        self,
        version: int,
        params: Params,
        data: PolicyData,
        frozen: Frozen,
        device_lock: DeviceGuard,
    ) -> dict[str, float]:
        """Return the norms that are due in the step that makes version + 1.

        If memory runs out, none: the step continues, with a warning.

        Args:
            version: of the weights.
            params: the trainable weights.
            data: the whole step.
            frozen: as for the step's updates.
            device_lock: held during each program, if a sampler shares the devices.

        Raises ConfigError if the compiler does not know one of trainer.compiler_options.
        """
        due = {name: i for name, (i, every) in self._every.items() if (version + 1) % every == 0}
        if not due:
            return {}
        objective = self._update.objective
        context = objective.context(data)
        micros = objective.micro_batches(data, self._update.sizes)
        try:
            return {
                f"loss_grad_norm/{name}": self._of(
                    index, params, micros, context, frozen, device_lock
                )
                for name, index in due.items()
            }
        except jax.errors.JaxRuntimeError as error:
            check_compiler_options(error)
            if not is_out_of_memory(error):
                raise
            log.warning(
                "the gradients of loss components are not measured in this step, as the trainer's "
                "devices are out of memory. Lower trainer.micro_batch_tokens, or leave out "
                "algorithm.losses.NAME.gradient_every."
            )
            return {}

    def _of(
        self,
        index: int,
        params: Params,
        micros: Sequence[DeviceBatch],
        context: PolicyContext,
        frozen: Frozen,
        device_lock: DeviceGuard,
    ) -> float:
        """Return the norm of one component's gradient, summed over the step's micro-batches."""
        with device_lock:
            grads = self._zeros(params)
        for micro in micros:
            with device_lock:
                on_device = self._update.programs.put(micro)
                grads = self._add(params, grads, on_device, context, frozen, index)
                jax.block_until_ready(grads)
        with device_lock:
            return float(np.asarray(self._norm(grads)))

    def _added(
        self,
        trainable: Params,
        grads: Params,
        micro: Any,
        context: Any,
        frozen: Frozen,
        index: int,
    ) -> Params:
        """Add a micro-batch's gradient of one component; inside jit."""
        more = jax.grad(self._update.objective.component_loss)(
            trainable, frozen, micro, context, index
        )
        return jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grads, more)
