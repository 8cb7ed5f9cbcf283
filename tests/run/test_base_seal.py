"""A resumed run goes on with the base that its adapter was trained on."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec
from runs import config_of

from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import Slices
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.builders import base_seal
from jaxrl_async.run.builders.base_seal import check_seal, keep_seal
from jaxrl_async.run.builders.initial_policy import make_policy

SPEC = tiny_spec(40)


def config(folder: Path, *words: str, resume: bool = False) -> Any:
    lora = (
        "model.lora.rank=4",
        "warm_start.steps=0",
        f"run.resume={str(resume).lower()}",
        "run.overwrite=false",
    )
    return config_of("addition", folder, *lora, *words)


def save(folder: Path, seed: int = 0) -> Policy:
    policy = Policy(SPEC, tiny_params(SPEC, seed))
    policy.save_pretrained(folder)
    return policy


@pytest.mark.full
def test_a_resumed_run_refuses_another_base(tmp_path: Path) -> None:
    own, path = tmp_path / "run" / "base", tmp_path / "model"
    own.parent.mkdir()
    save(path)
    begun = config(tmp_path, f"model.path={path}")
    keep_seal(begun.model, own)
    check_seal(config(tmp_path, f"model.path={path}", resume=True).model, own)
    copied = path.rename(tmp_path / "moved")
    again = config(tmp_path, f"model.path={copied}", resume=True)
    check_seal(again.model, own)
    form = config(tmp_path, f"model.path={copied}", "model.lora.base=int4", resume=True)
    with pytest.raises(ConfigError, match="in full, not int4, groups of 64"):
        check_seal(form.model, own)
    save(copied, seed=1)
    with pytest.raises(ConfigError, match="moved: its weights are not the weights"):
        check_seal(again.model, own)


def test_a_resumed_run_misses_its_own_base(tmp_path: Path, caplog) -> None:
    own = tmp_path / "base"
    resumed = config(tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"base: the weights .* are missing"):
        check_seal(resumed.model, own)
    save(own)
    check_seal(resumed.model, own)
    assert "could not be compared" in caplog.text, "of a run that noted nothing"


def test_a_base_that_differs_in_a_single_byte_is_another(tmp_path: Path) -> None:
    own, path = tmp_path / "base", tmp_path / "model"
    save(path)
    keep_seal(config(tmp_path, f"model.path={path}").model, own)
    file, again = path / "model.safetensors", config(tmp_path, f"model.path={path}", resume=True)
    content, before = bytearray(file.read_bytes()), file.stat()
    for index in (len(content) - 1, len(content) // 3):
        content[index] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
        with pytest.raises(ConfigError, match="its weights are not the weights"):
            check_seal(again.model, own)
        content[index] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 2 * 10**9))
    check_seal(again.model, own)


def test_a_file_that_is_as_it_was_is_not_read_again(tmp_path: Path, monkeypatch) -> None:
    own, path = tmp_path / "base", tmp_path / "model"
    save(path)
    keep_seal(config(tmp_path, f"model.path={path}").model, own)
    monkeypatch.setattr(base_seal.hashlib, "file_digest", None)
    check_seal(config(tmp_path, f"model.path={path}", resume=True).model, own)


@pytest.mark.parametrize(
    "noted", ["[]", "{}", '{"base": "full", "files": {"model.safetensors": "0"}}', '{"weights": 3}']
)
def test_a_note_of_another_form_is_reported(tmp_path: Path, caplog, noted: str) -> None:
    own = tmp_path / "base"
    save(own)
    (tmp_path / "base.json").write_text(noted, encoding="utf-8")
    check_seal(config(tmp_path, resume=True).model, own)
    assert "could not be compared" in caplog.text


@pytest.mark.full
def test_a_base_that_an_earlier_start_left_is_not_taken_for_the_users(tmp_path: Path) -> None:
    own = tmp_path / "base"
    save(own, seed=1)
    policy = save(tmp_path / "model")
    begun = config(tmp_path, f"model.path={tmp_path}/model", resume=True)
    slices = Slices(trainer=mesh_of(), samplers=(mesh_of(),), colocated=True)
    loaded = make_policy(begun.model, begun.run, SPEC, None, slices, own)
    np.testing.assert_array_equal(loaded.params["embed"], policy.params["embed"])
