"""Tokenizers: directories that load, texts that come back, end tokens, templates."""

import functools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.tokenizer import (
    Tokenizer,
    character_tokenizer,
    chat_tokenizer,
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


@pytest.mark.full
@needs_gpt2
def test_gpt2_loads_with_the_end_token_of_its_config():
    tokenizer = load_tokenizer(GPT2)
    assert (tokenizer.eos_ids, tokenizer.vocab_size, tokenizer.pad_id) == ((50256,), 50257, 50256)
    ids = tokenizer.encode("Hello world, 12!")
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == "Hello world, 12!"
    assert tokenizer.encode_prompt("Hello").tolist() == tokenizer.encode("Hello").tolist()


@pytest.mark.full
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


def test_end_tokens_of_a_text_config_count_where_the_outer_one_names_none(tmp_path):
    addition_tokenizer().save_pretrained(tmp_path)
    inner = {"model_type": "gemma3", "text_config": {"eos_token_id": [2, 5]}}
    (tmp_path / "config.json").write_text(json.dumps(inner))
    assert load_tokenizer(tmp_path).eos_ids == (2, 5)
    (tmp_path / "config.json").write_text(json.dumps({**inner, "eos_token_id": [2, 7]}))
    assert load_tokenizer(tmp_path).eos_ids == (2, 7)


def test_ids_without_a_token_are_counted_and_logged_once(caplog):
    tokenizer = addition_tokenizer()
    beyond = tokenizer.vocab_size
    assert tokenizer.count_unknown(np.array([4, 5, 6], np.int32)) == 0 and not caplog.text
    assert tokenizer.count_unknown(np.array([4, beyond, beyond + 7, 5], np.int32)) == 2
    assert tokenizer.count_unknown(np.array([beyond], np.int32)) == 1
    assert caplog.text.count("2 of 4 here") == len(caplog.records) == 1
    assert tokenizer.decode([4, beyond, 5]) == tokenizer.decode([4, 5])


def test_a_hole_in_the_vocabulary_is_no_token():
    hf = addition_tokenizer().hf
    hf.get_vocab = lambda: {"<pad>": 0, "a": 1, "b": 3}
    assert Tokenizer(hf).count_unknown(np.array([1, 2, 3], np.int32)) == 1


def test_old_files_say_minus_one_for_no_end_token(tmp_path):
    addition_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": -1, "pad_token_id": -1}))
    assert load_tokenizer(tmp_path).eos_ids == (2,)


def test_a_chat_template_that_was_in_the_folder_does_not_stay(tmp_path):
    chat_tokenizer("ab").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).has_chat_template
    addition_tokenizer().save_pretrained(tmp_path)
    assert not load_tokenizer(tmp_path).has_chat_template


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_torn_json_file_is_a_data_error_that_names_it(tmp_path, name):
    addition_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(DataError, match=name):
        load_tokenizer(tmp_path)


def test_missing_and_torn_tokenizers_are_data_errors(tmp_path):
    with pytest.raises(DataError, match=r"neither tokenizer\.json"):
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


def test_a_text_with_half_a_surrogate_pair_is_refused_as_no_fault_of_the_files():
    with pytest.raises(DataError, match=r"half a surrogate pair. Give text in UTF-8"):
        character_tokenizer("12").encode("1\ud83d2")


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


# ---- answers behind their prompts

SPECIAL = ["<s>", "</s>", "<unk>"]
CHARACTERS = sorted(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?'#\n\t\u00e9\u2603"
)
CORPUS = [
    "In the silence, I dream of light. Once upon a time there was a word, and the words were many.",
    "Question: how many apples are 12 and 34?\nAnswer: 46 apples are there. The answer is 46.",
    "Answer: 18\nAnswer: 19  and  20\n\nThe caf\u00e9 is in the snow \u2603, I know.",
] * 4


def trained(model, trainer, *, begin=True, **parts):
    """A tokenizer trained on the corpus, with these parts and perhaps a token before each text."""
    backend = Backend(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.train_from_iterator(CORPUS, trainer)
    if begin:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    return Tokenizer(hf)


def llama2_like():
    """SentencePiece BPE as Llama 2's: a space before every text, spaces are letters."""
    return trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=SPECIAL, initial_alphabet=[*CHARACTERS, "\u2581"],
            show_progress=False,
        ),
        normalizer=normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        ),
        decoder=decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )  # fmt: skip


def t5_like():
    """SentencePiece Unigram as T5's: words by Metaspace, which sets a space before each text."""
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>",
            initial_alphabet=[*CHARACTERS, "\u2581"], show_progress=False,
        ),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
    )  # fmt: skip


def bytes_like():
    """Byte-level BPE as GPT-2's, Llama 3's and Qwen's."""
    return trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=SPECIAL, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
        begin=False,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )  # fmt: skip


KINDS = {"llama2": llama2_like, "t5": t5_like, "bytes": bytes_like}
made = functools.cache(lambda kind: load_tokenizer(GPT2) if kind == "gpt2" else KINDS[kind]())
each_kind = pytest.mark.parametrize("kind", [*KINDS, pytest.param("gpt2", marks=needs_gpt2)])
JOINED = [
    ("In the silence,", " I dream"), ("In the silence,", "I dream"), ("Answer:", " 18"),
    ("Answer: ", "18"), ("Answer: ", " 18"), ("Answer:\n", "18"), ("Answer:\n", " 18"),
    ("Answer:", "\n18"), ("wor", "ds and"), ("Once upon", ""), ("Once upon ", ""), ("", "Once"),
    ("1", "2 apples"), ("caf", "\u00e9 \u2603"), ("the\n", "\n\nThe"), ("a  ", "  b"),
]  # fmt: skip


def check_joined(tokenizer, prompt, answer, template=None):
    """Prompt and answer, each as it is given to the policy, are the tokens of the joined text or at
    least decode to what those decode to."""
    before, ids = tokenizer.encode_prompt(prompt, template), None
    shown = prompt if template is None else template.replace("{prompt}", prompt)
    joined = tokenizer.encode_prompt(shown + answer, "{prompt}")
    *ids, end = tokenizer.encode_answer(prompt, answer, template).tolist()
    assert end == tokenizer.eos_ids[0]
    if joined[: len(before)].tolist() == before.tolist():
        assert [*before.tolist(), *ids] == joined.tolist()
    assert tokenizer.decode([*before, *ids]) == tokenizer.decode(joined)


@pytest.mark.full
@each_kind
@pytest.mark.parametrize(("prompt", "answer"), JOINED)
def test_an_answers_tokens_go_on_where_the_prompts_end(kind, prompt, answer):
    tokenizer = made(kind)
    check_joined(tokenizer, prompt, answer)
    ids = [*tokenizer.encode_prompt(prompt), *tokenizer.encode_answer(prompt, answer)]
    assert tokenizer.decode(ids) == prompt + answer
    assert tokenizer.num_inexact == 0


@pytest.mark.full
@each_kind
@settings(deadline=None)
@given(
    prompt=st.text(st.sampled_from(CHARACTERS), max_size=12),
    answer=st.text(st.sampled_from(CHARACTERS), max_size=12),
    template=st.sampled_from([None, "Answer: {prompt}", "{prompt} ", "Q {prompt}\nA:"]),
)
def test_fuzz_any_text_behind_any_prompt_decodes_to_both_joined(kind, prompt, answer, template):
    check_joined(made(kind), prompt, answer, template)
    assert made(kind).num_inexact == 0


@pytest.mark.full
def test_an_answer_that_no_tokens_make_the_joined_text_of_is_counted_and_logged(caplog):
    tokenizer = character_tokenizer("e\u00e9\u0301")
    tokenizer.hf.backend_tokenizer.normalizer = normalizers.NFC()  # joins the e and its accent
    assert len(tokenizer.encode_answer("e", "\u0301e")) == 3
    assert tokenizer.num_inexact == 1
    assert "1 answers so far have no tokens that reproduce the joined text" in caplog.text


# ---- hostile files


def edited(folder, name, **changes):
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_truncation_and_padding_in_the_file_do_not_cut_or_fill_prompts(tmp_path):
    addition_tokenizer().save_pretrained(tmp_path)
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    edited(tmp_path, "tokenizer.json", truncation=truncation, padding=padding)
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer.encode("12+34=")) == len(tokenizer.encode_prompt("12+34=")) == 6


@pytest.mark.full
@pytest.mark.parametrize("eos", [99, -2, 2**40])
def test_an_end_token_of_another_tokenizer_is_refused(tmp_path, eos):
    addition_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(DataError, match=f"token {eos} is not one"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('no') }}", "{{ a.b.c }}"])
def test_a_chat_template_that_fails_is_refused_at_load(tmp_path, template):
    addition_tokenizer().save_pretrained(tmp_path)
    edited(tmp_path, "tokenizer_config.json", chat_template=template)
    with pytest.raises(DataError, match="chat template fails"):
        load_tokenizer(tmp_path)


def test_special_tokens_that_are_no_tokens_are_refused(tmp_path):
    addition_tokenizer().save_pretrained(tmp_path)
    edited(tmp_path, "tokenizer_config.json", unk_token="", eos_token="")  # found by the fuzz test
    with pytest.raises(DataError, match="special tokens cannot be read: RecursionError"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_encode_is_refused_at_load(tmp_path):
    addition_tokenizer().save_pretrained(tmp_path)
    edited(
        tmp_path, "tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    )
    with pytest.raises(DataError, match="cannot encode"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tokenizer's directory: bytes by name."""
    folder = tmp_path_factory.mktemp("whole")
    addition_tokenizer().save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from(["BPE", "Unigram", "WordPiece", "WordLevel", "Split", "<eos>", 2**32, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "vocab", "merges", "pattern", "id"]) | st.text(max_size=3),
        inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def paths(tree, path=()):
    """Every path into a JSON tree, some levels deep."""
    yield path
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from paths(value, (*path, key))


@pytest.mark.full
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_a_mutated_tokenizer_works_or_is_a_data_error(whole, tmp_path, data):
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    if data.draw(st.booleans()):
        tree = json.loads(whole[name])
        for _ in range(data.draw(st.integers(1, 3))):
            *way, last = data.draw(st.sampled_from(list(paths(tree))[1:] or [("x",)]))
            inner = tree
            for key in way:
                inner = inner[key]
            inner[last] = data.draw(VALUES)
        content = json.dumps(tree).encode()
    else:
        raw = bytearray(whole[name])
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        content = bytes(raw)
    folder = tmp_path / "t"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file, raw in (whole | {name: content}).items():
        (folder / file).write_bytes(raw)
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        assert str(folder) in str(error) and len(str(error)) < 1000
        return
    ids = tokenizer.encode_prompt("12+34=")
    assert all(0 <= i < tokenizer.vocab_size for i in (*ids, *tokenizer.eos_ids))


def test_a_tokenizer_that_was_loaded_is_saved_as_it_was(tmp_path):
    """transformers would note that it was loaded from a folder."""
    addition_tokenizer().save_pretrained(tmp_path / "first")
    load_tokenizer(tmp_path / "first").save_pretrained(tmp_path / "again")
    first, again = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("first", "again")
    )
    assert first == again
