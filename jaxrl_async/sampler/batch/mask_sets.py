"""The sampling masks of one request's tokens, gathered as they are sampled. Pure host code."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.types import BoolArray, IntArray, KeptTokens

Words = NDArray[np.uint32]
"""A mask as bits, [ceil(vocab / 32)]: bit i of word w is token 32 w + i."""


class MaskSets:
    """The masks of a request's tokens, each different one stored once."""

    def __init__(self, vocab: int) -> None:
        """vocab: number of token ids; 0: unknown, sets then always hold the possible ids."""
        self._vocab = vocab
        self._ids: list[IntArray] = []  # of each set
        self._left_out: list[bool] = []  # of each set: it holds the impossible ids
        self._which: list[int] = []  # the set of each token
        self._known: dict[bytes, int] = {}  # set by the digest of its words

    def add(self, words: Words) -> None:
        """Add the mask of the next token."""
        digest = hashlib.blake2b(words.astype("<u4").tobytes(), digest_size=16).digest()
        if digest not in self._known:
            self._known[digest] = len(self._ids)
            bits, vocab = unpacked_bits(words), self._vocab
            inverts = 2 * int(np.count_nonzero(bits)) > vocab > 0
            self._left_out.append(inverts)
            listed = ~bits[:vocab] if inverts else bits
            self._ids.append(np.flatnonzero(listed).astype(np.int32))
        self._which.append(self._known[digest])

    def recall(self, kept: KeptTokens) -> None:
        """Add the masks of tokens that were sampled elsewhere."""
        width = -(-max(self._vocab, 1 + int(kept.ids.max(initial=-1))) // 32)
        of_sets: dict[int, Words] = {}
        sizes = kept.sizes
        for token, one in enumerate(kept.set_of.tolist()):
            if one not in of_sets:
                every = np.arange(self._vocab, dtype=np.int32)
                ids: IntArray = kept.of(token) if sizes[token] else every
                of_sets[one] = packed_words(ids, width)
            self.add(of_sets[one])

    def record(self) -> KeptTokens:
        """Return the masks of all tokens so far."""
        sets, inverts = len(self._ids), any(self._left_out)
        ids = np.concatenate(self._ids) if sets else np.zeros(0, np.int32)
        return KeptTokens(
            ids=ids.astype(np.int32),
            starts=np.cumsum([0, *map(len, self._ids)], dtype=np.int32),
            which=None if len(self._which) == sets else np.asarray(self._which, np.int32),
            left_out=np.asarray(self._left_out, bool) if inverts else None,
            vocab=self._vocab if inverts else 0,
        )


def unpacked_bits(words: Any) -> BoolArray:
    """Return the bits of [W] uint32, [32 W] bool."""
    little = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(little, bitorder="little").view(bool)


def packed_words(ids: IntArray, width: int) -> Words:
    """Return token ids as bits, [width] uint32."""
    bits = np.zeros(32 * width, bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
