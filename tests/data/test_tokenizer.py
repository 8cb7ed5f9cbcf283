"""Tokenizers: directories that load, texts that come back, end tokens, templates."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.tokenizer import (
    Tokenizer,
    character_tokenizer,
    check_template,
    check_vocabulary,
    load_tokenizer,
)
from jaxrl_async.errors import ConfigError, DataError

GPT2 = Path(__file__).parents[3] / "shared" / "data" / "gpt2_tokenizer"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="the shared GPT-2 tokenizer is not here")


def test_a_saved_character_tokenizer_reloads_here_and_in_transformers(tmp_path):
    ours = addition_tokenizer()
    ours.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 2}))
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    text = "47+85=7+5=12 #132"
    assert theirs(text)["input_ids"] == ours.encode(text).tolist() == again.encode(text).tolist()
    assert theirs.decode(ours.encode(text)) == text == again.decode(again.encode(text))
    assert again.eos_ids == ours.eos_ids == (theirs.eos_token_id,) == (2,)
    assert again.pad_id == ours.pad_id == theirs.pad_token_id == 0


def test_decoding_leaves_special_tokens_out():
    tokenizer = character_tokenizer("ab")
    unknown_to_it = 500  # a model's vocabulary may be larger
    ids = np.array(
        [1, *tokenizer.encode("ab"), unknown_to_it, *tokenizer.eos_ids, tokenizer.pad_id], np.int32
    )
    assert tokenizer.decode(ids) == "ab"


@needs_gpt2
def test_gpt2_loads_with_the_end_token_of_its_config():
    tokenizer = load_tokenizer(GPT2)
    assert (tokenizer.eos_ids, tokenizer.vocab_size, tokenizer.pad_id) == ((50256,), 50257, 50256)
    ids = tokenizer.encode("Hello world, 12!")
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == "Hello world, 12!"
    assert tokenizer.encode_prompt("Hello").tolist() == tokenizer.encode("Hello").tolist()


@needs_gpt2
def test_a_saved_gpt2_names_its_end_token(tmp_path):
    load_tokenizer(GPT2).save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert load_tokenizer(tmp_path).eos_ids == (50256,)


def test_end_tokens_are_gathered_from_all_files(tmp_path):
    addition_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert load_tokenizer(tmp_path).eos_ids == (2, 5)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_torn_json_file_is_a_data_error_that_names_it(tmp_path, name):
    addition_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(DataError, match=name):
        load_tokenizer(tmp_path)


def test_missing_and_torn_tokenizers_are_data_errors(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(DataError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_alone_is_enough(tmp_path, caplog):
    addition_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("1+2=").tolist() == addition_tokenizer().encode("1+2=").tolist()
    assert tokenizer.eos_ids == ()
    assert "no end token" in caplog.text


def test_a_template_is_filled_in():
    tokenizer = character_tokenizer("QA:12 \n")
    assert tokenizer.decode(tokenizer.encode_prompt("12", "Q: {prompt}\nA:")) == "Q: 12\nA:"


def test_a_chat_template_is_used_where_there_is_one():
    tokenizer = character_tokenizer("ua:12")
    tokenizer.hf.chat_template = (
        "{{ bos_token }}{% for m in messages %}u:{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    ids = tokenizer.encode_prompt("12")
    assert tokenizer.decode(ids) == "u:12a:"
    assert ids[0] == tokenizer.hf.bos_token_id
    assert tokenizer.decode(tokenizer.encode_prompt("12", "a{prompt}")) == "a12"


def test_a_prompt_keeps_the_token_before_it_and_loses_the_end_token_after_it():
    tokenizer = character_tokenizer("12")
    tokenizer.hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert tokenizer.encode_prompt("12").tolist() == [1, 4, 5]
    assert tokenizer.encode("12").tolist() == [4, 5]


@pytest.mark.parametrize(
    "template", ["no field", "{}", "{other}", "{prompt", "{prompt.__class__}", "{0}"]
)
def test_a_template_without_exactly_the_prompt_is_refused(template):
    with pytest.raises(ConfigError, match=r"data\.jsonl\.template"):
        check_template(template)


def test_a_vocabulary_that_is_too_small_is_refused():
    tokenizer = addition_tokenizer()
    check_vocabulary(tokenizer, tokenizer.vocab_size, "x")
    with pytest.raises(DataError, match="ids up to 17"):
        check_vocabulary(tokenizer, tokenizer.vocab_size - 1, "x")


def test_threads_may_share_a_tokenizer():
    tokenizer: Tokenizer = addition_tokenizer()
    texts = [f"{i}+{i}=" for i in range(300)]
    with ThreadPoolExecutor(4) as pool:
        assert (
            list(pool.map(lambda t: tokenizer.decode(tokenizer.encode_prompt(t)), texts)) == texts
        )
