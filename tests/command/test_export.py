"""Exports of a run and of a policy, read by the readers they are for."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from builders import tiny_params, tiny_spec
from runs import many_digits, run_job
from safetensors.numpy import load_file

from jaxrl_async.command.export import main
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.model.policy import Policy

SMALL = (
    "run.steps=3",
    "trainer.warmup_steps=1",
    "warm_start.steps=0",
    "checkpoint.every=2",
    "sampler.slots=4",
    "data.addition.eval_size=8",
    "algorithm.groups_per_step=2",
    "algorithm.group_size=2",
)


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    """A finished run of an adapter, with checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("adapted")
    run_job("addition", folder, *SMALL, "model.lora.rank=4", many_digits(folder))
    return folder / "addition"


@pytest.fixture
def policy(tmp_path) -> Path:
    tokenizer = addition_tokenizer()
    spec = tiny_spec(tokenizer.vocab_size)
    Policy(spec, tiny_params(spec), tokenizer).save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_runs_policy_is_what_it_wrote(adapted, tmp_path, capsys):
    assert main([str(adapted), str(tmp_path / "out")]) == 0
    assert same(weights(tmp_path / "out"), weights(adapted / "policy"))
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert "float32" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.exhaustive
def test_the_last_checkpoint_has_the_weights_of_the_end_and_an_earlier_one_others(
    adapted, tmp_path
):
    for step in ("2", "3"):
        assert main([str(adapted), str(tmp_path / step), "--step", step]) == 0
    assert same(weights(tmp_path / "3"), weights(adapted / "policy"))
    assert not same(weights(tmp_path / "2"), weights(adapted / "policy"))


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_run_without_a_policy_is_exported_by_its_checkpoint(adapted, tmp_path, capsys):
    killed = tmp_path / "killed"
    shutil.copytree(adapted, killed, ignore=shutil.ignore_patterns("policy", "adapter"))
    before = sorted(p.relative_to(killed) for p in killed.rglob("*"))
    assert main([str(killed), str(tmp_path / "no")]) == 1
    assert "--step, one of 2, 3" in capsys.readouterr().err
    assert main([str(killed), str(tmp_path / "out"), "--step", "3"]) == 0
    assert same(weights(tmp_path / "out"), weights(adapted / "policy"))
    assert (tmp_path / "out/tokenizer.json").read_text() == (
        adapted / "policy/tokenizer.json"
    ).read_text()
    assert sorted(p.relative_to(killed) for p in killed.rglob("*")) == before
    assert main([str(killed), str(tmp_path / "no"), "--step", "1"]) == 1
    assert "no checkpoint of step 1; existing steps: 2, 3." in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_is_read_and_merged_as_peft_does(adapted, tmp_path):
    """PEFT adds our adapter to the frozen base, and gets the policy that the run wrote."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    assert main([str(adapted), str(tmp_path / "out"), "--adapter-only"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(adapted / "base")
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "out").merge_and_unload()
    ours = weights(adapted / "policy")
    theirs = {k: v.numpy() for k, v in merged.state_dict().items() if k in ours}
    assert theirs.keys() == ours.keys()
    for name in ours:
        np.testing.assert_allclose(theirs[name], ours[name], atol=1e-5)
    again = tmp_path / "again"
    adapter = str(tmp_path / "out")
    assert main([str(adapted / "base"), str(again), "--adapter", adapter]) == 0
    for name, value in weights(again).items():
        np.testing.assert_allclose(value, ours[name], atol=1e-5)


@pytest.mark.full
def test_a_policy_in_bfloat16_is_its_weights_rounded(policy, tmp_path, capsys):
    assert main([str(policy), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    whole, rounded = weights(policy), weights(tmp_path / "out")
    for name, value in whole.items():
        assert str(rounded[name].dtype) == "bfloat16"
        assert np.array_equal(rounded[name], value.astype(rounded[name].dtype))
    assert '"dtype": "bfloat16"' in (tmp_path / "out/config.json").read_text()
    assert main([str(tmp_path / "out"), str(tmp_path / "as_it_is")]) == 0
    assert same(weights(tmp_path / "as_it_is"), rounded)


def test_what_cannot_be_exported_is_refused_with_what_to_do(policy, tmp_path, capsys):
    def error_of(*words: str) -> str:
        assert main(list(words)) == 2
        return capsys.readouterr().err

    new, there = str(tmp_path / "new"), str(policy)
    assert "there is no such folder" in error_of(str(tmp_path / "none"), new)
    assert "neither the folder of a run" in error_of(str(tmp_path), new)
    assert "Give a new folder, or empty it" in error_of(there, there)
    assert "for runs" in error_of(there, new, "--step", "3")
    assert "for runs" in error_of(there, new, "--adapter-only")
    assert not (tmp_path / "new").exists()
