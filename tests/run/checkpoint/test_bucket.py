"""Checkpoints that orbax writes to a bucket itself: what counts as one, and what is removed."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import fsspec
import numpy as np
import pytest
import two_processes
from object_store import BUCKET, environment, object_store
from runs import CONFIGS, config_of, weights_of

from jaxrl_async import audit
from jaxrl_async.config.load import load
from jaxrl_async.config.run_section import CheckpointSection, RunSection
from jaxrl_async.errors import ConfigError, FolderLost
from jaxrl_async.metrics.recorder import Recorder
from jaxrl_async.metrics.trackers import TRACKERS_FILE
from jaxrl_async.run.checkpoint import bucket_start, store
from jaxrl_async.run.checkpoint.bucket import ASIDE, WRITER, BucketStorage
from jaxrl_async.run.checkpoint.bucket_start import begin_writing, bring_back_records
from jaxrl_async.run.checkpoint.seal import CHECKSUMS, HashingAbandoned, is_transient
from jaxrl_async.run.checkpoint.storage import bring_back
from jaxrl_async.run.folder import WRITERS, Paths, read_signs, write_config

ROOT = Path(__file__).parents[3]
AT = "/bucket/runs/a"


@pytest.fixture
def bucket(monkeypatch):
    system = fsspec.filesystem("memory")
    made = BucketStorage(PurePosixPath(AT), system, AT)
    monkeypatch.setattr(bucket_start, "open_bucket", lambda address, name: made)
    yield made
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)


def write(
    bucket: BucketStorage, step: int, run: Paths | None = None, *, whole: bool = True
) -> None:
    """Write what looks like a checkpoint."""
    bucket.make_room(step)
    for name in ("state/d/1", "state/ocdbt.process_0/d/1", "loop/d/1"):
        bucket.system.pipe_file(f"{AT}/{step}/{name}", f"{name} of {step}".encode() * 9)
    if whole:
        bucket.complete(step, run)


def names(bucket: BucketStorage, step: int) -> set[str]:
    return {p.removeprefix(f"{AT}/{step}/") for p in bucket.system.find(f"{AT}/{step}")}


def test_only_what_has_checksums_is_a_checkpoint_and_the_rest_is_removed(bucket, caplog):
    write(bucket, 1)
    write(bucket, 2, whole=False)
    assert bucket.steps() == [1]
    bucket.sweep()
    assert names(bucket, 2) == set() and "2 is an unfinished save: it is removed" in caplog.text
    write(bucket, 3, whole=False)
    write(bucket, 4)
    assert names(bucket, 3) == set() and bucket.steps() == [1, 4]


@pytest.mark.parametrize("harm", ["cut", "gone", "added", "no sums", "other sums"])
def test_what_is_not_what_was_written_is_reported_and_is_damage(bucket, harm):
    write(bucket, 1)
    bucket.check(1)
    file, sums = f"{AT}/1/state/d/1", f"{AT}/1/{CHECKSUMS}"
    if harm == "cut":
        bucket.system.pipe_file(file, bucket.system.cat_file(file)[:10])
    elif harm == "gone":
        bucket.system.rm_file(file)
    elif harm == "added":
        bucket.system.pipe_file(file + "2", b"x")
    elif harm == "no sums":
        bucket.system.rm_file(sums)
    else:
        bucket.system.pipe_file(sums, b"[")
    with pytest.raises(OSError, match=r"missing|not what was written|no checksums") as caught:
        bucket.check(1)
    assert not is_transient(caught.value)


def test_the_sums_of_the_bucket_are_compared_where_sizes_are_the_same(bucket, monkeypatch):
    real = BucketStorage._find
    sums = {"crc32c": "AAAAAA==", "md5Hash": None}
    monkeypatch.setattr(
        BucketStorage, "_find", lambda *a: {k: {**v, **sums} for k, v in real(*a).items()}
    )
    write(bucket, 1)
    bucket.check(1)
    sums["md5Hash"] = "told of one that was composed before"
    bucket.check(1)
    sums["crc32c"] = "BBBBBB=="
    with pytest.raises(OSError, match="sums differ"):
        bucket.check(1)


def away_now(*_: object, **__: object) -> None:
    raise RuntimeError("503 from the bucket")


def test_a_bucket_that_is_unreachable_is_no_damage(bucket, monkeypatch):
    write(bucket, 1)

    monkeypatch.setattr(bucket.system, "find", away_now)
    for act in (bucket.steps, lambda: bucket.check(1), bucket.sweep, lambda: bucket.make_room(2)):
        with pytest.raises(OSError, match="503 from the bucket") as caught:
            act()
        assert is_transient(caught.value)
    monkeypatch.undo()


def test_a_save_whose_records_do_not_arrive_is_no_checkpoint(bucket, tmp_path, monkeypatch):
    run = made_run(tmp_path / "a", 1)
    write(bucket, 1, whole=False)
    real = bucket.system.open

    def opened(path: str, *args: object, **more: object) -> object:
        return away_now() if "/records/" in path else real(path, *args, **more)

    with monkeypatch.context() as away, pytest.raises(OSError, match="503"):
        away.setattr(bucket.system, "open", opened)
        bucket.complete(1, run)
    assert bucket.steps() == [] and "state/d/1" in names(bucket, 1)


def test_older_ones_go_and_the_mark_goes_first(bucket, monkeypatch):
    for step in (1, 2, 3, 4):
        write(bucket, step)
    removed: list[str] = []
    real = bucket.system.rm_file
    monkeypatch.setattr(
        type(bucket.system), "rm_file", lambda self, path: (removed.append(path), real(path))
    )
    bucket.forget_old(3, 2)
    assert bucket.steps() == [2, 3, 4] and removed[0] == f"{AT}/1/{CHECKSUMS}"
    assert names(bucket, 1) == set()
    with pytest.raises(HashingAbandoned):
        bucket.check(4, lambda: True)


def test_one_damaged_checkpoint_is_kept_and_no_sweep_removes_it(bucket):
    for step in (1, 2, 3):
        write(bucket, step)
    assert bucket.set_aside(3) == f"3/{ASIDE}"
    bucket.set_aside(2)
    assert bucket.forget_aside(f"3/{ASIDE}") == ["2"]
    bucket.sweep()
    assert bucket.steps() == [1] and "state/d/1" in names(bucket, 3)
    write(bucket, 3)
    assert bucket.steps() == [1, 3] and ASIDE not in names(bucket, 3)


SECTION = CheckpointSection(dir="gs://bucket/runs")


def line(step: int, spent_s: float = 1.0) -> str:
    return json.dumps({"step": step, "time/step_s": spent_s}) + "\n"


def made_run(folder: Path, *steps: int) -> Paths:
    """A folder as if a trainer had begun in it and recorded these steps."""
    folder.mkdir(parents=True)
    begin_writing(SECTION, RunSection(dir=str(folder.parent), name=folder.name))
    (folder / "metrics.jsonl").write_text("".join(map(line, steps)))
    return Paths(folder)


def begun_elsewhere(folder: Path) -> Paths:
    """A folder of the same run in which a trainer has taken over."""
    assert resumed(folder)
    return Paths(folder)


def resumed(folder: Path) -> bool:
    """Begin again in a folder; return whether there is a checkpoint to go on from."""
    run = RunSection(dir=str(folder.parent), name=folder.name, resume=True)
    goes_on = bring_back_records(SECTION, run)
    begin_writing(SECTION, run)
    return goes_on


def steps_in(folder: Path) -> list[int]:
    return [json.loads(x)["step"] for x in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_empty_machine_gets_the_records_of_the_newest_whole_one(bucket, tmp_path):
    there = made_run(tmp_path / "there/a", 1, 2)
    (there.root / TRACKERS_FILE).write_text('{"wandb": {"id": "x"}}')
    (there.root / "ledger.jsonl").touch()
    write(bucket, 2, there)
    there.metrics.write_text(line(1) + line(2) + line(3))
    write(bucket, 3, there)
    bucket.system.rm_file(f"{AT}/3/loop/d/1")
    assert resumed(tmp_path / "here/a")
    here = tmp_path / "here/a"
    assert (here / "metrics.jsonl").read_text() == line(1) + line(2)
    assert (here / TRACKERS_FILE).read_text() == '{"wandb": {"id": "x"}}'
    assert (here / "ledger.jsonl").read_bytes() == b""
    assert not list(here.glob("*.tmp"))


def test_a_folder_that_continues_from_the_checkpoint_stays_and_another_is_moved(bucket, tmp_path):
    here = made_run(tmp_path / "here/a", 1)
    assert not resumed(here.root)
    write(bucket, 1, here)
    here.metrics.write_text(line(1) + "2 is not saved")
    assert resumed(here.root)
    assert here.metrics.read_text() == line(1) + "2 is not saved"
    assert resumed(tmp_path / "elsewhere/a")
    elsewhere = Paths(tmp_path / "elsewhere/a")
    elsewhere.metrics.write_text(line(1) + line(2, 5.0))
    write(bucket, 2, elsewhere)
    here.metrics.write_text(line(1) + line(2) + line(3))  # made before the other one began
    assert resumed(here.root)
    assert here.metrics.read_text() == line(1) + line(2, 5.0)
    assert steps_in(tmp_path / "here/a.1") == [1, 2, 3]
    assert resumed(here.root) and not (tmp_path / "here/a.2").exists()


def test_a_folder_that_has_made_its_last_lines_anew_was_not_continued_elsewhere(bucket, tmp_path):
    """The records of a checkpoint may reach further than it, and its last line may be completed."""
    here = made_run(tmp_path / "a", 1, 2, 3)
    write(bucket, 2, here)
    again = Recorder(here.root, tensorboard=False, resume_step=2)
    again.log(2, {"eval/reward": 1.0})
    again.log(3, {"time/step_s": 2.0})
    again.close()
    assert resumed(here.root) and not (tmp_path / "a.1").exists()
    assert steps_in(here.root) == [1, 2, 3]


@pytest.mark.parametrize("at", ["add_signs", "begin"])
def test_a_start_that_was_killed_does_not_make_the_folder_a_stranger(
    bucket, tmp_path, monkeypatch, at
):
    here = made_run(tmp_path / "a", 1)
    write(bucket, 1, here)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(bucket_start if at == "add_signs" else BucketStorage, at, die)
        begin_writing(SECTION, RunSection(dir=str(tmp_path), name="a", resume=True))
    assert resumed(here.root) and not (tmp_path / "a.1").exists()


def test_a_copy_that_is_older_than_the_checkpoint_gets_its_records(bucket, tmp_path):
    """What only the copy has, such as the events of TensorBoard, stays."""
    there = made_run(tmp_path / "there/a", 1, 2, 3)
    write(bucket, 3, there)
    fetched = tmp_path / "here/a"  # as run.copy_to brought it
    shutil.copytree(there.root, fetched)
    (fetched / "metrics.jsonl").write_text(line(1))
    (fetched / "tensorboard").mkdir()
    (fetched / "tensorboard/events").write_text("x")
    assert resumed(fetched)
    assert steps_in(fetched) == [1, 2, 3] and (fetched / "tensorboard/events").exists()
    assert not (tmp_path / "here/a.1").exists()


def test_a_copy_whose_ledger_is_older_than_its_metrics_gets_the_records(bucket, tmp_path):
    there = made_run(tmp_path / "there/a", 1, 2)
    there.ledger.write_text('{"fate": "trained"}\n' * 3)
    write(bucket, 2, there)
    shutil.copytree(there.root, tmp_path / "here/a")
    (tmp_path / "here/a/ledger.jsonl").write_text('{"fate": "trained"}\n')
    assert resumed(tmp_path / "here/a")
    assert (tmp_path / "here/a/ledger.jsonl").read_text() == there.ledger.read_text()


def test_what_the_trainer_before_saves_while_another_one_is_prepared_is_brought(bucket, tmp_path):
    there = made_run(tmp_path / "there/a", 1)
    write(bucket, 1, there)
    run = RunSection(dir=str(tmp_path / "here"), name="a", resume=True)
    assert bring_back_records(SECTION, run)
    there.metrics.write_text(line(1) + line(2))
    write(writing(bucket, there), 2, there)
    begin_writing(SECTION, run)
    assert steps_in(tmp_path / "here/a") == [1, 2]


def test_a_new_run_that_meets_the_first_checkpoint_of_another_is_refused(bucket, tmp_path):
    run = RunSection(dir=str(tmp_path / "here"), name="a", resume_or_start=True)
    assert not bring_back_records(SECTION, run)
    there = made_run(tmp_path / "there/a", 1)
    write(bucket, 1, there)
    Paths(tmp_path / "here/a").root.mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on .*has saved the run's first"):
        begin_writing(SECTION, run)


def test_a_folder_that_knows_nothing_of_the_bucket_is_not_taken_for_it(bucket, tmp_path):
    write(bucket, 1, made_run(tmp_path / "there/a", 1))
    (tmp_path / "here/a").mkdir(parents=True)
    (tmp_path / "here/a/metrics.jsonl").write_text(line(1))
    with pytest.raises(ConfigError, match="know nothing of each other"):
        resumed(tmp_path / "here/a")
    assert steps_in(tmp_path / "here/a") == [1]


def test_a_host_that_was_not_the_first_may_be_the_first_when_a_run_continues(bucket, tmp_path):
    write(bucket, 1, made_run(tmp_path / "there/a", 1))
    (tmp_path / "here/a").mkdir(parents=True)
    (tmp_path / "here/a/trace.1.json").write_text("[]")
    assert resumed(tmp_path / "here/a")
    assert steps_in(tmp_path / "here/a") == [1] and (tmp_path / "here/a/trace.1.json").exists()


def test_where_no_checkpoint_is_whole_nothing_begins(bucket, tmp_path):
    write(bucket, 1, made_run(tmp_path / "there/a", 1))
    bucket.system.rm_file(f"{AT}/1/loop/d/1")
    with pytest.raises(ConfigError, match=r"none of the checkpoints \[1\] is what was written"):
        resumed(tmp_path / "here/a")


def writing(bucket: BucketStorage, run: Paths) -> BucketStorage:
    """The storage as the trainer that began last in this folder has it."""
    return dataclasses.replace(bucket, sign=read_signs(run.root / WRITERS)[-1])


def test_a_trainer_ends_once_another_writes_and_removes_nothing_of_it(bucket, tmp_path):
    first = made_run(tmp_path / "first/a", 1)
    earlier = writing(bucket, first)
    write(earlier, 1, first)
    earlier.system.pipe_file(f"{AT}/2/state/d/1", b"half")
    second = begun_elsewhere(tmp_path / "second/a")
    write(writing(bucket, second), 2, second, whole=False)
    before = names(bucket, 2)
    message = f"written by another trainer now: process {os.getpid()} on {socket.gethostname()}"
    for act in (lambda: earlier.make_room(2), lambda: earlier.complete(2, first)):
        with pytest.raises(FolderLost, match=message):
            act()
    assert names(bucket, 2) == before and bucket.steps() == [1]
    writing(bucket, second).complete(2, second)
    assert bucket.steps() == [1, 2]


def test_who_begins_while_another_seals_finds_no_seal_of_it(bucket, tmp_path, monkeypatch):
    first = made_run(tmp_path / "first/a", 1)
    earlier = writing(bucket, first)
    earlier.make_room(1)
    real = BucketStorage._objects

    def begun(self: BucketStorage, step: int) -> dict[str, object]:
        made_run(tmp_path / "second/a", 1)
        return real(self, step)

    with monkeypatch.context() as between, pytest.raises(FolderLost):
        between.setattr(BucketStorage, "_objects", begun)
        earlier.complete(1, first)
    assert bucket.steps() == []


def test_a_run_whose_sign_was_removed_continues(bucket, tmp_path):
    run = made_run(tmp_path / "a", 1)
    bucket.system.rm_file(f"{AT}/{WRITER}")
    write(writing(bucket, run), 1, run)
    assert resumed(run.root) and bucket.steps() == [1]


def test_a_save_that_another_trainer_ended_ends_the_run(bucket, tmp_path, monkeypatch):
    first = made_run(tmp_path / "first/a", 1)
    made_run(tmp_path / "second/a", 1)
    checkpoints = store.Checkpoints(writing(bucket, first), run=first)
    checkpoints.save(1, state={"train": np.zeros(2)}, loop={})
    with pytest.raises(FolderLost, match="another trainer"):
        checkpoints.save(2, state={"train": np.zeros(2)}, loop={})
    checkpoints.close()
    assert bucket.steps() == []


def test_a_new_run_where_checkpoints_are_is_refused(bucket, tmp_path):
    write(bucket, 1)
    run = RunSection(dir=str(tmp_path), name="a", overwrite=True)
    with pytest.raises(ConfigError, match="holds checkpoints of a run already"):
        bring_back_records(SECTION, run)


@pytest.mark.parametrize(("before", "now"), [(None, "gs://b"), ("gs://c", None)])
def test_a_run_that_saved_elsewhere_does_not_begin_from_its_start(bucket, tmp_path, before, now):
    made_run(tmp_path / "a", 1).config.write_text(json.dumps({"checkpoint": {"dir": before}}))
    if before is None:
        (tmp_path / "a/checkpoints/3").mkdir(parents=True)
    run = RunSection(dir=str(tmp_path), name="a", resume=True)
    with pytest.raises(ConfigError, match="where it has no checkpoint"):
        bring_back(CheckpointSection(dir=now), run)
    assert not bring_back(CheckpointSection(dir=before), run)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("warm_start.steps=3",), "warm_start.steps"),
        (("warm_start.steps=0", "model.lora.rank=2"), "model.lora without model.path"),
    ],
)
def test_what_a_run_keeps_beside_its_checkpoints_is_refused_by_name(words, named):
    with pytest.raises(ConfigError, match=rf"checkpoint\.dir does not work with {named}:"):
        load(CONFIGS / "addition.yaml", [*words, "checkpoint.dir=gs://bucket/x"])


@pytest.mark.parametrize("address", ["s3://b/x", "gs://", "/x", "gs://me:secret@b/x", "gs://b/x?a"])
def test_other_addresses_are_refused(address):
    with pytest.raises(ConfigError, match=r"checkpoint\.dir"):
        load(CONFIGS / "addition.yaml", ["warm_start.steps=0", f"checkpoint.dir={address}"])


# ---- orbax and TensorStore with a server of the bucket's interface

WORKER = f"""
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
if len(sys.argv) > 2:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jaxrl_async.run.checkpoint import bucket
from jaxrl_async.run.checkpoint.store import Checkpoints
storage = bucket.open_bucket("{BUCKET}/c", "a")
rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
def state(step):
    wanted = np.arange(1000, dtype=np.float32).reshape(8, 125) * step
    return {{"train": jax.make_array_from_callback((8, 125), rows, lambda i: wanted[i])}}
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
with Checkpoints(storage, 2) as checkpoints:
    for word in sys.argv[1].split():
        act, step = word.split("=")
        if act == "die":
            bucket.BucketStorage.complete = die
        if act in ("save", "die"):
            checkpoints.save(int(step), state=state(int(step)), loop={{"version": int(step)}})
            checkpoints.wait()
            multihost_utils.sync_global_devices("saved")  # the first process seals for all
        elif act == "cut":
            find = storage._find(f"{{storage.root}}/{{step}}/state")
            name = max((n for n in find if "/d/" in n), key=lambda n: find[n]["size"])
            path = f"{{storage.root}}/{{step}}/state/{{name}}"
            storage.system.pipe_file(path, storage.system.cat_file(path)[:20])
        else:
            saved = checkpoints.restore(None, state(0))
            assert saved.step == int(step) == saved.loop["version"], saved.step
            wanted = state(int(step))["train"]
            for a, b in zip(saved.state["train"].addressable_shards, wanted.addressable_shards):
                np.testing.assert_array_equal(a.data, b.data)
    print(sorted(storage._find(storage.root)))
"""


def worked(store, acts: str, *process: str, wait: bool = True) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", WORKER, acts, *process]
    env = {**environment(store), "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(program, env=env, cwd=ROOT, text=True, **pipes)


def names_after(store, acts: str) -> list[str]:
    out, err = (process := worked(store, acts)).communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.strip().splitlines()[-1].replace("'", '"'))


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_killed_save_and_a_cut_object_leave_the_one_before():
    with object_store() as store:
        found = names_after(store, "save=1 save=2 save=3 read=3")
        assert {n.partition("/")[0] for n in found} == {"2", "3"}
        killed = worked(store, "die=4")
        killed.communicate(timeout=120)
        assert killed.returncode == -9
        found = names_after(store, "read=3")
        assert {n.partition("/")[0] for n in found} == {"2", "3"}
        found = names_after(store, "cut=3 read=2 save=3 read=3 save=4 read=4")
        assert {n.partition("/")[0] for n in found} == {"3", "4"}
        assert [n for n in found if CHECKSUMS in n] == [f"3/{CHECKSUMS}", f"4/{CHECKSUMS}"]


@pytest.mark.full
@pytest.mark.exhaustive
def test_each_process_writes_its_own_shards_and_one_seals():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    with object_store() as store:
        both = [worked(store, "save=1 save=2 read=2", address, str(i)) for i in range(2)]
        try:
            outs = [process.communicate(timeout=180) for process in both]
        finally:
            for process in both:
                process.kill()
        assert [process.returncode for process in both] == [0, 0], [err[-3000:] for _, err in outs]
        found = names_after(store, "read=2")  # by one process, on another mesh
    for of in (0, 1):
        assert any(n.startswith(f"2/state/ocdbt.process_{of}/d/") for n in found)
    assert [n for n in found if CHECKSUMS in n] == [f"1/{CHECKSUMS}", f"2/{CHECKSUMS}"]


HELD = """
import time
from pathlib import Path

CALLS = []


def many_digits(prompt, completion, reference):
    CALLS.append(1)
    while len(CALLS) > 28 and Path(__file__).with_name("hold").exists():
        time.sleep(0.05)
    return sum(c.isdigit() for c in completion) / 8
"""
TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 6}",
    "data.max_prompt_tokens=16",
    "warm_start.steps=0",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 8}",
    "algorithm={group_size: 2, groups_per_step: 4, learning_rate: 1e-2}",
    "trainer={row_length: 32, micro_batch_tokens: 128}",
    "staleness.max_staleness=0",
    "run={steps: 8, name: a, overwrite: false}",
    "eval.every=0",
    "checkpoint={every: 2}",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_killed_run_continues_elsewhere_from_the_bucket_alone(tmp_path):
    """Its weights are those of a run that was not disturbed, bit for bit."""
    (tmp_path / "reward.py").write_text(HELD)
    both = (*TINY, f"reward.function={tmp_path / 'reward.py'}:many_digits")
    command = [sys.executable, "-m", "jaxrl_async.train", str(CONFIGS / "addition.yaml"), *both]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    alone = [*command, f"run.dir={tmp_path / 'alone'}"]
    subprocess.run(alone, check=True, cwd=tmp_path, env=env, timeout=300)
    with object_store() as store:
        env = {**environment(store), "PYTHONPATH": str(ROOT)}
        there = [*command, f"run.dir={tmp_path / 'here'}", f"checkpoint.dir={BUCKET}/all"]
        there.append("run.resume_or_start=true")
        (tmp_path / "hold").touch()
        killed = subprocess.Popen(there, cwd=tmp_path, env=env)
        try:
            end_s = time.monotonic() + 240
            while not _steps(env):
                assert killed.poll() is None and time.monotonic() < end_s
        finally:
            killed.kill()
            killed.wait()
        shutil.rmtree(tmp_path / "here")
        (tmp_path / "hold").unlink()
        done = subprocess.run(
            there, cwd=tmp_path, env=env, timeout=300, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert _steps(env) == [6, 8]
        whole = [sys.executable, "-m", "jaxrl_async", "export", str(tmp_path / "here/a")]
        whole += [str(tmp_path / "out"), "--step", "6"]
        subprocess.run(whole, cwd=tmp_path, env=env, timeout=120, check=True)
        assert (tmp_path / "out/model.safetensors").is_file()
        audited = [sys.executable, "-m", "jaxrl_async", "audit", str(tmp_path / "here/a")]
        result = subprocess.run(
            audited, cwd=tmp_path, env=env, timeout=60, capture_output=True, text=True
        )
        assert result.returncode == 0 and "resumed 1 times" in result.stdout, result
    assert not (tmp_path / "here/a/checkpoints").exists()
    expected = weights_of(config_of("addition", tmp_path / "alone", *both))
    found = weights_of(config_of("addition", tmp_path / "here", *both))
    assert all(np.array_equal(expected[key], found[key]) for key in expected)


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_killed_run_of_hosts_that_share_no_folder_continues_on_others(tmp_path):
    """The first of them has the folder of what was the second before. What is trained is what one
    process trains."""
    words = ("warm_start.steps=0", "run={name: a, steps: 6}", "checkpoint.every=2", "eval.every=0")
    two_processes.alone(tmp_path, *words)
    with object_store() as store:
        env = environment(store)
        there = (*words, f"checkpoint.dir={BUCKET}/all", "run.resume_or_start=true")

        def begun(*hosts: str) -> list[subprocess.Popen]:
            own = tuple(f"run.dir={tmp_path / host}" for host in hosts)
            return two_processes.start(tmp_path, *there, own=own, more_env=store)

        killed = begun("x", "y")
        try:
            end_s = time.monotonic() + 240
            while max(_steps(env), default=0) < 2:
                assert time.monotonic() < end_s and all(p.poll() is None for p in killed)
        finally:
            for process in killed:
                process.kill()
                process.communicate()
        ended = two_processes.ended(begun("y", "z"))
        assert [code for code, _ in ended] == [0, 0], [result[-3000:] for _, result in ended]
        assert _steps(env) == [4, 6]
    assert not (tmp_path / "z/a/metrics.jsonl").exists()
    one, two = two_processes.results(tmp_path, "a"), two_processes.results(tmp_path / "y", "a")
    two_processes.assert_same_run(one, two, atol=1e-5)


STEPS = f"""
from jaxrl_async.run.checkpoint.bucket import open_bucket
print(open_bucket("{BUCKET}/all", "a").steps())
"""


def _steps(env: dict[str, str]) -> list[int]:
    """Return the steps that have a checkpoint on the bucket."""
    asked = [sys.executable, "-c", STEPS]
    result = subprocess.run(asked, env=env, check=True, capture_output=True, timeout=60)
    return json.loads(result.stdout)


def test_an_audit_asks_the_bucket(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "open_bucket", lambda address, name: bucket)
    config = load(CONFIGS / "addition.yaml", ["warm_start.steps=0", "checkpoint.dir=gs://b/x"])
    run = made_run(tmp_path / "a")
    write_config(config, run)
    run.ledger.write_text("")
    write(bucket, 5)
    problems = audit.audit_run(run.root).problems
    assert any("the newest checkpoint is of step 5" in p for p in problems), problems
