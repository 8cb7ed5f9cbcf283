"""What a reward function gave, as a Score. Needs no JAX.

0.5                                        the reward
{"correct": 1, "short": -0.2}              named parts; the reward is their sum
{"correct": 1, "token_rewards": [...]}     beside them, one number for each token of token_ids
Score(...)                                 as it is
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from jaxrl_async.errors import RefusedScore
from jaxrl_async.metrics.metric import part_name
from jaxrl_async.types import Episode, FloatArray, Score

TOKEN_REWARDS = "token_rewards"
"""Key of a mapping that holds no part: rewards of single tokens on top of the parts' sum."""
MODEL = "model"
"""Part of a Score that is a reward model's number."""
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


def told_apart(
    by_function: Mapping[str, Sequence[Score]], taken: Iterable[str] = ()
) -> list[list[Score]]:
    """Several functions' Scores of a group, by the functions' names, no two with an equal part.

    The number of a function without parts is a part by its name, unless it is alone. A part that
    an earlier function gives, or that is taken, is FUNCTION.PART. Raises RefusedScore where that
    is one, too.
    """
    alone, known, apart = len(by_function) == 1, set(taken), []
    for function, scores in by_function.items():
        parts = [score.parts or ({} if alone else {function: score.reward}) for score in scores]
        names = _names_apart(sorted({name for each in parts for name in each}), function, known)
        known |= set(names.values())
        apart.append(
            [
                replace(score, parts={names[name]: value for name, value in each.items()})
                for score, each in zip(scores, parts, strict=True)
            ]
        )
    return apart


def _names_apart(parts: Sequence[str], function: str, known: Collection[str]) -> dict[str, str]:
    """What a function's parts are called beside those that are known."""
    names = {p: part_name(f"{function}.{p}") if p in known else p for p in parts}
    if len({*names.values()} - {*known}) < len(names):
        raise RefusedScore(
            f"has parts of {function}, {', '.join(map(repr, parts))}, that cannot be told from "
            f"{', '.join(map(repr, sorted(known)))}, which there are. Rename them."
        )
    return names


def added(scores: Sequence[tuple[float, Score]]) -> Score:
    """One Score of several functions' of one episode, each with its weight. The parts are theirs,
    before weighting, no two of one name."""
    tokens = [weight * s.token_rewards for weight, s in scores if s.token_rewards is not None]
    return Score(
        reward=_sum(weight * score.reward for weight, score in scores),
        parts={name: value for _, score in scores for name, value in score.parts.items()},
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
