"""The bytes of a token, even if it is part of a character and has no text; characters per token.

decoder                          token    bytes
ByteLevel (GPT-2, Qwen, Llama 3) ðŁĺ     F0 9F 98
ByteFallback (Llama 2, Gemma)    <0xF0>   F0
Metaspace, Replace               ▁the     20 74 68 65
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LATIN = (*range(33, 127), *range(161, 173), *range(174, 256))
"""The bytes that a byte-level vocabulary maps to the character with the same code."""


def byte_of_character() -> dict[str, int]:
    """Return the bytes by their characters in a byte-level vocabulary (GPT-2's bytes_to_unicode);
    bytes outside LATIN map to characters from 256 on."""
    others = (byte for byte in range(256) if byte not in LATIN)
    return {
        **{chr(byte): byte for byte in LATIN},
        **{chr(256 + i): byte for i, byte in enumerate(others)},
    }


def bytes_of_tokens(backend: Backend) -> Callable[[int], bytes | None]:
    """Return a function from a token's id to the bytes that it adds to a text. The function returns
    None for an id without a token, for a token outside the byte-level alphabet, and for any other
    type of decoder; use the token's text then.

    The bytes include a space that a decoder strips from the start of a text (SentencePiece), and
    other markers such as WordPiece's ##."""
    steps = _decoders(backend)
    kinds = {step.get("type") for step in steps}
    characters = byte_of_character() if "ByteLevel" in kinds else {}
    spaces = [step["replacement"] for step in steps if step.get("type") == "Metaspace"]
    replaced = [(mark, " ") for mark in spaces] + [
        (step["pattern"]["String"], step["content"])
        for step in steps
        if step.get("type") == "Replace" and "String" in step["pattern"]
    ]

    def bytes_of(token_id: int) -> bytes | None:
        token = backend.id_to_token(token_id)
        if token is None:
            return None
        if "ByteFallback" in kinds and (one := ONE_BYTE.fullmatch(token)):
            return bytes([int(one[1], 16)])
        if characters:
            known = all(c in characters for c in token)
            return bytes(characters[c] for c in token) if known else None
        for mark, text in replaced:
            token = token.replace(mark, text)
        return token.encode() if replaced else None

    return bytes_of


def joins_bytes(backend: Backend) -> bool:
    """Return True if the decoder is byte-level, so a decoded text is exactly the bytes of its
    tokens decoded as UTF-8."""
    steps = _decoders(backend)
    return [step.get("type") for step in steps] == ["ByteLevel"]


WRITES_BYTES = (["ByteLevel"], ["Fuse"], ["Replace", "ByteFallback", "Fuse"])
"""Decoders whose texts are the bytes of their tokens: of GPT-2, of tokens that are words, and of
SentencePiece with a token for each byte (Gemma's). Half a character may decode otherwise."""


def writes_bytes(backend: Backend) -> bool:
    """Return True if whole texts are exactly the bytes of their tokens, one after another."""
    steps = _decoders(backend)
    return [step.get("type") for step in steps] in WRITES_BYTES


def _decoders(backend: Backend) -> list[Mapping[str, Any]]:
    return _steps(json.loads(backend.to_str()).get("decoder"), "decoders")


# ---- bounds on the number of characters per token

#     tokens of a text  >=  characters / (longest token * characters that a normalizer joins)
#
# A text longer than this bound times the maximum number of tokens cannot fit, so it is refused by
# its length, before tokenization. This holds if no step of the tokenizer drops characters or maps
# an unlimited number of them to one token. For other tokenizers (whole unknown words, stripped
# white space) a generous bound is used.


JOINED = 4
"""Maximum number of characters that NFC and NFKC join into one: the longest canonical decomposition
(Unicode 15)."""
LOOSE_CHARS = 1024
"""Assumed maximum of characters per token if there is no proven bound."""
LEAST_LOOSE = 2**20
"""Length of a text that is always encoded if there is no proven bound, characters."""
ALL_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
KEEPING_NORMALIZERS = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
KEEPING_SPLITS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})


def most_chars(chars_per_token: int | None, max_tokens: int) -> int:
    """Return the maximum length of a text with at most `max_tokens` tokens, characters.

    chars_per_token: result of `chars_per_token`.
    """
    if chars_per_token is None:
        return max(LOOSE_CHARS * max_tokens, LEAST_LOOSE)
    return chars_per_token * max_tokens


def chars_per_token(backend: Backend) -> int | None:
    """Return the maximum number of characters of a text per token; None: unlimited."""
    written = json.loads(backend.to_str())
    added = written.get("added_tokens") or []
    normalizers = _steps(written.get("normalizer"), "normalizers")
    splits = _steps(written.get("pre_tokenizer"), "pretokenizers")
    joined = _most_joined(normalizers)
    if joined is None or not all(map(_keeps, splits)):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # such a token absorbs all adjacent white space
    kinds = {step.get("type") for step in (*normalizers, *splits)}
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if not _covers(written.get("model") or {}, vocabulary, is_byte_level="ByteLevel" in kinds):
        return None
    longest = max(map(len, (*vocabulary, *(token["content"] for token in added))), default=1)
    return max(longest, 1) * joined


def _most_joined(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the maximum number of characters that become one; None: some are dropped."""
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


def _keeps(split: Mapping[str, object]) -> bool:
    """Return True if a pre-tokenizer keeps every character."""
    kind = split.get("type")
    if kind in ("Split", "Punctuation"):
        return split.get("behavior") != "Removed"
    return kind in KEEPING_SPLITS


def _covers(
    model: Mapping[str, object], vocabulary: Mapping[str, int], *, is_byte_level: bool
) -> bool:
    """Return True if no character is dropped, and no run of unknown characters becomes one
    token."""
    kind = model.get("type")
    alphabet = byte_of_character() if is_byte_level else ALL_BYTES
    every_byte = all(byte in vocabulary for byte in alphabet)
    if kind == "BPE":
        if is_byte_level or model.get("byte_fallback"):
            return every_byte
        return model.get("unk_token") is not None and not model.get("fuse_unk")
    return bool(kind == "Unigram" and model.get("byte_fallback") and every_byte)


def _steps(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Return the steps of a part of a tokenizer, with sequences flattened."""
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [single for part in step[inner] for single in _steps(part, inner)]
