"""The prefills that score prompts: their tokens, and the targets of their results. Pure host code.

Token i's result is the log-prob of token i + 1, so the last token of a prompt is not scored.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl_async.data.images import ImageStore
from jaxrl_async.sampler.batch.prefill import Chunk, Part
from jaxrl_async.sampler.batch.shapes import pad_to
from jaxrl_async.sampler.device.program_arguments import ScoreArgs, TokenScores
from jaxrl_async.sampler.device.sampling import named_size
from jaxrl_async.types import IntArray


def divided_parts(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Return the parts without a scored token, and the others."""

    def is_scored(part: Part) -> bool:
        prefilling, count = part
        begin, scores = prefilling.prefilled, prefilling.scores
        return scores is not None and len(scores.scored(begin, begin + count)) > 0

    plain = [part for part in parts if not is_scored(part)]
    return plain, [part for part in parts if is_scored(part)]


def score_args(chunk: Chunk, images: ImageStore | None) -> tuple[ScoreArgs, int]:
    """Return the arguments of a scoring prefill of this chunk, all of whose requests want
    log-probs, and the number of likeliest tokens that it returns. Call before Chunk.advance."""
    indices, targets, rows, begin = list[IntArray](), list[IntArray](), list[IntArray](), 0
    all_asked = [p.scores.asked for p, _ in chunk.parts if p.scores is not None]
    size = named_size(max(len(asked.ids) for asked in all_asked))
    ids = np.zeros((len(chunk.args.lengths), size), np.int32)
    for row, (prefilling, _) in enumerate(chunk.parts):
        scored = np.asarray(_scored(chunk, row), np.int32)
        after = prefilling.token_ids[scored + 1]
        indices.append(scored - prefilling.prefilled + begin)
        targets.append(after if images is None else images.plain(after))
        rows.append(np.full(len(scored), row, np.int32))
        ids[row, : len(all_asked[row].ids)] = all_asked[row].ids
        begin += chunk.parts[row][1]
    n = len(chunk.args.token_ids)
    args = ScoreArgs(
        indices=pad_to(n, np.concatenate(indices), 0),
        count=np.int32(sum(map(len, indices))),
        targets=pad_to(n, np.concatenate(targets), 0),
        rows=pad_to(n, np.concatenate(rows), 0),
        ids=ids,
    )
    return args, named_size(max(asked.top for asked in all_asked))


def expect_scores(chunk: Chunk, scores: TokenScores) -> None:
    """Give each request of a chunk its part of the results. Call before Chunk.advance."""
    begin = 0
    for row, (prefilling, _) in enumerate(chunk.parts):
        scored = _scored(chunk, row)
        assert prefilling.scores is not None
        rows = slice(begin, begin + len(scored))
        prefilling.scores.expect(scored.start + 1, rows, scores)
        begin = rows.stop


def _scored(chunk: Chunk, row: int) -> range:
    """Return the tokens of a part that are scored, as indices of its sequence."""
    prefilling, count = chunk.parts[row]
    assert prefilling.scores is not None, "all requests of the chunk want log-probs"
    return prefilling.scores.scored(prefilling.prefilled, prefilling.prefilled + count)
