"""Everything that the algorithm names, tried on a tiny batch before anything is trained."""

from collections.abc import Callable
from typing import Any

import jax

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError
from jaxrl_async.trainer.advantages import advantage
from jaxrl_async.trainer.aggregate import aggregate
from jaxrl_async.trainer.objective import make_recipe
from jaxrl_async.trainer.own import own_advantage, tiny_inputs, tiny_step
from jaxrl_async.trainer.shaping import shape, shaping


def check_algorithm(algorithm: schema.Algorithm, teacher: schema.Teacher) -> None:
    """Raises ConfigError where a function is unknown, or refuses its arguments."""
    recipe = make_recipe(algorithm, teacher)
    x, step = tiny_inputs(algorithm), tiny_step()
    _try("algorithm.loss", algorithm.loss, lambda: jax.eval_shape(recipe.loss, x))
    _try("algorithm.correction", algorithm.correction, lambda: jax.eval_shape(recipe.correction, x))
    for choice in algorithm.shaping:
        function = shaping.resolve(choice)
        _try("algorithm.shaping", choice, lambda f=function: shape(step, [f]))  # type: ignore[misc]
    own_advantage(advantage.resolve(algorithm.advantage), algorithm.advantage)
    aggregate.resolve(algorithm.aggregate)


def _try(key: str, choice: schema.Choices, call: Callable[[], Any]) -> None:
    try:
        call()
    except ConfigError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"{key} = {choice!r} fails on a tiny batch: {type(error).__name__}: {first}. Correct "
            "its arguments."
        ) from error
