"""Preference records: what is read, what is refused, and answers for other prompts."""

import json

import numpy as np
import pytest
from tokenizers import normalizers

from jaxrl_async.config.schema import DataSection, JsonlSection
from jaxrl_async.data.preferences import PreferencePair, mismatched, read_preferences
from jaxrl_async.data.tokenizer import character_tokenizer
from jaxrl_async.errors import ConfigError, DataError

TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz :")
EOS = TOKENIZER.eos_ids[0]


def read(tmp_path, *lines, **settings):
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
    )
    data = DataSection(max_prompt_tokens=20, jsonl=JsonlSection(**settings))
    return read_preferences(path, data, TOKENIZER, max_tokens=20)


def pair_of(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def text(ids):
    return TOKENIZER.decode(ids)


def test_a_pair_has_a_prompt_and_two_answers_with_their_end_tokens(tmp_path):
    (pair,) = read(tmp_path, pair_of("ab", "good", "bad"))
    assert (text(pair.prompt_ids), text(pair.chosen_ids), text(pair.rejected_ids)) == (
        "ab", "good", "bad",
    )  # fmt: skip
    assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == EOS
    assert {a.dtype for a in (pair.prompt_ids, *pair.answers)} == {np.dtype(np.int32)}


def test_a_judged_answer_is_half_a_pair(tmp_path):
    judged = [{"prompt": "ab", "completion": "c", "label": label} for label in (True, False)]
    good, bad = read(tmp_path, *judged)
    assert text(good.chosen_ids) == "c" and not len(good.rejected_ids)
    assert text(bad.rejected_ids) == "c" and not len(bad.chosen_ids)
    assert len(good.answers) == len(bad.answers) == 1


def test_an_empty_answer_is_still_an_end_token(tmp_path):
    (pair,) = read(tmp_path, pair_of("ab", "", "bad"))
    assert list(pair.chosen_ids) == [EOS]


def test_a_template_surrounds_the_prompt(tmp_path):
    (pair,) = read(tmp_path, pair_of("ab", "c", "d"), template="q: {prompt} a:")
    assert text(pair.prompt_ids) == "q: ab a:"
    with pytest.raises(ConfigError, match=r"must contain \{prompt\}"):
        read(tmp_path, pair_of("ab", "c", "d"), template="{question}")


BAD = [
    (b"\xff", "not UTF-8"),
    (b"[1]", "not a JSON object"),
    ({"prompt": "a", "chosen": "b"}, "a field is missing or is not text"),
    ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "a field is missing or is not text"),
    ({"prompt": "a", "chosen": True, "rejected": "c"}, "a field is missing or is not text"),
    ({"prompt": "a", "completion": "b", "label": "yes"}, "a field is missing or is not text"),
    ({"prompt": "a", "completion": "b", "label": 2}, "a field is missing or is not text"),
    ({"prompt": "a", "label": True}, "a field is missing or is not text"),
    (pair_of("", "b", "c"), "the prompt has no tokens"),
    (pair_of("a" * 10, "b" * 10, "c"), "the prompt with an answer is longer than a training row"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=str)
def test_a_bad_record_is_skipped_and_logged_with_its_line(tmp_path, caplog, line, reason):
    pairs = read(tmp_path, pair_of("a", "b", "c"), line, max_bad_share=0.5)
    assert len(pairs) == 1
    assert f"p.jsonl, line 2: skipped: {reason}" in caplog.text


def test_too_many_bad_records_are_an_error_that_names_file_and_lines(tmp_path):
    with pytest.raises(DataError, match=r"p\.jsonl: 1 of 2 .* line 2: .* a label: true or false"):
        read(tmp_path, pair_of("a", "b", "c"), {"prompt": "a"})


def test_the_longest_pair_that_fits_is_kept(tmp_path):
    (pair,) = read(tmp_path, pair_of("a" * 10, "b" * 9, "c"))
    assert len(pair.prompt_ids) + len(pair.chosen_ids) == 20


def test_mismatched_gives_each_prompt_another_prompts_answers(tmp_path):
    pairs = read(tmp_path, pair_of("a", "b", "c"), pair_of("a", "d", "e"), pair_of("f", "g", "h"))
    made = mismatched(pairs)
    shown = [tuple(map(text, (p.prompt_ids, p.chosen_ids, p.rejected_ids))) for p in made]
    assert shown == [("a", "g", "h"), ("a", "g", "h"), ("f", "b", "c")]


def test_one_prompt_has_no_other_prompts_answers():
    ids = np.ones(1, np.int32)
    pair = PreferencePair(prompt_ids=ids, chosen_ids=ids, rejected_ids=ids)
    with pytest.raises(DataError, match="have the same prompt"):
        mismatched([pair, pair])


def test_pairs_whose_answers_are_the_same_are_logged(tmp_path, caplog):
    read(tmp_path, pair_of("a", "b", "b"), pair_of("a", "b", "c"))
    assert "in 1 of 2 pairs both answers are equal" in caplog.text


def test_an_answers_tokens_are_those_of_the_text_that_it_ends(tmp_path):
    """A SentencePiece tokenizer sets a space before each text; an answer is no text of its own."""
    backend = TOKENIZER.hf.backend_tokenizer
    backend.normalizer = normalizers.Prepend(" ")
    try:
        (pair,) = read(tmp_path, pair_of("ab", " good", "bad"))
    finally:
        backend.normalizer = None
    assert [text(ids) for ids in (pair.prompt_ids, *pair.answers)] == [" ab", " good", "bad"]
