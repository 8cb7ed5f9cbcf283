"""What a reward function gave, as a Score. Needs no JAX.

0.5                                        the reward
{"correct": 1, "short": -0.2}              named parts; the reward is their sum
{"correct": 1, "token_rewards": [...]}     beside them, one number for each token of token_ids
Score(...)                                 as it is
"""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from jaxrl_async.errors import RefusedScore
from jaxrl_async.metrics.metric import part_name
from jaxrl_async.types import Episode, FloatArray, Score

TOKEN_REWARDS = "token_rewards"
"""Key of a mapping that holds no part: rewards of single tokens on top of the parts' sum."""
REMEDY = "It must give a finite number, or a mapping of names to finite numbers."


def score_of(result: Any, episode: Episode) -> Score:
    """The Score that a result means. Raises RefusedScore in words that go on after "reward f"."""
    if isinstance(result, Score):
        parts = _parts(result.parts)
        tokens = _floats(result.token_rewards, len(episode.token_ids), "token of the episode")
        return Score(reward=_number(result.reward, "a reward"), parts=parts, token_rewards=tokens)
    if not isinstance(result, Mapping):
        return Score(reward=_number(result, "a reward"))
    if not result:
        raise RefusedScore(f"gave {{}}, which has no part. {REMEDY}")
    parts = _parts({name: value for name, value in result.items() if name != TOKEN_REWARDS})
    return Score(
        reward=_sum(parts.values()),
        parts=parts,
        token_rewards=_spread(result.get(TOKEN_REWARDS), episode),
    )


def added(scores: Sequence[tuple[str, float, Score]], *, alone: bool) -> Score:
    """One Score of several functions' of one episode, each with its name and weight.

    The parts are theirs, before weighting; the number of a function without parts is a part by its
    name, unless it is alone. Raises RefusedScore where two name the same part.
    """
    parts: dict[str, float] = {}
    for name, _, score in scores:
        mine = score.parts or ({} if alone else {name: score.reward})
        if twice := sorted(parts.keys() & mine.keys()):
            raise RefusedScore(
                f"gave a part {twice[0]!r}, which another function of reward.function gives, too. "
                "Rename one of them."
            )
        parts |= mine
    tokens = [weight * s.token_rewards for _, weight, s in scores if s.token_rewards is not None]
    return Score(
        reward=_sum(weight * score.reward for _, weight, score in scores),
        parts=parts,
        token_rewards=np.sum(tokens, axis=0, dtype=np.float32) if tokens else None,
    )


def finite(value: Any) -> float | None:
    """A real number of any type (bool, NumPy's, Decimal, Fraction, an array without dimensions) as
    a float; None: it is none, or not finite."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real | Decimal):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # 10**400; a signalling NaN
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """A value and its type, for a message; one that cannot be shown by its type alone."""
    try:
        text = repr(value)
    except Exception:  # 10**5000 has too many digits; a user's __repr__ may do anything
        return f"a {type(value).__name__} that cannot be shown"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _number(value: Any, what: str) -> float:
    number = finite(value)
    if number is None:
        raise RefusedScore(f"gave {what} of {shown(value)}. {REMEDY}")
    return number


def _parts(given: Mapping[Any, Any]) -> dict[str, float]:
    """Parts by the names that they have in metrics."""
    parts: dict[str, float] = {}
    for name, value in given.items():
        legal = part_name(name)
        if legal in parts:
            raise RefusedScore(
                f"gave two parts that are both {legal!r} in a metric's name, the second is "
                f"{name!r}. Rename one of them."
            )
        parts[legal] = _number(value, f"part {name!r}")
    return parts


def _sum(numbers: Any) -> float:
    try:
        total = math.fsum(numbers)
    except OverflowError:
        total = math.inf
    return _number(total, "parts with a sum")


def _floats(values: Any, length: int, unit: str) -> FloatArray | None:
    """One finite float32 for each of `length`; None stays None."""
    if values is None:
        return None
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        array = np.array(math.nan)
    if array.shape != (length,) or not np.isfinite(array.astype(np.float32)).all():
        raise RefusedScore(
            f"gave {TOKEN_REWARDS} of {shown(values)}. They must be {length} finite numbers, one "
            f"for each {unit}."
        )
    return array.astype(np.float32)


def _spread(values: Any, episode: Episode) -> FloatArray | None:
    """Rewards of the drawn tokens at their places in the episode."""
    drawn = _floats(values, episode.num_drawn, "drawn token (those of token_ids)")
    if drawn is None:
        return None
    whole = np.zeros(len(episode.token_ids), np.float32)
    whole[episode.drawn] = drawn
    return whole
