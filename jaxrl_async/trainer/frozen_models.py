"""Models that a step reads and does not train: the reference and teachers.

Each may follow the policy: the reference and teachers by name as a moving average or as a copy
every so many steps, the only teacher as a copy.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_async.config.schema import FollowingTeacher, ReferenceSection, TeacherSection
from jaxrl_async.mesh import DEVICE, HOST, in_memory
from jaxrl_async.model.spec import Params
from jaxrl_async.trainer.optimizer import rounded_tree

EMA_SEED = 1
"""Seed of the random bits that round a moving reference in bfloat16."""


class FrozenModels:
    """The weights of the reference and of teachers. Owned by the trainer's thread."""

    def __init__(
        self,
        reference: Params | None,
        teacher: Params | None,
        *,
        moves: ReferenceSection,
        teaches: TeacherSection | None,
        offload_reference: bool = False,
        teachers: Mapping[str, Params] = MappingProxyType({}),
        follows: Mapping[str, FollowingTeacher] = MappingProxyType({}),
    ) -> None:
        """Begin with these weights, whole or an adapter; None: the run has no such model.

        moves, teaches: how the reference and the teacher follow the policy; None: no teacher.
        offload_reference: to host memory between two uses.
        teachers, follows: the teachers by name that are the policy, and how they follow it.
        """
        self.teachers, self._follows = dict(teachers), follows
        self._moves, self._teaches, self._offloads = moves, teaches, offload_reference
        self.reference, self.teacher = self._stored(reference), teacher
        self._follow = jax.jit(_moved_average, donate_argnums=(0,), static_argnums=(3,))

    @property
    def _teaches_itself(self) -> bool:
        """Whether the teacher is an older copy of the policy."""
        return self._teaches is not None and self._teaches.source == "self"

    def tree(self) -> dict[str, Params | None]:
        """Return the arrays that change from step to step; None: nothing does."""
        return {
            "reference": self.reference,
            "teacher": self.teacher if self._teaches_itself else None,
            "teachers": self.teachers or None,
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Continue from `tree`."""
        self.reference = tree.get("reference", self.reference)
        self.teacher = tree.get("teacher", self.teacher)
        self.teachers = dict(tree.get("teachers", self.teachers))

    def loaded_reference(self) -> Params:
        """Return the reference in device memory."""
        return in_memory(DEVICE, self.reference) if self._offloads else self.reference

    def follow(self, policy: Params, version: int) -> None:
        """Update the models that are due after the step that made version + 1.

        policy: the new weights; copied, since the next update donates them.
        """
        ema, every = self._moves.ema, self._moves.refresh_every
        if self.reference is not None and ema:
            average = self._follow(self.loaded_reference(), policy, np.int32(version), ema)
            self.reference = self._stored(average)
        if self.reference is not None and _is_due(version, every):
            self.reference = self._stored(copied(policy))
        every = 0 if self._teaches is None else self._teaches.refresh_every
        if self._teaches_itself and _is_due(version, every):
            self.teacher = copied(policy)
        for name, how in self._follows.items():
            if how.average is not None:
                now, at = self.teachers[name], np.int32(version)
                self.teachers[name] = self._follow(now, policy, at, how.average)
            elif how.every is not None and _is_due(version, how.every):
                self.teachers[name] = copied(policy)

    def _stored(self, reference: Params | None) -> Params | None:
        """Return the reference in the memory that holds it between two uses."""
        return in_memory(HOST, reference) if self._offloads else reference


def copied(params: Params) -> Params:
    """Return a copy on the same devices that no step donates."""
    return jax.tree.map(jnp.copy, params)


def _moved_average(reference: Params, params: Params, version: Array, ema: float) -> Params:
    """Return ema * reference + (1 - ema) * params.

    In bfloat16 rounding to the nearest would lose most of such a step: the result is rounded
    stochastically, which keeps the mean.
    """

    def mixed(old: Array, new: Array) -> Any:
        return ema * old.astype(jnp.float32) + (1 - ema) * new.astype(jnp.float32)

    mean = jax.tree.map(mixed, reference, params)
    if (dtype := jax.tree.leaves(reference)[0].dtype) == jnp.float32:
        return mean
    return rounded_tree(jax.random.fold_in(jax.random.key(EMA_SEED), version), mean, dtype)


def _is_due(version: int, every: int) -> bool:
    """Return whether the step that makes version + 1 ends a period."""
    return every > 0 and (version + 1) % every == 0
