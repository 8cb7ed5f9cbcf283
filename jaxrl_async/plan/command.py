"""From a command line to a plan: what __main__ calls once the environment is set."""

from jaxrl_async.config import schema
from jaxrl_async.plan.chips import Chip, Slice
from jaxrl_async.plan.compiled import compiled
from jaxrl_async.plan.programs import check, lowered, places_of, spec_of
from jaxrl_async.plan.simulate import Histogram
from jaxrl_async.plan.whole import Plan, make_plan


def plan(config: schema.Config, trainer: Slice, chip: Chip, chips: int, lengths: Histogram) -> Plan:
    """Lower, compile (or look up) and put together. Raises ConfigError, CheckpointError,
    MeshError."""
    check(config)
    spec = spec_of(config)
    places = places_of(config, trainer, chip, chips)
    programs, held = lowered(config, spec, places)
    return make_plan(config, spec, places, [compiled(one) for one in programs], held, lengths)
