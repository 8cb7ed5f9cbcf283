"""New weights of a sampler: checked on a probe, then swapped in between two decode blocks.

A swap changes one pointer; no program is compiled again. sampler.on_new_weights says what happens
to running sequences: they continue with their KV, have it recomputed, start again (restart), or
finish first while the new weights wait (drain).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import DeviceGuard, whole
from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.lora import is_whole
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.sampler.batch.batch import Batch
from jaxrl_async.sampler.batch.new_weights import new_version, recompute, restart, under_way
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.probe import Probe, ProbeJudge
from jaxrl_async.types import FloatArray, IntArray, VersionedParams

LogprobsOf = Callable[[IntArray], Any]
"""Untempered log-probs of all tokens of a sequence but the first, [n - 1] float32."""


ADVICE = (
    "Compare weights.dtype with model.dtype, and check how weights reach this sampler "
    "(remote.transfer, weights.checksum)."
)
"""Advice for a sampler of ours whose log-probs differ from the trainer's."""


class SwapCheck:
    """Compares the sampler's log-probs on a probe with the trainer's, before a swap."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: DTypeLike,
        probe: Probe | None,
        device_lock: DeviceGuard,
    ) -> None:
        """Make the check; without a probe, every swap passes."""
        self._spec, self._dtype, self._probe = spec, jnp.dtype(dtype), probe
        self._judge = None if probe is None else ProbeJudge(probe, "the sampler's", ADVICE)
        self._device_lock = device_lock

    def checked(self, where: str, logprobs: object) -> FloatArray:
        """Return the trainer's log-probs on the probe, given by a caller. Raises ConfigError, which
        begins with `where`, if they do not fit the probe."""
        if self._probe is None:
            raise ConfigError(
                f"{where}: probe_logprobs were given, but this sampler has no probe to compare "
                "them with. Start it with SamplerSettings(probe=...), or leave them out."
            )
        given, shape = np.asarray(logprobs), (len(self._probe.token_ids) - 1,)
        if given.dtype.kind != "f" or given.shape != shape:
            raise ConfigError(
                f"{where}: probe_logprobs must be numbers of shape {shape}, one for each token of "
                f"the probe but the first, not {given.dtype} {given.shape}."
            )
        return given

    def error_of(self, update: VersionedParams, logprobs_of: LogprobsOf | None = None) -> float:
        """Return the largest difference, nats; 0 without a probe. Raises WeightsError for weights
        that are not the trainer's (ProbeJudge).

        logprobs_of: computes the log-probs; None: from the update, which has all weights.
        """
        if self._probe is None or self._judge is None or update.probe_logprobs is None:
            return 0.0
        token_ids = self._probe.token_ids
        with self._device_lock:
            if logprobs_of is None:
                logprobs = _sequence_logprobs(self._spec, update.params, token_ids, self._dtype)
            else:
                logprobs = logprobs_of(token_ids)
            sampler, trainer = whole(logprobs), np.asarray(update.probe_logprobs)
        return self._judge.judge(update.version, sampler, trainer, compared=update.compared)


class SwappedWeights:
    """The weights in use, and new weights that wait. Used by the sampler's thread."""

    def __init__(
        self,
        engine: Engine,
        check: SwapCheck,
        *,
        mode: str,
        device_lock: DeviceGuard,
        version: int,
        prepared: Any,
    ) -> None:
        """Start with `prepared` (Engine.prepare) of this version. mode: sampler.on_new_weights."""
        self._engine, self._check, self._mode = engine, check, mode
        self._device_lock = device_lock
        self.version, self.prepared = version, prepared
        self._staged: VersionedParams | None = None

    @property
    def waiting(self) -> bool:
        """Whether new weights wait until running sequences are done."""
        return self._staged is not None

    def swap(self, update: VersionedParams | None, batch: Batch) -> float | None:
        """Swap to new or waiting weights; return the probe's error in nats.

        None: no new weights, or they wait until running sequences are done. Raises WeightsError.
        """
        update = self._staged or update
        if update is None:
            return None
        if self._mode == "drain" and under_way(batch):
            self._staged = update
            return None
        self._staged = None
        if is_whole(update.params):
            error = self._check.error_of(update)
            self.prepared = None  # frees memory for the new ones
            self.prepared = self._engine.prepare(update.params)
        else:
            adapted = self._engine.prepare(update.params, self.prepared)
            error = self._check.error_of(update, partial(self._engine.probe, adapted))
            self.prepared = adapted
        self.version = update.version
        new_version(batch, update.version)
        if self._mode == "recompute":
            remake(batch, self.prepared, self._device_lock)
        elif self._mode == "restart":
            restart(batch)
        return error


def remake(batch: Batch, prepared: Any, device_lock: DeviceGuard, adapter: str = "") -> None:
    """Recompute the KV of an adapter's running sequences, and wait for it."""
    with device_lock:
        recompute(batch, adapter)
        while batch.prefilling:
            batch.prefill(prepared)
        jax.block_until_ready(batch.state.logits)


@partial(jax.jit, static_argnums=(0, 3))
def _sequence_logprobs(spec: ModelSpec, params: Params, token_ids: Array, dtype: DTypeLike) -> Any:
    """Return the log-probs of token_ids[1:] of one sequence, [n - 1] float32."""
    ids = jnp.asarray(token_ids)[None]
    tokens = TokenRows(ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
    settings = DecoderSettings(dtype=dtype, chunk=ids.shape[1])
    return token_logprobs(spec, params, tokens, settings).logprobs[0, 1:]
