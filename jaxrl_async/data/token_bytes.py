"""The bytes of a token, even if the token is part of a character and has no text.

decoder                          token    bytes
ByteLevel (GPT-2, Qwen, Llama 3) ðŁĺ     F0 9F 98
ByteFallback (Llama 2, Gemma)    <0xF0>   F0
Metaspace, Replace               ▁the     20 74 68 65
"""

import json
import re
from collections.abc import Callable, Mapping
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
    steps = _decoders(json.loads(backend.to_str()).get("decoder"))
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
    steps = _decoders(json.loads(backend.to_str()).get("decoder"))
    return [step.get("type") for step in steps] == ["ByteLevel"]


WRITES_BYTES = (["ByteLevel"], ["Fuse"], ["Replace", "ByteFallback", "Fuse"])
"""Decoders whose texts are the bytes of their tokens: of GPT-2, of tokens that are words, and of
SentencePiece with a token for each byte (Gemma's). Half a character may decode otherwise."""


def writes_bytes(backend: Backend) -> bool:
    """Return True if whole texts are exactly the bytes of their tokens, one after another."""
    steps = _decoders(json.loads(backend.to_str()).get("decoder"))
    return [step.get("type") for step in steps] in WRITES_BYTES


def _decoders(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a decoder, with sequences flattened."""
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _decoders(part)]
