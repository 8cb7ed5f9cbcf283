"""The shell of an update, whatever is learnt: gradients summed over micro-batches, then one step.

    device    accumulate(params, sum, micro, context) -> sum, totals     for each micro-batch
              apply(state, sum) -> state                                 once

Two programs, compiled once each. The state is donated, and so is the sum: the state only by
`apply`, which begins once every gradient is there. Where memory does not suffice before that, the
update begins again with half the rows in a micro-batch, and stays with them.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.algorithms.objective import Totals, summarize
from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError, TrainingError, is_out_of_memory
from jaxrl_async.mesh import (
    HOST,
    NO_DEVICE_LOCK,
    Rules,
    batch_sharding,
    in_memory,
    num_shards,
    put,
    shapes_on,
    shardings,
)
from jaxrl_async.model.spec import Weight
from jaxrl_async.trainer.optimizer import (
    make_optimizer,
    make_schedule,
    needs_masters,
    rounded_tree,
    state_shardings,
)

log = logging.getLogger(__name__)

Params = Any  # nested dict of arrays in the tree of a table of weights

ROUNDING_SEED = 0
"""Of the random bits of trainer.rounding=stochastic; the number of the update is folded in."""
MAX_QUEUED = 4
"""Programs in flight on forced-host devices, whose collectives can deadlock behind a long queue."""


class TrainState(NamedTuple):
    """All that an update changes. Donated: the state given to `update` is gone afterwards."""

    params: Params
    opt_state: Any
    step: Array  # [] int32, updates made; skipped ones do not count


class WithMasters(NamedTuple):
    """An optimizer's state where the weights are kept in another type than they learn in."""

    optimizer: Any
    masters: Params  # float32; the weights are these, rounded to the nearest


class GradSum(NamedTuple):
    """Gradients and loss so far, over micro-batches."""

    grads: Params  # float32
    loss: Array  # [] float32


Objective = Callable[[Params, Any, Any], tuple[Array, Totals]]
"""(params, micro-batch, context) -> its share of the loss, and of the report."""


class Updater:
    """Compiled update of one table of weights. Owned by the trainer's thread."""

    def __init__(
        self,
        table: Any,
        mesh: Mesh,
        rules: Rules,
        objective: Objective,
        *,
        trainer: schema.TrainerSection,
        learning_rate: float,
        total_steps: int,
        param_dtype: Any = jnp.float32,
        whole_rows: bool = True,
    ) -> None:
        """table: of Weights, which says shapes, shardings and what decays. whole_rows: a row of a
        micro-batch stands for itself, so that one that is too large may be halved."""
        self._objective, self._param_dtype = objective, param_dtype
        self._whole_rows, self._halvings = whole_rows, 0
        self._schedule = make_schedule(
            trainer, learning_rate=learning_rate, total_steps=total_steps
        )
        self._optimizer = make_optimizer(trainer, decayed=decayed(table))
        self._masters = needs_masters(trainer, param_dtype)
        narrow = jnp.dtype(param_dtype) != jnp.float32
        self._stochastic = narrow and trainer.rounding == "stochastic"
        self._compiler_options = dict(trainer.compiler_options) or None
        self._bounded = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self.replicated: Any = NamedSharding(mesh, PartitionSpec())
        self.batch_sharding = batch_sharding(mesh, rules)
        self.num_row_shards = num_shards(mesh, rules, "batch")
        self._compile(table, shardings(table, mesh, rules), "optimizer" in trainer.offload)

    def _compile(self, table: Any, of_params: Any, offloads: bool) -> None:
        """Declare the jitted programs; XLA compiles each at its first call.

        offloads: AdamW's moments, and the masters, live in the host's memory, and are on the device
        in `apply` only.
        """
        shapes = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32),
            table,
            is_leaf=lambda w: isinstance(w, Weight),
        )
        lying = in_memory(HOST, of_params) if offloads else of_params
        opt, in_use = (self._opt_shardings(shapes, of_moments) for of_moments in (lying, of_params))
        self._opt_in_use = in_use if offloads else None
        self.state_shardings = TrainState(of_params, opt, self.replicated)
        sums = GradSum(of_params, self.replicated)
        self._copy = jax.jit(self._copy_params, out_shardings=of_params)
        self._init_opt = jax.jit(self._fresh_opt, out_shardings=opt)
        self._zeros = jax.jit(lambda: _zeros_of(shapes), out_shardings=sums)
        jit = partial(jax.jit, compiler_options=self._compiler_options)
        self._accumulate = jit(
            self._accumulate_one, donate_argnums=(1,), out_shardings=(sums, self.replicated)
        )
        self._apply = jit(
            self._apply_sum,
            donate_argnums=(0,),
            out_shardings=(self.state_shardings, self.replicated),
        )
        self._measure = jax.jit(
            lambda *args: self._objective(*args)[1], out_shardings=self.replicated
        )

    def _opt_shardings(self, shapes: Any, of_moments: Any) -> Any:
        found = state_shardings(self._optimizer, shapes, of_moments, self.replicated)
        return WithMasters(found, of_moments) if self._masters else found

    def init(self, params: Params) -> TrainState:
        """A fresh state around a copy of params (any placement): the caller's arrays stay valid."""
        given = jax.device_put(params, self.state_shardings.params)
        step = jax.device_put(jnp.zeros((), jnp.int32), self.replicated)
        return TrainState(self._copy(given), self._init_opt(given), step)

    def update(
        self,
        state: TrainState,
        micros: Sequence[Any],
        context: Any,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
        at: float | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on all micro-batches (host arrays [rows, ...]); the state is donated.

        device_lock: held for each program, until it has run, where a sampler shares the devices.
        at: place on the learning rate's course, in updates; null: as many as were made.
        A non-finite loss or gradient leaves the state as it was, and train/skipped is 1. Raises
        TrainingError where memory does not suffice with one row on each device; the state is then
        as it was; ConfigError for an option that the compiler does not know.
        """
        retries = 0
        while True:
            parts = _halved(micros, self._halvings, self.num_row_shards)
            try:
                sums, totals = self._gradients(state.params, parts, context, device_lock)
                break
            except jax.errors.JaxRuntimeError as error:
                if "No such compile option" in str(error):
                    raise ConfigError(
                        f"trainer.compiler_options: {str(error).partition(': ')[2]}, says the "
                        "compiler of the trainer's devices. Leave it out, or correct its name."
                    ) from error
                if not is_out_of_memory(error):
                    raise
                self._halve(len(jax.tree.leaves(parts[0])[0]), error)
            retries += 1
        with device_lock:
            state, applied = self._apply(state, sums, None if at is None else np.float32(at))
            told, host_applied = jax.device_get((totals, applied))
        return state, {
            **summarize(told),
            **{f"train/{k}": float(v) for k, v in host_applied.items()},
            **({"faults/oom_retries": float(retries)} if retries else {}),
        }

    def _gradients(
        self,
        params: Params,
        micros: Sequence[Any],
        context: Any,
        device_lock: AbstractContextManager[Any],
    ) -> tuple[GradSum, list[Totals]]:
        """Summed over all micro-batches, and there: nothing that can fail is under way."""
        totals: list[Totals] = []
        with device_lock:
            sums = self._zeros()
        for index, micro in enumerate(micros):
            with device_lock:
                sums, total = self._accumulate(params, sums, self.put(micro), context)
                if device_lock is not NO_DEVICE_LOCK or self.is_full(index):
                    jax.block_until_ready(sums)
            totals.append(total)
        jax.block_until_ready((sums, totals))
        return sums, totals

    def _halve(self, rows: int, error: Exception) -> None:
        """Half the rows from now on. Raises TrainingError where there is nothing to halve."""
        if not self._whole_rows or rows <= self.num_row_shards:
            fewer = "" if self._whole_rows else "lower trainer.micro_batch_tokens, "
            raise TrainingError(
                f"the trainer's devices are out of memory in an update of {rows} rows at once: "
                f"{str(error).splitlines()[0]}. The weights are as before the step. To need less, "
                f"{fewer}set model.remat=layer, lower trainer.row_length (with sampler.max_length) "
                "or trainer.logprob_chunk, or share the weights by mesh.trainer.fsdp."
            ) from error
        self._halvings += 1
        log.warning(
            "out of memory in an update of %d rows at once; half as many from now on. Lower "
            "trainer.micro_batch_tokens to begin so.",
            rows,
        )

    def num_passes(self, micros: Sequence[Any]) -> int:
        """Forward and backward passes that these take now: more where memory was short."""
        return len(_halved(micros, self._halvings, self.num_row_shards))

    def measure(self, params: Params, micros: Sequence[Any], context: Any) -> dict[str, float]:
        """What `update` would report of the objective, without learning."""
        totals = [self._measure(params, self.put(micro), context) for micro in micros]
        return summarize(jax.device_get(totals))

    def lower(self, params: Params, micro: Any, context: Any) -> dict[str, Any]:
        """What `update` compiles, for shapes alone (jax.ShapeDtypeStruct with shardings): gradient
        of a micro-batch, and update. Nothing runs."""
        state = jax.eval_shape(lambda p: TrainState(p, self._init_opt(p), jnp.int32(0)), params)
        state = shapes_on(state, self.state_shardings)
        summed = GradSum(self.state_shardings.params, self.replicated)
        sums = shapes_on(jax.eval_shape(self._zeros), summed)
        return {
            "gradient": self._accumulate.lower(state.params, sums, micro, context),
            "update": self._apply.lower(state, sums),
        }

    def put(self, micro: Any) -> Any:
        """A micro-batch on the devices, divided as batch_sharding says."""
        return put(micro, self.batch_sharding)

    def is_full(self, index: int) -> bool:
        """Whether to wait before more programs are queued on forced-host devices."""
        return self._bounded and index % MAX_QUEUED == MAX_QUEUED - 1

    # ---- inside jit

    def _copy_params(self, params: Params) -> Params:
        return jax.tree.map(lambda p: jnp.array(p, self._param_dtype, copy=True), params)

    def _accumulate_one(
        self, params: Params, sums: GradSum, micro: Any, context: Any
    ) -> tuple[GradSum, Totals]:
        """Add one micro-batch's gradient and loss."""
        gradient = jax.value_and_grad(self._objective, has_aux=True)
        (loss, totals), grads = gradient(params, micro, context)
        grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), sums.grads, grads)
        return GradSum(grads, sums.loss + loss), totals

    def _apply_sum(
        self, state: TrainState, sums: GradSum, at: Array | None = None
    ) -> tuple[TrainState, dict[str, Array]]:
        """The optimizer's step where all is finite; the same state where not."""
        grad_norm = optax.tree.norm(sums.grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)
        if self._opt_in_use is not None:
            state = state._replace(opt_state=jax.device_put(state.opt_state, self._opt_in_use))
        rate = jnp.float32(self._schedule(state.step if at is None else at))
        moved = self._moved(state, sums.grads, rate)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state)
        return kept, {
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "param_norm": optax.tree.norm(_float32(kept.params)),
            "skipped": 1 - finite.astype(jnp.int32),
        }

    def _fresh_opt(self, params: Params) -> Any:
        """Of weights in any type; the masters are what they are before they are rounded."""
        masters = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
        fresh = self._optimizer.init(masters)
        return WithMasters(fresh, masters) if self._masters else fresh

    def _moved(self, state: TrainState, grads: Params, rate: Array) -> TrainState:
        """One step of the optimizer on the masters, or on the weights where there are none."""
        opt_state, before = state.opt_state, _float32(state.params)
        if self._masters:
            opt_state, before = state.opt_state
        updates, opt_state = self._optimizer.update(grads, opt_state, before)
        after = jax.tree.map(lambda p, update: p + rate * update, before, updates)
        params = self._rounded(after, state.step)
        opt_state = WithMasters(opt_state, after) if self._masters else opt_state
        return TrainState(params, opt_state, state.step + 1)

    def _rounded(self, params: Params, step: Array) -> Params:
        """float32 weights in the type that they are kept in, as trainer.rounding says."""
        if self._stochastic:
            key = jax.random.fold_in(jax.random.key(ROUNDING_SEED), step)
            return rounded_tree(key, params, self._param_dtype)
        return jax.tree.map(lambda p: p.astype(self._param_dtype), params)


def _halved(micros: Sequence[Any], times: int, multiple: int) -> list[Any]:
    """Each micro-batch in parts of rows / 2**times rows, rounded up to a multiple; one at least."""
    if not times:
        return list(micros)
    parts = []
    for micro in micros:
        rows = len(jax.tree.leaves(micro)[0])
        size = -(-rows // (multiple * 2**times)) * multiple
        for at in range(0, rows, size):
            parts.append(jax.tree.map(itemgetter(slice(at, at + size)), micro))
    return parts


def _zeros_of(shapes: Any) -> GradSum:
    return GradSum(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), jnp.float32(0))


def _float32(params: Params) -> Params:
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)


def rows_per_micro_batch(micro_batch_tokens: int, row_length: int, num_row_shards: int) -> int:
    """Rows within the token budget, at least one, rounded up to whole rows on every device."""
    rows = max(1, micro_batch_tokens // row_length)
    return -(-rows // num_row_shards) * num_row_shards


def decayed(table: Any) -> Any:
    """Tree of bool: weight decay applies to matrices, not to norms and biases."""
    return jax.tree.map(_is_matrix, table, is_leaf=lambda w: isinstance(w, Weight))


def _is_matrix(weight: Weight) -> bool:
    return weight.init == "normal"
