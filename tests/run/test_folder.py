"""The run folder is never overwritten by accident."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_async.config.load import load
from jaxrl_async.config.rules import check_rules
from jaxrl_async.config.schema import Config, DistributedSection, RunSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.run.folder import Paths, claimed, is_inside, look, settled, write_config

ROOT = Path(__file__).parents[2]


def run(tmp_path, **values):
    return Config(run=RunSection(dir=str(tmp_path / "runs"), name="demo", **values))


def prepare(config):
    """The folder of a run that is over at once."""
    with claimed(getattr(config, "run", config)) as paths:
        return paths


def old_run(tmp_path):
    paths = prepare(run(tmp_path))
    paths.metrics.write_text("old")
    return paths


def test_a_new_run_gets_its_folder_and_everything_lies_below_it(tmp_path):
    paths = prepare(run(tmp_path))
    assert paths.root.is_dir() and paths.root == tmp_path / "runs" / "demo"
    for path in (paths.config, paths.metrics, paths.samples, paths.ledger, paths.tensorboard):
        assert path.parent == paths.root
    for path in (paths.checkpoints, paths.policy, paths.report, paths.schedule):
        assert path.parent == paths.root


def test_an_existing_run_is_refused_with_the_three_ways_out(tmp_path):
    old_run(tmp_path)
    with pytest.raises(ConfigError) as error:
        prepare(run(tmp_path))
    for way in ("--resume", "run.overwrite=true", "run.name", str(tmp_path)):
        assert way in str(error.value)


def test_overwriting_moves_each_old_run_aside(tmp_path):
    for text in ("first", "second"):
        paths = prepare(run(tmp_path, overwrite=True))
        paths.metrics.write_text(text)
    paths = prepare(run(tmp_path, overwrite=True))
    assert [p.name for p in paths.root.iterdir()] == ["lock"]
    runs = tmp_path / "runs"
    assert (runs / "demo.1" / "metrics.jsonl").read_text() == "first"
    assert (runs / "demo.2" / "metrics.jsonl").read_text() == "second"


def test_resuming_leaves_everything_where_it_is(tmp_path):
    old_run(tmp_path)
    assert prepare(run(tmp_path, resume=True)).metrics.read_text() == "old"


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(ConfigError, match="no run to resume"):
        prepare(run(tmp_path, resume=True))


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        prepare(run(tmp_path))


def test_only_one_process_trains_a_run(tmp_path):
    one = run(tmp_path).run
    with claimed(one), pytest.raises(ConfigError, match="another process"), claimed(one):
        pass
    with claimed(one):
        pass


def content(folder):
    return {p.relative_to(folder): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_looking_changes_nothing(tmp_path):
    assert look(run(tmp_path).run) == Paths(tmp_path / "runs" / "demo")
    assert list(tmp_path.iterdir()) == []
    old_run(tmp_path)
    before = content(tmp_path)
    look(run(tmp_path, overwrite=True).run)
    look(run(tmp_path, resume=True).run)
    assert content(tmp_path) == before


def fail_after_claiming(one, write=lambda paths: None):
    with pytest.raises(RuntimeError, match="refused"), claimed(one) as paths:
        write_config(Config(run=one), paths)
        paths.checkpoints.mkdir()
        paths.metrics.touch()
        write(paths)
        raise RuntimeError("refused")


def test_a_start_that_fails_before_anything_is_made_leaves_nothing_behind(tmp_path):
    fail_after_claiming(run(tmp_path).run)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_moved_aside_for_a_start_that_fails_comes_back(tmp_path):
    old_run(tmp_path)
    before = content(tmp_path)
    fail_after_claiming(run(tmp_path, overwrite=True).run)
    assert content(tmp_path) == before and not (tmp_path / "runs" / "demo.1").exists()


def test_an_empty_folder_of_ones_own_stays_as_it_was(tmp_path):
    (tmp_path / "runs" / "demo" / "mine").mkdir(parents=True)
    fail_after_claiming(run(tmp_path).run)
    assert [p.name for p in (tmp_path / "runs" / "demo").iterdir()] == ["mine"]


def test_a_run_that_fails_after_its_first_record_keeps_its_folder(tmp_path):
    old_run(tmp_path)
    fail_after_claiming(
        run(tmp_path, overwrite=True).run, lambda paths: paths.metrics.write_text("new")
    )
    runs = tmp_path / "runs"
    assert (runs / "demo" / "metrics.jsonl").read_text() == "new"
    assert (runs / "demo.1" / "metrics.jsonl").read_text() == "old"


HOLD = """
import sys
from jaxrl_async.config.schema import RunSection
from jaxrl_async.run.folder import claimed
with claimed(RunSection(dir=sys.argv[1], name="demo", overwrite=True)) as paths:
    paths.metrics.write_text("living")
    print("held", flush=True)
    sys.stdin.readline()
"""


def held_by_another_process(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "runs")]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.full
@pytest.mark.parametrize("way", [{"overwrite": True}, {"resume": True}])
def test_no_way_to_start_touches_a_run_that_another_process_trains(tmp_path, way):
    """The other process has itself moved an older run aside."""
    old_run(tmp_path)
    process = held_by_another_process(tmp_path)
    with pytest.raises(ConfigError, match="another process is training this run"):
        prepare(run(tmp_path, **way))
    assert (tmp_path / "runs" / "demo" / "metrics.jsonl").read_text() == "living"
    assert (tmp_path / "runs" / "demo.1" / "metrics.jsonl").read_text() == "old"
    assert not (tmp_path / "runs" / "demo.2").exists()
    process.communicate("", timeout=20)
    prepare(run(tmp_path, **way))


@pytest.mark.full
def test_a_second_process_is_refused_while_this_one_holds_the_run_that_it_would_move(tmp_path):
    with claimed(run(tmp_path).run) as paths:
        paths.metrics.write_text("ours")
        command = [sys.executable, "-c", HOLD, str(tmp_path / "runs")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert "another process is training this run" in done.stderr
        assert paths.metrics.read_text() == "ours"
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["demo"]


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/3", "checkpoints", "policy/x"])
def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path, name, resume):
    root = prepare(run(tmp_path)).root
    (tmp_path / "elsewhere").mkdir()
    link = root / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="leads out" if resume else "holds a run already"):
        prepare(run(tmp_path, resume=resume))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_links_within_the_folder_and_the_folder_itself_as_a_link_are_followed(tmp_path):
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(tmp_path / "big_disk")
    paths = old_run(tmp_path)
    (paths.root / "newest.jsonl").symlink_to("metrics.jsonl")
    assert prepare(run(tmp_path, resume=True)).root == paths.root
    assert (tmp_path / "big_disk" / "metrics.jsonl").read_text() == "old"


def test_inside_follows_links_and_dots(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "ab").mkdir()
    (tmp_path / "a" / "out").symlink_to(tmp_path / "ab")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a" / "loop")
    root = tmp_path / "a"
    assert (
        is_inside(root, root)
        and is_inside(root, root / "not" / "there")
        and is_inside(root, root / "loop")
    )
    for path in ("out", "out/x", "../ab", "../a/../ab"):
        assert not is_inside(root, root / path)


def test_what_a_refused_start_leaves_is_no_run(tmp_path):
    paths = prepare(run(tmp_path))
    paths.config.write_text("run: {}")
    paths.checkpoints.mkdir()
    paths.metrics.touch()
    assert prepare(run(tmp_path)).root == paths.root


def test_a_dangling_link_is_no_free_name(tmp_path):
    old_run(tmp_path)
    (tmp_path / "runs" / "demo.1").symlink_to(tmp_path / "nowhere")
    prepare(run(tmp_path, overwrite=True))
    assert (tmp_path / "runs" / "demo.2" / "metrics.jsonl").read_text() == "old"
    assert (tmp_path / "runs" / "demo.1").is_symlink()


def test_a_run_that_is_started_again_and_again_starts_once_and_then_continues(tmp_path):
    again = run(tmp_path, resume_or_start=True).run
    assert not settled(again).resume
    prepare(settled(again)).metrics.write_text("old")
    assert settled(again).resume
    assert prepare(settled(again)).metrics.read_text() == "old"
    assert settled(run(tmp_path).run) == run(tmp_path).run


@pytest.mark.parametrize("name", ["resume", "resume_or_start"])
def test_what_continues_a_run_excludes_replacing_before_anything_is_looked_at(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"run\.{name} and run\.overwrite exclude each other"):
        check_rules(run(tmp_path, overwrite=True, **{name: True}))


def test_the_configuration_kept_is_that_of_all_processes(tmp_path):
    here = DistributedSection(coordinator="a:1", num_processes=2, process_id=1, heartbeat_s=7)
    config = Config(run=RunSection(dir=str(tmp_path)), distributed=here)
    paths = prepare(config)
    write_config(config, paths)
    assert load(paths.config).distributed == DistributedSection(heartbeat_s=7)
