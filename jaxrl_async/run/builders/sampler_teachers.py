"""Teachers and the reference that compute on the sampler's chips (teachers.NAME.chips=sampler)."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_async.config.schema import Config, NamedTeacher
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import DeviceGuard, Slices
from jaxrl_async.model.hf import load_spec
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.builders.frozen_weights import cut_vocabulary
from jaxrl_async.run.builders.initial_policy import load_policy
from jaxrl_async.scorers.logprob_model import LogprobModel

log = logging.getLogger(__name__)


class SamplerModel(NamedTuple):
    """A model on the sampler's chips, not loaded yet."""

    load: Callable[[], LogprobModel]
    vocab: int  # number of its tokens


def sampler_models(
    config: Config, policy: ModelSpec, slices: Slices, lock: DeviceGuard
) -> dict[str, SamplerModel]:
    """Return the models of the teachers that compute on the first sampler's chips, by name. Raises
    CheckpointError, ConfigError.

    lock: of the sampler's devices.
    """
    models = {}
    for name, teacher in config.named_teachers.items():
        if teacher.chips != "sampler":
            continue
        assert teacher.path is not None, "a config rule requires it"
        spec = load_spec(Path(teacher.path))
        if teacher.tokenizer is None:
            spec = replace(spec, vocab=min(spec.vocab, policy.vocab))
        compares = config.distils_by_loss and name in config.distilling
        top_k = config.teacher.top_k if config.teacher is not None and compares else 0
        if top_k >= spec.vocab:
            raise ConfigError(
                f"teacher.top_k ({top_k}) must be below the vocabulary of teachers.{name} "
                f"({spec.vocab})."
            )
        load = functools.partial(_load, config, name, teacher, spec, top_k, slices, lock)
        models[name] = SamplerModel(load, spec.vocab)
    return models


def _load(
    config: Config,
    name: str,
    teacher: NamedTeacher,
    spec: ModelSpec,
    top_k: int,
    slices: Slices,
    lock: DeviceGuard,
) -> LogprobModel:
    """Load a teacher's weights onto the first sampler's chips, in the type of the computation."""
    mesh, dtype = slices.sampler, jnp.dtype(config.model.computes_in)
    with lock:
        there = slices._replace(trainer=mesh)
        own = load_policy(config.model, teacher.path or "", there, adapter=teacher.adapter).merged()
        params = cut_vocabulary(own.spec, own.params, spec, mesh)
        params = jax.tree.map(lambda weight: weight.astype(dtype), params)
        jax.block_until_ready(params)
    log.info("teachers.%s: %s is on the sampler's chips, in %s", name, teacher.path, dtype)
    return LogprobModel(
        spec,
        params,
        mesh,
        top_k=top_k,
        temperature=config.temperature,
        dtype=dtype,
        attention=config.model.attention,
        chunk=config.trainer.logprob_chunk,
        device_lock=lock,
    )
