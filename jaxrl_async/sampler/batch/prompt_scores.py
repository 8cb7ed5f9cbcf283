"""The log-probs of one prompt, as prefills compute them. Pure host code."""

from typing import Any, NamedTuple

import numpy as np

from jaxrl_async.types import LogprobRequest, Partial, PositionLogprobs, Request


class _Result(NamedTuple):
    """A prefill's results for a prompt."""

    begin: int  # first position that has a log-prob
    rows: slice  # in the prefill's results
    scores: Any  # program_arguments.TokenScores, on the device


class PromptScores:
    """The log-probs of one prompt, all by one version of the weights: if these change before the
    prompt is computed, it starts again. Used only by the sampler's thread."""

    def __init__(self, request: LogprobRequest, tokens: int, version: int) -> None:
        """Start without any.

        Args:
            request: the requested log-probs.
            tokens: of the prompt.
            version: of the weights.
        """
        self.request, self.tokens, self.version = request, tokens, version
        self._results: list[_Result] = []

    def scored(self, begin: int, end: int) -> range:
        """Return which of the sequence's tokens from `begin` to `end` are scored: the token after
        each is in the prompt, and its log-prob is requested."""
        return range(max(begin, self.request.start - 1), min(end, self.tokens - 1))

    def expect(self, begin: int, rows: slice, scores: object) -> None:
        """Add a prefill's results, which the device may still compute.

        Args:
            begin: first position that has a log-prob there.
            rows: this prompt's, of all results.
            scores: all results, program_arguments.TokenScores.
        """
        self._results.append(_Result(begin, rows, scores))

    def result(self) -> PositionLogprobs:
        """Return the log-probs, [tokens]. Waits for the device."""
        n, top, ids = self.tokens, self.request.top, len(self.request.ids)
        result = PositionLogprobs(
            logprobs=np.full(n, np.nan, np.float32),
            top_ids=np.full((n, top), -1, np.int32),
            top_logprobs=np.full((n, top), np.nan, np.float32),
            id_logprobs=np.full((n, ids), np.nan, np.float32),
            version=self.version,
        )
        for begin, rows, scores in self._results:
            span, named = slice(begin, begin + rows.stop - rows.start), scores.named
            result.logprobs[span] = np.asarray(scores.logprobs)[rows]
            result.top_ids[span] = np.asarray(named.top_ids)[rows, :top]
            result.top_logprobs[span] = np.asarray(named.top_logprobs)[rows, :top]
            result.id_logprobs[span] = np.asarray(named.id_logprobs)[rows, :ids]
        return result


def scores_for(request: Request, saved: Partial | None, version: int) -> PromptScores | None:
    """Return the empty log-probs of a request whose prompt will be computed by weights of this
    version; None if it requests none, or if it has them (`saved`)."""
    logprobs = request.logprobs
    if (
        logprobs is None
        or not logprobs.prompt
        or (saved is not None and saved.prompt_logprobs is not None)
    ):
        return None
    return PromptScores(logprobs, len(request.token_ids), version)
