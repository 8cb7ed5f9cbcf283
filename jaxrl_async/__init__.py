"""Asynchronous reinforcement learning of language models in JAX.

The public names below are loaded on first use, so importing the package costs nothing.
The main command is `jaxrl-async train CONFIG`; from Python, `jaxrl_async.train(...)`. Names that
are not in `__all__` are not public and may change at any time (docs/python.md).
"""

import importlib
from types import ModuleType  # never `import types`: the package has a module of that name
from typing import Any

__version__ = "0.4.0.dev0"

_MODULES = {
    "train": "jaxrl_async.api.training",
    "steps": "jaxrl_async.api.training",
    "from_trl": "jaxrl_async.api.from_peers",
    "plan": "jaxrl_async.api.planning",
    "PlannedRun": "jaxrl_async.api.planning",
    "generate": "jaxrl_async.api.asker",
    "Asker": "jaxrl_async.api.asker",
    "Conversation": "jaxrl_async.api.conversation",
    "ConversationAnswer": "jaxrl_async.api.conversation",
    "score": "jaxrl_async.api.asker",
    "evaluate": "jaxrl_async.api.evaluating",
    "PolicyEvaluation": "jaxrl_async.evals.policy_eval",
    "Estimate": "jaxrl_async.evals.estimates",
    "EvalAnswer": "jaxrl_async.evals.eval_answers",
    "ScoredText": "jaxrl_async.api.scored_text",
    "Callback": "jaxrl_async.run.callbacks",
    "Run": "jaxrl_async.api.finished_run",
    "StopTraining": "jaxrl_async.errors",
    "JaxrlError": "jaxrl_async.errors",
    "Config": "jaxrl_async.config.schema",
    "load": "jaxrl_async.config.load",
    "Policy": "jaxrl_async.model.policy",
    "Sampler": "jaxrl_async.sampler.sampler",
    "Request": "jaxrl_async.types",
    "LogprobRequest": "jaxrl_async.types",
    "PositionLogprobs": "jaxrl_async.types",
    "SamplingParams": "jaxrl_async.types",
    "Constraint": "jaxrl_async.types",
    "LogitShaping": "jaxrl_async.types",
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

__all__ = [*sorted(_MODULES), "__version__"]


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List only the public names, for completion."""
    return sorted(__all__)


class CalledModule(ModuleType):
    """A module that shares its name with a public function, such as jaxrl_async.train. Once
    imported, the module is found under that name; calling it calls the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return __getattr__(self.__name__.rpartition(".")[2])(*args, **kwargs)
