"""The built-in graders: compare an answer with the reference. Needs no JAX.

    exact     the same text
    gsm8k     the same final number
    math      the same mathematics (the library math-verify, in processes of its own)

Each is a reward function with one part, `correct`, 1 or 0. In doubt it is 0: a policy soon finds
what is rewarded without being right.
"""

from collections.abc import Mapping

from jaxrl_async.errors import RefusedScore
from jaxrl_async.scorers.answers import final_number
from jaxrl_async.scorers.mathprocess import same_mathematics
from jaxrl_async.types import CORRECT


def exact(completion: str, reference: str) -> Mapping[str, float]:
    """Check that the completion, or what follows a '#' in it up to its end, is the reference.

    Spaces around either are ignored. A reference may itself have a '#' in it ("C#").
    """
    given, right = completion.strip(), _needed(reference).strip()
    before = given.removesuffix(right).rstrip()
    marked = given.endswith(right) and before.endswith("#")
    return {CORRECT: float(given == right or marked)}


def gsm8k(completion: str, reference: str) -> Mapping[str, float]:
    """Check the final number: the first after the last '####', else the last of the text.

    18, 18.0, $18, 18%, **18**, 18kg and 1,018 without its comma are numbers. A final number that is
    part of something larger (1/2, 10-5, sqrt(2), (1,2), x^2, 2x, 18g, 5 million, > 3) makes the
    answer wrong; earlier numbers are not tried instead. (One letter after a number may be a
    variable.) The format is that of Cobbe et al. 2021 (arXiv:2110.14168).
    """
    right, given = final_number(_needed(reference)), final_number(completion)
    return {CORRECT: float(right is not None and given == right)}


def math(completion: str, reference: str) -> Mapping[str, float]:
    r"""Check that the final answer equals the reference mathematically: 1/2, \frac12 and 0.5.

    The final answer is the content of the last \boxed{}, else what follows the last '####', else
    the last formula in $..$, \(..\) or \[..\], else the last line. The library math-verify parses
    and compares; an answer on which it takes too long is wrong (scorers/mathprocess.py).
    """
    return {CORRECT: float(same_mathematics(completion, _needed(reference)))}


def _needed(reference: str) -> str:
    if not reference.strip():
        raise RefusedScore(
            "has no right answer to compare with: the record has none. Set "
            "data.jsonl.answer_field, or choose a reward that needs no right answer."
        )
    return reference
