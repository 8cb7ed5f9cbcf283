"""The bytes of tokens: joined they are the text, whatever its script and however it was cut."""

import numpy as np
import pytest
from chat_tokenizers import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.token_bytes import byte_of_character
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.endpoint.text_flow import TextFlow

TEXTS = {
    "emoji": "Hi 😀🎉 naïve 日本語 done",
    "families of emoji": "👨‍👩‍👧‍👦 and 🏳️‍🌈!",
    "chinese": "答案是18。共18元",
    "thai": "คำตอบคือ18 บาท",
    "arabic": "الجواب هو ١٨",
    "hindi": "उत्तर १८ है",
    "korean": "정답은 18입니다.",
    "cyrillic": "Ответ: 18 яблок",
    "ascii": "The answer is 18.\n\n  x = {1}",
    "combining": "e\u0301 n\u0303",
}


def gemma_like() -> Tokenizer:
    """SentencePiece's form: ▁ for blanks, bytes for what is not in the vocabulary."""
    known = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    known += [*"▁thenaswrvidoABC", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {token: i for i, token in enumerate(known)}
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def llama2_like() -> Tokenizer:
    """As Gemma's, with a blank before a text that is taken off again."""
    tokenizer = gemma_like()
    backend = tokenizer.hf.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def unigram() -> Tokenizer:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    alphabet = sorted({c for text in TEXTS.values() for c in text if c != " "})
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(list(TEXTS.values()) * 3, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


MADE = {
    "bytes": lambda: byte_tokenizer(None),
    "gemma": gemma_like,
    "llama 2": llama2_like,
    "unigram": unigram,
}


def offsets_by_bytes(text: str, pieces: list[bytes]) -> list[int]:
    """The character that holds the first byte of each piece."""
    owner = [i for i, c in enumerate(text) for _ in c.encode()] + [len(text)]
    starts = np.cumsum([0, *map(len, pieces)])[:-1]
    return [owner[start] for start in starts]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("kind", MADE)
def test_bytes_joined_are_the_text_and_each_token_begins_where_they_say(kind, text):
    tokenizer = MADE[kind]()
    ids = tokenizer.encode(text).tolist()
    pieces = [tokenizer.token_bytes(i) for i in ids]
    before = " " if kind in ("llama 2", "unigram") else ""  # taken off again when a text is decoded
    assert b"".join(pieces).decode() == before + text
    assert tokenizer.decode(ids) == text
    expected = [max(0, offset - len(before)) for offset in offsets_by_bytes(before + text, pieces)]
    for bytes_of in {None, tokenizer.bytes_in_text}:
        assert TextFlow(tokenizer.decode, bytes_of=bytes_of).offsets(ids) == expected
    assert (tokenizer.bytes_in_text is None) == (kind != "bytes")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(deadline=None, max_examples=100)
def test_any_text_comes_back_from_the_bytes_of_its_tokens(text):
    tokenizer = byte_tokenizer(None)
    ids = tokenizer.encode(text).tolist()
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_special_tokens_and_ids_without_one():
    tokenizer = byte_tokenizer(None)
    end = tokenizer.eos_ids[0]
    assert tokenizer.token_bytes(end) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""
    letters = addition_tokenizer()
    assert b"".join(map(letters.token_bytes, letters.encode("12+3=").tolist())) == b"12+3="
    ids = [*tokenizer.encode("a😀").tolist(), end, *tokenizer.encode("b").tolist()]
    for bytes_of in (None, tokenizer.bytes_in_text):
        offsets = TextFlow(tokenizer.decode, bytes_of=bytes_of).offsets(ids)
        assert offsets[0] == 0 and offsets[-1] == offsets[-2] == 2  # an end token has no text


def ids_of_bytes(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """Return a token for each byte."""
    characters = {byte: c for c, byte in byte_of_character().items()}
    return [tokenizer.hf.convert_tokens_to_ids(characters[byte]) for byte in text]


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        (b"\x80\x80ab", [0, 1, 2, 3]),
        (b"\xe2\x82a", [0, 0, 1]),
        (b"\xe2\x82\xacb", [0, 0, 0, 1]),
        (b"\xe2\xe2\x82\xac", [0, 1, 1, 1]),
        (b"\xf0\x9f\x98\x80\x80a", [0, 0, 0, 0, 1, 2]),
        (b"\xff\xfea\xc3", [0, 1, 2, 3]),
        (b"\xed\xa0\x80a", [0, 1, 2, 3]),  # half of a surrogate pair
    ],
)
def test_bytes_that_are_no_character_have_offsets_of_their_own(text, offsets):
    tokenizer = byte_tokenizer(None)
    flow = TextFlow(tokenizer.decode, bytes_of=tokenizer.bytes_in_text)
    assert flow.offsets(ids_of_bytes(tokenizer, text)) == offsets


@pytest.mark.full
@given(st.data(), st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=4).map(str.encode))))
@settings(deadline=None, max_examples=200)
def test_a_token_begins_in_the_last_character_of_the_text_up_to_its_first_byte(data, parts):
    tokenizer = byte_tokenizer(None)
    ids = ids_of_bytes(tokenizer, b"".join(parts))
    end = tokenizer.eos_ids[0]
    if data.draw(st.booleans()):  # an end token within has no bytes
        ids.insert(data.draw(st.integers(0, len(ids))), end)
    flow, whole, expected = TextFlow(tokenizer.decode, bytes_of=tokenizer.bytes_in_text), b"", []
    for token in ids:
        whole += b"" if token == end else tokenizer.token_bytes(token)
        expected.append(max(0, len(whole.decode("utf-8", "replace")) - 1))
    assert tokenizer.decode(ids) == whole.decode("utf-8", "replace")
    offsets = flow.offsets(ids)
    assert [p for p, i in zip(offsets, ids, strict=True) if i != end] == [
        w for w, i in zip(expected, ids, strict=True) if i != end
    ]


def test_tokens_that_were_added_have_the_bytes_of_their_text():
    for made, token, text in (
        ("bytes", "a b", b"a b"),
        ("bytes", "日本", "日本".encode()),
        ("bytes", "\u00e9", b"\xe9"),  # é is how the alphabet writes this byte
        ("llama 2", "\u2581\u2581", b"  "),  # alone, a text would lose its first blank
        ("unigram", "x\u2581y", b"x y"),
    ):
        tokenizer = MADE[made]()
        tokenizer.hf.add_tokens([AddedToken(token, normalized=False)])
        assert tokenizer.token_bytes(tokenizer.hf.convert_tokens_to_ids(token)) == text
