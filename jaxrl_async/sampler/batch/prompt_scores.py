"""The log-probs of one prompt, as prefills find them. Pure host code."""

from typing import Any, NamedTuple

import numpy as np

from jaxrl_async.types import LogprobRequest, Partial, PositionLogprobs, Request


class _Found(NamedTuple):
    """A prefill's results for a prompt."""

    begin: int  # first position that has a log-prob
    rows: slice  # in the prefill's results
    scores: Any  # program_arguments.TokenScores, on the device


class PromptScores:
    """The log-probs of one prompt, all by one version of the weights: if these change before the
    prompt is computed, it starts again. Used only by the sampler's thread."""

    def __init__(self, asked: LogprobRequest, tokens: int, version: int) -> None:
        """Start without any.

        Args:
            asked: what is wanted.
            tokens: of the prompt.
            version: of the weights.
        """
        self.asked, self.tokens, self.version = asked, tokens, version
        self._found: list[_Found] = []

    def scored(self, begin: int, end: int) -> range:
        """Return which of the sequence's tokens from `begin` to `end` are scored: the token after
        each is in the prompt, and its log-prob is wanted."""
        return range(max(begin, self.asked.start - 1), min(end, self.tokens - 1))

    def expect(self, begin: int, rows: slice, scores: object) -> None:
        """Add a prefill's results, which the device may still compute.

        Args:
            begin: first position that has a log-prob there.
            rows: this prompt's, of all results.
            scores: all results, program_arguments.TokenScores.
        """
        self._found.append(_Found(begin, rows, scores))

    def result(self) -> PositionLogprobs:
        """Return the log-probs, [tokens]. Waits for the device."""
        n, top, ids = self.tokens, self.asked.top, len(self.asked.ids)
        result = PositionLogprobs(
            logprobs=np.full(n, np.nan, np.float32),
            top_ids=np.full((n, top), -1, np.int32),
            top_logprobs=np.full((n, top), np.nan, np.float32),
            id_logprobs=np.full((n, ids), np.nan, np.float32),
            version=self.version,
        )
        for begin, rows, scores in self._found:
            at, named = slice(begin, begin + rows.stop - rows.start), scores.named
            result.logprobs[at] = np.asarray(scores.logprobs)[rows]
            result.top_ids[at] = np.asarray(named.top_ids)[rows, :top]
            result.top_logprobs[at] = np.asarray(named.top_logprobs)[rows, :top]
            result.id_logprobs[at] = np.asarray(named.id_logprobs)[rows, :ids]
        return result


def scores_for(request: Request, saved: Partial | None, version: int) -> PromptScores | None:
    """Return the empty log-probs of a request whose prompt will be computed by weights of this
    version; None if it wants none, or if it has them (`saved`)."""
    asked = request.logprobs
    if (
        asked is None
        or not asked.prompt
        or (saved is not None and saved.prompt_logprobs is not None)
    ):
        return None
    return PromptScores(asked, len(request.token_ids), version)
