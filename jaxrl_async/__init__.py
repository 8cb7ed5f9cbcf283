"""Asynchronous reinforcement learning of language models in JAX.

The public names below are loaded on first use: importing the package costs nothing.
The main job is `python -m jaxrl_async.train CONFIG`; from Python,
`jaxrl_async.run.loop.train(config)`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "train": "jaxrl_async.api.training",
    "steps": "jaxrl_async.api.training",
    "generate": "jaxrl_async.api.asking",
    "Asker": "jaxrl_async.api.asking",
    "Run": "jaxrl_async.api.finished_run",
    "StopTraining": "jaxrl_async.errors",
    "JaxrlError": "jaxrl_async.errors",
    "Config": "jaxrl_async.config.schema",
    "load": "jaxrl_async.config.load",
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
    "Task": "jaxrl_async.tasks.task",
    "Environment": "jaxrl_async.tasks.task",
    "Game": "jaxrl_async.tasks.game",
    "Round": "jaxrl_async.tasks.game",
    "Step": "jaxrl_async.tasks.task",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
