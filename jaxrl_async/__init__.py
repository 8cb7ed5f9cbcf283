"""Asynchronous reinforcement learning of language models in JAX.

The public names below are loaded on first use: importing the package costs nothing.
The main job is `python -m jaxrl_async.train CONFIG`; from Python,
`jaxrl_async.run.loop.train(config)`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Policy": "jaxrl_async.model.policy",
    "Sampler": "jaxrl_async.sampler.sampler",
    "Request": "jaxrl_async.types",
    "SamplingParams": "jaxrl_async.types",
    "Router": "jaxrl_async.sampler.router.router",
    "save_partial": "jaxrl_async.sampler.partial",
    "load_partial": "jaxrl_async.sampler.partial",
    "Completion": "jaxrl_async.types",
    "Partial": "jaxrl_async.types",
    "Episode": "jaxrl_async.types",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
