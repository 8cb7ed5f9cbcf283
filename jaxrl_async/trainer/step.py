"""The update: PackedBatch -> micro-batches -> gradients summed on the devices -> optimizer.

    host    aggregate(batch) ──> weights ──> micro_batches ──┐
    device                                  accumulate(params, sum, micro) ──> apply(state, sum)

Two programs, compiled once each: shapes never change. The state is donated, and so is the sum.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.config import schema
from jaxrl_async.mesh import NO_TURNS, shardings
from jaxrl_async.model.attention import sequence_attention
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.trainer.aggregate import aggregate, token_mean
from jaxrl_async.trainer.losses import TokenInputs
from jaxrl_async.trainer.objective import (
    Totals,
    make_recipe,
    policy_objective,
    summarize,
    supervised_objective,
)
from jaxrl_async.trainer.optimizer import make_optimizer, make_schedule, state_shardings
from jaxrl_async.trainer.pack import micro_batches, split
from jaxrl_async.types import FloatArray, IntArray, PackedBatch

Params = Any  # nested dict of arrays, layers stacked on axis 0
Objective = Literal["policy", "supervised"]

MAX_QUEUED = 4
"""Programs in flight on forced-host devices, whose collectives can deadlock behind a long queue."""


class TrainState(NamedTuple):
    """All that an update changes. Donated: the state given to `update` is gone afterwards."""

    params: Params
    opt_state: Any
    step: Array  # [] int32, updates made; skipped ones do not count


class DeviceBatch(NamedTuple):
    """A micro-batch on the devices; [rows, length] each, rows over (data, fsdp)."""

    token_ids: Array
    positions: Array
    segment_ids: Array
    mask: Array
    behavior_logprobs: Array
    versions: Array
    advantages: Array
    weights: Array  # float32, from `aggregate`
    kept: Array | None = None  # uint8 [rows, length, ceil(vocab / 8)]: sampling masks


class GradSum(NamedTuple):
    """Gradients and loss so far, over micro-batches."""

    grads: Params  # float32
    loss: Array  # [] float32


class TrainStep:
    """Holds the compiled update for one model, mesh and recipe. Owned by the trainer's thread."""

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        rules: dict[str, Any],
        *,
        algorithm: schema.Algorithm,
        trainer: schema.Trainer,
        row_length: int,
        total_steps: int,
        learning_rate: float | None = None,
        temperature: float = 1.0,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: str = "none",
        attention: str = "auto",
    ) -> None:
        """learning_rate: null takes the algorithm's; temperature: the sampler's (0 counts as 1).

        Raises ConfigError where the algorithm names an unknown function or argument, and where the
        attention cannot run on the mesh.
        """
        self._spec, self._mesh, self._row_length = spec, mesh, row_length
        self._dtype, self._param_dtype, self._remat = dtype, param_dtype, remat
        self._attention = sequence_attention(
            attention, mesh=mesh, dtype=dtype, head_dim=spec.head_dim
        )
        self._chunk, self._temperature = trainer.logprob_chunk, temperature or 1.0
        self._recipe = make_recipe(algorithm)
        self._aggregate = aggregate.resolve(algorithm.aggregate)
        peak = algorithm.learning_rate if learning_rate is None else learning_rate
        self._schedule = make_schedule(trainer, learning_rate=peak, total_steps=total_steps)
        table = weight_table(spec)
        self._optimizer = make_optimizer(trainer, schedule=self._schedule, decayed=decayed(table))
        self._replicated: Any = NamedSharding(mesh, PartitionSpec())
        self._batch_sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
        self._param_shardings = shardings(table, mesh, rules)
        self.num_row_shards = mesh.shape["data"] * mesh.shape["fsdp"]
        self.micro_rows = rows_per_micro_batch(
            trainer.micro_batch_tokens, row_length, self.num_row_shards
        )
        self._bounded = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._compile(table)

    def _compile(self, table: Any) -> None:
        """Declare the jitted programs; XLA compiles each at its first call."""
        shapes = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32),
            table,
            is_leaf=lambda w: isinstance(w, Weight),
        )
        opt = state_shardings(self._optimizer, shapes, self._param_shardings, self._replicated)
        self.state_shardings = TrainState(self._param_shardings, opt, self._replicated)
        sums = GradSum(self._param_shardings, self._replicated)
        self._copy = jax.jit(self._copy_params, out_shardings=self._param_shardings)
        self._init_opt = jax.jit(lambda p: self._optimizer.init(_float32(p)), out_shardings=opt)
        self._zeros = jax.jit(
            lambda: GradSum(
                jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), jnp.float32(0)
            ),
            out_shardings=sums,
        )
        self._accumulate: dict[str, Callable[..., Any]] = {
            name: jax.jit(
                partial(self._accumulate_one, objective),
                donate_argnums=(1,),
                out_shardings=(sums, self._replicated),
            )
            for name, objective in (
                ("policy", self._policy_loss),
                ("supervised", self._supervised_loss),
            )
        }
        self._apply = jax.jit(
            self._apply_sum,
            donate_argnums=(0,),
            out_shardings=(self.state_shardings, self._replicated),
        )
        self._probe = jax.jit(self._probe_logprobs, out_shardings=self._replicated)

    def init(self, params: Params) -> TrainState:
        """A fresh state around a copy of params (any placement): the caller's arrays stay valid."""
        params = self._copy(jax.device_put(params, self._param_shardings))
        step = jax.device_put(jnp.zeros((), jnp.int32), self._replicated)
        return TrainState(params, self._init_opt(params), step)

    def update(
        self,
        state: TrainState,
        batch: PackedBatch,
        *,
        version: int = 0,
        reference_params: Params | None = None,
        objective: Objective = "policy",
        turns: AbstractContextManager[Any] = NO_TURNS,
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on the whole batch; the state given is donated.

        version: of the weights that learn, to tell fresh tokens from stale ones in the report.
        reference_params: frozen weights for the KL, on this mesh; null: none.
        turns: held for each program, until it has run, where a sampler shares the devices.
        A non-finite loss or gradient leaves the state as it was, and train/skipped is 1.
        The report's keys are explained in metrics.metric.METRICS.
        """
        assert batch.token_ids.shape[1] == self._row_length, "packed for another row length"
        weights = token_mean(batch) if objective == "supervised" else self._aggregate(batch)
        micros = zip(
            micro_batches(batch, self.micro_rows), split(weights, self.micro_rows, 0.0), strict=True
        )
        totals: list[Totals] = []
        with turns:
            sums = self._zeros()
        for index, (micro, micro_weights) in enumerate(micros):
            with turns:
                device_batch = self._put(micro, micro_weights)
                sums, total = self._accumulate[objective](
                    state.params, sums, device_batch, reference_params, np.int32(version)
                )
                if turns is not NO_TURNS or (
                    self._bounded and index % MAX_QUEUED == MAX_QUEUED - 1
                ):
                    jax.block_until_ready(sums)
            totals.append(total)
        with turns:
            state, applied = self._apply(state, sums)
            host_totals, host_applied = jax.device_get(
                (totals, applied)
            )  # the one sync of an update
        flops = train_flops(self._spec, batch, reference=reference_params is not None)
        return state, {
            **summarize(host_totals),
            **{f"train/{k}": float(v) for k, v in host_applied.items()},
            **packing_measures(batch, self.micro_rows, len(totals)),
            "train/flops": flops,
        }

    def logprobs(self, params: Params, token_ids: IntArray) -> Array:
        """Untempered log-probs of token_ids[1:], given what precedes: [n - 1] float32 on the mesh.

        Does not wait. Recompiles for each new n.
        """
        return self._probe(params, np.asarray(token_ids, np.int32))

    # ---- inside jit

    def _copy_params(self, params: Params) -> Params:
        return jax.tree.map(lambda p: jnp.array(p, self._param_dtype, copy=True), params)

    def _accumulate_one(
        self,
        objective: Callable[..., tuple[Array, Totals]],
        params: Params,
        sums: GradSum,
        micro: DeviceBatch,
        reference_params: Params | None,
        version: Array,
    ) -> tuple[GradSum, Totals]:
        """Add one micro-batch's gradient and loss."""
        gradient = jax.value_and_grad(objective, has_aux=True)
        (loss, totals), grads = gradient(params, micro, reference_params, version)
        grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), sums.grads, grads)
        return GradSum(grads, sums.loss + loss), totals

    def _policy_loss(
        self, params: Params, micro: DeviceBatch, reference_params: Params | None, version: Array
    ) -> tuple[Array, Totals]:
        x = self._inputs(params, micro, self._temperature)
        if reference_params is not None:
            reference, _ = self._logprobs_of(reference_params, micro, self._temperature)
            x = x._replace(reference_logprobs=jax.lax.stop_gradient(reference))
        return policy_objective(self._recipe, x, micro.weights, version)

    def _supervised_loss(
        self, params: Params, micro: DeviceBatch, reference_params: Params | None, version: Array
    ) -> tuple[Array, Totals]:
        return supervised_objective(self._inputs(params, micro, 1.0), micro.weights)

    def _inputs(self, params: Params, micro: DeviceBatch, temperature: float) -> TokenInputs:
        logprobs, entropy = self._logprobs_of(params, micro, temperature)
        return TokenInputs(
            policy_logprobs=logprobs,
            behavior_logprobs=micro.behavior_logprobs,
            advantages=micro.advantages,
            mask=micro.mask,
            versions=micro.versions,
            entropy=entropy if self._recipe.entropy_coefficient else jax.lax.stop_gradient(entropy),
        )

    def _logprobs_of(
        self, params: Params, micro: DeviceBatch, temperature: float
    ) -> tuple[Array, Array]:
        return token_logprobs(
            self._spec,
            params,
            micro.token_ids,
            micro.positions,
            micro.segment_ids,
            dtype=self._dtype,
            remat=self._remat,
            attention=self._attention,
            chunk=self._chunk,
            temperature=temperature,
            kept=micro.kept,
        )

    def _apply_sum(self, state: TrainState, sums: GradSum) -> tuple[TrainState, dict[str, Array]]:
        """The optimizer's step where all is finite; the same state where not."""
        grad_norm = optax.tree.norm(sums.grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)
        masters = _float32(state.params)
        updates, opt_state = self._optimizer.update(sums.grads, state.opt_state, masters)
        params = jax.tree.map(
            lambda p, new: new.astype(p.dtype), state.params, optax.apply_updates(masters, updates)
        )
        moved = TrainState(params, opt_state, state.step + 1)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state)
        return kept, {
            "grad_norm": grad_norm,
            "learning_rate": jnp.float32(self._schedule(state.step)),
            "param_norm": optax.tree.norm(_float32(kept.params)),
            "skipped": 1 - finite.astype(jnp.int32),
        }

    def _probe_logprobs(self, params: Params, token_ids: Array) -> Array:
        rows = jnp.tile(token_ids, (self.num_row_shards, 1))
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
        logprobs, _ = token_logprobs(
            self._spec,
            params,
            rows,
            positions,
            jnp.ones_like(rows),
            dtype=self._dtype,
            attention=self._attention,
            chunk=self._chunk,
            temperature=1.0,
        )
        return logprobs[0, 1:]

    # ---- host

    def _put(self, micro: PackedBatch, weights: FloatArray) -> DeviceBatch:
        columns = {k: getattr(micro, k) for k in DeviceBatch._fields if k != "weights"}
        return DeviceBatch(**jax.device_put({**columns, "weights": weights}, self._batch_sharding))


def rows_per_micro_batch(micro_batch_tokens: int, row_length: int, num_row_shards: int) -> int:
    """Rows within the token budget, at least one, rounded up to whole rows on every device."""
    rows = max(1, micro_batch_tokens // row_length)
    return -(-rows // num_row_shards) * num_row_shards


def decayed(table: Any) -> Any:
    """Tree of bool: weight decay applies to matrices, not to norms and biases."""
    return jax.tree.map(_is_matrix, table, is_leaf=lambda w: isinstance(w, Weight))


def _is_matrix(weight: Weight) -> bool:
    return weight.init == "normal"


def packing_measures(batch: PackedBatch, rows: int, num_micro_batches: int) -> dict[str, float]:
    """How full the rows are, with those that only fill the last micro-batch."""
    num_rows = rows * num_micro_batches
    return {
        "train/rows": float(num_rows),
        "train/micro_batches": float(num_micro_batches),
        "train/packing": np.count_nonzero(batch.segment_ids) / (num_rows * batch.mask.shape[1]),
    }


def num_matmul_params(spec: ModelSpec) -> int:
    """Weights that a token is multiplied with: all but an embedding that is only looked up."""
    leaves = jax.tree.leaves(weight_table(spec), is_leaf=lambda w: isinstance(w, Weight))
    total = sum(int(np.prod(w.shape)) for w in leaves)
    return total if spec.tied else total - spec.vocab * spec.width


def train_flops(spec: ModelSpec, batch: PackedBatch, *, reference: bool) -> float:
    """Model FLOPs of one update (padding and rematerialisation do not count).

    Forward: 2 per weight and token, and the two products of causal attention, 2 * length^2 * heads
    * head_dim per layer and sequence; backward twice that. A reference adds one forward.
    Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B, with attention's causal half.
    """
    lengths = np.bincount(batch.sequence_ids[batch.sequence_ids >= 0]).astype(np.float64)
    attention = 2 * spec.layers * spec.heads * spec.head_dim * float((lengths**2).sum())
    forward = 2 * num_matmul_params(spec) * float(lengths.sum()) + attention
    return forward * (4 if reference else 3)


def _float32(params: Params) -> Params:
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)
