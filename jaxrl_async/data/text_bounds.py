"""How many characters one token may stand for: a longer text than that times the most tokens cannot
fit, which its length alone tells before anything is tokenized. Pure.

    tokens of a text  >=  characters / (longest token * how many characters a normalizer joins)

This is proved where no step of the tokenizer drops characters or covers any number of them by one
token. Of other tokenizers (words that are unknown as a whole, white space that is taken off) a
generous bound is taken.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxrl_async.data.token_bytes import byte_of_character

JOINED = 4
"""Most characters that NFC and NFKC join into one: the longest canonical decomposition (Unicode
15)."""
LOOSE_CHARS = 1024
"""Characters of a token where nothing can be proved."""
LEAST_LOOSE = 2**20
"""Characters of a text that are encoded in any case where nothing can be proved."""
ALL_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
KEEPING_NORMALIZERS = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
KEEPING_SPLITS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})


def most_chars(chars_per_token: int | None, max_tokens: int) -> int:
    """Return how long a text may be, characters, if it is to have at most `max_tokens` tokens.

    chars_per_token: as `chars_per_token` returns it.
    """
    if chars_per_token is None:
        return max(LOOSE_CHARS * max_tokens, LEAST_LOOSE)
    return chars_per_token * max_tokens


def chars_per_token(backend: Backend) -> int | None:
    """Return the most characters of a text that one token may stand for; None: any number."""
    written = json.loads(backend.to_str())
    added = written.get("added_tokens") or []
    normalizers = _steps(written.get("normalizer"), "normalizers")
    splits = _steps(written.get("pre_tokenizer"), "pretokenizers")
    joined = _joined(normalizers)
    if joined is None or not all(map(_keeps, splits)):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # one takes in all the white space beside it
    kinds = {step.get("type") for step in (*normalizers, *splits)}
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if not _covers(written.get("model") or {}, vocabulary, is_byte_level="ByteLevel" in kinds):
        return None
    longest = max(map(len, (*vocabulary, *(token["content"] for token in added))), default=1)
    return max(longest, 1) * joined


def _joined(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many characters become one at most; None: some are dropped."""
    joined = 1
    for step in normalizers:
        kind = step.get("type")
        if kind in ("NFC", "NFKC"):
            joined *= JOINED
        elif kind == "Replace":
            pattern, content = step.get("pattern", {}).get("String"), step.get("content")
            if not pattern or not content:
                return None
            joined *= -(-len(pattern) // len(content))
        elif kind not in KEEPING_NORMALIZERS:
            return None
    return joined


def _keeps(split: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer keeps every character."""
    kind = split.get("type")
    if kind in ("Split", "Punctuation"):
        return split.get("behavior") != "Removed"
    return kind in KEEPING_SPLITS


def _covers(
    model: Mapping[str, Any], vocabulary: Mapping[str, int], *, is_byte_level: bool
) -> bool:
    """Return whether no character is dropped, and no run of unknown ones becomes one token."""
    kind = model.get("type")
    alphabet = byte_of_character() if is_byte_level else ALL_BYTES
    every_byte = all(byte in vocabulary for byte in alphabet)
    if kind == "BPE":
        if is_byte_level or model.get("byte_fallback"):
            return every_byte
        return model.get("unk_token") is not None and not model.get("fuse_unk")
    return bool(kind == "Unigram" and model.get("byte_fallback") and every_byte)


def _steps(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, those of sequences one by one."""
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [single for part in step[inner] for single in _steps(part, inner)]
