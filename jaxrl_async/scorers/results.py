"""Convert the result of a reward function to a Score. Needs no JAX.

0.5                                        the reward
{"correct": 1, "short": -0.2}              named parts; the reward is their sum
{"correct": 1, "token_rewards": [...]}     also one number for each token of token_ids
Score(...)                                 unchanged
None                                       the function does not apply (reward_call.py)
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
from jaxrl_async.types import LARGEST_REWARD, Episode, FloatArray, Score

TOKEN_REWARDS = "token_rewards"
"""Key of a result that is not a part: rewards of single tokens, added to the sum of parts."""
FUNCTIONS = "functions"
"""Part of a score with a judge: the total of all other scorers, if they name no parts."""
FUNCTION = "function"
"""Part of a Score: the function's number, if the function names no parts itself."""
MODEL = "model"
"""Part of a Score that holds the reward model's number."""
REMEDY = (
    f"It must give a finite number of at most {LARGEST_REWARD:g}, or a mapping of names to such "
    "numbers; None means that it does not apply."
)


def score_of(result: object, episode: Episode) -> Score:
    """Convert a result to a Score. Raises RefusedScore with a message that continues "reward f"."""
    if isinstance(result, Score):
        parts = _parts(result.parts)
        tokens = _floats(result.token_rewards, len(episode.token_ids), "token of the episode")
        return replace(
            result, reward=_number(result.reward, "a reward"), parts=parts, token_rewards=tokens
        )
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


def distinct_parts(
    by_function: Mapping[str, Sequence[Score | None]], taken: Iterable[str] = ()
) -> list[list[Score | None]]:
    """Rename the parts of several functions' Scores so no two functions share a part.

    A function without parts gets one with its name, unless it is the only function. A part that an
    earlier function has, or that is taken, becomes FUNCTION.PART.

    Args:
        by_function: One Score per episode of the group, by the function's name; None: it does not
            apply.
        taken: Names of parts that others provide.

    Raises RefusedScore if FUNCTION.PART is taken as well.
    """
    alone, known, renamed = len(by_function) == 1, set(taken), []
    for function, scores in by_function.items():
        mixed = any(score.parts for score in scores if score is not None)
        parts = [_own_parts(score, function, alone, mixed) for score in scores]
        names = _distinct_names(sorted({name for each in parts for name in each}), function, known)
        known |= set(names.values())
        renamed.append(
            [
                None
                if score is None
                else replace(
                    score,
                    parts={names[name]: value for name, value in each.items()},
                    named_of_tokens=score.named_of_tokens
                    if score.parts or not each
                    else score.total - score.reward,
                )
                for score, each in zip(scores, parts, strict=True)
            ]
        )
    return renamed


def _own_parts(score: Score | None, function: str, alone: bool, mixed: bool) -> Mapping[str, float]:
    """Return a score's parts. A plain number becomes one part named after its function, unless the
    function is the only one, or gives parts elsewhere and nothing here."""
    if score is None or (score.left_out and not score.parts):
        return {}
    return score.parts or ({} if alone or (mixed and not score.total) else {function: score.total})


def _distinct_names(parts: Sequence[str], function: str, known: Collection[str]) -> dict[str, str]:
    """Return a name for each of a function's parts that differs from all known names."""
    names = {p: part_name(f"{function}.{p}") if p in known else p for p in parts}
    if len({*names.values()} - {*known}) < len(names):
        raise RefusedScore(
            f"has parts of {function}, {', '.join(map(repr, parts))}, that clash with the "
            f"existing {', '.join(map(repr, sorted(known)))}. Rename them."
        )
    return names


def added(weighted: Sequence[tuple[float, Score | None]]) -> Score:
    """Add several functions' weighted Scores of one episode. Their parts stay unweighted; functions
    that do not apply are skipped."""
    scores = [(weight, score) for weight, score in weighted if score is not None]
    tokens = [weight * s.token_rewards for weight, s in scores if s.token_rewards is not None]
    return Score(
        reward=_sum(weight * score.reward for weight, score in scores),
        parts={name: value for _, score in scores for name, value in score.parts.items()},
        token_rewards=np.sum(tokens, axis=0, dtype=np.float32) if tokens else None,
        named_of_tokens=_sum(weight * score.named_of_tokens for weight, score in scores),
        left_out=len(scores) < len(weighted) or any(score.left_out for _, score in scores),
        logged={name: value for _, score in scores for name, value in score.logged.items()},
    )


def finite(value: object) -> float | None:
    """Convert a real number of any type to a float; None if it is not a number or not finite.

    Supports bool, NumPy's types, Decimal, Fraction, arrays without dimensions and others.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real | Decimal):
        return None
    try:
        number = float(value)
    except Exception:  # 10**400; a signalling NaN; a user's __float__ may raise anything
        return None
    return number if math.isfinite(number) else None


def cited(value: object) -> str:
    """Describe a value and its type for a message; only the type if its repr fails."""
    try:
        text = repr(value)
    except Exception:  # 10**5000 has too many digits; a user's __repr__ may raise anything
        return f"a {type(value).__name__} that cannot be shown"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _number(value: object, what: str) -> float:
    number = finite(value)
    if number is None or abs(number) > LARGEST_REWARD:
        raise RefusedScore(f"gave {what} of {cited(value)}. {REMEDY}")
    return number


def _parts(values: Mapping[Any, object]) -> dict[str, float]:
    """Return the parts by their names in metrics."""
    parts: dict[str, float] = {}
    for name, value in values.items():
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


def _floats(values: object, length: int, unit: str) -> FloatArray | None:
    """Convert values to `length` finite float32 numbers; None stays None."""
    if values is None:
        return None
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        array = np.array(math.nan)
    if array.shape != (length,) or not np.isfinite(array.astype(np.float32)).all():
        raise RefusedScore(
            f"gave {TOKEN_REWARDS} of {cited(values)}. They must be {length} finite numbers, one "
            f"for each {unit}."
        )
    return array.astype(np.float32)


def _spread(values: object, episode: Episode) -> FloatArray | None:
    """Spread rewards of the generated tokens over all tokens of the episode."""
    rewards = _floats(values, episode.num_drawn, "generated token (in token_ids)")
    if rewards is None:
        return None
    spread = np.zeros(len(episode.token_ids), np.float32)
    spread[episode.drawn] = rewards
    return spread
