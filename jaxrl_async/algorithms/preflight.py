"""Functions from the user's own file, tried on a tiny batch before the run starts.

    algorithm: {loss: my_file.py:my_loss}          or   {my_file.py:my_loss: {strength: 0.5}}

    def my_loss(x: TokenInputs, *, strength: float = 1.0) -> jax.Array:     # [rows, length]
        ratio = jnp.exp(log_ratio(x))
        return -strength * ratio * x.advantages

What lies outside x.mask is thrown away; averaging is algorithm.aggregate's. A TokenLoss may be
returned as well, which also says which tokens were clipped. The field names and shapes of
TokenInputs are documented at the class (algorithms/losses.py).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.advantages import (
    AdvantageFn,
    StepAdvantages,
    StepData,
    needs_critic,
)
from jaxrl_async.algorithms.kl import is_whole
from jaxrl_async.algorithms.losses import TokenInputs, TokenLoss, TokenLossFn, token_inputs
from jaxrl_async.config import schema
from jaxrl_async.config.userfile import is_own
from jaxrl_async.errors import ConfigError
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket

SHAPE = (2, 6)


def own_loss(function: TokenLossFn, algorithm: schema.AlgorithmSection) -> TokenLossFn:
    """The loss as it is, or, of a user's file, masked, and tried for shape, dtype and gradient.

    Raises ConfigError.
    """
    name = schema.name_of(algorithm.loss)
    if not is_own(name):
        return function

    def masked(x: TokenInputs) -> TokenLoss:
        clean = x._replace(
            policy_logprobs=jnp.where(x.mask, x.policy_logprobs, 0.0),
            advantages=jnp.where(x.mask, x.advantages, 0.0),
        )
        given: Any = function(clean)
        loss, clipped = given if isinstance(given, tuple) else (given, jnp.zeros_like(x.mask))
        return TokenLoss(jnp.where(x.mask, loss, 0.0), x.mask & clipped)

    _try_loss(f"algorithm.loss = {name!r}", function, masked, tiny_inputs(algorithm))
    return masked


def _try_loss(where: str, function: TokenLossFn, masked: TokenLossFn, x: TokenInputs) -> None:
    try:
        given: Any = jax.eval_shape(function, x)
    except Exception as error:
        raise ConfigError(
            f"{where} fails on a batch of {list(SHAPE)} tokens: {_first_line(error)}. It is "
            "called as loss(x) inside jit, x being a trainer.losses.TokenInputs: use jax.numpy."
        ) from error
    loss = given[0] if isinstance(given, tuple) and given else given
    if getattr(loss, "shape", None) != SHAPE or not jnp.issubdtype(loss.dtype, jnp.floating):
        told = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise ConfigError(
            f"{where} must give one float per token, float32{list(SHAPE)} here, not {told}. Do not "
            "average: that is algorithm.aggregate's."
        )

    def total(logprobs: jax.Array) -> jax.Array:
        return masked(x._replace(policy_logprobs=logprobs)).loss.sum()

    value, gradient = jax.value_and_grad(total)(x.policy_logprobs)
    if not (np.isfinite(value) and np.isfinite(gradient).all()):
        raise ConfigError(
            f"{where} is not finite, or its gradient is not, on a batch with log ratios up to 3. "
            "Look for a division by zero or the log of 0; jnp.where keeps a NaN in its gradient."
        )
    if not np.any(gradient):
        raise ConfigError(
            f"{where} has no gradient by x.policy_logprobs: nothing would be learnt. Use it, and "
            "without stop_gradient."
        )


def tiny_inputs(algorithm: schema.AlgorithmSection) -> TokenInputs:
    """Every field that a loss may look at with this algorithm, with tokens that are not learnt."""
    refers = algorithm.kl_coefficient > 0
    whole = is_whole(algorithm.kl)
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
            "anchor_logprobs": None,  # the objective puts it in, with algorithm.anchor=proximal
            "teacher_divergence": None,  # a term of its own, which no loss looks at
        }
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def own_advantage(function: AdvantageFn, choice: schema.Choice) -> AdvantageFn:
    """The estimator, of a user's file tried on two groups. Raises ConfigError."""
    name = schema.name_of(choice)
    if not is_own(name):
        return function
    where, data = f"algorithm.advantage = {name!r}", tiny_step(with_values=needs_critic(choice))
    try:
        given = function(data)
    except Exception as error:
        raise ConfigError(
            f"{where} fails on two groups of three episodes: {_first_line(error)}. It is "
            "called as advantage(data), data being a trainer.advantages.StepData."
        ) from error
    if not isinstance(given, StepAdvantages):
        raise ConfigError(
            f"{where} must give a trainer.advantages.StepAdvantages, not {type(given).__name__}."
        )
    shapes = [[np.shape(a) for a in of_group] for of_group in given.advantages]
    wanted = [[e.token_ids.shape for e in g.episodes] for g in data.groups]
    if shapes != wanted:
        raise ConfigError(
            f"{where} must give one number per token of each episode of each group: shapes {wanted}"
            f" here, not {shapes}."
        )
    if not all(np.isfinite(a).all() for of_group in given.advantages for a in of_group):
        raise ConfigError(f"{where} gives numbers that are not finite on two small groups.")
    return function


def tiny_step(*, with_values: bool = False) -> StepData:
    """Two groups of three episodes, one of them with different rewards; with_values: of a critic,
    which are 0."""
    drawn = np.array([False, True, True, True])
    episode = Episode(
        token_ids=np.arange(4, dtype=np.int32),
        drawn=drawn,
        logprobs=np.where(drawn, -1, 0).astype(np.float32),
        versions=np.where(drawn, 0, -1).astype(np.int32),
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
