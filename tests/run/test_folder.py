"""The run folder is never overwritten by accident."""

import pytest

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config, Distributed, Run
from jaxrl_async.errors import ConfigError
from jaxrl_async.run.folder import prepare, settled, write_config


def run(tmp_path, **values):
    return Config(run=Run(dir=str(tmp_path / "runs"), name="demo", **values))


def old_run(tmp_path):
    paths = prepare(run(tmp_path))
    paths.metrics.write_text("old")
    return paths


def test_a_new_run_gets_its_folder_and_everything_lies_below_it(tmp_path):
    paths = prepare(run(tmp_path))
    assert paths.root.is_dir() and paths.root == tmp_path / "runs" / "demo"
    for path in (paths.config, paths.metrics, paths.samples, paths.ledger, paths.tensorboard):
        assert path.parent == paths.root
    for path in (paths.checkpoints, paths.policy, paths.report):
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
    assert list(paths.root.iterdir()) == []
    runs = tmp_path / "runs"
    assert (runs / "demo.1" / "metrics.jsonl").read_text() == "first"
    assert (runs / "demo.2" / "metrics.jsonl").read_text() == "second"


def test_resuming_leaves_everything_where_it_is(tmp_path):
    old_run(tmp_path)
    assert prepare(run(tmp_path, resume=True)).metrics.read_text() == "old"


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(ConfigError, match="no run to resume"):
        prepare(run(tmp_path, resume=True))


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    old_run(tmp_path)
    with pytest.raises(ConfigError, match="exclude each other"):
        prepare(run(tmp_path, resume=True, overwrite=True))


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        prepare(run(tmp_path))


def test_a_run_that_is_started_again_and_again_starts_once_and_then_continues(tmp_path):
    again = run(tmp_path, resume_or_start=True).run
    assert not settled(again).resume
    prepare(settled(again)).metrics.write_text("old")
    assert settled(again).resume
    assert prepare(settled(again)).metrics.read_text() == "old"
    assert settled(run(tmp_path).run) == run(tmp_path).run


def test_continuing_or_starting_excludes_replacing(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.resume_or_start and run\.overwrite"):
        settled(run(tmp_path, resume_or_start=True, overwrite=True).run)


def test_the_configuration_kept_is_that_of_all_processes(tmp_path):
    here = Distributed(coordinator="a:1", num_processes=2, process_id=1, heartbeat_s=7)
    config = Config(run=Run(dir=str(tmp_path)), distributed=here)
    paths = prepare(config)
    write_config(config, paths)
    assert load(paths.config).distributed == Distributed(heartbeat_s=7)
