"""Folders as users have them: used before, tied in config.json alone, without a head; what is read
is what transformers reads."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from whole_rows import row_states

from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.tokenizer import load_tokenizer
from jaxrl_async.errors import CheckpointError
from jaxrl_async.model.decoder import output_head
from jaxrl_async.model.hf import load_spec
from jaxrl_async.model.hf_config import spec_from_hf
from jaxrl_async.model.policy import Policy

pytestmark = pytest.mark.full

torch = pytest.importorskip("torch", reason="parity needs torch (extra [dev])")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
st = pytest.importorskip("safetensors.torch")

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
TOKENS = np.random.default_rng(1).integers(0, 60, (1, 12)).astype(np.int32)
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def made(folder, *, seed=0, dtype=torch.float32, shards=False, **more):
    """Write a random Qwen3 and return it."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**SIZES, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, **({"max_shard_size": "5KB"} if shards else {}))
    return model


def changed(folder, change):
    """Rewrite a folder's tensors."""
    tensors = st.load_file(folder / SINGLE)
    change(tensors)
    st.save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def say(folder, **more):
    """Change config.json."""
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, **more}))


def filled(policy, number):
    """The policy with this number for every weight."""
    return policy.with_params(jax.tree.map(lambda x: x * 0 + number, policy.params))


def logits(policy):
    """Our logits, [12, V]."""
    spec, params = policy.spec, policy.params
    positions = np.arange(TOKENS.shape[1], dtype=np.int32)[None]
    hidden = row_states(spec, params, TOKENS, positions, np.ones_like(TOKENS))
    return np.asarray(hidden[0] @ output_head(spec, params))


def their_logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS, dtype=torch.long)).logits[0].numpy()


def same(folder):
    policy = Policy.from_pretrained(folder)
    np.testing.assert_allclose(logits(policy), their_logits(folder), atol=1e-5)
    return policy


def test_a_policy_saved_over_shards_is_what_is_read(tmp_path):
    made(tmp_path, shards=True)
    old = {file.name for file in tmp_path.glob("*.safetensors")}
    assert len(old) > 1
    policy = Policy.from_pretrained(tmp_path)
    policy.with_params(jax.tree.map(lambda x: x * 0 + 0.01, policy.params)).save_pretrained(
        tmp_path
    )
    assert {file.name for file in tmp_path.glob("*.safetensors")} == {SINGLE}
    assert not (tmp_path / INDEX).exists()
    assert float(same(tmp_path).params["embed"][3, 3]) == pytest.approx(0.01)


def test_shards_saved_over_a_single_file_or_other_shards_are_what_is_read(tmp_path, monkeypatch):
    made(tmp_path, shards=True)
    monkeypatch.setattr("jaxrl_async.model.hf.MAX_FILE_BYTES", 4000)
    policy = Policy.from_pretrained(tmp_path)
    policy.with_params(jax.tree.map(lambda x: x * 0 + 0.02, policy.params)).save_pretrained(
        tmp_path
    )
    named = set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())
    assert {file.name for file in tmp_path.glob("*.safetensors")} == named
    assert float(same(tmp_path).params["embed"][3, 3]) == pytest.approx(0.02)
    made(tmp_path, seed=3)  # transformers removes the shards itself
    (tmp_path / INDEX).unlink(missing_ok=True)
    policy.with_params(jax.tree.map(lambda x: x * 0 + 0.03, policy.params)).save_pretrained(
        tmp_path
    )
    assert not (tmp_path / SINGLE).exists()
    assert float(same(tmp_path).params["embed"][3, 3]) == pytest.approx(0.03)


def test_a_save_that_fails_leaves_the_old_weights(tmp_path, monkeypatch):
    made(tmp_path, shards=True)
    policy, before = Policy.from_pretrained(tmp_path), sorted(f.name for f in tmp_path.iterdir())

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxrl_async.model.hf.save_file", full)
    with pytest.raises(OSError, match="No space"):
        policy.with_params(jax.tree.map(lambda x: x * 0, policy.params)).save_pretrained(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == before
    np.testing.assert_array_equal(logits(Policy.from_pretrained(tmp_path)), logits(policy))


def test_two_models_in_a_folder_are_refused_by_name(tmp_path):
    made(tmp_path / "new", seed=1)
    made(tmp_path / "old", shards=True)
    (tmp_path / "new" / SINGLE).rename(tmp_path / "old" / SINGLE)
    with pytest.raises(CheckpointError, match=rf"contains two models: {SINGLE}, and model-00001"):
        Policy.from_pretrained(tmp_path / "old")
    for shard in (tmp_path / "old").glob("model-*.safetensors"):
        shard.unlink()
    same(tmp_path / "old")  # the index alone is left: there is no doubt


def test_a_spec_needs_no_weights(tmp_path):
    made(tmp_path, shards=True)
    spec = load_spec(tmp_path)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    assert load_spec(tmp_path) == spec  # the index is there
    (tmp_path / INDEX).unlink()
    assert load_spec(tmp_path) == spec


def test_a_head_that_differs_from_the_embedding_is_kept(tmp_path, caplog):
    made(tmp_path, tie_word_embeddings=True)
    head = torch.randn(60, 16, generator=torch.Generator().manual_seed(5))
    changed(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    policy = same(tmp_path)
    assert not policy.spec.tied and "differs from the embedding" in caplog.text
    policy.save_pretrained(tmp_path / "again")
    said = json.loads((tmp_path / "again" / "config.json").read_text())
    assert said["tie_word_embeddings"] is False
    same(tmp_path / "again")


def test_one_number_in_the_last_row_makes_a_head_of_its_own(tmp_path):
    made(tmp_path, tie_word_embeddings=True)

    def last(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1.0
        tensors["lm_head.weight"] = head

    changed(tmp_path, last)
    assert not same(tmp_path).spec.tied


def test_an_equal_head_is_the_embedding(tmp_path, caplog):
    made(tmp_path, tie_word_embeddings=True)

    def copied(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    changed(tmp_path, copied)
    assert same(tmp_path).spec.tied and "head" not in caplog.text


def test_a_head_alone_is_the_embedding_too(tmp_path):
    made(tmp_path, tie_word_embeddings=True)
    changed(
        tmp_path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}
        ),
    )
    assert same(tmp_path).spec.tied


def test_an_untied_model_without_a_head_is_tied_and_says_so(tmp_path, caplog):
    made(tmp_path, tie_word_embeddings=True)
    say(tmp_path, tie_word_embeddings=False)
    policy = Policy.from_pretrained(tmp_path)
    assert policy.spec.tied and "the embedding is also used as the head" in caplog.text
    say(tmp_path, tie_word_embeddings=True)
    np.testing.assert_allclose(logits(policy), their_logits(tmp_path), atol=1e-5)


def test_the_names_of_a_model_without_its_head_are_read(tmp_path):
    made(tmp_path, tie_word_embeddings=True)

    def bare(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    changed(tmp_path, bare)
    same(tmp_path)


def test_a_value_head_beside_a_policy_is_left_out_and_says_so(tmp_path, caplog):
    made(tmp_path)
    changed(tmp_path, lambda tensors: tensors.update({"v_head.summary.weight": torch.ones(1, 16)}))
    same(tmp_path)
    assert "v_head.* are a value head, and are ignored" in caplog.text


def test_an_adapter_that_is_a_pickle_is_converted_as_an_adapter(tmp_path):
    made(tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    (adapter / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin may be .*PeftModel\."):
        Policy.from_pretrained(tmp_path, adapter=adapter)


def test_no_model_is_saved_into_an_adapters_folder(tmp_path):
    made(tmp_path)
    policy = Policy.from_pretrained(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="contains an adapter"):
        policy.save_pretrained(tmp_path / "adapter")
    assert [f.name for f in (tmp_path / "adapter").iterdir()] == ["adapter_config.json"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_type_is_kept_where_nothing_is_lost(tmp_path, dtype):
    made(tmp_path, dtype=getattr(torch, dtype))
    policy = Policy.from_pretrained(tmp_path)
    policy.save_pretrained(tmp_path / "same")
    saved = st.load_file(tmp_path / "same" / SINGLE)
    for name, tensor in st.load_file(tmp_path / SINGLE).items():
        assert torch.equal(saved[name], tensor) and saved[name].dtype == tensor.dtype
    assert json.loads((tmp_path / "same" / "config.json").read_text())["dtype"] == dtype
    trained = jax.tree.map(lambda x: x + 1e-6, policy.params)  # an update below its resolution
    policy.with_params(trained).save_pretrained(tmp_path / "trained")
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["dtype"] == "float32"
    again = Policy.from_pretrained(tmp_path / "trained").params
    jax.tree.map(np.testing.assert_array_equal, again, trained)
    Policy.from_pretrained(tmp_path, dtype="float32").save_pretrained(tmp_path / "wide")
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def stored_types(folder):
    return {name: tensor.dtype for name, tensor in st.load_file(folder / SINGLE).items()}


def test_each_tensor_keeps_the_type_that_it_was_read_in(tmp_path, caplog):
    """As DeepSeek V3 is published: bfloat16, and some tensors in float32."""
    made(tmp_path, dtype=torch.bfloat16)
    norm, other = "model.norm.weight", "model.layers.1.input_layernorm.weight"

    def exact(tensors):
        tensors[norm] = tensors[norm].float() * 1.0001

    changed(tmp_path, exact)
    before = st.load_file(tmp_path / SINGLE)
    policy = Policy.from_pretrained(tmp_path)
    caplog.set_level("INFO", "jaxrl_async.model.hf")
    policy.save_pretrained(tmp_path / "same")
    after = st.load_file(tmp_path / "same" / SINGLE)
    assert before[norm].dtype == torch.float32 and before[other].dtype == torch.bfloat16
    assert stored_types(tmp_path / "same") == stored_types(tmp_path)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert json.loads((tmp_path / "same" / "config.json").read_text())["dtype"] == "bfloat16"
    assert "float32" not in caplog.text
    moved = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 1e-6 if "embed" in str(path[0]) else x, policy.params
    )
    policy.with_params(moved).save_pretrained(tmp_path / "moved")
    types = stored_types(tmp_path / "moved")
    assert {n for n, t in types.items() if t == torch.float32} == {
        norm,
        "model.embed_tokens.weight",
    }
    assert json.loads((tmp_path / "moved" / "config.json").read_text())["dtype"] == "float32"
    assert "1 of " in caplog.text and "model.embed_tokens.weight" in caplog.text
    same(tmp_path / "moved")


@pytest.mark.parametrize("failing", [INDEX, "config.json"])
def test_a_save_interrupted_at_its_small_files_leaves_the_old_model(tmp_path, monkeypatch, failing):
    made(tmp_path, shards=True)
    policy, before = Policy.from_pretrained(tmp_path), sorted(f.name for f in tmp_path.iterdir())
    write = Path.write_text

    def full(path, *args, **kwargs):
        if path.name == failing:
            raise OSError(28, "No space left on device")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr("jaxrl_async.model.hf.MAX_FILE_BYTES", 5000)
    with pytest.raises(OSError, match="No space"):
        filled(policy, 1.0).save_pretrained(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == before
    np.testing.assert_array_equal(logits(Policy.from_pretrained(tmp_path)), logits(policy))


def test_files_of_a_killed_save_are_explained_and_replaced(tmp_path):
    made(tmp_path / "whole")
    policy = Policy.from_pretrained(tmp_path / "whole")
    killed = tmp_path / "killed"
    (killed / ".writing").mkdir(parents=True)
    (killed / ".writing" / "model-00001-of-00003.safetensors").write_bytes(b"part")
    (killed / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"was interrupted.*copy the whole model again"):
        Policy.from_pretrained(killed)
    policy.save_pretrained(killed)
    assert not (killed / ".writing").exists()
    same(killed)
    made(tmp_path / "shards", shards=True)
    (tmp_path / "shards" / INDEX).unlink()
    with pytest.raises(CheckpointError, match=rf"lack their {re.escape(INDEX)}\. Save or copy"):
        Policy.from_pretrained(tmp_path / "shards")


def test_links_are_replaced_and_not_written_through(tmp_path):
    """As in a snapshot of the hub's cache, which other jobs read."""
    made(tmp_path / "blobs")
    policy = Policy.from_pretrained(tmp_path / "blobs", tokenizer=addition_tokenizer())
    policy.save_pretrained(tmp_path / "blobs")
    before = {f.name: f.read_bytes() for f in (tmp_path / "blobs").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", SINGLE} <= before.keys()
    (tmp_path / "snapshot").mkdir()
    for name in before:
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    other = dataclasses.replace(policy, generation={"temperature": 0.5})
    filled(other, 0.01).save_pretrained(tmp_path / "snapshot")
    assert {f.name: f.read_bytes() for f in (tmp_path / "blobs").iterdir()} == before
    assert not [f.name for f in (tmp_path / "snapshot").iterdir() if f.is_symlink()]
    assert float(Policy.from_pretrained(tmp_path / "snapshot").params["embed"][0, 0]) > 0


def test_an_index_of_files_that_are_gone_is_named_once(tmp_path, caplog):
    made(tmp_path, shards=True)
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    made(tmp_path / "one")
    (tmp_path / "one" / SINGLE).rename(tmp_path / SINGLE)
    Policy.from_pretrained(tmp_path)
    assert caplog.text.count(f"the files in {INDEX} do not exist") == 1


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ({"eos_token_id": -1}, ()),
        ({"eos_token_id": [-1]}, ()),
        ({"eos_token_id": [1, -1]}, (1,)),
        ({"eos_token_id": [2, 1]}, (2, 1)),
        ({"eos_token_id": -1, "text_config": {"eos_token_id": 7}}, (7,)),
        ({"eos_token_id": [-1], "text_config": {"eos_token_id": [7, -1]}}, (7,)),
        ({"eos_token_id": 3, "text_config": {"eos_token_id": 7}}, (3,)),
    ],
)
def test_an_end_token_of_minus_one_is_none(tmp_path, said, ends):
    made(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    if "text_config" in said:
        inner = transformers.Gemma3TextConfig(**SIZES).to_dict()
        inner |= {"sliding_window": 8} | said["text_config"]
        whole = {"model_type": "gemma3", "text_config": inner}
    whole |= {"eos_token_id": said["eos_token_id"]}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert spec_from_hf(whole, "config.json").eos_ids == ends
    addition_tokenizer().save_pretrained(tmp_path)
    own = addition_tokenizer().eos_ids
    assert load_tokenizer(tmp_path).eos_ids == tuple(dict.fromkeys([*own, *ends]))
