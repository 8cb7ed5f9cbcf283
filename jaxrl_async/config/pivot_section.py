"""Settings of pivots: tokens of an answer from which further continuations are drawn
(algorithm.pivots). Needs no JAX."""

from typing import Literal

from pydantic import Field

from jaxrl_async.config.section import NonNegative, Positive, Section


class PivotSection(Section):
    """Continuations of answers, drawn from chosen tokens (pivots) and compared with each other."""

    continuations: NonNegative = 0
    """Continuations drawn from each pivot, beside the answer's own; 0: none."""
    members: Positive = 1
    """Members of each group whose answers have pivots, chosen at random; at most all."""
    per_member: Positive = 1
    """Pivots of each of these answers; fewer where it has fewer tokens or marks."""
    where: Literal["lowest_logprob", "random", "fractions", "mark"] = "lowest_logprob"
    """Which tokens are drawn anew first: the least likely ones (lowest_logprob), random ones, those
    at equal fractions of the answer's length, or random ones of those behind a mark."""
    mark: str = Field("\n", min_length=1)
    """Text of where=mark: a pivot comes behind a token whose text holds it."""
    trunk: Literal["group", "fork"] = "group"
    """What the forked answer's own tokens behind a pivot are credited by: the comparison with the
    group's other members (group), or with the pivot's continuations (fork)."""
