"""Engines with JetStream's interface as the samplers of a run (sampler.engine=jetstream). They run
in threads of this process, one for each sampler's slice.

    sampler: {engine: jetstream, engine_class: my_engine.py:MyEngine}

    class MyEngine(jetstream.engine.engine_api.Engine):      # prefill, insert, generate, ...
        def __init__(self, policy, *, slots, max_length, max_new_tokens, tokens_per_step,
                     sampling, stop_token_ids, seed, tokenizer, mesh, dtype): ...
        def take_params(self, params): ...    # convert new weights, a tree like policy.params,
                                              # for prefill and generate

The interface returns only tokens, so the trainer's log-probs replace the engine's.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.config.schema import Config
from jaxrl_async.config.userfile import load_attribute
from jaxrl_async.errors import ConfigError
from jaxrl_async.interop.foreign import ForeignSampler
from jaxrl_async.interop.jetstream import engine_api, make_engine
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.builders.inputs import Inputs
from jaxrl_async.run.builders.learning import sampling_params
from jaxrl_async.run.builders.samplers import Sampling, make_channel, make_router
from jaxrl_async.run.replay.player import ReplayedBuffer
from jaxrl_async.types import VersionedParams

log = logging.getLogger(__name__)

SETTING = "sampler.engine_class"


def make_jetstream_sampling(
    config: Config,
    inputs: Inputs,
    weights: VersionedParams,
    gate: ReplayBuffer | ReplayedBuffer,
) -> Sampling:
    """Make the samplers with the policy's weights, and the channel for new weights. Arguments as
    for make_sampling. Raises ConfigError, and MissingExtraError without jetstream."""
    if jax.process_count() > 1:
        raise ConfigError(
            "sampler.engine=jetstream needs a trainer in one process, but this run has "
            f"{jax.process_count()}. Run it on one host, or use sampler.engine=native."
        )
    make, slices, spec = engine_maker(config), inputs.slices, inputs.spec
    pushes, channel = make_channel(config, spec, slices, weights.version, gate, inputs.faults.add)
    samplers = []
    for i, (push, mesh) in enumerate(zip(pushes, slices.samplers, strict=True)):
        policy = Policy(spec, push(weights.params), inputs.tokenizer)
        seed = engine_seed(config.run.seed, i, weights.version)
        engine = build_engine(config, make, policy, mesh, seed, inputs.play.stop_token_ids)
        samplers.append(
            ForeignSampler(
                engine,
                params=engine.take_params(policy.params),
                weights=channel.subscribe(),
                version=weights.version,
                to_params=engine.take_params,
                sampling=sampling_params(config.sampler),
                device_lock=inputs.locks.sampler,
                name=f"sampler-{i}" if len(pushes) > 1 else "sampler",
            )
        )
    log.info(
        "JetStream's interface returns no log-probs: the trainer's log-probs are used instead, "
        "with an importance weight of 1 (policy/recomputed_logprob_share)"
    )
    router = make_router(config.faults, samplers, inputs.faults.add)
    return Sampling(router=router, channel=channel, publisher=channel, probe=None)


def engine_maker(config: Config) -> Callable[..., Any]:
    """Return the function or class that makes engines. Raises ConfigError, MissingExtraError."""
    api, name = engine_api(), config.sampler.engine_class
    if name is None:
        return make_engine
    made: Callable[..., Any] = load_attribute(
        name,
        SETTING,
        "subclass of jetstream.engine.engine_api.Engine",
        lambda found: isinstance(found, type) and issubclass(found, api.Engine),
    )
    return made


def build_engine(
    config: Config,
    make: Callable[..., Any],
    policy: Policy,
    mesh: Mesh,
    seed: int,
    stop_token_ids: tuple[int, ...],
) -> Any:
    """Make an engine. Raises ConfigError if that fails, or if it cannot serve the run."""
    section = config.sampler
    assert section.slots is not None, "an_engine_does_what_is_asked"
    try:
        engine = make(
            policy,
            slots=section.slots,
            max_length=section.max_length,
            max_new_tokens=section.max_new_tokens,
            tokens_per_step=section.block,
            sampling=sampling_params(section),
            stop_token_ids=stop_token_ids,
            seed=seed,
            tokenizer=policy.tokenizer,
            mesh=mesh,
            dtype=jnp.dtype(config.model.computes_in),
        )
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"{SETTING} = {section.engine_class!r}: its constructor fails: {error}. It is called "
            "with the policy and the keywords slots, max_length, max_new_tokens, tokens_per_step, "
            "sampling, stop_token_ids, seed, tokenizer, mesh, dtype (docs/engines.md, JetStream)."
        ) from error
    if not callable(getattr(engine, "take_params", None)):
        raise ConfigError(
            f"{SETTING} = {section.engine_class!r} has no method take_params(params), which passes "
            "new weights to the engine (docs/engines.md, JetStream)."
        )
    longest = int(engine.max_prefill_length)
    if longest < config.prompt_limit:
        raise ConfigError(
            f"prompts of this run have up to {config.prompt_limit} tokens, but the engine accepts "
            f"at most {longest} (max_prefill_length; for this package's engine the largest power "
            "of two below sampler.max_length). Raise sampler.max_length, or shorten the prompts "
            "(data.max_prompt_tokens)."
        )
    return engine


def engine_seed(seed: int, sampler: int, version: int) -> int:
    """Return the seed of a sampler's engine. It changes with each resume, because an engine's
    random numbers are not saved."""
    state = np.random.SeedSequence([seed, sampler, version]).generate_state(1)
    return int(state[0]) & 0x7FFFFFFF
