"""Hugging Face folders beside the checkpoints: whole, equal to an export, gone with them."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of
from safetensors.numpy import load_file

import jaxrl_async as jr
from jaxrl_async.command.export import main as export
from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError
from jaxrl_async.run import policy_copies
from jaxrl_async.run.loop import train

SMALL = (
    "run.steps=4",
    "trainer.warmup_steps=1",
    "warm_start.steps=0",
    "checkpoint.every=1",
    "checkpoint.keep=2",
    "checkpoint.hugging_face=true",
    "sampler.slots=4",
    "data.addition.eval_size=8",
    "algorithm.groups_per_step=2",
    "algorithm.group_size=2",
    "algorithm.learning_rate=1e-3",
    "eval.every=0",
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16}",
)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "README.md"  # its table ends with the last metrics
    }


def run(folder: Path, *overrides: str, **how):
    config = config_of("addition", folder, *SMALL, many_digits(folder), *overrides)
    train(config, **how)
    return folder / config.run.name, config


@pytest.mark.full
def test_each_checkpoint_has_its_policy_as_export_writes_it(tmp_path):
    """Also after a resume, and with what a killed run left half written."""
    root, _ = run(tmp_path, "run.steps=2")
    assert sorted(p.name for p in (root / "hugging_face").iterdir()) == ["1", "2"]
    (root / "hugging_face/.3.writing").mkdir()
    again = ("run.overwrite=false", "run.resume=true")
    root, config = run(tmp_path, *again)
    assert sorted(p.name for p in (root / "hugging_face").iterdir()) == ["3", "4"]
    for step in ("3", "4"):
        out = tmp_path / f"out{step}"
        assert export([str(root), str(out), "--step", step]) == 0
        assert files(out) == files(root / "hugging_face" / step)
    last = load_file(root / "hugging_face/4/model.safetensors")
    for name, values in load_file(root / "policy/model.safetensors").items():
        np.testing.assert_array_equal(last[name], values)
    assert "# addition" in (root / "hugging_face/4/README.md").read_text()
    assert not any(x.get("faults/failed_policy_copies") for x in metrics_of(config))


@pytest.mark.full
def test_an_adapter_is_written_alone_as_peft_reads_it(tmp_path):
    root, _ = run(tmp_path, "model.lora.rank=2", "run.steps=2")
    out = tmp_path / "out"
    assert export([str(root), str(out), "--step", "2", "--adapter-only"]) == 0
    assert files(out) == files(root / "hugging_face/2")
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 2
    assert {*files(out)} == {"adapter_config.json", "adapter_model.safetensors"}
    ours = load_file(root / "adapter/adapter_model.safetensors")
    for name, values in load_file(out / "adapter_model.safetensors").items():
        np.testing.assert_array_equal(values, ours[name])


@pytest.mark.full
def test_transformers_loads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    root, _ = run(tmp_path, "run.steps=1")
    folder = root / "hugging_face/1"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("1+2=").input_ids) == "1+2="
    theirs = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, values in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(theirs[name], values)


@pytest.mark.full
def test_supervised_jobs_have_them_too(tmp_path):
    config = config_of(
        "sft",
        tmp_path,
        "run.steps=2",
        "checkpoint.every=1",
        "checkpoint.keep=1",
        "checkpoint.hugging_face=true",
        "trainer.warmup_steps=1",
    )
    train(config)
    root = tmp_path / config.run.name
    assert [p.name for p in (root / "hugging_face").iterdir()] == ["2"]
    last = load_file(root / "hugging_face/2/model.safetensors")
    for name, values in load_file(root / "policy/model.safetensors").items():
        np.testing.assert_array_equal(last[name], values)


class Seen(jr.Callback):
    def __init__(self) -> None:
        self.there: list[tuple[int, bool]] = []

    def on_save(self, step: int, folder: Path) -> None:
        copy = folder.parent.parent / "hugging_face" / str(step) / "config.json"
        self.there.append((step, copy.is_file()))


@pytest.mark.full
def test_a_copy_that_fails_is_counted_and_the_checkpoint_is_whole(tmp_path, monkeypatch, caplog):
    """A callback sees a folder that is whole, or none."""
    write, seen = policy_copies.write_step, Seen()

    def failing(paths, step, out, **how):
        made = write(paths, step, out, **how)
        if step == 1:
            raise OSError("the disk is full")
        return made

    monkeypatch.setattr(policy_copies, "write_step", failing)
    root, config = run(tmp_path, "run.steps=6", "checkpoint.keep=9", callbacks=[seen])
    assert [there for step, there in seen.there if step] == [False, *[True] * 5]
    names = {p.name for p in (root / "hugging_face").glob("[0-9]*")}
    assert names == set("023456")
    assert "could not be written (OSError: the disk is full)" in caplog.text
    assert {p.name for p in (root / "checkpoints").glob("[0-9]*")} == set("0123456")
    assert sum(x.get("faults/failed_policy_copies", 0) for x in metrics_of(config)) == 1


def test_a_process_that_must_end_writes_none(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = load({}, ["checkpoint.hugging_face=true", f"run.dir={tmp_path}"])
    calls = list[int]()
    copies = policy_copies.PolicyCopies(
        config,
        policy_copies.Paths(tmp_path / "r"),
        None,  # type: ignore[arg-type]
        is_hurried=lambda: True,
        failed=lambda: calls.append(-1),
        on_saved=lambda step, folder: calls.append(step),
    )
    copies(3, tmp_path / "r/checkpoints/3")
    assert calls == [3] and "is not written: the process ends" in caplog.text
    assert not (tmp_path / "r/hugging_face").exists()


def test_what_cannot_have_them_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"has no effect without run\.job=rl, sft or preference"):
        load(
            {"run": {"job": "reward_model"}, "data": {"jsonl": {"path": "p.jsonl"}}},
            ["checkpoint.hugging_face=true"],
        )
    monkeypatch.setattr(policy_copies.jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="needs one trainer process"):
        policy_copies.PolicyCopies(
            load({}, ["checkpoint.hugging_face=true"]),
            policy_copies.Paths(tmp_path),
            None,  # type: ignore[arg-type]
            is_hurried=lambda: False,
            failed=lambda: None,
            on_saved=None,
        )
