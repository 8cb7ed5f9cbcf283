"""The one update, of any objective: gradients summed over micro-batches, then one optimizer step.

    host      objective: micro_batches(data), context(data)
    device    accumulate ──> sums, totals    each micro-batch     (update_programs.py)
              apply ──> state, report        once

`accumulate` is compiled once for each size of micro-batches (MicroSizes), `apply` once. `apply`
alone donates the state, and starts once every gradient is complete. If memory runs out before that,
or would on a CPU, the update starts again with half the rows in its largest micro-batch, and keeps
that size.
"""

import logging
from collections.abc import Sequence
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_async.algorithms.expert_load import ExpertLoad
from jaxrl_async.algorithms.objective import Totals, summarize
from jaxrl_async.errors import ConfigError, TrainingError, is_out_of_memory
from jaxrl_async.host import host_memory
from jaxrl_async.mesh import NO_DEVICE_LOCK, DeviceGuard, spans_processes
from jaxrl_async.model.dropout import Noise
from jaxrl_async.model.spec import Params
from jaxrl_async.trainer.expert_balance import load_report
from jaxrl_async.trainer.learning_settings import LearningSettings, MicroSizes
from jaxrl_async.trainer.update_programs import (
    NOTHING_FROZEN,
    Frozen,
    GradSum,
    ObjectiveT,
    Passes,
    TrainState,
    UpdatePrograms,
    probe_ids,
)

log = logging.getLogger(__name__)

MAX_QUEUED = 4
"""Maximum programs queued on forced-host devices: with more, their collectives can deadlock."""
MOST_OF_FREE = 0.9
"""Share of the free memory of a CPU's machine that an update's program may take."""
APPLIED = ("grad_norm", "learning_rate", "param_norm", "skipped", "blown_up")
"""The reported results of `apply`."""


def check_compiler_options(error: jax.errors.JaxRuntimeError) -> None:
    """Raise ConfigError if the error is about an unknown option of trainer.compiler_options."""
    if "No such compile option" in str(error):
        raise ConfigError(
            f"trainer.compiler_options: {str(error).partition(': ')[2]}, says the compiler of the "
            "trainer's devices. Leave it out, or correct its name."
        ) from error


class Update(Generic[ObjectiveT]):
    """The update of one objective. Owned by the trainer's thread."""

    def __init__(
        self,
        objective: ObjectiveT,
        settings: LearningSettings,
        *,
        learning_rate: float,
        total_steps: int,
    ) -> None:
        """Prepare it. learning_rate: its peak; total_steps: the schedule's length in updates."""
        self.objective, self.settings = objective, settings
        self.programs = UpdatePrograms(
            objective, settings, learning_rate=learning_rate, total_steps=total_steps
        )
        self.sizes = settings.micro_sizes(objective.rows_are_independent)
        self._drops = settings.lora is not None and settings.lora.dropout > 0
        self._fitting: set[int] = set()  # rows of micro-batches whose program fits in memory

    @property
    def micro_rows(self) -> int:
        """Rows of the largest micro-batch."""
        return self.sizes.most

    def init(self, params: Params) -> TrainState:
        """See UpdatePrograms.init."""
        return self.programs.init(params)

    def update(
        self,
        state: TrainState,
        data: object,
        frozen: Frozen = NOTHING_FROZEN,
        *,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
        at: float | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Make one optimizer step on the objective's data; the state is donated.

        A non-finite loss or gradient keeps the old state and sets PREFIX/skipped to 1. New weights
        that blow up (`UpdatePrograms._apply_sum`) do so, too, and set PREFIX/blown_up to 1.
        metrics.metric.METRICS describes the report's keys.

        Args:
            device_lock: held during each program, if a sampler shares the devices.
            at: index in the learning rate's schedule, in updates; None: the updates so far.

        Raises:
            TrainingError: memory runs out with one row on each device; the state is unchanged.
            ConfigError: the compiler does not know one of trainer.compiler_options.
        """
        context = self.objective.context(data)
        retries = 0
        while True:
            micros = self._micros(data)
            try:
                self._check_memory(state.params, micros, context, frozen)
                sums, totals = self._gradients(state, micros, context, frozen, device_lock)
                break
            except jax.errors.JaxRuntimeError as error:
                check_compiler_options(error)
                if not is_out_of_memory(error):
                    raise
                self._halve(str(error).splitlines()[0])
                retries += 1
            except MemoryError as error:
                self._halve(str(error))
        with device_lock:
            now = None if at is None else np.float32(at)
            probed = NOTHING_FROZEN._replace(base=frozen.base)
            state, applied = self.programs.apply(state, sums, probed, probe_ids(micros[0]), now)
            host_totals, host_applied = jax.device_get((totals, applied))
        if host_applied["blown_up"]:
            log.warning(
                "an update is skipped: with a learning rate of %.3g its weights (norm %.3g) are "
                "far too large or give non-finite numbers. Lower algorithm.learning_rate (of a "
                "warm start: warm_start.learning_rate).",
                host_applied["learning_rate"],
                host_applied["made_norm"],
            )
        passes = Passes(sum(map(num_rows, micros)), len(micros))
        return state, {
            **summarize(host_totals),
            **load_report(host_totals, self.settings.balance),
            **{f"{self.objective.prefix}/{k}": float(host_applied[k]) for k in APPLIED},
            **({"faults/oom_retries": float(retries)} if retries else {}),
            **self.objective.report(data, frozen, passes),
        }

    def _micros(self, data: object) -> Sequence[Any]:
        micros = self.objective.micro_batches(data, self.sizes)
        length = jax.tree.leaves(micros[0])[0].shape[1]
        assert length == self.settings.row_length, "packed for another row length"
        return micros

    def _gradients(
        self,
        state: TrainState,
        micros: Sequence[object],
        context: object,
        frozen: Frozen,
        device_lock: DeviceGuard,
    ) -> tuple[GradSum, list[Totals]]:
        """Sum the gradients of all micro-batches and wait for them; `apply` then cannot fail."""
        totals: list[Totals] = []
        if self.settings.balance.loss and (len(micros) > 1 or self.programs.parts > 1):
            load = self._counted(state.params, micros, context, frozen, device_lock)
            frozen = frozen._replace(load=load)
        with device_lock:
            sums = self.programs.zeros()
        for index, micro in enumerate(micros):
            if self._drops:
                frozen = frozen._replace(noise=Noise(state.step, np.int32(index)))
            with device_lock:
                sums, total = self.programs.accumulate(
                    state.params, sums, self.programs.put(micro), context, frozen
                )
                if device_lock is not NO_DEVICE_LOCK or is_queue_full(self.settings.mesh, index):
                    jax.block_until_ready(sums)
            totals.append(total)
        jax.block_until_ready((sums, totals))
        return sums, totals

    def _counted(
        self,
        params: Params,
        micros: Sequence[object],
        context: object,
        frozen: Frozen,
        device_lock: DeviceGuard,
    ) -> ExpertLoad:
        """Count each expert's tokens over all micro-batches, with a forward pass over each."""
        load = None
        for index, micro in enumerate(micros):
            with device_lock:
                one = self.programs.count(params, self.programs.put(micro), context, frozen)
                load = one if load is None else jax.tree.map(jnp.add, load, one)
                if device_lock is not NO_DEVICE_LOCK or is_queue_full(self.settings.mesh, index):
                    jax.block_until_ready(load)
        assert load is not None
        return load

    def _check_memory(
        self, params: Params, micros: Sequence[object], context: object, frozen: Frozen
    ) -> None:
        """Raise MemoryError if the machine lacks the memory of a micro-batch's program.

        Only on CPUs, where the process would be killed without an error. The programs are compiled
        here, once.
        """
        new = {num_rows(m): m for m in micros if num_rows(m) not in self._fitting}
        free = free_memory(self.settings.mesh) if new else None
        if free is None:
            return
        for rows, micro in new.items():
            lowered = self.programs.lower_gradient(
                params, self.programs.put(micro), context, frozen
            )
            analysis = lowered.compile().memory_analysis()
            needed = 0 if analysis is None else analysis.temp_size_in_bytes
            if needed > free:
                shortage = f"its program needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
                if self._can_halve:
                    raise MemoryError(shortage)
                log.warning("memory may not suffice for an update of %d rows: %s", rows, shortage)
            self._fitting.add(rows)

    @property
    def _can_halve(self) -> bool:
        """True if micro-batches may have fewer rows."""
        independent = self.objective.rows_are_independent
        return independent and self.sizes.most > self.settings.num_row_shards

    def _halve(self, error: str) -> None:
        """Halve the maximum rows of a micro-batch. Raises TrainingError if that is impossible."""
        multiple, rows = self.settings.num_row_shards, self.sizes.most
        if not self._can_halve:
            independent = self.objective.rows_are_independent
            fewer = "" if independent else "lower trainer.micro_batch_tokens, "
            raise TrainingError(
                f"the trainer's devices are out of memory in an update of {rows} rows at once: "
                f"{error}. The weights are as before the step. To need less, "
                f"{fewer}set model.remat=layer, lower trainer.row_length (with sampler.max_length) "
                "or trainer.logprob_chunk, or share the weights by mesh.trainer.fsdp."
            )
        self.sizes = MicroSizes.up_to(-(-rows // (2 * multiple)) * multiple, multiple)
        log.warning(
            "out of memory in an update of %d rows at once (%s); at most %d from now on. Lower "
            "trainer.micro_batch_tokens to begin so.",
            rows,
            error,
            self.sizes.most,
        )

    def measure(
        self,
        params: Params,
        data: object,
        frozen: Frozen = NOTHING_FROZEN,
        *,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
    ) -> dict[str, float]:
        """Report the objective's measures of the data without an update."""
        micros, context = self._micros(data), self.objective.context(data)
        with device_lock:
            totals = [
                self.programs.measure(params, frozen, self.programs.put(m), context) for m in micros
            ]
            host_totals = jax.device_get(totals)
        return summarize(host_totals) | load_report(host_totals, self.settings.balance)


def is_queue_full(mesh: Mesh, index: int) -> bool:
    """Return whether to wait after program `index` of a loop before queueing another."""
    bounded = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    return bounded and index % MAX_QUEUED == MAX_QUEUED - 1


def free_memory(mesh: Mesh) -> int | None:
    """Return the bytes that a program may use on each device of a mesh of CPUs.

    None: unknown, or other devices, which raise errors themselves, or a mesh of several processes,
    which would have to agree.
    """
    if mesh.devices.flat[0].platform != "cpu" or spans_processes(mesh):
        return None
    try:
        return int(host_memory()[1] * MOST_OF_FREE / max(1, len(mesh.local_devices)))
    except OSError:
        return None


def num_rows(micro: object) -> int:
    """Return the rows of a micro-batch."""
    return len(jax.tree.leaves(micro)[0])
