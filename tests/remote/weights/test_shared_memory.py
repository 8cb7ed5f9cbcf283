"""Weights through /dev/shm: a second process reads them, and nothing is left behind."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transport_rig import FetchProcess, host_tree, on_trainer, same_bits, target_of

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights import shared_memory
from jaxrl_async.remote.weights.shared_memory import (
    FOLDER,
    PREFIX,
    SharedFiles,
    SharedReader,
    delete_left_over,
)
from jaxrl_async.remote.weights.transport_choice import make_fetching, make_offering

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs /dev/shm")

SHARED = RemoteSection(transfer="shared_memory")
AUTO = RemoteSection(transfer="auto")


def own_files(run):
    return sorted(FOLDER.glob(f"{PREFIX}{run}-{os.getpid()}-*"))


@pytest.mark.full
def test_another_process_reads_version_after_version_from_the_same_files():
    offering = make_offering(SHARED, run="shm-process")
    assert offering.address == ""
    process = FetchProcess(transfer="shared_memory")
    process.tell(64)
    assert process.hear() == ""
    inodes = set()
    for version in range(5):
        tree = host_tree(version)
        where = offering.offer(version, on_trainer(tree))
        process.tell([version, where, []])
        num_bytes, source, same = process.hear()
        assert same and num_bytes == sum(x.nbytes for x in tree["layers"].values()) + 64 * 16
        assert source == where["holders"][0]["shared"]
        inodes |= {path.stat().st_ino for path in own_files("shm-process")}
        if version:
            offering.withdraw(version - 1)
    assert len(inodes) == 2  # a double buffer
    process.close()
    offering.close()
    assert not own_files("shm-process")


def test_weights_stay_when_the_trainer_writes_the_file_again():
    offering = make_offering(AUTO, run="shm-again")
    fetching = make_fetching(AUTO, target_of(host_tree(), 1, 4))
    kept = []
    for version in range(3):
        tree = host_tree(version)
        where = offering.offer(version, on_trainer(tree))
        got = fetching.fetch(version, where, [offering.address], threading.Event())
        assert got.source.startswith(str(FOLDER))
        kept.append((got.params, tree))
        offering.withdraw(version)
    assert all(same_bits(params, tree) for params, tree in kept)
    assert len(own_files("shm-again")) == 1
    fetching.close()
    offering.close()


def test_what_is_withdrawn_too_early_comes_over_tcp_or_is_an_error():
    tree = host_tree()
    offering = make_offering(AUTO, run="shm-gone")
    where = offering.offer(0, on_trainer(tree))
    offering._transports.shared.withdraw(0)
    fetching = make_fetching(AUTO, target_of(tree))
    got = fetching.fetch(0, where, [offering.address], threading.Event())
    # the server reads the same file, whose contents are still there
    assert same_bits(got.params, tree) and got.source == offering.address
    assert fetching.counts["without_shared_memory"] == 1
    alone = make_fetching(SHARED, target_of(tree))
    with pytest.raises(WeightsError, match="no longer has version 0"):
        alone.fetch(0, where, [], threading.Event())
    for one in (fetching, alone, offering):
        one.close()


def test_another_machines_shared_memory_is_not_looked_for():
    tree = host_tree()
    offering = make_offering(AUTO, run="shm-far")
    where = offering.offer(0, on_trainer(tree))
    where["holders"][0]["boot_id"] = "another"
    fetching = make_fetching(AUTO, target_of(tree))
    got = fetching.fetch(0, where, [offering.address], threading.Event())
    assert got.source == offering.address and not fetching.counts
    alone = make_fetching(SHARED, target_of(tree))
    with pytest.raises(WeightsError, match=r"remote\.transfer=auto"):
        alone.fetch(0, where, [], threading.Event())
    for one in (fetching, alone, offering):
        one.close()


def test_too_little_room_goes_over_tcp_if_it_may_and_says_what_to_do_if_not(monkeypatch, caplog):
    def full(descriptor, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    tree = host_tree()
    offering = make_offering(AUTO, run="shm-full")
    where = offering.offer(0, on_trainer(tree))
    assert "remote.transfer=tcp" in caplog.text and "--shm-size" in caplog.text
    fetching = make_fetching(AUTO, target_of(tree))
    got = fetching.fetch(0, where, [offering.address], threading.Event())
    assert same_bits(got.params, tree) and not own_files("shm-full")
    alone = make_offering(SHARED, run="shm-full")
    with pytest.raises(WeightsError, match=r"MiB left.*remote\.transfer=tcp"):
        alone.offer(0, on_trainer(tree))
    for one in (fetching, alone, offering):
        one.close()


@pytest.mark.full
def test_files_of_a_killed_process_are_deleted_and_those_of_the_living_are_not():
    program = (
        "import os, sys, signal; from jaxrl_async.remote.weights.shared_memory import SharedFiles\n"
        "files = SharedFiles('killed'); files.write(0, [4096])\n"
        "print('made', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = str(Path(__file__).parent.parent.parent.parent)
    living = SharedFiles("living")
    file, _ = living.write(0, [100])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.stdout == "made\n" and done.returncode < 0
    assert list(FOLDER.glob(f"{PREFIX}killed-*"))
    assert delete_left_over()
    assert not list(FOLDER.glob(f"{PREFIX}killed-*"))
    assert file.path.exists()
    living.close()
    assert not file.path.exists()


def test_a_file_elsewhere_or_of_another_size_is_not_mapped(tmp_path):
    reader = SharedReader()
    with pytest.raises(WeightsError, match="not a weights file"):
        reader._file("/etc/passwd", 10)
    with pytest.raises(WeightsError, match="cannot be read"):
        reader._file(f"{FOLDER}/{PREFIX}none", 10)
    files = SharedFiles("sizes")
    file, _ = files.write(0, [100])
    with pytest.raises(WeightsError, match="bytes instead of"):
        reader._file(str(file.path), 10)
    descriptor = os.open(file.path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    files.close()
