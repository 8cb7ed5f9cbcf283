"""Checks of all functions that the algorithm names, on a tiny batch, before training.

A user's own functions are also checked for shapes, dtypes and gradients:

    algorithm: {loss: my_file.py:my_loss}          or   {my_file.py:my_loss: {strength: 0.5}}

    def my_loss(x: TokenInputs, *, strength: float = 1.0) -> jax.Array:     # [rows, length]
        ratio = jnp.exp(log_ratio(x))
        return -strength * ratio * x.advantages

Values outside x.mask are discarded, and algorithm.aggregate averages the rest. The function may
return a TokenLoss instead, which also marks the clipped tokens. The fields of TokenInputs are
documented in the class (algorithms/losses.py).
"""

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxrl_async.algorithms.advantages import StepAdvantages, StepData, advantage, needs_critic
from jaxrl_async.algorithms.aggregate import aggregate
from jaxrl_async.algorithms.corrections import correction, correction_of, default_correction
from jaxrl_async.algorithms.kl import sees_whole_distribution
from jaxrl_async.algorithms.losses import (
    ON_REQUEST,
    TokenInputs,
    masked_loss,
    token_inputs,
    token_loss,
)
from jaxrl_async.algorithms.objective import make_recipe, pass_columns, policy_loss
from jaxrl_async.algorithms.shaping import kept_group_size, shape, shaping
from jaxrl_async.config import schema
from jaxrl_async.config.userfile import is_own
from jaxrl_async.errors import ConfigError
from jaxrl_async.later import Later
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket

if TYPE_CHECKING:
    from jaxrl_async.algorithms import loss_components
    from jaxrl_async.algorithms.loss_components import ComponentFn
else:
    loss_components = Later("jaxrl_async.algorithms.loss_components")

SHAPE = (2, 6)
"""Rows and length of the tiny batch."""
RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)
"""Ratios policy / behavior of a token for which a warning reports its weight. A second token of the
sequence has the inverse ratio, so the ratio of the sequence is 1."""

log = logging.getLogger(__name__)


def with_correction(config: schema.Config) -> schema.Config:
    """Return the configuration with algorithm.correction filled in.

    Raise ConfigError on an unknown loss.
    """
    algorithm = config.algorithm
    if config.run.job != "rl" or config.pairs is not None:  # pairs need no correction
        return config
    used = algorithm.model_copy(update={"correction": correction_of(algorithm)})
    return config.model_copy(update={"algorithm": used})


def check_algorithm(
    algorithm: schema.AlgorithmSection, teacher: schema.TeacherSection | None
) -> None:
    """Try every function that the algorithm names.

    Raise ConfigError if a function is unknown, rejects its arguments or fails. Warn if a correction
    changes a loss that needs none.
    """
    recipe = make_recipe(algorithm, teacher)
    try_own_loss(algorithm)
    try_components(algorithm)
    x, step = tiny_inputs(algorithm), tiny_step()
    _try("algorithm.loss", algorithm.loss, lambda: jax.eval_shape(recipe.loss, x))
    used = correction_of(algorithm)
    _try("algorithm.correction", used, lambda: jax.eval_shape(recipe.correction, x))
    members = algorithm.min_members or algorithm.group_size
    for choice in algorithm.shaping:
        function = shaping.resolve(choice, group_size=members)
        _try("algorithm.shaping", choice, lambda f=function: shape(step, [f]))  # type: ignore[misc]
    left = kept_group_size(algorithm.shaping, members)
    if algorithm.pivots is not None:  # and the trunk
        left = min(left, algorithm.pivots.continuations + 1)
    try_advantage(algorithm.advantage, group_size=left)
    if algorithm.baseline == "unmasked" and needs_critic(algorithm.advantage):
        raise ConfigError(
            f"algorithm.baseline=unmasked hides masked answers from algorithm.advantage = "
            f"{algorithm.advantage!r}, whose critic is trained on all answers. Set baseline=all."
        )
    aggregate.resolve(algorithm.aggregate)
    if overcorrects(algorithm):
        log.warning(overcorrection_warning(algorithm))


def _try(key: str, choice: schema.Choices, call: Callable[[], object]) -> None:
    """Call the function; raise ConfigError, with the setting's name, if it fails."""
    try:
        call()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key} = {choice!r} fails on a tiny batch: {_first_line(error)}. Correct its "
            "arguments."
        ) from error


def _first_line(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"


# ---- a correction that changes a loss


def overcorrects(algorithm: schema.AlgorithmSection) -> bool:
    """Return whether a correction changes the token weights of a loss that needs none."""
    used = schema.each_of(correction_of(algorithm))
    if default_correction(algorithm.loss, algorithm.anchor) != "none":
        return False
    if not any(correction.facts(c).role == "bounds" for c in used):
        return False
    return _first_difference(algorithm) is not None


def overcorrection_warning(algorithm: schema.AlgorithmSection) -> str:
    """Return the warning for `overcorrects`: the token weights with and without the correction."""
    difference = _first_difference(algorithm)
    assert difference is not None, "the correction changes no weight"
    sign, *both = difference
    plain, other = (", ".join(f"{w:.3g}" for w in weights) for weights in both)
    return (
        f"algorithm.loss={schema.name_of(algorithm.loss)} needs no correction, and "
        f"algorithm.correction={correction_of(algorithm)} is set: a token of advantage "
        f"{sign:g} with policy / behavior = {', '.join(f'{r:g}' for r in RATIOS)}, in a "
        f"sequence with a token of the inverse ratio, weighs {other} instead of {plain}. "
        "To remove the correction, set algorithm.correction=null."
    )


def _first_difference(
    algorithm: schema.AlgorithmSection,
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]] | None:
    """Return an advantage for which the correction changes the weights of tokens of RATIOS, and the
    weights without and with it. None: it never does."""
    by_default = algorithm.model_copy(update={"correction": None})
    pairs = [(r, 1 / r) for r in RATIOS]
    for sign in (1.0, -1.0):
        plain, other = (effective_weights(a, pairs, sign)[:, 0] for a in (by_default, algorithm))
        if not np.allclose(plain, other, rtol=1e-4):
            return sign, plain, other
    return None


def effective_weights(
    algorithm: schema.AlgorithmSection, ratios: ArrayLike, advantage: float = 1.0
) -> NDArray[np.float64]:
    """Return -d loss / d log policy / advantage of each token; [sequences, length]. Losses are
    summed.

    Args:
        algorithm: the settings of the loss; its KL term is ignored.
        ratios: [sequences, length], policy / behavior of each token, which has a probability of
            exp(-5) under the behaviour policy. With anchor=proximal the proximal policy is the
            policy being trained.
        advantage: advantage of each token.
    """
    logs = np.log(np.asarray(ratios, np.float64))
    behavior = np.full(logs.shape, -5.0, np.float32)
    policy = jnp.asarray(behavior + logs, jnp.float32)
    ones = np.ones(behavior.shape)
    x = token_inputs(
        {
            "policy_logprobs": policy,
            "behavior_logprobs": behavior,
            "advantages": advantage * ones,
            "proximal_logprobs": policy if algorithm.anchor == "proximal" else None,
            **dict.fromkeys(("mask", "versions", "entropy", "covariance_rank"), ones),
        }
    )
    recipe = make_recipe(algorithm.model_copy(update={"kl_coefficient": 0.0, "losses": None}))

    def loss(logprobs: jax.Array) -> jax.Array:
        weights = jnp.asarray(ones, jnp.float32)
        moved = x._replace(policy_logprobs=logprobs)
        return policy_loss(recipe, moved, weights, jnp.int32(1))[0]

    return np.asarray(-jax.grad(loss)(policy) / advantage, np.float64)


# ---- a user's loss


def try_own_loss(algorithm: schema.AlgorithmSection) -> None:
    """Check shape, dtype and gradient of a loss from a user's file. Raise ConfigError."""
    if not is_own(schema.name_of(algorithm.loss)):
        return
    where = f"algorithm.loss = {schema.name_of(algorithm.loss)!r}"
    made = pass_columns(algorithm, refers=algorithm.refers, offloads=False)
    absent = sorted(ON_REQUEST - made)
    function, x = token_loss.resolve(algorithm.loss), tiny_inputs(algorithm)
    none: dict[str, Any] = dict.fromkeys(absent)
    x = x._replace(**none)
    missing = "".join(f" x.{name} exists only for a loss that declares it." for name in absent)
    try:
        result: Any = jax.eval_shape(function, x)
    except Exception as error:
        raise ConfigError(
            f"{where} fails on a batch of {list(SHAPE)} tokens: {_first_line(error)}. It is "
            "called as loss(x) inside jit, x being an algorithms.losses.TokenInputs: use "
            f"jax.numpy.{missing}"
        ) from error
    _check_loss_shape(where, result[0] if isinstance(result, tuple) and result else result)

    def total(logprobs: jax.Array) -> jax.Array:
        return masked_loss(function)(x._replace(policy_logprobs=logprobs)).loss.sum()

    value, gradient = jax.value_and_grad(total)(x.policy_logprobs)
    _check_finite(where, value, gradient)
    if not np.any(gradient):
        raise ConfigError(
            f"{where} has no gradient with respect to x.policy_logprobs: nothing would be trained. "
            "Use it, without stop_gradient."
        )


def _check_loss_shape(where: str, loss: Any) -> None:
    """Raise ConfigError unless a loss is one float per token."""
    if getattr(loss, "shape", None) == SHAPE and jnp.issubdtype(loss.dtype, jnp.floating):
        return
    given = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
    raise ConfigError(
        f"{where} must return one float per token, float32{list(SHAPE)} here, not {given}. Do not "
        "average: algorithm.aggregate does."
    )


def tiny_inputs(algorithm: schema.AlgorithmSection) -> TokenInputs:
    """Make every field that a loss may use with this algorithm; some tokens are masked."""
    refers = algorithm.refers
    whole = sees_whole_distribution(algorithm.kl)
    rng = np.random.default_rng(0)
    policy = -rng.exponential(1.0, SHAPE)

    def near(scale: float) -> NDArray[np.float32]:
        return (policy + scale * rng.uniform(-1, 1, SHAPE)).astype(np.float32)

    return token_inputs(
        {
            "policy_logprobs": policy,
            "behavior_logprobs": near(3.0),
            "advantages": rng.normal(0, 1, SHAPE),
            "mask": [[False, False, True, True, True, True], [False, *[True] * 3, *[False] * 2]],
            "versions": np.full(SHAPE, 3),
            "entropy": rng.random(SHAPE),
            "reference_logprobs": near(0.5) if refers and not whole else None,
            "proximal_logprobs": near(0.1),
            "segment_ids": [[1] * 6, [1] * 4 + [0] * 2],
            "ages": rng.integers(0, 4, SHAPE),
            "reference_divergence": near(0.5) ** 2 if refers and whole else None,
            "covariance_rank": rng.random(SHAPE),
            "rewards": np.repeat([[1.0], [0.0]], SHAPE[1], axis=1),
            "anchor_logprobs": None,  # the objective sets it, with algorithm.anchor=proximal
            "teacher_divergence": None,  # a separate term, which no loss uses
        }
    )


# ---- loss components


def try_components(algorithm: schema.AlgorithmSection) -> None:
    """Check the functions of algorithm.losses: for a user's own shape, dtype, metrics and gradient.
    Raise ConfigError."""
    x = tiny_inputs(algorithm)
    for name, section in algorithm.components.items():
        where = f"algorithm.losses.{name} = {schema.name_of(section.loss)!r}"
        function = loss_components.component.resolve(section.loss)
        try:
            values, metrics = jax.eval_shape(partial(loss_components.called, function), x)
        except Exception as error:
            raise ConfigError(
                f"{where} fails on a batch of {list(SHAPE)} tokens: {_first_line(error)}. It is "
                "called as loss(x) inside jit, x being an algorithms.losses.TokenInputs: use "
                "jax.numpy. x.reference_logprobs exists only if the run has a reference."
            ) from error
        _check_loss_shape(where, values)
        for metric, of_token in metrics.items():
            if not re.fullmatch(r"[\w.-]{1,64}", str(metric)):
                raise ConfigError(
                    f"{where} returns the metric {metric!r}. Name it by letters, digits, _ . and -."
                )
            if of_token.shape != SHAPE:
                raise ConfigError(
                    f"{where} must return one number per token for the metric {metric!r}, "
                    f"{list(SHAPE)} here, not {list(of_token.shape)}."
                )
        if is_own(schema.name_of(section.loss)):
            _check_component_gradient(where, function, x)


def _check_finite(where: str, *values: jax.Array) -> None:
    """Raise ConfigError unless a loss and its gradients are finite."""
    if not all(np.isfinite(value).all() for value in values):
        raise ConfigError(
            f"{where} is not finite, or its gradient is not, on a batch with log ratios up to 3. "
            "Look for a division by zero or the log of 0; jnp.where keeps a NaN in its gradient."
        )


def _check_component_gradient(where: str, function: "ComponentFn", x: TokenInputs) -> None:
    """Raise ConfigError unless a user's component and its gradient are finite, and not all 0."""

    def total(logprobs: jax.Array, entropy: jax.Array) -> jax.Array:
        moved = x._replace(policy_logprobs=logprobs, entropy=entropy)
        return jnp.where(x.mask, loss_components.called(function, moved)[0], 0.0).sum()

    value, slopes = jax.value_and_grad(total, argnums=(0, 1))(x.policy_logprobs, x.entropy)
    _check_finite(where, value, *slopes)
    if not any(np.any(slope) for slope in slopes):
        raise ConfigError(
            f"{where} has no gradient with respect to x.policy_logprobs or x.entropy: it would "
            "change nothing. Use one of them, without stop_gradient."
        )


# ---- a user's advantage


def try_advantage(choice: schema.Choice, *, group_size: int) -> None:
    """Try an estimator from a user's file on two groups; for others only check the arguments.

    group_size: episodes per group after the shapings. Raise ConfigError.
    """
    function = advantage.resolve(choice, group_size=group_size)
    if not is_own(schema.name_of(choice)):
        return
    where = f"algorithm.advantage = {schema.name_of(choice)!r}"
    data = tiny_step(with_values=needs_critic(choice))
    try:
        result = function(data)
    except Exception as error:
        raise ConfigError(
            f"{where} fails on two groups of three episodes: {_first_line(error)}. It is "
            "called as advantage(data), data being an algorithms.advantages.StepData."
        ) from error
    if not isinstance(result, StepAdvantages):
        raise ConfigError(
            f"{where} must return an algorithms.advantages.StepAdvantages, not "
            f"{type(result).__name__}."
        )
    shapes = [[np.shape(a) for a in of_group] for of_group in result.advantages]
    needed = [[e.token_ids.shape for e in g.episodes] for g in data.groups]
    if shapes != needed:
        raise ConfigError(
            f"{where} must return one number per token of each episode of each group: shapes "
            f"{needed} here, not {shapes}."
        )
    if needs_critic(choice):
        returns = [[np.shape(a) for a in of_group] for of_group in result.returns or ()]
        if returns != needed:
            raise ConfigError(
                f"{where} declares that it needs a critic's values, so it must return the critic's "
                f"targets (returns), in the shapes of the advantages: {needed} here, not {returns}."
            )
    if not all(np.isfinite(a).all() for of_group in result.advantages for a in of_group):
        raise ConfigError(f"{where} returns numbers that are not finite on two small groups.")


def tiny_step(*, with_values: bool = False) -> StepData:
    """Make two groups of three episodes, one group with different rewards; with_values adds a
    critic's values, all 0."""
    sampled = np.array([False, True, True, True])
    episode = Episode(
        token_ids=np.arange(4, dtype=np.int32),
        drawn=sampled,
        logprobs=np.where(sampled, -1, 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        stop=StopReason.EOS,
    )
    prompt = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")
    rewards = (np.array([0.0, 1.0, 0.5]), np.array([1.0, 1.0, 1.0]))
    groups = tuple(
        EpisodeGroup(
            prompt=prompt,
            episodes=(episode,) * 3,
            scores=tuple(Score(reward=float(r)) for r in of_group),
            ticket=Ticket(group=number, version=0),
        )
        for number, of_group in enumerate(rewards)
    )
    if not with_values:
        return StepData(groups=groups, rewards=rewards)
    return StepData(
        groups=groups,
        rewards=rewards,
        values=tuple((np.zeros(4, np.float32),) * 3 for _ in groups),
        last_values=tuple(np.zeros(3) for _ in groups),
    )
