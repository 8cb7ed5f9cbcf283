"""The tokenizer that a GGUF file's header describes, as a Hugging Face tokenizer with its chat
template.

    gpt2     byte-level BPE: tokens and merges are there; how a text is split first is only named
    llama    SentencePiece's BPE: merges follow from the tokens and their scores

A name of a split that is not known here is refused: with another one the same text would have other
tokens than the model has learnt.
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
"""Types of tokens."""
SPACE = "\u2581"
"""SentencePiece's sign for a space."""
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens in a tokenizer, and their names in the file."""
LETTER, NUMBER = r"\p{L}", r"\p{N}"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
MARKS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD = r"[^\r\n\p{L}\p{N}]?"


def _words(numbers: str) -> str:
    """Return the split of Llama 3, with so many digits together; Qwen 2's differs in these."""
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return f"{SHORT_FORMS}|{WORD}{LETTER}+|{numbers}|{rest}|{SPACES}"


def _cased_words(numbers: str, ending: str) -> str:
    """Return the split of GPT-4o, which divides words where capitals begin; Mistral's Tekken is
    alike."""
    upper, lower = MARKS
    words = f"{WORD}{upper}*{lower}+{ending}|{WORD}{upper}+{lower}*{ending}"
    return f"{words}|{numbers}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|{SPACES}"


class Split(NamedTuple):
    """How a text is divided before its parts become tokens."""

    pattern: str | None = None  # None: GPT-2's
    single_digits: bool = False
    whole_first: bool = False
    """A part that is a token is taken as it is, whatever the merges; and texts begin with bos."""
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
"""Splits by llama.cpp's names (tokenizer.ggml.pre)."""


def tokenizer_of(file: GgufFile) -> Any:
    """Return a file's tokenizer. Raises DataError where it has none, or one that is not known."""
    kind = file.said.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in BUILDERS:
        raise DataError(f"its tokenizer is {str(kind)[:40]!r}, not one of {', '.join(BUILDERS)}")
    words = _Words(file)
    try:
        backend = BUILDERS[kind](file, words)
        backend.add_special_tokens([*map(_whole, words.of_type(CONTROL))])
        backend.add_tokens([*map(_whole, words.of_type(USER_DEFINED))])
        named = {name: words.named(theirs) for name, theirs in SPECIAL.items()}
        if _adds_bos(file) and named["bos"] is not None:
            backend.post_processor = _with_bos(named["bos"], backend)
    except DataError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"its tokenizer cannot be made: {error!r:.120}") from None
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        chat_template=file.said.get("tokenizer.chat_template"),
        **{f"{name}_token": token for name, token in named.items() if token is not None},
    )


class _Words:
    """The tokens of a file, by number, with their types."""

    def __init__(self, file: GgufFile) -> None:
        self.texts: list[str] = file.said["tokenizer.ggml.tokens"]
        self.types: list[int] = file.said.get("tokenizer.ggml.token_type") or [1] * len(self.texts)
        self._said = file.said

    def of_type(self, kind: int) -> Iterator[str]:
        """Yield the tokens of a type."""
        return (text for text, own in zip(self.texts, self.types, strict=True) if own == kind)

    def named(self, name: str) -> str | None:
        """Return the special token that the file names; None: it does not."""
        number = self._said.get(f"tokenizer.ggml.{name}_token_id")
        return self.texts[number] if type(number) is int else None

    def ids(self) -> dict[str, int]:
        """Return the numbers of all tokens but those that only fill the vocabulary up."""
        return {
            text: number
            for number, text in enumerate(self.texts)
            if self.types[number] != UNUSED or not text.startswith("[PAD")
        }


def _whole(text: str) -> AddedToken:
    return AddedToken(text, normalized=False)


def _byte_level(file: GgufFile, words: _Words) -> Backend:
    """Return byte-level BPE. Raises DataError for a split that is not known."""
    name = file.said.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise DataError(
            f"its texts are split as in {str(name)[:40]!r}, which is not known, only "
            f"{', '.join(SPLITS)}"
        )
    split: Split = SPLITS[name]
    ids = words.ids()
    merges = [_merge(merge, ids) for merge in file.said["tokenizer.ggml.merges"]]
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
    """Return both parts of a merge. Raises DataError where it does not fit the tokens, which
    `tokenizers` answers with a panic."""
    left, _, right = merge.partition(" ")
    for text in (left, right, left + right):
        if text not in ids:
            raise DataError(
                f"its tokenizer has the merge {merge[:60]!r}, but no token {text[:60]!r}"
            )
    return left, right


def _sentence_piece(file: GgufFile, words: _Words) -> Backend:
    """Return SentencePiece's BPE."""
    texts = [_spelt(text) for text in words.texts]
    ids = {_spelt(text): number for text, number in words.ids().items()}
    scores: list[float] = file.said["tokenizer.ggml.scores"]
    if file.architecture.startswith("gemma"):  # whose scores are not in the order of its merges
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
    prefixed = bool(file.said.get("tokenizer.ggml.add_space_prefix", True))
    first: list[Any] = [normalizers.Prepend(SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return backend


def _spelt(text: str) -> str:
    """Return a token as the tokenizer spells it: files have tokens of spaces alone as spaces."""
    return SPACE * len(text) if text and not text.strip(" ") else text


def merges_of(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that make tokens of two others, best scores first.

    Args:
        scores: of the tokens that merges make.
        ids: the numbers of all tokens.
    """
    found = [
        (-score, ids[left], ids[right], left, right)
        for text, score in scores.items()
        for left, right in ((text[:i], text[i:]) for i in range(1, len(text)))
        if left in scores and right in scores
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _adds_bos(file: GgufFile) -> bool:
    """Return whether texts begin with bos, by the file, or as llama.cpp does where it is silent."""
    split = SPLITS.get(file.said.get("tokenizer.ggml.pre", "default"), Split())
    usual = file.said["tokenizer.ggml.model"] == "llama" or split.whole_first
    return bool(file.said.get("tokenizer.ggml.add_bos_token", usual))


def _with_bos(bos: str, backend: Backend) -> Any:
    return processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, backend.token_to_id(bos))],
    )


BUILDERS = {"gpt2": _byte_level, "llama": _sentence_piece}
"""What makes a tokenizer, by llama.cpp's names of its kind (tokenizer.ggml.model)."""
