"""Build a Hugging Face tokenizer with its chat template from a GGUF file's header.

    gpt2     byte-level BPE: has tokens and merges; the pre-tokenizer is only named
    llama    SentencePiece BPE: merges are derived from the tokens and their scores

Unknown pre-tokenizer names are refused: with a different split, a text would have other tokens than
in the model's training.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from jaxrl_async.data.gguf_file import GgufFile
from jaxrl_async.data.tokenizer import PreTrainedTokenizerFast
from jaxrl_async.errors import DataError

CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
"""Token types."""
SPACE = "\u2581"
"""SentencePiece's symbol for a space."""
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens of a tokenizer, with their names in the file."""
LETTER, NUMBER = r"\p{L}", r"\p{N}"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
MARKS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD = r"[^\r\n\p{L}\p{N}]?"


def _words(numbers: str) -> str:
    """Return the split pattern of Llama 3 with this pattern for numbers, in which Qwen 2
    differs."""
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return f"{SHORT_FORMS}|{WORD}{LETTER}+|{numbers}|{rest}|{SPACES}"


def _cased_words(numbers: str, ending: str) -> str:
    """Return the split pattern of GPT-4o, which splits words at capitals; Mistral's Tekken is
    similar."""
    upper, lower = MARKS
    words = f"{WORD}{upper}*{lower}+{ending}|{WORD}{upper}+{lower}*{ending}"
    return f"{words}|{numbers}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|{SPACES}"


class Split(NamedTuple):
    """The pre-tokenization of a text."""

    pattern: str | None = None  # None: GPT-2's
    single_digits: bool = False
    whole_first: bool = False
    """A part that is a token is used directly, without merges; and texts begin with bos."""
    composed: bool = False  # letters with accents are one character (NFC)


LLAMA3, UP_TO_3 = Split(_words(r"\p{N}{1,3}"), whole_first=True), Split(_words(r"\p{N}{1,3}"))
SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "granite-docling"), Split()),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), Split(single_digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), UP_TO_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split(_words(NUMBER), composed=True)),
    "tekken": Split(_cased_words(NUMBER, ""), whole_first=True),
    "gpt-4o": Split(_cased_words(r"\p{N}{1,3}", f"{SHORT_FORMS}?")),
}
"""Pre-tokenizers by llama.cpp's names (tokenizer.ggml.pre)."""


def tokenizer_of(file: GgufFile) -> Any:
    """Return a file's tokenizer. Raises DataError if it has none, or an unsupported one."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in BUILDERS:
        raise DataError(f"its tokenizer is {str(kind)[:40]!r}, not one of {', '.join(BUILDERS)}")
    words = _Words(file)
    try:
        backend = BUILDERS[kind](file, words)
        backend.add_special_tokens([*map(_whole, words.of_type(CONTROL))])
        backend.add_tokens([*map(_whole, words.of_type(USER_DEFINED))])
        named = {name: words.named(key) for name, key in SPECIAL.items()}
        if _adds_bos(file) and named["bos"] is not None:
            backend.post_processor = _with_bos(named["bos"], backend)
    except DataError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"its tokenizer cannot be built: {error!r:.120}") from None
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        **{f"{name}_token": token for name, token in named.items() if token is not None},
    )


class _Words:
    """The tokens of a file, by id, with their types."""

    def __init__(self, file: GgufFile) -> None:
        self._metadata = known = file.metadata
        self.texts: list[str] = known["tokenizer.ggml.tokens"]
        self.types: list[int] = known.get("tokenizer.ggml.token_type") or [1] * len(self.texts)

    def of_type(self, kind: int) -> Iterator[str]:
        """Yield the tokens of a type."""
        return (text for text, own in zip(self.texts, self.types, strict=True) if own == kind)

    def named(self, name: str) -> str | None:
        """Return the special token with this name; None: the file does not name one."""
        number = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        return self.texts[number] if type(number) is int else None

    def ids(self) -> dict[str, int]:
        """Return the ids of all tokens except padding of the vocabulary."""
        return {
            text: number
            for number, text in enumerate(self.texts)
            if self.types[number] != UNUSED or not text.startswith("[PAD")
        }


def _whole(text: str) -> AddedToken:
    return AddedToken(text, normalized=False)


def _byte_level(file: GgufFile, words: _Words) -> Backend:
    """Return a byte-level BPE tokenizer. Raises DataError for an unknown pre-tokenizer."""
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise DataError(
            f"its pre-tokenizer is {str(name)[:40]!r}; supported are {', '.join(SPLITS)}"
        )
    split: Split = SPLITS[name]
    ids = words.ids()
    merges = [_merge(merge, ids) for merge in file.metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(ids, merges, ignore_merges=split.whole_first))
    steps: list[Any] = [pre_tokenizers.Digits(True)] if split.single_digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if split.composed:
        backend.normalizer = normalizers.NFC()
    return backend


def _merge(merge: str, ids: Mapping[str, int]) -> tuple[str, str]:
    """Return both parts of a merge. Raises DataError if it does not match the tokens, since
    `tokenizers` would panic."""
    left, _, right = merge.partition(" ")
    for text in (left, right, left + right):
        if text not in ids:
            raise DataError(
                f"its tokenizer has the merge {merge[:60]!r}, but no token {text[:60]!r}"
            )
    return left, right


def _sentence_piece(file: GgufFile, words: _Words) -> Backend:
    """Return a SentencePiece BPE tokenizer."""
    texts = [_spelling(text) for text in words.texts]
    ids = {_spelling(text): number for text, number in words.ids().items()}
    scores: list[float] = file.metadata["tokenizer.ggml.scores"]
    if file.architecture.startswith("gemma"):  # its scores are not in merge order
        scores = [-float(number) for number in range(len(texts))]
    plain = {t: s for t, s, kind in zip(texts, scores, words.types, strict=True) if kind == 1}
    backend = Backend(
        models.BPE(
            ids,
            merges_of(plain, ids),
            unk_token=words.named("unknown"),
            fuse_unk=True,
            byte_fallback=BYTE in words.types,
        )
    )
    prefixed = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    first: list[Any] = [normalizers.Prepend(SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return backend


def _spelling(text: str) -> str:
    """Return a token in the tokenizer's spelling: files contain tokens of only spaces as spaces."""
    return SPACE * len(text) if text and not text.strip(" ") else text


def merges_of(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that form tokens from two others, best scores first.

    Args:
        scores: of the tokens formed by merges.
        ids: the ids of all tokens.
    """
    merges = [
        (-score, ids[left], ids[right], left, right)
        for text, score in scores.items()
        for left, right in ((text[:i], text[i:]) for i in range(1, len(text)))
        if left in scores and right in scores
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _adds_bos(file: GgufFile) -> bool:
    """Return True if texts begin with bos, by the file or else by llama.cpp's default."""
    split = SPLITS.get(file.metadata.get("tokenizer.ggml.pre", "default"), Split())
    usual = file.metadata["tokenizer.ggml.model"] == "llama" or split.whole_first
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", usual))


def _with_bos(bos: str, backend: Backend) -> Any:
    return processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, backend.token_to_id(bos))],
    )


BUILDERS = {"gpt2": _byte_level, "llama": _sentence_piece}
"""Tokenizer builders by llama.cpp's names (tokenizer.ggml.model)."""
