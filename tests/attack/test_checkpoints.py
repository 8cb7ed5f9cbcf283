"""Damaged checkpoints, disks that are full, folders that disappear: the last good one survives."""

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.audit import audit_run
from jaxrl_async.config.schema import Config, RunSection
from jaxrl_async.errors import CheckpointError, EarlierSaveError, FolderLost
from jaxrl_async.run.checkpoint import seal, store
from jaxrl_async.run.checkpoint.store import Checkpoints
from jaxrl_async.run.copies.mirror import FolderMirror
from jaxrl_async.run.copies.place import open_place
from jaxrl_async.run.folder import Paths, claimed

SIZE = 1000


def state_of(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.arange(SIZE, dtype=jnp.float32) * step}


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, state=state_of(step), loop={"version": step})
    checkpoints.wait()


def made(folder: Path, *steps: int, keep: int = 9) -> Path:
    with Checkpoints(folder, keep) as checkpoints:
        for step in steps:
            save(checkpoints, step)
    return folder


def read(folder: Path) -> int:
    """Restore the newest, compare it with what was saved, and return its step."""
    with Checkpoints(folder) as checkpoints:
        saved = checkpoints.restore(None, state_of(0))
    assert saved.loop["version"] == saved.step
    np.testing.assert_array_equal(saved.state["w"], np.arange(SIZE, dtype=np.float32) * saved.step)
    return saved.step


def flip(folder: Path) -> None:
    """Change bits in the middle of the largest file of a checkpoint."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    for k in range(8):
        data[len(data) // 2 + 31 * k] ^= 0x40
    path.write_bytes(data)


def test_one_without_checksums_never_comes_before_one_with(tmp_path, caplog):
    folder = made(tmp_path / "c", 9, 12)
    (folder / "12" / seal.CHECKSUMS).unlink()
    flip(folder / "12")
    assert read(folder) == 9
    assert sorted(p.name for p in folder.iterdir()) == ["12.unreadable.1", "9"]
    assert "has no checksums.json" in caplog.text
    with Checkpoints(folder, 1) as checkpoints:
        save(checkpoints, 12)
    assert read(folder) == 12


def test_one_without_checksums_is_read_where_none_has_them_and_that_is_an_error_line(
    tmp_path, caplog
):
    folder = made(tmp_path / "c", 9, 12)
    for step in ("9", "12"):
        (folder / step / seal.CHECKSUMS).unlink()
    assert read(folder) == 12
    (line,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "12 has no checksums.json" in line.getMessage()


def test_one_without_checksums_is_the_last_resort_where_the_others_are_damaged(tmp_path, caplog):
    folder = made(tmp_path / "c", 3, 9, 12)
    flip(folder / "12")
    flip(folder / "9")
    (folder / "3" / seal.CHECKSUMS).unlink()
    assert read(folder) == 3
    assert [r.levelno for r in caplog.records].count(logging.ERROR) == 1


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', "[" * 100_000, "{}", "1", "{"])
def test_odd_checksums_are_no_checksums_that_agree(tmp_path, text):
    folder = made(tmp_path / "c", 1, 2)
    (folder / "2" / seal.CHECKSUMS).write_text(text)
    assert read(folder) == 1


def test_a_name_is_given_once_the_sums_are_there_and_all_is_synced(tmp_path, monkeypatch):
    """A kill at any call leaves either the named checkpoint with its sums, or none of that name."""
    folder, calls = tmp_path / "c", []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        calls.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        real_fsync(handle)

    def rename(path: Path, target: Path) -> Path:
        if path.name == f"1{seal.UNNAMED}":
            assert (path / seal.CHECKSUMS).is_file()
            files = {str(p) for p in (path, *path.rglob("*"))}
            assert files <= {name for what, name in calls if what == "sync"}
            calls.append(("rename", str(target)))
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    made(folder, 1)
    named = calls.index(("rename", str(folder / "1")))
    assert ("sync", str(folder)) in calls[named:]


def test_an_old_one_is_removed_only_after_the_new_one_was_read_back(tmp_path, monkeypatch):
    folder = made(tmp_path / "c", 1)
    real = store.give_name

    def torn(unnamed: Path, target: Path) -> None:
        real(unnamed, target)
        flip(target)

    monkeypatch.setattr(store, "give_name", torn)
    with Checkpoints(folder, 1) as checkpoints:
        checkpoints.save(2, state=state_of(2), loop={"version": 2})
        with pytest.raises(CheckpointError, match="its checksum differs"):
            checkpoints.wait()
    assert read(folder) == 1


def test_a_damaged_newer_one_never_pushes_out_a_good_one(tmp_path):
    folder = made(tmp_path / "c", 9, 12)
    shutil.copytree(folder / "12", folder / "50")  # a later step of nobody, without checksums
    (folder / "50" / seal.CHECKSUMS).unlink()
    with Checkpoints(folder, 1) as checkpoints:
        save(checkpoints, 13)
    assert (folder / "13").is_dir()
    assert read(folder) == 13


@given(
    sealed=st.dictionaries(st.integers(0, 30), st.booleans(), min_size=1),
    keep=st.integers(1, 4),
)
def test_removing_leaves_the_newest_with_checksums(tmp_path_factory, sealed, keep):
    folder = tmp_path_factory.mktemp("c")
    for step, has_sums in sealed.items():
        (folder / str(step)).mkdir()
        if has_sums:
            (folder / str(step) / seal.CHECKSUMS).write_text("{}")
    newest = max(sealed)
    (folder / str(newest) / seal.CHECKSUMS).write_text("{}")
    seal.forget_old(folder, newest, keep)
    left = set(seal.saved_steps(folder))
    with_sums = sorted(s for s in sealed if sealed[s] or s == newest)
    assert set(with_sums[-keep:]) == {s for s in left if seal.is_sealed(folder / str(s))}


def test_what_was_being_replaced_when_the_machine_died_gets_its_name_back(tmp_path):
    folder = made(tmp_path / "c", 1, 2)
    (folder / "2").rename(folder / f"2{seal.REPLACED}")
    assert read(folder) == 2


@pytest.mark.parametrize("kind", ["a file", "a link to nothing"])
def test_what_is_no_checkpoint_does_not_keep_a_step_from_being_saved(tmp_path, kind):
    folder = made(tmp_path / "c", 1)
    if kind == "a file":
        (folder / "2").write_text("x")
    else:
        (folder / "2").symlink_to(tmp_path / "nowhere")
    made(folder, 2)
    assert read(folder) == 2
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2"]


def test_a_disk_that_is_full_at_the_sums_leaves_the_one_before_and_says_so(
    tmp_path, monkeypatch, capfd
):
    folder, real = made(tmp_path / "c", 1), store.seal

    def full(unnamed: Path) -> None:
        if unnamed.name.startswith("2."):
            raise OSError(errno.ENOSPC, "No space left on device", str(unnamed / seal.CHECKSUMS))
        real(unnamed)

    monkeypatch.setattr(store, "seal", full)
    with Checkpoints(folder, 1) as checkpoints:
        checkpoints.save(2, state=state_of(2), loop={"version": 2})
        with pytest.raises(EarlierSaveError, match="Check whether the disk is full"):
            checkpoints.save(3, state=state_of(3), loop={"version": 3})
        checkpoints.wait()
    assert sorted(p.name for p in folder.iterdir()) == ["3"]
    assert "Traceback" not in capfd.readouterr().err


# ---- a folder that disappears


@pytest.fixture
def run(tmp_path):
    with claimed(RunSection(dir=str(tmp_path), name="run")) as paths:
        for path in (paths.metrics, paths.ledger):
            path.write_text("")
        with paths.metrics.open("a"), paths.ledger.open("a"):
            yield paths


def removed(paths: Paths) -> None:
    shutil.rmtree(paths.root)


def replaced(paths: Paths) -> None:
    shutil.copytree(paths.root, paths.root.with_name("other"))
    shutil.rmtree(paths.root)
    paths.root.with_name("other").rename(paths.root)


def moved(paths: Paths) -> None:
    paths.root.rename(paths.root.with_name("elsewhere"))


def without_metrics(paths: Paths) -> None:
    paths.metrics.unlink()


def with_other_ledger(paths: Paths) -> None:
    paths.ledger.unlink()
    paths.ledger.write_text("")


@pytest.mark.parametrize(
    "attack",
    [removed, replaced, moved, without_metrics, with_other_ledger],
    ids=lambda f: f.__name__,
)
def test_the_next_save_says_that_the_folder_is_lost_and_makes_none(run, attack):
    with Checkpoints(run.checkpoints, run=run) as checkpoints:
        save(checkpoints, 1)
        attack(run)
        with pytest.raises(FolderLost, match=r"removed, moved or replaced.*--resume"):
            checkpoints.save(2, state=state_of(2), loop={"version": 2})
        assert not (run.checkpoints / "2").exists()
        if attack in (removed, moved):
            assert not run.root.exists()


def test_a_copy_is_not_emptied_because_the_folder_is_gone(run, tmp_path):
    place = open_place(f"file://{tmp_path}/copy", "run")
    mirror = FolderMirror(run.root, place, 2, "me")
    place.take("me")
    made(run.checkpoints, 1)
    mirror.update()
    there = sorted(place.names())
    assert f"checkpoints/1/{seal.CHECKSUMS}" in there
    shutil.rmtree(run.root)
    with pytest.raises(FolderLost):
        mirror.update()
    assert sorted(place.names()) == there


# ---- the audit


def test_an_audit_compares_with_the_newest_checkpoint(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    (root / "config.yaml").write_text(yaml.safe_dump(Config().model_dump(mode="json")))
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (root / name).write_text("")
    assert audit_run(root).problems == ()
    (root / "checkpoints" / "330").mkdir(parents=True)
    (root / "checkpoints" / "330" / seal.CHECKSUMS).write_text("{}")
    (problem, *_) = audit_run(root).problems
    assert "330" in problem and "missing" in problem
    (root / "metrics.jsonl").write_text(json.dumps({"step": 330}) + "\n")
    assert audit_run(root).problems
