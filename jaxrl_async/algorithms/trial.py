"""Everything that the algorithm names, tried on a tiny batch before anything is trained."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.algorithms.advantages import advantage
from jaxrl_async.algorithms.aggregate import aggregate
from jaxrl_async.algorithms.corrections import (
    BOUNDING,
    correction_of,
    default_correction,
)
from jaxrl_async.algorithms.losses import token_inputs
from jaxrl_async.algorithms.objective import make_recipe, policy_loss
from jaxrl_async.algorithms.preflight import own_advantage, tiny_inputs, tiny_step
from jaxrl_async.algorithms.shaping import shape, shaping
from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError

log = logging.getLogger(__name__)

RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)
"""Where effective weights are told."""


def with_correction(config: schema.Config) -> schema.Config:
    """The configuration with algorithm.correction as it is used, for whoever reads it later.

    Raises ConfigError on an unknown loss.
    """
    algorithm = config.algorithm
    if config.run.job != "rl":
        return config
    used = algorithm.model_copy(update={"correction": correction_of(algorithm)})
    return config.model_copy(update={"algorithm": used})


def check_algorithm(algorithm: schema.AlgorithmSection, teacher: schema.TeacherSection) -> None:
    """Raises ConfigError where a function is unknown, or refuses its arguments; says so where a
    correction bends a loss that asks for none."""
    facts = {"group_size": algorithm.group_size}
    recipe = make_recipe(algorithm, teacher)
    x, step = tiny_inputs(algorithm), tiny_step()
    _try("algorithm.loss", algorithm.loss, lambda: jax.eval_shape(recipe.loss, x))
    used = correction_of(algorithm)
    _try("algorithm.correction", used, lambda: jax.eval_shape(recipe.correction, x))
    for choice in algorithm.shaping:
        function = shaping.resolve(choice, **facts)
        _try("algorithm.shaping", choice, lambda f=function: shape(step, [f]))  # type: ignore[misc]
    downsamples = [c for c in algorithm.shaping if schema.name_of(c) == "downsample"]
    kept = [schema.arguments_of(c)["keep"] for c in downsamples]
    facts["group_size"] = min([algorithm.group_size, *kept])
    own_advantage(advantage.resolve(algorithm.advantage, **facts), algorithm.advantage)
    aggregate.resolve(algorithm.aggregate)
    if bends(algorithm):
        log.warning(told_weights(algorithm))


def bends(algorithm: schema.AlgorithmSection) -> bool:
    """Whether a correction bounds what the loss bounds already, or takes no ratio of."""
    names = map(schema.name_of, schema.each_of(correction_of(algorithm)))
    asked = default_correction(algorithm.loss, algorithm.anchor)
    return asked == "none" and any(name in BOUNDING for name in names)


def told_weights(algorithm: schema.AlgorithmSection) -> str:
    """What algorithm.correction does to a loss that asks for none, in numbers."""
    as_asked = algorithm.model_copy(update={"correction": None})
    kept, bent = (
        ", ".join(f"{w:.3g}" for w in effective_weights(a, RATIOS)) for a in (as_asked, algorithm)
    )
    return (
        f"algorithm.loss={schema.name_of(algorithm.loss)} asks for no correction, and "
        f"algorithm.correction={correction_of(algorithm)} is set: at policy / behavior = "
        f"{', '.join(f'{r:g}' for r in RATIOS)} a token of advantage 1 weighs {bent}, without it "
        f"{kept}. Set algorithm.correction=null for that."
    )


def effective_weights(
    algorithm: schema.AlgorithmSection, ratios: Sequence[float], advantage: float = 1.0
) -> list[float]:
    """-d loss / d log policy / advantage of a sequence of one token, at policy / behavior = ratio.

    With anchor=proximal the proximal policy is the one that learns.
    """
    behavior = np.full((len(ratios), 1), -5.0, np.float32)
    policy = jnp.asarray(behavior + np.log(ratios)[:, None], jnp.float32)
    alike = np.ones(behavior.shape)
    x = token_inputs(
        {
            "policy_logprobs": policy,
            "behavior_logprobs": behavior,
            "advantages": advantage * alike,
            "proximal_logprobs": policy if algorithm.anchor == "proximal" else None,
            **dict.fromkeys(("mask", "versions", "entropy", "covariance_rank"), alike),
        }
    )
    recipe = make_recipe(algorithm.model_copy(update={"kl_coefficient": 0.0}))

    def loss(logprobs: jax.Array) -> jax.Array:
        weights = jnp.asarray(alike, jnp.float32)
        moved = x._replace(policy_logprobs=logprobs)
        return policy_loss(recipe, moved, weights, jnp.int32(1))[0]

    return [float(-g / advantage) for g in jax.grad(loss)(policy).ravel()]


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
