"""Damaged checkpoints, disks that are full, folders that disappear: the last good one survives."""

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async import audit as audit_module
from jaxrl_async.audit import audit_run
from jaxrl_async.config.schema import Config, RunSection
from jaxrl_async.errors import CheckpointError, EarlierSaveError, FolderLost
from jaxrl_async.mirror.copy_pass import FolderMirror
from jaxrl_async.mirror.remote_copy import open_target
from jaxrl_async.run.checkpoint import seal, store
from jaxrl_async.run.checkpoint import storage as place
from jaxrl_async.run.checkpoint.store import Checkpoints
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


@pytest.mark.full
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


@pytest.mark.full
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
    real = place.give_name

    def torn(unnamed: Path, target: Path) -> None:
        real(unnamed, target)
        flip(target)

    monkeypatch.setattr(place, "give_name", torn)
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


@pytest.mark.full
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
    folder, real = made(tmp_path / "c", 1), place.seal

    def full(unnamed: Path) -> None:
        if unnamed.name.startswith("2."):
            raise OSError(errno.ENOSPC, "No space left on device", str(unnamed / seal.CHECKSUMS))
        real(unnamed)

    monkeypatch.setattr(place, "seal", full)
    with Checkpoints(folder, 1) as checkpoints:
        checkpoints.save(2, state=state_of(2), loop={"version": 2})
        with pytest.raises(EarlierSaveError, match="Check whether the disk is full"):
            checkpoints.save(3, state=state_of(3), loop={"version": 3})
        checkpoints.wait()
    assert sorted(p.name for p in folder.iterdir()) == ["3"]
    assert "Traceback" not in capfd.readouterr().err


def test_several_files_are_hashed_at_once_and_right(tmp_path, monkeypatch):
    contents = {f"{k}/{k}": bytes([k]) * k * 1000 for k in range(9)}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    real, two = seal._digest, threading.Barrier(3)

    def meets(path: Path, *args: Any, **kwargs: Any) -> str:
        two.wait(10)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(seal, "_digest", meets)
    monkeypatch.setattr(seal, "BLOCK", 700, raising=False)
    right = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    assert seal.checksums(tmp_path) == right


def test_a_process_that_must_end_waits_for_the_name_and_not_for_the_rest(tmp_path, monkeypatch):
    folder, hurried = tmp_path / "c", threading.Event()
    with Checkpoints(folder, 1, is_hurried=hurried.is_set) as checkpoints:
        save(checkpoints, 1)
        hurried.set()
        checkpoints.save(2, state=state_of(2), loop={"version": 2})
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2"], "none is removed unread"
    assert read(folder) == 2
    made(folder, 3, keep=1)
    assert sorted(p.name for p in folder.iterdir()) == ["3"]


# ---- files of others, and file systems that cannot sync or do not answer


def failing_sync(monkeypatch, code: int, fails) -> None:
    real = os.fsync

    def fsync(handle: int) -> None:
        if fails(Path(os.readlink(f"/proc/self/fd/{handle}"))):
            raise OSError(code, os.strerror(code))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


def warnings(caplog, text: str) -> list[str]:
    return [m for m in caplog.messages if text in m]


@pytest.mark.parametrize("kind", ["unreadable", "gone", "unsyncable"])
def test_a_file_of_another_program_in_the_runs_folder_does_not_matter(run, monkeypatch, kind):
    foreign, real = run.root / "notes.swp", os.open
    foreign.write_text("x")

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) == str(foreign) and kind != "unsyncable":
            code = errno.EACCES if kind == "unreadable" else errno.ENOENT
            raise OSError(code, os.strerror(code), str(foreign))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    failing_sync(monkeypatch, errno.EIO, lambda path: path == foreign)
    with Checkpoints(run.checkpoints, run=run) as checkpoints:
        save(checkpoints, 1)
    assert read(run.checkpoints) == 1


def test_records_that_cannot_be_synced_are_a_warning_once(run, monkeypatch, caplog):
    failing_sync(monkeypatch, errno.EIO, lambda path: path in (run.metrics, run.ledger))
    with Checkpoints(run.checkpoints, run=run) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    assert read(run.checkpoints) == 2
    assert len(warnings(caplog, "records are not certainly on the disk")) == 1


def test_the_runs_own_records_are_synced(run, monkeypatch):
    synced: list[Path] = []
    for path in (run.config, run.samples, run.answers, run.schedule):
        path.write_text("")
    failing_sync(monkeypatch, 0, lambda path: bool(synced.append(path)))
    with Checkpoints(run.checkpoints, run=run) as checkpoints:
        save(checkpoints, 1)
    names = "config.yaml metrics.jsonl samples.jsonl answers.jsonl ledger.jsonl schedule.jsonl"
    assert {run.root / name for name in names.split()} <= {*synced}


def test_a_file_of_the_checkpoint_that_cannot_be_synced_fails_the_save(tmp_path, monkeypatch):
    made(tmp_path / "c", 1)
    failing_sync(monkeypatch, errno.EIO, lambda path: path.name == seal.CHECKSUMS)
    with Checkpoints(tmp_path / "c") as checkpoints, pytest.raises(CheckpointError):
        save(checkpoints, 2)
    assert read(tmp_path / "c") == 1


@pytest.mark.full
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EROFS])
def test_a_file_system_without_fsync_saves_and_says_so_once(run, monkeypatch, caplog, code):
    seal._warn_of_no_sync.cache_clear()
    failing_sync(monkeypatch, code, lambda path: True)
    with Checkpoints(run.checkpoints, run=run) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    assert read(run.checkpoints) == 2
    assert len(warnings(caplog, "fsync")) == 1


@pytest.fixture
def answer(run, monkeypatch) -> dict[str, int]:
    """The error, if any, with which the file system answers who looks at the run's metrics."""
    real, answers = Path.stat, {"code": 0}

    def stat(path: Path, **kwargs: Any) -> os.stat_result:
        if path == run.metrics and (code := answers["code"]):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, **kwargs)

    monkeypatch.setattr(Path, "stat", stat)
    return answers


@pytest.mark.full
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EACCES])
def test_a_disk_that_does_not_answer_is_a_failed_save_and_the_next_is_made(run, answer, code):
    with Checkpoints(run.checkpoints, run=run) as checkpoints:
        save(checkpoints, 1)
        answer["code"] = code
        with pytest.raises(CheckpointError, match="could not be written"):
            save(checkpoints, 2)
        answer["code"] = 0
        save(checkpoints, 3)
    assert read(run.checkpoints) == 3


def test_a_stale_folder_at_two_saves_in_a_row_is_lost(run, answer):
    stale = errno.ESTALE
    with Checkpoints(run.checkpoints, run=run) as checkpoints:
        save(checkpoints, 1)
        for step, code in enumerate((stale, 0, stale, errno.EIO, stale), 2):
            answer["code"] = code
            if code:
                with pytest.raises(CheckpointError):
                    save(checkpoints, step)
            else:
                save(checkpoints, step)
        with pytest.raises(FolderLost, match="removed, moved or replaced"):
            save(checkpoints, 9)


# ---- what is damaged, and what only cannot be read now


TRAINED = {"train": {"params": jnp.arange(SIZE, dtype=jnp.float32)}, "reference": jnp.ones(SIZE)}


def trained(folder: Path, *steps: int) -> Path:
    with Checkpoints(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, state=TRAINED, loop={"version": step})
    return folder


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def garbled(path: Path) -> None:
    path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.full
@pytest.mark.parametrize(
    "damage", [emptied, garbled, halved, Path.unlink], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "d", "d/*", "*"])
@pytest.mark.parametrize("verify", [False, True])
def test_a_damaged_one_without_checksums_gives_way_wherever_it_is_damaged(
    tmp_path, name, damage, verify
):
    folder = trained(tmp_path / "c", 1, 2)
    if verify:
        for step in "12":
            (folder / step / seal.CHECKSUMS).unlink()
    if name == "d":
        shutil.rmtree(folder / "2" / "state" / "d")
    else:
        for path in (folder / "2" / "state").glob(name):
            if path.is_file():
                damage(path)
    with Checkpoints(folder, verify=verify) as checkpoints:
        assert checkpoints.restore(None, TRAINED).step == 1


@pytest.mark.parametrize("verify", [False, True])
def test_one_of_other_settings_is_still_refused_by_name(tmp_path, verify):
    folder = trained(tmp_path / "c", 1, 2)
    with (
        Checkpoints(folder, verify=verify) as checkpoints,
        pytest.raises(CheckpointError, match="2 was made without a critic"),
    ):
        checkpoints.restore(None, {**TRAINED, "critic": jnp.ones(3)})
    assert seal.saved_steps(folder) == [1, 2]


@pytest.mark.full
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, os.strerror(errno.EIO)),
        OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        OSError(errno.EACCES, os.strerror(errno.EACCES)),
        MemoryError(),
        ValueError("DATA_LOSS: reading d/1 [POSIX error: Input/output error]"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte"),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["check_files", "load"])
def test_a_passing_failure_stops_and_sets_nothing_aside(tmp_path, monkeypatch, error, where):
    folder = made(tmp_path / "c", 1, 2)

    def fails(*args: Any, **kwargs: Any) -> None:
        if args[0].name == "2":
            raise error
        real(*args, **kwargs)

    owner, name = (place, "check_files") if where == "check_files" else (store.v1, LOAD)
    real = getattr(owner, name)
    with monkeypatch.context() as patch, Checkpoints(folder) as checkpoints:
        patch.setattr(owner, name, fails)
        with pytest.raises(CheckpointError, match=r"2 cannot be read now: .*--resume"):
            checkpoints.restore(None, state_of(0))
    assert seal.saved_steps(folder) == [1, 2]
    assert read(folder) == 2


LOAD = "load_checkpointables"


@pytest.mark.full
def test_one_damaged_folder_is_kept_the_newest(tmp_path, caplog):
    folder = made(tmp_path / "c", 1, 2, 3)
    for step in ("2", "3"):
        flip(folder / step)
    assert read(folder) == 1
    assert sorted(p.name for p in folder.iterdir()) == ["1", "3.unreadable.1"]
    made(folder, 2)
    flip(folder / "2")
    (folder / "7.unreadable.mine").mkdir()
    assert read(folder) == 1
    left = ["1", "2.unreadable.1", "7.unreadable.mine"]
    assert sorted(p.name for p in folder.iterdir()) == left
    assert "removed 3.unreadable.1" in caplog.text


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
    place = open_target(f"file://{tmp_path}/copy", "run")
    mirror = FolderMirror(run.root, place, 2, "me")
    place.claim("me")
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


def test_an_audit_of_a_live_run_does_not_accuse_it(tmp_path, monkeypatch):
    """Another step is made, and saved, whenever the audit has read a file."""
    root = tmp_path / "run"
    root.mkdir()
    config = Config().model_dump(mode="json")
    config["algorithm"]["groups_per_step"] = 1
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    steps = 0

    def make_step() -> None:
        nonlocal steps
        facts = {"group": steps, "version": steps}
        lines = ({"fate": "admitted", **facts}, {"fate": "trained", **facts, "oldest": steps})
        with (root / "ledger.jsonl").open("a") as ledger:
            ledger.writelines(json.dumps(line) + "\n" for line in lines)
        steps += 1
        with (root / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": steps}) + "\n")
        (root / "checkpoints" / str(steps)).mkdir(parents=True)
        (root / "checkpoints" / str(steps) / seal.CHECKSUMS).write_text("{}")

    for _ in range(3):
        make_step()
    with (root / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 0}) + "\n")
    for name in ("read_lines", "saved_steps"):
        real = getattr(audit_module, name)

        def read_then_step(path: Path, real: Any = real) -> Any:
            found = real(path)
            make_step()
            return found

        monkeypatch.setattr(audit_module, name, read_then_step)
    assert audit_run(root).problems == ()
    assert steps > 4
