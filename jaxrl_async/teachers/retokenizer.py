"""Writes a policy's contexts in the tokens of a teacher with another tokenizer.

the policy's   H e l l o <|im_end|>          its end of a turn becomes the teacher's;
the teacher's  Hello     <|eot_id|>          the text between is tokenized again
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import DataError
from jaxrl_async.teachers.text_spans import NO_SPANS, Spans, spans_of
from jaxrl_async.types import BoolArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Retokenized:
    """A policy's tokens in a teacher's tokens."""

    token_ids: IntArray  # [written] int32, the teacher's
    spans: Spans  # of the tokens that the policy generated
    is_whole: bool  # False: it ends before a token that cannot be written


class Retokenizer:
    """A policy's tokenizer and a teacher's. Thread-safe."""

    def __init__(
        self, own: Tokenizer, other: Tokenizer, own_ends: Sequence[int], other_end: int | None
    ) -> None:
        """Compare nothing yet.

        Args:
            own: the policy's tokenizer.
            other: the teacher's.
            own_ends: tokens that end the policy's turn.
            other_end: token that ends the teacher's turn; None: it has none.
        """
        self.other, self._own = other, own
        self._own_ends, self._other_end = tuple(own_ends), other_end
        self._special = own.special_tokens
        self._others_special = {text: i for i, text in other.special_tokens.items()}
        self._own_bytes = lru_cache(2**18)(own.token_bytes)
        self._other_bytes = lru_cache(2**18)(other.token_bytes)

    def retokenize(self, token_ids: IntArray, sampled: BoolArray) -> Retokenized:
        """Return tokens of a context in the teacher's tokens, up to the first token that cannot be
        written: a special token that the teacher does not have, a token without text, or bytes that
        are no UTF-8.

        token_ids [length] int32; sampled [length]: which ones the policy generated.
        """
        ids_of_runs: list[IntArray] = []
        spans: list[Spans] = [NO_SPANS]
        length = 0
        for start, end in self._runs(token_ids, sampled):
            run = token_ids[start:end]
            single = self._single(int(run[0]))
            if single is not None:
                ids, of_run, is_whole = single
            else:
                ids, of_run, is_whole = self._text(run)
            ids_of_runs.append(ids)
            if sampled[start]:
                spans.append(of_run.moved(start, length))
            length += len(ids)
            if not is_whole:
                break
        else:
            is_whole = True
        return Retokenized(
            token_ids=np.concatenate([np.zeros(0, np.int32), *ids_of_runs]).astype(np.int32),
            spans=Spans(*(np.concatenate(part) for part in zip(*spans, strict=True))),
            is_whole=is_whole,
        )

    @cached_property
    def own_ids(self) -> IntArray:
        """The policy's token with the same text for each of the teacher's, [vocabulary] int32; -1:
        it has no such token. No two of the teacher's have the same one."""
        by_text = self._by_text(self._own, self._own_bytes)
        own_ids = np.full(self.other.vocab_size, -1, np.int32)
        for text, token_id in self._by_text(self.other, self._other_bytes).items():
            own_ids[token_id] = by_text.get(text, -1)
        if self._own_ends and self._other_end is not None:
            own_ids[np.isin(own_ids, self._own_ends)] = -1
            own_ids[self._other_end] = self._own_ends[0]
        return own_ids

    @staticmethod
    def _by_text(tokenizer: Tokenizer, bytes_of: Callable[[int], bytes]) -> dict[bytes, int]:
        """Return the token of each text; the last one where several have it, since the tokens of
        single bytes come first and are used for rare characters alone."""
        by_text = {}
        for token_id in range(tokenizer.vocab_size):
            if text := bytes_of(token_id):
                by_text[text] = token_id
        return by_text

    def _runs(self, token_ids: IntArray, sampled: BoolArray) -> Iterator[tuple[int, int]]:
        """Yield the runs of text that only the policy, or only others wrote, and the single tokens
        between them, as [start, end)."""
        if not len(token_ids):
            return
        alone = np.isin(token_ids, [*self._special, *self._own_ends])
        alone |= np.array([not self._own_bytes(int(i)) for i in token_ids], bool)
        begins = np.ones(len(token_ids), bool)
        begins[1:] = alone[1:] | alone[:-1] | (sampled[1:] != sampled[:-1])
        starts = np.flatnonzero(begins).tolist()
        yield from zip(starts, [*starts[1:], len(token_ids)], strict=True)

    def _single(self, token_id: int) -> tuple[IntArray, Spans, bool] | None:
        """Return the teacher's token for a special one of the policy's; None: this one has text."""
        if token_id in self._own_ends:
            teacher_id = self._other_end
        elif token_id in self._special:
            teacher_id = self._others_special.get(self._special[token_id])
        elif self._own_bytes(token_id):
            return None
        else:
            teacher_id = None
        if teacher_id is None:
            return np.zeros(0, np.int32), NO_SPANS, False
        one = np.array([[0, 1]], np.int32)
        return np.array([teacher_id], np.int32), Spans(one, one), True

    def _text(self, run: IntArray) -> tuple[IntArray, Spans, bool]:
        """Return the teacher's tokens of a run of text, and the spans."""
        policy = [self._own_bytes(int(i)) for i in run]
        text, is_whole = _decoded(b"".join(policy))
        try:
            ids, usual = self.other.encode(text), self._own.encode(text)
        except DataError:
            return np.zeros(0, np.int32), NO_SPANS, False
        teacher = _pieces(ids, self._other_bytes, text)
        return ids, spans_of(policy, teacher, _pieces(usual, self._own_bytes, text)), is_whole


def _pieces(token_ids: IntArray, bytes_of: Callable[[int], bytes], text: str) -> list[bytes]:
    """Return the bytes of a text's tokens, without a space that SentencePiece writes before it."""
    pieces = [bytes_of(int(i)) for i in token_ids]
    if b"".join(pieces) == b" " + text.encode():
        pieces[0] = pieces[0][1:]
    return pieces


def _decoded(content: bytes) -> tuple[str, bool]:
    """Return the text of bytes up to the first that is no UTF-8, and whether that is all."""
    try:
        return content.decode(), True
    except UnicodeDecodeError as error:
        return content[: error.start].decode(), False
