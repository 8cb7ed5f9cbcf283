"""From a command line to a plan: what __main__ calls once the environment is set."""

import jax.numpy as jnp

from jaxrl_async.config import schema
from jaxrl_async.plan import programs as lowering
from jaxrl_async.plan.chips import Chip, Slice
from jaxrl_async.plan.compiled import compiled
from jaxrl_async.plan.simulate import Histogram
from jaxrl_async.plan.whole import Plan, make_plan
from jaxrl_async.sampler.sampler import kv_plan, make_engine


def plan(config: schema.Config, trainer: Slice, chip: Chip, chips: int, lengths: Histogram) -> Plan:
    """Lower, compile (or look up) and put together. Raises ConfigError, CheckpointError,
    MeshError."""
    spec = lowering.spec_of(config)
    places = lowering.places_of(config, trainer, chip, chips)
    lowered = [
        *lowering.trainer_programs(config, spec, places),
        *lowering.sampler_programs(config, spec, places),
    ]
    dtype = jnp.dtype(config.model.dtype)
    kv = kv_plan(spec, config.sampler, dtype)
    engine = make_engine(spec, kv, config.sampler, places.slices.sampler, dtype=dtype)
    return make_plan(
        config,
        spec,
        places,
        [compiled(one) for one in lowered],
        kv,
        lengths,
        sent=lowering.sent_weights(config, spec, places),
        state=engine.state_shapes(),
    )
