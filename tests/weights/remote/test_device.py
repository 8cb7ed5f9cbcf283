"""Weights from device to device between processes, and over TCP when they do not come."""

import threading

import pytest
from transport_rig import FetchProcess, host_tree, on_trainer, same_bits, target_of

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.weights.remote.transports import make_fetching, make_offering

SECTION = RemoteSection(transfer="device", silence_s=0.5)


@pytest.fixture(scope="module")
def trainer():
    offering = make_offering(SECTION, run="device")
    yield offering
    offering.close()


@pytest.fixture(scope="module")
def fetchings():
    made = {}
    yield lambda mesh: made.setdefault(mesh, make_fetching(SECTION, target_of(host_tree(), *mesh)))
    for fetching in made.values():
        fetching.close()


@pytest.mark.parametrize("mesh", [(1, 4), (1, 1)])
def test_shards_are_cut_and_joined_on_their_way_from_device_to_device(trainer, fetchings, mesh):
    tree, fetching = host_tree(), fetchings(mesh)
    for version in range(2):
        where = trainer.offer(version, on_trainer(tree))
        sent = trainer.counts.get("sent_bytes", 0)
        got = fetching.fetch(version, where, [trainer.address], threading.Event())
        assert same_bits(got.params, tree) and not fetching.counts
        assert trainer.counts.get("sent_bytes", 0) == sent  # nothing over TCP
        trainer.withdraw(version)


def test_another_process_pulls_and_passes_on(trainer):
    tree = host_tree(1)
    where = trainer.offer(1, on_trainer(tree))
    process = FetchProcess(transfer="device")
    process.tell(64)
    address = process.hear()
    process.tell([1, where, [trainer.address]])
    _, source, same = process.hear()
    assert same and source == trainer.address
    section = RemoteSection(transfer="tcp")
    fetching = make_fetching(section, target_of(tree))
    got = fetching.fetch(1, where, [address], threading.Event())
    assert same_bits(got.params, tree) and got.source == address
    fetching.close()
    process.close()
    trainer.withdraw(1)


def test_pieces_that_do_not_come_are_fetched_over_tcp_and_it_is_counted(
    trainer, fetchings, caplog, monkeypatch
):
    tree, fetching = host_tree(), fetchings((1, 4))
    where = trainer.offer(2, on_trainer(tree))
    monkeypatch.setattr(  # numbers under which nothing is published: the pull waits for ever
        trainer._ways.server, "_publish", lambda version, array, box: 12345 + array
    )
    before = fetching.counts["without_device"]
    got = fetching.fetch(2, where, [trainer.address], threading.Event())
    assert same_bits(got.params, tree)
    assert fetching.counts["without_device"] == before + 1
    assert "nothing came for 0.5 s; they are fetched over TCP" in caplog.text
    monkeypatch.undo()
    trainer.withdraw(2)
    where = trainer.offer(3, on_trainer(tree))
    got = fetching.fetch(3, where, [trainer.address], threading.Event())  # a new connection
    assert same_bits(got.params, tree)
    assert fetching.counts["without_device"] == before + 1
    trainer.withdraw(3)


def test_a_trainer_that_has_died_is_an_error_and_not_a_hang(fetchings):
    tree, fetching = host_tree(), fetchings((1, 4))
    offering = make_offering(SECTION, run="dead")
    where = offering.offer(9, on_trainer(tree))
    offering.close()
    with pytest.raises(Exception, match="no source"):
        fetching.fetch(9, where, [offering.address], threading.Event())
