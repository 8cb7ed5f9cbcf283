"""A policy's directory: its tokenizer, its special tokens, the lengths that it was made for."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxrl_async.config import schema
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.tokenizer import load_tokenizer
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.sampler import Sampler

SHAPE = schema.ArchitectureSection(
    layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=16, tied=False
)
SPEC = ModelSpec.from_architecture(SHAPE, 24)
PARAMS = init_params(SPEC, jax.random.key(0))
EOS = addition_tokenizer().eos_ids[0]


def content(folder, name="config.json"):
    return json.loads((folder / name).read_text())


@pytest.fixture
def saved(tmp_path):
    """The directory of a policy of the embedded task."""
    Policy(SPEC, PARAMS, addition_tokenizer()).save_pretrained(tmp_path / "a")
    return tmp_path / "a"


def test_all_saved_files_have_the_same_permissions(saved):
    modes = {file.name: file.stat().st_mode & 0o777 for file in saved.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
    assert len(set(modes.values())) == 1


def test_a_mounted_folder_without_modes_keeps_the_weights(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(path, mode)

    monkeypatch.setattr("pathlib.Path.chmod", refuse)
    Policy(SPEC, PARAMS, addition_tokenizer()).save_pretrained(tmp_path / "a")
    assert (tmp_path / "a/model.safetensors").is_file()


def always_ends():
    """Weights with which the end token is certain after any text: every hidden state is 1 in each
    dimension, and only the end token's logit looks at it."""
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    head = zero["lm_head"].at[:, EOS].set(10.0)
    ones = {"embed": jnp.ones_like(zero["embed"]), "final_norm": jnp.ones_like(zero["final_norm"])}
    return {**zero, **ones, "lm_head": head}


@pytest.mark.full
def test_transformers_stops_where_the_policy_ends_its_answer(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch (extra [dev])")
    transformers = pytest.importorskip("transformers")
    Policy(SPEC, always_ends(), addition_tokenizer()).save_pretrained(tmp_path / "a")
    Policy.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    for folder in (tmp_path / "a", tmp_path / "b"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        prompt = transformers.AutoTokenizer.from_pretrained(folder)("47+85=", return_tensors="pt")
        out = model.generate(**prompt, max_new_tokens=20, do_sample=False)
        assert out[0, prompt["input_ids"].shape[1] :].tolist() == [EOS]
        (folder / "generation_config.json").unlink()  # config.json alone says it, too
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            again = model.generate(**prompt, max_new_tokens=20, do_sample=False)
        assert again.tolist() == out.tolist()


def test_config_and_generation_config_name_the_tokenizers_special_tokens(saved):
    named = {"eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": 0}
    assert content(saved, "generation_config.json") == named
    assert content(saved).items() >= named.items()


def test_a_loaded_policy_keeps_its_tokenizer_and_writes_it_again(saved, tmp_path):
    policy = Policy.from_pretrained(saved)
    assert policy.tokenizer.encode("1+2=").tolist() == addition_tokenizer().encode("1+2=").tolist()
    policy.with_params(PARAMS).save_pretrained(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b").eos_ids == (EOS,)
    assert content(tmp_path / "b") == content(saved)


def test_a_directory_without_a_tokenizer_is_a_policy_all_the_same(tmp_path):
    Policy(SPEC, PARAMS).save_pretrained(tmp_path / "a")
    policy = Policy.from_pretrained(tmp_path / "a")
    policy.save_pretrained(tmp_path / "b")
    assert policy.tokenizer is None
    assert not (tmp_path / "b" / "tokenizer.json").exists()


def test_a_broken_tokenizer_is_refused_only_when_it_is_used(saved, tmp_path):
    (saved / "tokenizer.json").write_text("{")
    policy = Policy.from_pretrained(saved)
    with pytest.raises(DataError, match="not a tokenizer"):
        policy.tokenizer.encode("1")
    with pytest.raises(DataError, match="not a tokenizer"):
        policy.save_pretrained(tmp_path / "b")


def test_the_source_models_sampling_is_kept_with_all_end_tokens(saved, tmp_path):
    given = {"temperature": 0.6, "top_k": 20, "eos_token_id": [5, EOS], "max_length": 99}
    (saved / "generation_config.json").write_text(json.dumps(given))
    Policy.from_pretrained(saved).save_pretrained(tmp_path / "b")
    kept = content(tmp_path / "b", "generation_config.json")
    assert kept == {**given, "eos_token_id": [EOS, 5], "bos_token_id": 1, "pad_token_id": 0}
    assert content(tmp_path / "b")["eos_token_id"] == [EOS, 5]
    (saved / "tokenizer.json").unlink()  # then only the two files have it
    Policy.from_pretrained(saved).save_pretrained(tmp_path / "c")
    assert content(tmp_path / "c", "generation_config.json")["eos_token_id"] == [EOS, 5]


def test_a_policy_is_like_another_whatever_its_special_tokens(saved):
    assert Policy.from_pretrained(saved).spec.is_like(SPEC)
    assert not SPEC.is_like(ModelSpec.from_architecture(SHAPE, 25))


@pytest.mark.full
def test_loading_a_policy_does_not_import_transformers(saved):
    code = (
        "import sys; from jaxrl_async import Policy; "
        f"Policy.from_pretrained({str(saved)!r}); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.full
def test_a_sampler_beyond_the_models_positions_is_refused(saved):
    config = {**content(saved), "max_position_embeddings": 64}
    (saved / "config.json").write_text(json.dumps(config))
    policy = Policy.from_pretrained(saved)
    with pytest.raises(
        ConfigError, match=r"sampler.max_length \(128\).*max_position_embeddings \(64\)"
    ):
        Sampler(policy, section=schema.SamplerSection(max_length=128))
    Sampler(policy, section=schema.SamplerSection(max_length=64, max_new_tokens=8)).close()
    with Sampler(policy) as sampler:
        assert sampler.section.max_length == 64, "without settings, what the model was made for"
