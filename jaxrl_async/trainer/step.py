"""The policy's update: PackedBatch -> micro-batches -> summed gradients -> optimizer.

    host    aggregate(batch) ──> weights ──> micro-batches ──┐
    device                                  accumulate(params, sum, micro) ──> apply(state, sum)

What is learnt is objective.py's, how it is added up update.py's. Shapes never change.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxrl_async.algorithms.aggregate import aggregate
from jaxrl_async.algorithms.columns import COLUMNS, Columns, DeviceBatch, Source, names_of
from jaxrl_async.algorithms.losses import TokenInputs
from jaxrl_async.algorithms.objective import (
    Coefficients,
    Totals,
    make_recipe,
    policy_objective,
    supervised_objective,
)
from jaxrl_async.config import schema
from jaxrl_async.mesh import NO_DEVICE_LOCK
from jaxrl_async.model.attention import decoder_settings
from jaxrl_async.model.divergence import Kind, TokenDivergence, chunked_over_vocab
from jaxrl_async.model.logprobs import replayed_logprobs, token_logprobs
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.trainer.distill import distill_rows
from jaxrl_async.trainer.pack import micro_batches, split
from jaxrl_async.trainer.update import Params, TrainState, Updater, rows_per_micro_batch
from jaxrl_async.types import FloatArray, IntArray, PackedBatch

SHARED = tuple(n for n in DeviceBatch._fields if COLUMNS[n].in_loss)
"""What a loss may look at of a micro-batch as it is."""


class UpdateContext(NamedTuple):
    """What holds for all micro-batches of an update; on the devices."""

    version: Any  # [] int32, of the weights that learn
    coefficients: Coefficients
    reference_params: Params | None = None
    teacher_params: Params | None = None  # where teacher.form is loss, over the whole vocabulary


class TrainStep:
    """Holds the compiled update for one model, mesh and recipe. Owned by the trainer's thread."""

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        rules: dict[str, Any],
        *,
        algorithm: schema.AlgorithmSection,
        trainer: schema.TrainerSection,
        row_length: int,
        total_steps: int,
        teacher: schema.TeacherSection | None = None,
        teacher_spec: ModelSpec | None = None,
        num_lags: int = 0,
        temperature: float = 1.0,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: str = "none",
        attention: str = "auto",
    ) -> None:
        """temperature: the sampler's (0 counts as 1); teacher_spec: null is the policy's.

        num_lags: lags whose divergence is reported.
        Raises ConfigError where the algorithm names an unknown function or argument, and where the
        attention cannot run on the mesh.
        """
        self.spec, self._row_length, self._num_lags = spec, row_length, num_lags
        self._decoder = decoder_settings(
            mesh, spec.head_dim, dtype=dtype, attention=attention, chunk=trainer.logprob_chunk
        )
        self._remat, self._temperature = remat, temperature or 1.0
        self.recipe = make_recipe(algorithm, teacher)
        self._teacher = (teacher or schema.TeacherSection(), teacher_spec or spec)
        self._supervised_coefficient = algorithm.supervised_coefficient
        self._aggregate = aggregate.resolve(algorithm.aggregate)
        self._updater = Updater(
            weight_table(spec),
            mesh,
            rules,
            self._policy_loss,
            trainer=trainer,
            learning_rate=algorithm.learning_rate,
            total_steps=total_steps,
            param_dtype=param_dtype,
        )
        self.state_shardings = self._updater.state_shardings
        self.num_row_shards = self._updater.num_row_shards
        self.micro_rows = rows_per_micro_batch(
            trainer.micro_batch_tokens, row_length, self.num_row_shards
        )
        self._probe = jax.jit(self._probe_logprobs, out_shardings=self._updater.replicated)

    def init(self, params: Params) -> TrainState:
        """A fresh state around a copy of params (any placement): the caller's arrays stay valid."""
        return self._updater.init(params)

    def update(
        self,
        state: TrainState,
        batch: PackedBatch,
        *,
        version: int = 0,
        columns: Columns | None = None,
        coefficients: Coefficients | None = None,
        reference_params: Params | None = None,
        teacher_params: Params | None = None,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
        at: float | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on the whole batch; the state given is donated.

        version: of the weights that learn, to tell fresh tokens from stale ones in the report.
        coefficients: null takes the algorithm's. reference_params: frozen weights for the KL, on
        this mesh; null: none. device_lock: held for each program, until it has run, where a sampler
        shares the devices. at: place on the learning rate's course, in updates; null: as many as
        were made. A non-finite loss or gradient leaves the state as it was, and train/skipped is 1.
        The report's keys are explained in metrics.metric.METRICS.
        """
        assert batch.token_ids.shape[1] == self._row_length, "packed for another row length"
        micros = self._micros(batch, columns or {})
        context = self._context(version, coefficients, reference_params, teacher_params)
        state, stats = self._updater.update(state, micros, context, device_lock, at)
        passes = self._updater.num_passes(micros)
        sizes = self._sizes(batch, len(micros), reference_params is not None)
        return state, stats | sizes | {"train/micro_batches": float(passes)}

    def measure(
        self,
        params: Params,
        batch: PackedBatch,
        *,
        version: int = 0,
        columns: Columns | None = None,
        coefficients: Coefficients | None = None,
        reference_params: Params | None = None,
        teacher_params: Params | None = None,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
    ) -> dict[str, float]:
        """What `update` would report of the policy's objective; nothing is learnt."""
        micros = self._micros(batch, columns or {})
        context = self._context(version, coefficients, reference_params, teacher_params)
        with device_lock:
            return self._updater.measure(params, micros, context)

    def weights(self, batch: PackedBatch, times: int = 1) -> Columns:
        """The columns that say what each token counts in the loss; [rows, length] each.

        times: number of parts of a step that are learnt one after the other, so that the mean of
        their gradients is the step's.
        """
        found = {"weights": self._aggregate(batch)}
        if self._supervised_coefficient:
            found["supervised_weights"] = supervised_weights(batch, self._supervised_coefficient)
        return {k: v * np.float32(times) for k, v in found.items()}

    def lower(self, params: Params, micro: DeviceBatch, context: UpdateContext) -> dict[str, Any]:
        """The programs of `update` for shapes alone, not compiled: gradient, update."""
        return self._updater.lower(params, micro, context)

    @property
    def batch_sharding(self) -> Any:
        """Of each array of a micro-batch."""
        return self._updater.batch_sharding

    def logprobs(self, params: Params, token_ids: IntArray) -> Array:
        """Untempered log-probs of token_ids[1:], given what precedes: [n - 1] float32 on the mesh.

        Does not wait. Recompiles for each new n.
        """
        return self._probe(params, np.asarray(token_ids, np.int32))

    # ---- host

    def _context(
        self,
        version: int,
        coefficients: Coefficients | None,
        reference_params: Params | None,
        teacher_params: Params | None,
    ) -> UpdateContext:
        numbers = self.recipe.coefficients if coefficients is None else coefficients
        on_device = Coefficients(*(np.float32(c) for c in numbers))
        return UpdateContext(np.int32(version), on_device, reference_params, teacher_params)

    def _micros(self, batch: PackedBatch, columns: Columns) -> list[DeviceBatch]:
        if "weights" not in columns:
            columns = columns | self.weights(batch)
        parts = {k: split(v, self.micro_rows, COLUMNS[k].fill) for k, v in columns.items()}
        packed = [name for name in names_of(Source.PACK) if COLUMNS[name].on_device]
        return [
            DeviceBatch(
                **{name: getattr(micro, name) for name in packed},
                **{name: of_micro[index] for name, of_micro in parts.items()},  # type: ignore[arg-type]
            )
            for index, micro in enumerate(micro_batches(batch, self.micro_rows))
        ]

    def _sizes(self, batch: PackedBatch, num_micros: int, reference: bool) -> dict[str, float]:
        flops = train_flops(self.spec, batch, reference=reference)
        return {**packing_measures(batch, self.micro_rows, num_micros), "train/flops": flops}

    # ---- inside jit

    def _policy_loss(
        self, params: Params, micro: DeviceBatch, context: UpdateContext
    ) -> tuple[Array, Totals]:
        x, changed = self._inputs(params, micro, context)
        x = self._compared(x, micro, context)
        loss, totals = policy_objective(
            self.recipe,
            x,
            micro.weights,
            context.version,
            context.coefficients,
            num_lags=self._num_lags,
        )
        if micro.expert_ids is not None and changed is not None:
            totals.means.update(routing_measures(micro.expert_ids, micro.segment_ids, changed))
        if micro.supervised_weights is None:
            return loss, totals
        given = x._replace(mask=micro.supervised_weights > 0)
        part, of_part = supervised_objective(given, micro.supervised_weights)
        count = jnp.sum(micro.supervised_weights)
        totals.means["supervised/loss"] = (of_part.sums["train/loss"], count)
        totals.sums["supervised/tokens"] = of_part.sums["train/tokens"]
        totals.sums["train/loss"] += of_part.sums["train/loss"]
        return loss + part, totals

    def _inputs(
        self, params: Params, micro: DeviceBatch, context: UpdateContext
    ) -> tuple[TokenInputs, Array | None]:
        """Of one pass over the policy, with the divergence that needs whole distributions; and how
        many layers would have sent each token elsewhere, where experts are replayed."""
        arrays = (micro.token_ids, micro.positions, micro.segment_ids)
        teacher, teacher_spec = self._teacher
        kwargs: dict[str, Any] = {
            **self._decoder, "remat": self._remat, "temperature": self._temperature,
            "expert_ids": micro.expert_ids,
        }  # fmt: skip
        kind: Kind = teacher.kind
        has_entropy = self.recipe.has_entropy
        if micro.teacher_ids is not None and micro.teacher_logprobs is not None:
            found = distill_rows(
                self.spec, params, *arrays, micro.teacher_ids, micro.teacher_logprobs,
                kind=kind, beta=teacher.beta, **kwargs,
            )  # fmt: skip
            return _token_inputs(found, micro, has_entropy, teacher=True), found.changed
        if context.teacher_params is not None:
            found = chunked_over_vocab(
                self.spec, params, context.teacher_params, *arrays,
                kind=kind, beta=teacher.beta, other_spec=teacher_spec, **kwargs,
            )  # fmt: skip
            return _token_inputs(found, micro, has_entropy, teacher=True), found.changed
        if context.reference_params is not None and self.recipe.whole_kl:
            found = chunked_over_vocab(
                self.spec, params, context.reference_params, *arrays, kind="reverse", **kwargs
            )
            x = _token_inputs(found, micro, has_entropy)
            return x._replace(reference_divergence=found.divergence), found.changed
        found = self._outputs(params, micro, self._temperature, micro.expert_ids)
        return _token_inputs(found, micro, has_entropy), found.changed

    def _compared(self, x: TokenInputs, micro: DeviceBatch, context: UpdateContext) -> TokenInputs:
        """The same with the reference's log-probs, where there is one."""
        known = micro.reference_logprobs is not None
        if known or context.reference_params is None or self.recipe.whole_kl:
            return x
        found = self._outputs(context.reference_params, micro, self._temperature)
        return x._replace(reference_logprobs=jax.lax.stop_gradient(found.logprobs))

    def _outputs(
        self,
        params: Params,
        micro: DeviceBatch,
        temperature: float,
        expert_ids: Array | None = None,
    ) -> TokenDivergence:
        logprobs, entropy, changed = replayed_logprobs(
            self.spec,
            params,
            micro.token_ids,
            micro.positions,
            micro.segment_ids,
            expert_ids,
            remat=self._remat,
            temperature=temperature,
            **self._decoder,
            kept=micro.kept,
        )
        return TokenDivergence(logprobs, entropy, jnp.zeros_like(logprobs), changed)

    def _probe_logprobs(self, params: Params, token_ids: Array) -> Array:
        rows = jnp.tile(token_ids, (self.num_row_shards, 1))
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
        logprobs, _ = token_logprobs(
            self.spec,
            params,
            rows,
            positions,
            jnp.ones_like(rows),
            temperature=1.0,
            **self._decoder,
        )
        return logprobs[0, 1:]


def _token_inputs(
    found: TokenDivergence, micro: DeviceBatch, has_entropy: bool, *, teacher: bool = False
) -> TokenInputs:
    return TokenInputs(
        policy_logprobs=found.logprobs,
        entropy=found.entropy if has_entropy else jax.lax.stop_gradient(found.entropy),
        teacher_divergence=found.divergence if teacher else None,
        **{name: getattr(micro, name) for name in SHARED},
    )


def routing_measures(
    expert_ids: Array, segment_ids: Array, changed: Array
) -> dict[str, tuple[Array, Array]]:
    """Of all real tokens of a batch whether their experts were told, and of those how many the
    router would have sent elsewhere. changed: as decoder.replayed_states."""
    real = segment_ids > 0
    known = real & jnp.all(expert_ids[:, :, 0] >= 0, axis=-1)
    layers = expert_ids.shape[2]
    count = jnp.sum(known)
    return {
        "routing/replayed_share": (count, jnp.sum(real)),
        "routing/changed_share": (jnp.sum(jnp.where(known, changed, 0)), count * layers),
        "routing/changed_token_share": (jnp.sum(known & (changed > 0)), count),
    }


def supervised_weights(batch: PackedBatch, coefficient: float) -> FloatArray:
    """coefficient / number of supervised tokens on each of them; [rows, length] float32."""
    count = max(int(batch.supervised.sum()), 1)
    return np.where(batch.supervised, coefficient / count, 0.0).astype(np.float32)


def packing_measures(batch: PackedBatch, rows: int, num_micro_batches: int) -> dict[str, float]:
    """How full the rows are, with those that only fill the last micro-batch."""
    num_rows = rows * num_micro_batches
    return {
        "train/rows": float(num_rows),
        "train/micro_batches": float(num_micro_batches),
        "train/packing": np.count_nonzero(batch.segment_ids) / (num_rows * batch.mask.shape[1]),
    }


def num_matmul_params(spec: ModelSpec) -> int:
    """Weights that a token is multiplied with: all but an embedding that is only looked up, and of
    experts those that it goes through."""
    leaves = jax.tree.leaves(weight_table(spec), is_leaf=lambda w: isinstance(w, Weight))
    total = sum(int(np.prod(w.shape)) for w in leaves)
    of_experts = sum(int(np.prod(w.shape)) for w in leaves if "expert" in w.axes)
    if of_experts:
        total -= of_experts - of_experts * spec.experts_per_token // spec.experts
    return total if spec.tied else total - spec.vocab * spec.width


def train_flops(spec: ModelSpec, batch: PackedBatch, *, reference: bool) -> float:
    """Model FLOPs of one update (padding and rematerialisation do not count): 3 forward passes.

    A reference adds one.
    """
    return forward_flops(spec, batch) * (4 if reference else 3)


def forward_flops(spec: ModelSpec, batch: PackedBatch) -> float:
    """Model FLOPs of one forward pass over a batch; a backward pass has twice that."""
    lengths = np.bincount(batch.sequence_ids[batch.sequence_ids >= 0]).astype(np.float64)
    return flops_of_lengths(spec, float(lengths.sum()), float((lengths**2).sum()))


def flops_of_lengths(spec: ModelSpec, tokens: float, squares: float) -> float:
    """The same for sequences whose lengths, and their squares, sum up to these.

    2 per weight and token, and the two products of causal attention, 2 * length^2 * heads *
    head_dim per layer and sequence.
    Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B, with attention's causal half.
    """
    attention = 2 * spec.layers * spec.heads * spec.head_dim * squares
    return 2 * num_matmul_params(spec) * tokens + attention
