"""Third-party engine servers as the samplers of a run: checked before the run starts, then each
subscribed to the weight channel."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.config.schema import Config, SamplerSection
from jaxrl_async.errors import CheckpointError, ConfigError, RolloutError
from jaxrl_async.interop.vllm import EngineSettings, VllmSampler
from jaxrl_async.interop.vllm_client import VllmServer
from jaxrl_async.interop.vllm_messages import ServerFacts, problem_with
from jaxrl_async.interop.weight_folder import WeightFolder
from jaxrl_async.mesh import TRAINER_RULES, shardings
from jaxrl_async.model.hf import load_spec
from jaxrl_async.model.spec import ModelSpec, Params, weight_table
from jaxrl_async.run.builders.inputs import Inputs
from jaxrl_async.run.builders.samplers import (
    Sampling,
    make_router,
    run_probe_ids,
    sampler_settings,
)
from jaxrl_async.run.replay.player import ReplayedBuffer
from jaxrl_async.sampler.probe import Probe
from jaxrl_async.sampler.request_checks import RequestLimits
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.local import Push

FOLDER = "engine_weights"
"""Folder for the weights inside the run's folder, unless remote.folder is set."""
UNIMPORTANT = ("max_positions", "eos_ids", "bos_id", "pad_id")
"""Fields of a spec in which the server's model may differ from the policy."""

log = logging.getLogger(__name__)


def check_engines(config: Config, spec: ModelSpec) -> None:
    """Check that each server can sample for this run; a no-op without servers.

    Raises ConfigError that names the server and the fix.
    """
    if config.sampler.engine != "vllm":
        return
    if jax.process_count() > 1:
        raise ConfigError(
            f"sampler.engine={config.sampler.engine} needs a trainer in one process to write the "
            f"weights, but this run has {jax.process_count()}. Run it on one host."
        )
    with ThreadPoolExecutor(len(config.sampler.engine_urls)) as pool:  # each has an event loop
        for url, facts in zip(
            config.sampler.engine_urls, pool.map(_facts, config.sampler.engine_urls), strict=True
        ):
            problem = problem_with(
                facts,
                spec.vocab,
                config.sampler.max_length,
                tied=spec.tied,
                plain=_is_plain(config.sampler),
                dtype=config.model.computes_in,
            ) or _model_difference(facts, spec)
            if problem is not None:
                raise ConfigError(f"sampler.engine_urls: the vLLM server at {url}: {problem}")
            log.info("%s: vLLM %s with %s", url, facts.version, facts.model)
    log.info(
        "algorithm.correction=%s corrects for the difference between the engine's log-probs and "
        "the trainer's",
        config.algorithm.correction,
    )


def _facts(url: str) -> ServerFacts:
    async def ask() -> ServerFacts:
        server = VllmServer(url)
        try:
            return await server.facts()
        finally:
            await server.close()

    try:
        return asyncio.run(ask())
    except RolloutError as error:
        raise ConfigError(f"sampler.engine_urls: {error}") from error


def _is_plain(section: SamplerSection) -> bool:
    """Return whether tokens are sampled from the unmodified distribution of the logits."""
    untruncated = section.top_k == 0 and section.top_p == 1 and section.min_p == 0
    return section.temperature == 1 and untruncated


def _model_difference(facts: ServerFacts, spec: ModelSpec) -> str | None:
    """Return how the server's model differs from the policy, if its directory is visible from this
    machine. None: it does not differ, or this is unknown until the weights are loaded."""
    folder = Path(facts.model)
    if not (folder / "config.json").is_file():
        return None
    try:
        theirs = load_spec(folder)
    except CheckpointError as error:
        return f"its model is not supported by this package: {error}"
    names = (f.name for f in fields(ModelSpec) if f.name not in UNIMPORTANT)
    if differs := [n for n in names if getattr(spec, n) != getattr(theirs, n)]:
        shown = ", ".join(f"{n} {getattr(theirs, n)}, not {getattr(spec, n)}" for n in differs[:3])
        return (
            f"its model {facts.model} differs from the policy ({shown}). Start it with the "
            "directory in model.path."
        )
    return None


class SharedPush:
    """A weights.link.Link to servers that read files. All servers share one private copy on the
    trainer's devices."""

    crosses: bool = False  # nothing is moved: there is no copy to compare

    def __init__(self, push: Push) -> None:
        """push: from the trainer's shardings to the same shardings."""
        self._push = push
        self._source: Any = None  # an array of the weights that were last copied
        self._copy: Params = None

    def cast(self, params: Params) -> Params:
        """Return the private copy, made by the first call for these weights."""
        first = jax.tree.leaves(params)[0]
        if first is not self._source:
            self._source, self._copy = first, self._push.cast(params)
        return self._copy

    def is_cast(self, params: Params) -> bool:
        """Return False: the trainer modifies the weights while servers read the copy."""
        return False

    def move(self, cast: Params) -> Params:
        """Return the copy itself."""
        return cast

    def finish(self, moved: Params) -> Params:
        """Return the copy itself."""
        return moved


def make_engines(
    config: Config,
    spec: ModelSpec,
    trainer: Mesh,
    weights: VersionedParams,
    on_live: Callable[[int], None],
    probe: Probe | None,
    count: Callable[[str], None],
) -> tuple[list[VllmSampler], WeightChannel]:
    """Make a sampler for each server, and the channel that delivers new weights to them.

    Args:
        config: sampler, weights, remote, faults, and the run's folder.
        spec: spec of the policy.
        trainer: the trainer's mesh.
        weights: the policy's weights, with which the servers start.
        on_live: called with a version once all servers sample from it.
        probe: tokens on which their log-probs are compared with the trainer's; None: no check.
        count: called with the name of each fault.
    """
    sharded = shardings(weight_table(spec), trainer, TRAINER_RULES)
    dtype = jnp.dtype(config.weights.dtype or config.model.computes_in)
    push = SharedPush(Push(sharded, sharded, dtype=dtype))
    urls = config.sampler.engine_urls
    channel = WeightChannel(
        [push] * len(urls), on_live=on_live, version=weights.version, count=count
    )
    folder = WeightFolder(_weights_root(config), spec)
    first = replace(weights, params=push.cast(weights.params))
    settings = engine_settings(config, spec, probe, count)
    samplers = [
        VllmSampler(url, settings, folder=folder, weights=channel.subscribe(), update=first)
        for url in urls
    ]
    return samplers, channel


def make_vllm_sampling(
    config: Config,
    inputs: Inputs,
    weights: VersionedParams,
    gate: ReplayBuffer | ReplayedBuffer,
) -> Sampling:
    """Make a sampler for each vLLM server (sampler.engine=vllm); arguments as for make_sampling."""
    settings = sampler_settings(config, inputs.spec, run_probe_ids(inputs))
    engines, channel = make_engines(
        config,
        inputs.spec,
        inputs.slices.trainer,
        weights,
        on_live=gate.set_live,
        probe=settings.probe,
        count=inputs.faults.add,
    )
    return Sampling(
        router=make_router(config.faults, engines, inputs.faults.add),
        channel=channel,
        publisher=channel,
        probe=settings.probe_tokens,
    )


def engine_settings(
    config: Config, spec: ModelSpec, probe: Probe | None, count: Callable[[str], None]
) -> EngineSettings:
    """Return the settings of a run's servers."""
    section = config.sampler
    assert section.slots is not None, "an_engine_supports_the_settings"
    return EngineSettings(
        run=secrets.token_hex(4),
        slots=section.slots,
        timeout_s=config.faults.sampler_hang_s,
        on_new_weights=section.on_new_weights,
        room=RequestLimits(
            max_length=section.max_length,
            max_new_tokens=section.max_new_tokens,
            vocab=spec.vocab,
        ),
        probe=probe,
        count=count,
    )


def _weights_root(config: Config) -> Path:
    """Return the folder of the weights: below remote.folder, or in the run's folder."""
    if config.remote_settings.folder is not None:
        return Path(config.remote_settings.folder) / config.run.name / FOLDER
    return Path(config.run.dir) / config.run.name / FOLDER
