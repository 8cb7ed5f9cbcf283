"""The compiled programs of an update: gradients summed over micro-batches, then one optimizer step.

    accumulate(trainable, sums, micro, context, frozen) -> sums, totals    each micro-batch
    apply(state, sums, frozen, probe) -> state, report                     once

Each part of the mesh's axis data sums its own gradients over all micro-batches; `apply` sums over
the parts (see can_sum_separately): between slices, gradients cross the network once.

`apply` keeps the old state if the gradient is not finite, if the new weights have grown beyond
MOST_GROWTH, or if they give non-finite numbers for the probe (the data's first tokens): such
weights are neither published nor saved.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.algorithms.expert_load import ExpertLoad
from jaxrl_async.algorithms.objective import Totals, merged_parts
from jaxrl_async.mesh import HOST, batch_sharding, by_slice, in_memory, put, shapes_on, shardings
from jaxrl_async.model.decoder import TokenRows
from jaxrl_async.model.dropout import Noise
from jaxrl_async.model.spec import ModelSpec, Params, Weight
from jaxrl_async.trainer.expert_balance import expert_balance
from jaxrl_async.trainer.learning_settings import LearningSettings, MicroSizes
from jaxrl_async.trainer.optimizer import (
    make_optimizer,
    make_schedule,
    needs_masters,
    rounded_tree,
    state_shardings,
)

log = logging.getLogger(__name__)

ROUNDING_SEED = 0
"""Seed of trainer.rounding=stochastic; the number of the update is folded in."""
PROBE_LENGTH = 16
"""Number of the data's first tokens that new weights are tested on before they are kept."""
MOST_GROWTH = 1000.0
"""Maximum factor by which one update may multiply the global norm of the weights, plus 1.

Squares of weights that are larger overflow, and a norm may hide it: it turns infinite values into
zeros."""


class TrainState(NamedTuple):
    """Everything that an update changes; an update donates it."""

    params: Params  # the trainable weights
    opt_state: Any
    step: Array  # [] int32, updates made; skipped ones do not count


class Frozen(NamedTuple):
    """Weights on the same mesh that a loss reads without a gradient; None: not read."""

    reference: Params | None = None
    teacher: Params | None = None
    base: Params | None = None  # frozen weights below an adapter; None: all weights are trained
    noise: Noise | None = None  # of the adapter's dropout, only in a gradient; None: no dropout
    load: ExpertLoad | None = None  # of all micro-batches, without odds; None: only one


NOTHING_FROZEN = Frozen()


class WithMasters(NamedTuple):
    """The state of an optimizer that updates float32 copies of narrower weights."""

    optimizer: Any
    masters: Params  # float32; the weights are their values rounded to the nearest


class GradSum(NamedTuple):
    """Gradients and loss, summed over micro-batches."""

    grads: Params  # float32; if the mesh divides data, [parts, ...], one sum for each part
    loss: Array  # [] float32
    chosen: Array | None = None  # [L, E] int32, of ExpertLoad; None: no correction moves


class Passes(NamedTuple):
    """Counts of one update."""

    rows: int  # of all micro-batches, including padding rows of the last one
    number: int  # forward and backward passes


class Objective(Protocol):
    """The function that an update minimises: a frozen record without state or thread.

    Its data becomes micro-batches (trees of host arrays [rows, length, ...]) and a context (a tree
    of numbers or arrays, the same for all micro-batches).
    """

    @property
    def spec(self) -> ModelSpec:
        """The trained decoder."""

    @property
    def table(self) -> Any:
        """The declared weights that are trained: shapes, placement, and weight decay."""

    @property
    def prefix(self) -> str:
        """The prefix of an update's metrics."""

    @property
    def rows_are_independent(self) -> bool:
        """True if the loss of a row does not depend on the others of its micro-batch."""

    def micro_batches(self, data: Any, sizes: MicroSizes) -> Sequence[Any]:
        """Split the data into micro-batches of these sizes; on the host."""

    def context(self, data: Any) -> Any:
        """Return the values that all micro-batches of the data share."""

    def loss(
        self, trainable: Params, frozen: Frozen, micro: Any, context: Any
    ) -> tuple[Array, Totals]:
        """Return a micro-batch's share of the loss and of the report; inside jit.

        The gradient is only taken of `trainable`.
        """

    def measures(self, trainable: Params, frozen: Frozen, micro: Any, context: Any) -> Totals:
        """Return a micro-batch's share of a report without an update; inside jit."""

    def probe(self, trainable: Params, frozen: Frozen, tokens: TokenRows) -> Array:
        """Return the model's output for tokens: log-probs, values or scores; inside jit."""

    def report(self, data: Any, frozen: Frozen, passes: Passes) -> dict[str, float]:
        """Return the metrics that the host computes of an update, in addition to the totals."""


ObjectiveT = TypeVar("ObjectiveT", bound=Objective)


class UpdatePrograms(Generic[ObjectiveT]):
    """The jitted programs of one objective; XLA compiles each at its first call.

    Attributes:
        accumulate, apply: see the module.
        zeros: () -> GradSum before the first micro-batch.
        measure: (trainable, frozen, micro, context) -> Totals, without a gradient.
        count: (trainable, micro, context, frozen) -> ExpertLoad of a micro-batch.
        parts: parts of the axis data that sum gradients separately; 1: XLA sums over the axis.
        state_shardings, sum_shardings, batch_sharding: of a TrainState, a GradSum, a micro-batch.
    """

    def __init__(
        self,
        objective: ObjectiveT,
        settings: LearningSettings,
        *,
        learning_rate: float,
        total_steps: int,
    ) -> None:
        """Declare the programs. learning_rate: its peak; total_steps: the schedule's length in
        updates."""
        self.objective, self.settings = objective, settings
        trainer, mesh, table = settings.trainer, settings.mesh, objective.table
        separate = objective.rows_are_independent and can_sum_separately(mesh, objective.spec)
        self.parts = mesh.shape["data"] if separate else 1
        if mesh.shape["data"] > 1 and not separate:
            log.info("each micro-batch sums its gradients over mesh.trainer.data, not each update")
        self._balance = expert_balance(objective.spec, settings.balance)
        self._schedule = make_schedule(
            trainer, learning_rate=learning_rate, total_steps=total_steps
        )
        self._optimizer = make_optimizer(trainer, weights=table)
        self._masters = needs_masters(trainer, settings.param_dtype)
        narrow = jnp.dtype(settings.param_dtype) != jnp.float32
        self._stochastic = narrow and trainer.rounding == "stochastic"
        self._replicated: Any = NamedSharding(mesh, PartitionSpec())
        self.batch_sharding = batch_sharding(mesh, settings.rules)
        self._declare(table, shardings(table, mesh, settings.rules), "optimizer" in trainer.offload)

    def _declare(self, table: object, of_params: object, offloads: bool) -> None:
        """Declare the jitted programs.

        offloads: AdamW's moments and the masters are in host memory, and on the device in `apply`
        only.
        """
        shapes = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32),
            table,
            is_leaf=lambda w: isinstance(w, Weight),
        )
        stored = in_memory(HOST, of_params) if offloads else of_params
        opt, in_use = (self._opt_shardings(shapes, moments) for moments in (stored, of_params))
        self._opt_in_use = in_use if offloads else None
        self.state_shardings = TrainState(of_params, opt, self._replicated)
        sums = self.sum_shardings = GradSum(
            self._per_part(of_params),
            self._replicated,
            self._replicated if self.settings.balance.bias_rate else None,
        )
        self._copy = jax.jit(
            lambda params: jax.tree.map(
                lambda p: jnp.array(p, self.settings.param_dtype, copy=True), params
            ),
            out_shardings=of_params,
        )
        self._init_opt = jax.jit(self._fresh_opt, out_shardings=opt)
        self.zeros = jax.jit(lambda: self._zeros_of(shapes), out_shardings=sums)
        options = dict(self.settings.trainer.compiler_options) or None
        jit = partial(jax.jit, compiler_options=options)
        self.accumulate = jit(
            self._accumulate_one, donate_argnums=(1,), out_shardings=(sums, self._replicated)
        )
        self._lower = self.accumulate.lower
        self.apply = jit(
            self._apply_sum,
            donate_argnums=(0,),
            out_shardings=(self.state_shardings, self._replicated),
        )
        self.measure = jax.jit(self.objective.measures, out_shardings=self._replicated)
        self.count = jax.jit(self._count_one, out_shardings=self._replicated)

    def _per_part(self, of_params: object) -> Any:
        """Return the shardings of gradients that each part of the axis data sums separately."""
        if self.parts == 1:
            return of_params
        return jax.tree.map(
            lambda s: NamedSharding(s.mesh, PartitionSpec("data", *s.spec)), of_params
        )

    def _opt_shardings(self, shapes: object, of_moments: object) -> Any:
        of_optimizer = state_shardings(self._optimizer, shapes, of_moments, self._replicated)
        return WithMasters(of_optimizer, of_moments) if self._masters else of_optimizer

    def init(self, params: Params) -> TrainState:
        """Make a fresh state around a copy of params (any placement); the caller's stay valid."""
        placed = jax.device_put(params, self.state_shardings.params)
        step = jax.device_put(jnp.zeros((), jnp.int32), self._replicated)
        return TrainState(self._copy(placed), self._init_opt(placed), step)

    def put(self, micro: Any) -> Any:
        """Place a micro-batch on the trainer's devices."""
        return put(micro, self.batch_sharding)

    def lower(
        self, params: Params, micro: object, context: object, frozen: Frozen = NOTHING_FROZEN
    ) -> dict[str, Any]:
        """Lower what an update compiles: a micro-batch's gradient and the optimizer's update.

        The arguments are shapes (jax.ShapeDtypeStruct with shardings); nothing runs.
        """
        state = jax.eval_shape(lambda p: TrainState(p, self._init_opt(p), jnp.int32(0)), params)
        state = shapes_on(state, self.state_shardings)
        return {
            "gradient": self.lower_gradient(state.params, micro, context, frozen),
            "update": self.apply.lower(
                state,
                self._shapes_of_sums(),
                NOTHING_FROZEN._replace(base=frozen.base),
                probe_ids(micro),
            ),
        }

    def lower_gradient(self, params: Params, micro: object, context: object, frozen: Frozen) -> Any:
        """Lower a micro-batch's gradient; the arguments are arrays or shapes."""
        return self._lower(params, self._shapes_of_sums(), micro, context, frozen)

    def _shapes_of_sums(self) -> Any:
        return shapes_on(jax.eval_shape(self.zeros), self.sum_shardings)

    # ---- inside jit

    def _zeros_of(self, shapes: object) -> GradSum:
        parts = () if self.parts == 1 else (self.parts,)
        zeros = jax.tree.map(lambda s: jnp.zeros((*parts, *s.shape), s.dtype), shapes)
        return GradSum(zeros, jnp.float32(0), self._balance.counts())

    def _accumulate_one(
        self, trainable: Params, sums: GradSum, micro: object, context: object, frozen: Frozen
    ) -> tuple[GradSum, Totals]:
        """Add one micro-batch's gradient and loss."""
        gradient = jax.value_and_grad(self._balanced_loss, has_aux=True)
        if self.parts == 1:
            (loss, totals), grads = gradient(trainable, frozen, micro, context)
        else:
            run = by_slice(
                lambda *args: gradient(*self._part_args(args)),
                self.settings.mesh,
                (None, None, "data", None),
            )
            (loss, totals), grads = run(trainable, frozen, micro, context)
            loss, totals = loss.sum(), merged_parts(totals)
        grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), sums.grads, grads)
        chosen = sums.chosen
        if chosen is not None and totals.load is not None:
            chosen = chosen + totals.load.chosen
        return GradSum(grads, sums.loss + loss, chosen), totals

    def _part_args(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the loss with the dropout of one part of the axis data."""
        trainable, frozen, micro, context = args
        if frozen.noise is not None:
            number = frozen.noise.micro * self.parts + jax.lax.axis_index("data")
            frozen = frozen._replace(noise=frozen.noise._replace(micro=number))
        return trainable, frozen, micro, context

    def _balanced_loss(
        self, trainable: Params, frozen: Frozen, micro: object, context: object
    ) -> tuple[Array, Totals]:
        """Return the objective's loss with the experts' balance loss, if there is one."""
        loss, totals = self.objective.loss(trainable, frozen, micro, context)
        return self._balance.added(loss, totals, frozen.load)

    def _count_one(
        self, trainable: Params, micro: object, context: object, frozen: Frozen
    ) -> ExpertLoad | None:
        load = self.objective.loss(trainable, frozen, micro, context)[1].load
        return None if load is None else load._replace(odds=None)

    def _apply_sum(
        self,
        state: TrainState,
        sums: GradSum,
        frozen: Frozen,
        ids: Array,
        at: Array | None = None,
    ) -> tuple[TrainState, dict[str, Array]]:
        """Make the optimizer's step; keep the old state if it is unsafe.

        A step is safe if loss and gradient are finite, the new weights are at most MOST_GROWTH
        times as large, and their outputs for `ids` are finite.

        ids: [n] int32, the tokens of the probe.
        """
        if self.parts > 1:
            sums = sums._replace(grads=jax.tree.map(lambda g: g.sum(axis=0), sums.grads))
        grad_norm = optax.tree.norm(sums.grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)
        if self._opt_in_use is not None:
            state = state._replace(opt_state=jax.device_put(state.opt_state, self._opt_in_use))
        rate = jnp.float32(self._schedule(state.step if at is None else at))
        moved = self._moved(state, sums, rate)
        before, made = (optax.tree.norm(_float32(s.params)) for s in (state, moved))
        rows = TokenRows.copies(ids, self.settings.num_row_shards)  # one on each device
        probed = self.objective.probe(moved.params, frozen, rows)
        bounded = jnp.isfinite(probed).all() & (made <= MOST_GROWTH * (before + 1))
        applied = finite & bounded
        new_state = jax.tree.map(lambda new, old: jnp.where(applied, new, old), moved, state)
        return new_state, {
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "param_norm": jnp.where(applied, made, before),
            "skipped": 1 - applied.astype(jnp.int32),
            "blown_up": (finite & ~bounded).astype(jnp.int32),
            "made_norm": made,
        }

    def _fresh_opt(self, params: Params) -> Any:
        """Make the optimizer's state for weights of any dtype; masters are unrounded copies."""
        masters = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
        fresh = self._optimizer.init(masters)
        return WithMasters(fresh, masters) if self._masters else fresh

    def _moved(self, state: TrainState, sums: GradSum, rate: Array) -> TrainState:
        """Apply one optimizer step to the masters, or to the weights if there are no masters, and
        move the routers' corrections."""
        opt_state, before = state.opt_state, _float32(state.params)
        if self._masters:
            opt_state, before = state.opt_state
        updates, opt_state = self._optimizer.update(sums.grads, opt_state, before)
        after = jax.tree.map(lambda p, update: p + rate * update, before, updates)
        after = self._balance.moved(after, sums.chosen)
        params = self._rounded(after, state.step)
        opt_state = WithMasters(opt_state, after) if self._masters else opt_state
        return TrainState(params, opt_state, state.step + 1)

    def _rounded(self, params: Params, step: Array) -> Params:
        """Round float32 weights to their dtype, as trainer.rounding specifies."""
        dtype = self.settings.param_dtype
        if self._stochastic:
            key = jax.random.fold_in(jax.random.key(ROUNDING_SEED), step)
            return rounded_tree(key, params, dtype)
        return jax.tree.map(lambda p: p.astype(dtype), params)


def can_sum_separately(mesh: Mesh, spec: ModelSpec) -> bool:
    """Return whether each part of the axis data may sum its gradients separately.

    XLA's partitioner aborts for some programs with one manual axis and others divided by XLA
    (spmd_partitioner_util.cc, ExpandDeviceGroups; jaxlib 0.10.2, experts over expert and tensor).
    Only tested meshes are allowed; an own decoder looks up its tokens without `Layout.rows_of`.
    """
    others = {axis for axis, size in mesh.shape.items() if size > 1} - {"data"}
    if spec.own is not None and {"fsdp", "tensor"} <= others:
        return False
    return others <= ({"expert"} if spec.experts else {"fsdp", "tensor"})


def probe_ids(micro: Any) -> Any:
    """Return the first tokens of a micro-batch, [n] int32, or their shape."""
    ids = micro["token_ids"] if isinstance(micro, Mapping) else micro.token_ids
    length = min(PROBE_LENGTH, ids.shape[1])
    if isinstance(ids, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((length,), ids.dtype)
    return ids[0, :length]


def _float32(params: Params) -> Params:
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)
