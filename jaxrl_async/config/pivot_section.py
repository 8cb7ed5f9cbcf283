"""Settings of pivots: tokens of an answer from which further continuations are sampled
(algorithm.pivots). Needs no JAX."""

from typing import Literal

from pydantic import Field

from jaxrl_async.config.section import Positive, Section


class PivotSection(Section):
    """Continuations of answers, sampled from chosen tokens (pivots) and compared with each
    other."""

    continuations: Positive
    """Continuations sampled from each pivot, in addition to the answer's own."""
    members: Positive = 1
    """Members of each group whose answers have pivots, chosen at random; at most all."""
    per_member: Positive = 1
    """Pivots of each of these answers; fewer where it has fewer tokens or marks."""
    where: Literal["lowest_logprob", "random", "fractions", "mark"] = "lowest_logprob"
    """Choice of the first token that is sampled again: the least likely tokens (lowest_logprob),
    random tokens, tokens at equal fractions of the answer's length, or random tokens after a
    mark."""
    mark: str = Field("\n", min_length=1)
    """Text of where=mark: a pivot follows a token whose text contains it."""
    trunk: Literal["group", "fork"] = "group"
    """Credit of the forked answer's own tokens after a pivot: by comparison with the group's other
    members (group), or with the pivot's continuations (fork)."""
