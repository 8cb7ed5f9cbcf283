"""Estimates of an evaluation: pass@k, majority votes, intervals and paired differences. Pure
functions; needs no JAX.

The standard error of a mean over prompts is rollout.evaluate.clustered_stderr.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxrl_async.rollout.evaluate import clustered_stderr

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution: a 95 % interval is the mean plus or minus this
many standard errors (Miller 2024, arXiv:2411.00640)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over an evaluation's answers, with its standard error."""

    mean: float
    stderr: float | None  # over prompts; None: fewer than two prompts

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval; None: no standard error."""
        if self.stderr is None:
            return None
        return self.mean - Z_95 * self.stderr, self.mean + Z_95 * self.stderr


def estimate(groups: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of all values with its standard error. groups: the values of each prompt, at
    least one in all."""
    values = [value for group in groups for value in group]
    return Estimate(math.fsum(values) / len(values), clustered_stderr(groups))


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the probability that at least one of k of a prompt's samples passes.

    It is the unbiased estimate 1 - C(n - c, k) / C(n, k) of Chen et al. 2021 (arXiv:2107.03374,
    equation 1): the share of all choices of k samples that hold a passing one.

    Args:
        samples: n, the number of samples.
        passed: c, the number of samples that pass.
        k: at most n.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def doubling(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`, and `most`."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def majority(answers: Sequence[str | None], grades: Sequence[float]) -> float:
    """Return the grade of a prompt's most frequent answer, over its samples.

    Samples without an answer have no vote; 0 if none has one. Answers with equally many votes are
    equally likely to be chosen, and the grade of an answer is the mean over its samples.

    Args:
        answers: the final answer of each sample; None: it has none.
        grades: of each sample, such as 1 if it passes.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    chosen = [answer for answer, count in votes.items() if count == most]
    graded = list(zip(answers, grades, strict=True))
    return math.fsum(g for a, g in graded if a in chosen) / (most * len(chosen))


def paired_difference(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> tuple[Estimate, int] | None:
    """Return the mean of `after` minus `before` over the prompts that both have, and their number;
    None if they share no prompt.

    The differences of the prompts' means have a smaller error than two separate means where both
    find the same prompts hard (Miller 2024, arXiv:2411.00640, paired differences).

    before, after: the values of each prompt, by the prompt's key.
    """
    both = [key for key, values in after.items() if values and before.get(key)]
    if not both:
        return None
    differences = [
        math.fsum(after[key]) / len(after[key]) - math.fsum(before[key]) / len(before[key])
        for key in both
    ]
    return estimate([[one] for one in differences]), len(both)
