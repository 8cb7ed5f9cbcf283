"""One change of a sampler's adapters, as it is asked for."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jaxrl_async.model.spec import Params
from jaxrl_async.sampler.batch.adapter_places import PlacedAdapter


@dataclass(slots=True, kw_only=True, eq=False)
class AdapterChange:
    """One adapter to load, to swap or to unload."""

    name: str
    params: Params | None  # of adapter_stack.fitted_adapter; None: unload
    version: int | None = None  # None: the next one
    probe_logprobs: Any = None  # the trainer's, on the sampler's probe; None: it is not checked
    compared: bool = False  # see types.VersionedParams
    done: "Future[PlacedAdapter | None]" = field(default_factory=Future)
