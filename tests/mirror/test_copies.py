"""Runs with a copy on a bucket: its contents at each moment, and what a run continues from."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from object_store import BUCKET, environment, object_store
from runs import CONFIGS, config_of, weights_of

import jaxrl_async.view.__main__ as view
from jaxrl_async import audit, serve
from jaxrl_async.audit import audit_run
from jaxrl_async.command import export
from jaxrl_async.config.run_section import RunSection
from jaxrl_async.data.addresses import local_argument
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.mirror import copy_thread
from jaxrl_async.mirror.bring_back import bring_back
from jaxrl_async.mirror.copy_pass import FolderMirror, TakenOver
from jaxrl_async.mirror.copy_thread import RunCopy
from jaxrl_async.mirror.remote_copy import OWNER, CopyTarget, open_target, whole_checkpoints
from jaxrl_async.run.checkpoint.seal import CHECKSUMS, checksums, saved_steps
from jaxrl_async.run.folder import SIGNS

ROOT = Path(__file__).parents[2]
ADDRESS = "memory://bucket/runs"


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path) -> RunSection:
    return RunSection(name="a", dir=str(tmp_path), copy_to=ADDRESS)


def folder_of(run: RunSection) -> Path:
    return Path(run.dir) / run.name


def save(folder: Path, step: int, content: str = "") -> None:
    """Write what looks like a checkpoint, and a line of metrics."""
    made = folder / "checkpoints" / str(step)
    for name in ("state/a", "state/b", "loop/json"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(content or f"{name} of {step}")
    (made / CHECKSUMS).write_text(json.dumps(checksums(made)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


def mirror_of(run: RunSection, keep: int = 2) -> tuple[FolderMirror, CopyTarget]:
    target = open_target(ADDRESS, run.name)
    target.claim("me")
    return FolderMirror(folder_of(run), target, keep, "me"), target


def steps_in(target: CopyTarget) -> list[int]:
    return whole_checkpoints(target.names()).get("checkpoints", [])


def refuse_after(system, monkeypatch, count: int) -> None:
    """Make all writes of files but the first `count` fail."""
    real, done = system.put_file, []

    def put_file(path: str, target: str) -> None:
        if len(done) == count:
            raise OSError("the bucket is away")
        done.append(target)
        real(path, target)

    monkeypatch.setattr(system, "put_file", put_file)


def test_the_copy_has_what_the_folder_has_and_keeps_as_many_checkpoints(run, memory):
    folder = folder_of(run)
    mirror, target = mirror_of(run)
    for step in (1, 2, 3):
        save(folder, step)
        (folder / "lock").touch()
        assert mirror.has_finished()
        mirror.update()
        assert not mirror.has_finished()
    assert steps_in(target) == [3, 2]
    assert not [n for n in target.names() if n.startswith("checkpoints/1/")]
    assert target.read("metrics.jsonl") == (folder / "metrics.jsonl").read_bytes()
    assert {"lock", SIGNS, ".copying/file"}.isdisjoint(target.names())
    (folder / "stacks.txt").write_text("x")
    mirror.update()
    assert target.read("stacks.txt") == b"x"
    (folder / "stacks.txt").unlink()
    mirror.update()
    assert target.read("stacks.txt") is None
    assert not (folder / ".copying").exists()


@pytest.mark.parametrize("count", range(5))
def test_an_upload_that_ends_anywhere_leaves_the_checkpoint_before(
    run, memory, monkeypatch, tmp_path, count
):
    folder = folder_of(run)
    mirror, target = mirror_of(run)
    save(folder, 1)
    mirror.update()
    save(folder, 2)
    with monkeypatch.context() as patched:
        refuse_after(memory, patched, count)
        with pytest.raises(OSError, match="away"):
            mirror.update()
        if count:  # the run's other files went first, so its ledger is never behind
            assert target.read("metrics.jsonl") == (folder / "metrics.jsonl").read_bytes()
    if count < 4:
        assert steps_in(target) == [1]
    fetched = run.model_copy(update={"dir": str(tmp_path / "other"), "resume": True})
    bring_back(fetched)
    assert saved_steps(folder_of(fetched) / "checkpoints") == [1]
    mirror.update()
    assert steps_in(target) == [2, 1]


def test_a_step_that_is_saved_again_is_sent_again_and_what_was_undone_goes(run, memory):
    folder = folder_of(run)
    save(folder, 2)
    save(folder, 9)
    mirror_of(run)[0].update()
    shutil.rmtree(folder / "checkpoints/9")
    save(folder, 4)
    mirror, target = mirror_of(run)  # of a process that was resumed
    save(folder, 2, "other weights")
    mirror.update()
    assert steps_in(target) == [4, 2]
    assert target.read("checkpoints/2/state/a") == b"other weights"


def test_a_checkpoint_that_the_run_removes_meanwhile_is_still_sent(run, memory, monkeypatch):
    folder = folder_of(run)
    mirror, target = mirror_of(run)
    save(folder, 1)
    real = memory.put_file

    def put_file(path: str, target: str) -> None:
        shutil.rmtree(folder / "checkpoints/1", ignore_errors=True)
        real(path, target)

    monkeypatch.setattr(memory, "put_file", put_file)
    mirror.update()
    assert steps_in(target) == [1]


def test_the_newest_checkpoint_that_is_as_it_was_written_is_fetched(run, memory, tmp_path, caplog):
    folder = folder_of(run)
    save(folder, 1)
    save(folder, 2)
    mirror, target = mirror_of(run)
    mirror.update()
    target.system.pipe_file(f"{target.root}/checkpoints/2/state/a", b"changed")
    fetched = run.model_copy(update={"dir": str(tmp_path / "other"), "resume_or_start": True})
    bring_back(fetched)
    assert saved_steps(folder_of(fetched) / "checkpoints") == [1]
    assert "skipping checkpoint checkpoints/2" in caplog.text
    assert not (folder_of(fetched) / OWNER).exists()


def test_a_second_run_of_the_name_takes_the_copy_over(run, memory, tmp_path):
    save(folder_of(run), 1)
    first, target = mirror_of(run)
    first.update()
    target.claim("another")
    save(folder_of(run), 2)
    with pytest.raises(TakenOver, match="written by another process"):
        first.update()
    assert steps_in(target) == [1]


def test_a_new_run_is_refused_where_there_is_a_copy_unless_it_replaces_it(run, memory):
    save(folder_of(run), 1)
    mirror_of(run)[0].update()
    fresh = run.model_copy(update={"dir": run.dir + "/other"})
    with pytest.raises(ConfigError, match="already holds a copy of a run"):
        bring_back(fresh)
    folder_of(fresh).mkdir(parents=True)
    replacing = fresh.model_copy(update={"overwrite": True})
    bring_back(replacing)
    with RunCopy() as copy:
        copy.begin(replacing, 2)
    assert memory.exists("/bucket/runs/a.1/checkpoints/1/state/a")
    assert not memory.exists("/bucket/runs/a/checkpoints")
    assert copy.verdict() == [f"copy of the run  {ADDRESS}/a (complete)"]


def test_a_folder_that_was_continued_elsewhere_is_moved_aside(run, memory, tmp_path):
    folder_of(run).mkdir()
    with RunCopy() as copy:
        copy.begin(run, 2)
        save(folder_of(run), 1)
    resumed = run.model_copy(update={"resume": True})
    bring_back(resumed)  # its own copy: nothing is moved
    assert not Path(f"{folder_of(run)}.1").exists()
    elsewhere = resumed.model_copy(update={"dir": str(tmp_path / "other")})
    bring_back(elsewhere)
    with RunCopy() as copy:
        copy.begin(elsewhere, 2)
        save(folder_of(elsewhere), 7)
    bring_back(resumed)
    assert saved_steps(folder_of(run) / "checkpoints") == [7]
    assert saved_steps(Path(f"{folder_of(run)}.1") / "checkpoints") == [1]


def test_folders_that_know_nothing_of_each_other_are_not_mixed(run, memory):
    save(folder_of(run), 1)
    mirror_of(run)[0].update()
    with pytest.raises(ConfigError, match="hold unrelated runs"):
        bring_back(run.model_copy(update={"resume": True}))


def test_a_bucket_that_does_not_answer_is_counted_and_logged(run, memory, monkeypatch, caplog):
    monkeypatch.setattr(copy_thread, "END_TRIES", 2)
    monkeypatch.setattr(copy_thread, "backoff_s", lambda first, failures: 0.0)
    folder_of(run).mkdir()
    with RunCopy() as copy:
        copy.begin(run, 2)
        save(folder_of(run), 1)
        refuse_after(memory, monkeypatch, 1)
    assert copy.new_failures() >= 2
    assert copy.new_failures() == 0
    (line,) = copy.verdict()
    assert "NOT complete: OSError: the bucket is away" in line
    assert line in caplog.text


def test_an_address_that_no_package_reads_is_refused(run):
    with pytest.raises(ConfigError, match=r"run\.copy_to: nothing://b/a cannot be used"):
        bring_back(run.model_copy(update={"copy_to": "nothing://b"}))


def test_the_records_of_a_copy_are_read_without_its_checkpoints(run, memory, cache, capsys):
    save(folder_of(run), 1)
    (folder_of(run) / "config.yaml").write_text("run: {}")
    (folder_of(run) / "policy").mkdir()
    (folder_of(run) / "policy/model.safetensors").write_text("weights")
    mirror_of(run)[0].update()
    here = local_argument(f"{ADDRESS}/a", "records of a run")
    found = {p.relative_to(here).as_posix() for p in here.rglob("*") if p.is_file()}
    assert found == {"config.yaml", "metrics.jsonl", OWNER}
    assert audit.main([f"{ADDRESS}/a"]) == 2  # it has no ledger
    assert f"{ADDRESS}/a cannot be audited" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "more", "code"),
    [(audit, [], 2), (export, ["OUT"], 2), (serve, [], 2), (view, [], 2)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_command_names_an_address_as_it_was_given(memory, cache, capsys, command, more, code):
    assert command.main([f"{ADDRESS}/none", *more]) == code
    assert f"'{ADDRESS}/none': found nothing" in capsys.readouterr().err


HELD = """
import time
from pathlib import Path

CALLS = []


def many_digits(prompt, completion, reference):
    CALLS.append(1)
    while len(CALLS) > 100 and (Path(__file__).parent / "hold").exists():
        time.sleep(0.05)
    return sum(c.isdigit() for c in completion) / 16
"""
TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start.steps=3",
    "sampler.slots=8",
    "algorithm={group_size: 2, groups_per_step: 4}",
    "trainer={micro_batch_tokens: 512}",
    "staleness.max_staleness=0",
    "run={steps: 16, name: a, overwrite: false}",
    "eval.every=0",
    "checkpoint={every: 2}",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_killed_run_whose_folder_is_lost_continues_from_a_bucket(tmp_path):
    """Its weights are those of a run that was not disturbed, bit for bit."""
    (tmp_path / "reward.py").write_text(HELD)
    reward = f"reward.function={tmp_path / 'reward.py'}:many_digits"
    alone = (f"run.dir={tmp_path / 'alone'}", *TINY, reward)
    here, copied = tmp_path / "here", (*TINY, reward, f"run.copy_to={BUCKET}/all")
    command = [sys.executable, "-m", "jaxrl_async.train", str(CONFIGS / "addition.yaml")]
    subprocess.run([*command, *alone], check=True, cwd=ROOT, timeout=300)
    with object_store() as store:
        env, args = environment(store), [*command, f"run.dir={here}", *copied]
        (tmp_path / "hold").touch()
        killed = subprocess.Popen(args, cwd=ROOT, env=env)
        try:
            _wait_for_copy(env, killed)
        finally:
            killed.kill()
            killed.wait()
        shutil.rmtree(here)
        (tmp_path / "hold").unlink()
        done = subprocess.run(
            [*args, "--resume"], cwd=ROOT, env=env, timeout=300, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert f"{BUCKET}/all/a (complete)" in " ".join(done.stdout.split())
        names = _list(env)
        read = [sys.executable, "-m", "jaxrl_async", "audit", f"{BUCKET}/all/a"]
        env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        audited = subprocess.run(
            read, cwd=ROOT, env=env, timeout=60, capture_output=True, text=True, check=True
        )
        assert "resumed 1 times" in audited.stdout
        written = [sys.executable, "-m", "jaxrl_async", "export", f"{BUCKET}/all/a"]
        subprocess.run([*written, str(tmp_path / "out")], cwd=ROOT, env=env, timeout=60, check=True)
        assert (tmp_path / "out/model.safetensors").is_file()
    wanted = weights_of(config_of("addition", tmp_path / "alone", *TINY))
    found = weights_of(config_of("addition", here, *TINY))
    assert wanted.keys() == found.keys()
    assert all(np.array_equal(wanted[key], found[key]) for key in wanted)
    assert audit_run(here / "a").resumed == 1
    lines = read_lines(here / "a/metrics.jsonl")
    assert [x["step"] for x in lines] == [
        x["step"] for x in read_lines(tmp_path / "alone/a/metrics.jsonl")
    ]
    assert {"policy/model.safetensors", "report.html", "metrics.jsonl", OWNER} <= names.keys()
    assert whole_checkpoints(names)["checkpoints"] == [16, 14]


LIST = f"""
import json
from jaxrl_async.mirror.remote_copy import open_target
print(json.dumps(open_target("{BUCKET}/all", "a").names()))
"""


def _list(env: dict[str, str]) -> dict[str, int]:
    """Return what is in the copy."""
    listed = subprocess.run(
        [sys.executable, "-c", LIST], cwd=ROOT, env=env, check=True, capture_output=True, timeout=60
    )
    return json.loads(listed.stdout)


def _wait_for_copy(env: dict[str, str], run: subprocess.Popen[bytes]) -> None:
    """Wait until a checkpoint of a run that is held is whole in the copy."""
    end_s = time.monotonic() + 240
    while not whole_checkpoints(_list(env)).get("checkpoints"):
        assert run.poll() is None, f"the run ended with {run.returncode}"
        assert time.monotonic() < end_s, "no checkpoint has come"
        time.sleep(0.5)
