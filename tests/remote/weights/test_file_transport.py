"""Weights as files in a folder that all machines see."""

import json
import threading
from pathlib import Path

import pytest
from transport_rig import FetchProcess, host_tree, on_trainer, same_bits, target_of

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import ConfigError, WeightsError
from jaxrl_async.remote.weights import file_transport
from jaxrl_async.remote.weights.transport_choice import make_fetching, make_offering


@pytest.fixture
def section(tmp_path):
    return RemoteSection(transfer="folder", folder=str(tmp_path / "bucket"))


@pytest.fixture
def trainer(section):
    offering = make_offering(section, run="a run/of mine")
    yield offering
    offering.close()


def files(section):
    return sorted(p for p in Path(section.folder).rglob("*") if p.is_file())


@pytest.mark.parametrize("mesh", [(1, 4), (1, 1), (2, 2)])
def test_any_mesh_reads_what_it_needs(section, trainer, mesh):
    tree = host_tree()
    where = trainer.offer(0, on_trainer(tree))
    fetching = make_fetching(section, target_of(tree, *mesh))
    assert trainer.address == fetching.address == ""
    got = fetching.fetch(0, where, [], threading.Event())
    assert same_bits(got.params, tree)
    assert got.source == where["holders"][0]["folder"]
    fetching.close()


@pytest.mark.full
def test_a_process_that_joins_late_reads_the_newest_version(section, trainer, monkeypatch):
    monkeypatch.setattr(file_transport, "KEEP_S", 0.0)
    for version in range(3):
        where = trainer.offer(version, on_trainer(host_tree(version)))
        trainer.withdraw(version - 1)
    assert len(files(section)) == 2  # the newest version's shards and index; old ones are deleted
    process = FetchProcess(transfer="folder", folder=section.folder)
    process.tell(64)
    process.hear()
    process.tell([2, where, []])
    assert process.hear()[2]
    process.close()
    trainer.close()
    assert not files(section)


def test_withdrawn_files_stay_for_those_who_still_read_them(section, trainer):
    tree = host_tree()
    where = trainer.offer(0, on_trainer(tree))
    trainer.withdraw(0)
    fetching = make_fetching(section, target_of(tree))
    assert same_bits(fetching.fetch(0, where, [], threading.Event()).params, tree)
    fetching.close()


@pytest.mark.full
def test_torn_missing_and_changed_files_are_found(section, trainer, monkeypatch):
    monkeypatch.setattr(file_transport, "APPEAR_S", 0.1)
    tree = host_tree()
    where = trainer.offer(0, on_trainer(tree))
    index, data = sorted(files(section), key=lambda p: p.suffix != ".json")
    whole, size = data.read_bytes(), data.stat().st_size
    fetching = make_fetching(section, target_of(tree))

    def fails(match):
        with pytest.raises(WeightsError, match=match):
            fetching.fetch(0, where, [], threading.Event())

    data.write_bytes(whole[: size // 2])
    fails("bytes instead of")
    data.write_bytes(whole[:4096] + bytes([whole[4096] ^ 1]) + whole[4097:])
    fails("differ from the trainer's after 2 repeats")
    data.unlink()
    fails("incomplete or missing")
    data.write_bytes(whole)
    index.write_text("{", encoding="utf-8")
    fails("incomplete or missing")
    index.write_text(json.dumps({"size": size}), encoding="utf-8")
    assert same_bits(fetching.fetch(0, where, [], threading.Event()).params, tree)
    where["holders"][0]["folder"] = "../secrets"
    fetching.close()
    fetching = make_fetching(section, target_of(tree))
    fails("not a path below")
    fetching.close()


def test_a_file_that_shows_late_is_waited_for(section, trainer):
    tree = host_tree()
    where = trainer.offer(0, on_trainer(tree))
    (index,) = [p for p in files(section) if p.suffix == ".json"]
    hidden = index.with_name("hidden")
    index.rename(hidden)
    timer = threading.Timer(0.3, hidden.rename, [index])
    timer.start()
    fetching = make_fetching(section, target_of(tree))
    assert same_bits(fetching.fetch(0, where, [], threading.Event()).params, tree)
    timer.join()
    fetching.close()


def test_a_folder_is_needed_and_must_be_writable(tmp_path):
    with pytest.raises(ConfigError, match=r"needs remote\.folder"):
        make_offering(RemoteSection(transfer="folder"), run="r")
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    with pytest.raises(WeightsError, match=r"remote\.folder="):
        make_offering(RemoteSection(transfer="folder", folder=str(file)), run="r")
