"""Weights from device to device between processes, and over TCP when they do not come."""

import gc
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_flags import QUICK_COMPILE
from jax._src.array import ArrayImpl
from transport_rig import FetchProcess, host_tree, on_trainer, same_bits, target_of

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights import device_transport, host_sums, transport_choice
from jaxrl_async.remote.weights import fetching as fetching_module
from jaxrl_async.remote.weights import offering as offering_module
from jaxrl_async.remote.weights.locations import merged_offers
from jaxrl_async.remote.weights.protocols import BASE
from jaxrl_async.remote.weights.transport_choice import make_fetching, make_offering
from jaxrl_async.remote.weights.transport_trial import DEVICE, TCP, TransportTrial
from jaxrl_async.remote.weights.verification import compare_with_offer

pytestmark = pytest.mark.full

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
        trainer._transports.server,
        "_publish",
        lambda version, pieces: (12345, [0] * len(pieces)),
    )
    before = fetching.counts["without_device"]
    got = fetching.fetch(2, where, [trainer.address], threading.Event())
    assert same_bits(got.params, tree)
    assert fetching.counts["without_device"] == before + 1
    assert "nothing arrived for 0.5 s; fetching them over TCP" in caplog.text
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


def on_host_is_forbidden(monkeypatch):
    def refuse(*_):
        raise AssertionError("a copy in host memory was made")

    for module in (offering_module, fetching_module):
        monkeypatch.setattr(module, "on_host", refuse)
    monkeypatch.setattr(host_sums, "host_sum", refuse)
    read = ArrayImpl._value

    def value(array):
        assert array.size <= 64, "an array of weights was read to the host"
        return read.fget(array)

    monkeypatch.setattr(ArrayImpl, "_value", property(value))


@pytest.mark.parametrize("mesh", [(1, 4), (1, 1)])
def test_no_weights_come_to_the_host_on_either_side_and_one_pull_brings_all(
    trainer, fetchings, monkeypatch, mesh
):
    tree, fetching = host_tree(3), fetchings(mesh)
    params = jax.block_until_ready(on_trainer(tree))
    pulls = []
    connection = fetching._transports.puller._connection
    with monkeypatch.context() as patch:
        on_host_is_forbidden(patch)
        patch.setattr(
            fetching._transports.puller,
            "_connection",
            lambda address: pulls.append(address) or connection(address),
        )
        where = trainer.offer(20, params)
        got = fetching.fetch(20, where, [trainer.address], threading.Event())
    assert got.compared and len(pulls) == 1
    assert same_bits(got.params, tree)
    trainer.withdraw(20)


class Flipping:
    """A connection that changes one bit of one array on its way."""

    def __init__(self, connection):
        self.connection = connection

    def pull(self, number, wanted):
        arrays = self.connection.pull(number, wanted)
        number = max(range(len(arrays)), key=lambda n: arrays[n].size)
        changed = np.asarray(arrays[number]).copy()
        changed.view(np.uint8).reshape(-1)[5] ^= 4
        arrays[number] = jax.device_put(changed, arrays[number].sharding)
        return arrays


def test_a_byte_that_changes_on_its_way_is_found_on_the_device(
    trainer, fetchings, caplog, monkeypatch
):
    tree, fetching = host_tree(4), fetchings((1, 4))
    where = trainer.offer(21, on_trainer(tree))
    puller, before = fetching._transports.puller, fetching.counts["without_device"]
    connection = puller._connection
    monkeypatch.setattr(puller, "_connection", lambda address: Flipping(connection(address)))
    got = fetching.fetch(21, where, [trainer.address], threading.Event())
    assert same_bits(got.params, tree) and got.compared and got.fallbacks == 1
    assert fetching.counts["without_device"] == before + 1
    assert "pieces arrived corrupted, first of" in caplog.text
    trainer.withdraw(21)


def test_weights_that_change_between_host_and_device_are_found_there(
    trainer, fetchings, monkeypatch
):
    """Over TCP in place of devices: the pieces are right, and what is on the device is not."""
    tree, fetching = host_tree(5), fetchings((1, 1))
    where = trainer.offer(22, on_trainer(tree))
    monkeypatch.setattr(trainer._transports.server, "_publish", None)
    put = fetching._on_devices

    def torn(assembly):
        shards = put(assembly)
        target = max(shards, key=lambda t: shards[t][0].size)
        shard = np.asarray(shards[target][0]).copy()
        shard.view(np.uint8).reshape(-1)[9] ^= 1
        shards[target] = [jax.device_put(shard, a.sharding) for a in shards[target]]
        return shards

    monkeypatch.setattr(fetching, "_on_devices", torn)
    with pytest.raises(WeightsError, match="differs from the trainer's arrays"):
        fetching.fetch(22, where, [trainer.address], threading.Event())
    monkeypatch.undo()
    assert same_bits(fetching.fetch(22, where, [trainer.address], threading.Event()).params, tree)
    trainer.withdraw(22)


def test_weights_that_a_sampler_has_released_are_not_relayed(trainer, fetchings):
    tree, first = host_tree(6), fetchings((1, 4))
    where = trainer.offer(23, on_trainer(tree))
    got = first.fetch(23, where, [trainer.address], threading.Event())
    assert not first.counts["host_copies"]
    tcp = make_fetching(RemoteSection(transfer="tcp"), target_of(tree))
    del got
    gc.collect()
    again = tcp.fetch(23, where, [first.address], threading.Event())
    assert same_bits(again.params, tree) and again.source == trainer.address
    tcp.close()
    trainer.withdraw(23)


def test_parts_that_two_samplers_want_at_a_time_are_cut_once(trainer, fetchings):
    shards = {(0, ((0, 8), (0, 4))): jnp.arange(32.0).reshape(8, 4)}
    published = device_transport._Published(shards, {(0, ((0, 8), (0, 4))): 77}, [(8, 4)])
    box = ((2, 6), (0, 4))
    (one,), sums = published.cut([(0, box)])
    (other,), _ = published.cut([(0, box)])
    assert one is other
    words = np.arange(8, 24, dtype=np.float32).view(np.uint32).astype(object)
    assert sums == [sum(w * (2 * n + 1) for n, w in enumerate(words, 8)) % 2**32]
    assert published.cut([(0, ((0, 8), (0, 4)))])[1] == [77], "what was offered"
    assert published.cut([(0, ((2, 9), (0, 4)))]) is None
    assert published.cut([(1, box)]) is None
    del one, other
    gc.collect()
    assert not published._parts


@pytest.mark.parametrize(
    "taken, then",
    [
        ([(DEVICE, 9, 1.0)], DEVICE),  # it compiled
        ([(DEVICE, 9, 1.0)] * 2, TCP),
        ([(DEVICE, 9, 1.0)] * 2 + [(TCP, 5, 1.0)], TCP),
        ([(DEVICE, 9, 1.0)] * 2 + [(TCP, 5, 1.0)] * 2, DEVICE),
        ([(DEVICE, 9, 9.0), (DEVICE, 9, 1.0), (TCP, 5, 1.0), (TCP, 5, 2.0)], DEVICE),
        ([(DEVICE, 5, 1.0)] * 2 + [(TCP, 9, 1.0)] * 2, TCP),
        ([None], TCP),
        ([(DEVICE, 9, 1.0)] * 2 + [(TCP, 5, 1.0)] * 2 + [None], TCP),
        ([(DEVICE, 9, 1.0)] * 2 + [(TCP, 5, 1.0)] * 2 + [(DEVICE, 1, 1.0)], DEVICE),
    ],
)
def test_auto_keeps_the_way_that_was_faster_and_leaves_one_that_failed(taken, then):
    trial = TransportTrial()
    assert trial.next == DEVICE
    for one in taken:
        trial.record(*one) if one else trial.failed(DEVICE)
    assert trial.next == then


def test_auto_tries_both_ways_where_both_sides_have_accelerators(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(transport_choice, "_may_try_devices", lambda section, devices: True)
    auto = RemoteSection(transfer="auto")
    offering = make_offering(auto, run="auto", separate_machines=True)
    tree = host_tree(7)
    fetching = make_fetching(auto, target_of(tree, 1, 4))
    used = []
    for version in range(6):
        published = offering.counts.get("published", 0)
        where = offering.offer(version, on_trainer(tree))
        got = fetching.fetch(version, where, [offering.address], threading.Event())
        assert same_bits(got.params, tree) and got.compared
        used.append(offering.counts.get("published", 0) - published)
        offering.withdraw(version)
    assert used[:4] == [1, 1, 0, 0] and used[4] == used[5]
    assert "from now on (auto); measured GB/s" in caplog.text
    fetching.close()
    offering.close()


class Clock:
    """Seconds that pass when work is done, by the name of the work."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def around(self, work, seconds):
        def timed(*arguments):
            self.now += seconds
            return work(*arguments)

        return timed


def of_auto(monkeypatch, **settings):
    """An offering and a maker of fetchings, as between accelerators."""
    monkeypatch.setattr(transport_choice, "_may_try_devices", lambda section, devices: True)
    auto = RemoteSection(transfer="auto", **settings)
    offering = make_offering(auto, run="auto", separate_machines=True)
    return offering, lambda tree: make_fetching(auto, target_of(tree, 1, 4))


def test_both_ways_are_timed_from_the_request_to_arrays_on_devices(monkeypatch):
    offering, fetching_of = of_auto(monkeypatch)
    tree, clock = host_tree(13), Clock()
    fetching = fetching_of(tree)
    monkeypatch.setattr(fetching_module, "time", clock)
    for owner, name, seconds in (
        (fetching._transports.puller, "pull", 3.0),
        (fetching, "_fill", 2.0),
        (fetching, "_on_devices", 4.0),
        (fetching, "_arrays", 1.0),
        (fetching_module, "_compare_sums", 1.5),
    ):
        monkeypatch.setattr(owner, name, clock.around(getattr(owner, name), seconds))
    for version in range(4):
        where = offering.offer(version, on_trainer(tree))
        fetching.fetch(version, where, [offering.address], threading.Event())
        offering.withdraw(version)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert fetching._transports.trial._rates == {
        DEVICE: [num_bytes / 4.0] * 2,
        TCP: [num_bytes / 8.5] * 2,
    }
    fetching.close()
    offering.close()


def test_a_pull_that_takes_too_long_has_failed_and_tcp_brings_the_version(monkeypatch, caplog):
    offering, fetching_of = of_auto(monkeypatch, silence_s=60.0, transfer_timeout_s=1.0)
    published = []

    def nothing(version, pieces):  # numbers under which nothing is published
        published.append(version)
        return 12345, [0] * len(pieces)

    monkeypatch.setattr(offering._transports.server, "_publish", nothing)
    tree = host_tree(14)
    fetching = fetching_of(tree)
    for version, fallbacks in ((0, 1), (1, 0), (2, 0)):
        where = offering.offer(version, on_trainer(tree))
        got = fetching.fetch(version, where, [offering.address], threading.Event())
        assert same_bits(got.params, tree) and got.fallbacks == fallbacks
        offering.withdraw(version)
    assert published == [0] and fetching._transports.trial.next == TCP
    assert "it took longer than 0.5 of remote.transfer_timeout_s (1 s)" in caplog.text
    assert "remote.transfer=auto does not try device again" in caplog.text
    fetching.close()
    offering.close()


def test_a_pull_that_blocks_until_the_next_offer_has_failed_too(monkeypatch):
    """Where JAX itself does not return: the trainer offers the version again meanwhile."""
    offering, fetching_of = of_auto(monkeypatch)
    tree, clock, newer = host_tree(15), Clock(), threading.Event()
    fetching = fetching_of(tree)
    monkeypatch.setattr(fetching_module, "time", clock)

    def blocked(*_):
        clock.now += 301.0
        newer.set()
        raise device_transport.PeerError("nothing came")

    monkeypatch.setattr(fetching._transports.puller, "pull", blocked)
    where = offering.offer(0, on_trainer(tree))
    with pytest.raises(WeightsError, match="version 0 was not fetched: it was aborted"):
        fetching.fetch(0, where, [offering.address], newer)
    assert fetching._transports.trial.next == TCP and fetching.counts["without_device"] == 1
    got = fetching.fetch(0, where, [offering.address], threading.Event())
    assert same_bits(got.params, tree)
    fetching.close()
    offering.close()


def test_a_frozen_base_is_not_measured_with_the_versions(monkeypatch):
    offering, fetching_of = of_auto(monkeypatch)
    tree = host_tree(16)
    fetching = fetching_of(tree)
    base = fetching.for_base(target_of(tree, 1, 4))
    monkeypatch.setattr(fetching._transports.puller, "_connection", None)  # every pull fails
    where = offering.offer(BASE, on_trainer(tree))
    for _ in range(2):  # the second time, for another base of the same size: over TCP at once
        got = base.fetch(BASE, where, [offering.address], threading.Event())
        assert same_bits(got.params, tree)
    assert base.counts["without_device"] == 1 and base._transports.trial.next == TCP
    assert (
        fetching._transports.trial == TransportTrial() and fetching._transports.trial.next == DEVICE
    )
    fetching.close()
    offering.close()


def test_auto_without_jaxs_server_is_tcp_on_either_side(monkeypatch, caplog):
    def refuse(host):
        raise WeightsError("it cannot serve")

    monkeypatch.setattr(device_transport, "start_transfer_server", refuse)
    offering, fetching_of = of_auto(monkeypatch)
    tree = host_tree(9)
    fetching = fetching_of(tree)
    where = offering.offer(0, on_trainer(tree))
    got = fetching.fetch(0, where, [offering.address], threading.Event())
    assert same_bits(got.params, tree) and not fetching.counts
    assert caplog.text.count("does not use transfer from device to device") == 2
    fetching.close()
    offering.close()


def test_processes_of_which_one_lacks_jaxs_server_all_offer_over_tcp():
    """Two real processes of a trainer; in the second one the server cannot start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    worker = Path(__file__).with_name("offering_worker.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_COMPILE}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), coordinator, str(index), "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ends
    offers = [json.loads(out.splitlines()[-1]) for out, _ in ends]
    assert offers == [{"device": "", "on_devices": False}] * 2
    assert "another process of the trainer cannot offer it" in ends[0][1]
    assert "JAX cannot serve in process 1" in ends[1][1]


def test_auto_between_cpus_is_tcp(monkeypatch):
    auto = RemoteSection(transfer="auto")
    offering = make_offering(auto, run="auto", local_samplers=False, separate_machines=True)
    where = offering.offer(0, on_trainer(host_tree()))
    assert [h["device"] for h in where["holders"]] == [""]
    offering.close()


def test_files_that_a_sampler_has_read_are_compared_with_an_offer_from_devices(trainer):
    tree = host_tree(8)
    where = trainer.offer(24, on_trainer(tree))
    compare_with_offer(tree, where)
    tree["layers"]["down"].view(np.uint32)[1, 2, 3] ^= 1
    with pytest.raises(WeightsError, match=r"'layers/down' differs from the trainer's"):
        compare_with_offer(tree, where)
    trainer.withdraw(24)


def test_offers_whose_checksums_are_of_different_kinds_are_not_merged(trainer):
    other = make_offering(RemoteSection(transfer="tcp"), run="other")
    params = on_trainer(host_tree())
    offers = [one.offer(25, params) for one in (trainer, other)]
    with pytest.raises(WeightsError, match="others in host memory"):
        merged_offers(offers)
    assert merged_offers([offers[0], offers[0]])["holders"][1]["on_devices"] is True
    other.close()
    trainer.withdraw(25)


def test_a_pull_that_a_newer_offer_ends_is_no_failure_of_the_way(trainer, fetchings, monkeypatch):
    tree, fetching = host_tree(10), fetchings((1, 4))
    where = trainer.offer(26, on_trainer(tree))
    monkeypatch.setattr(
        trainer._transports.server, "_publish", lambda version, pieces: (12345, [0] * len(pieces))
    )
    before, newer = dict(fetching.counts), threading.Event()
    threading.Timer(0.1, newer.set).start()
    with pytest.raises(WeightsError, match="version 26 was not fetched: it was aborted"):
        fetching.fetch(26, where, [trainer.address], newer)
    assert dict(fetching.counts) == before
    trainer.withdraw(26)


def test_an_error_of_jaxs_own_is_a_failure_of_the_way(trainer, fetchings, monkeypatch):
    tree, fetching = host_tree(11), fetchings((1, 4))

    def pull(*_):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: not on this backend")

    monkeypatch.setattr(fetching._transports.puller, "_connection", pull)
    where, before = trainer.offer(27, on_trainer(tree)), fetching.counts["without_device"]
    got = fetching.fetch(27, where, [trainer.address], threading.Event())
    assert same_bits(got.params, tree) and got.fallbacks == 1
    assert fetching.counts["without_device"] == before + 1
    trainer.withdraw(27)


def test_pieces_are_freed_while_they_are_put_together(trainer, fetchings, monkeypatch):
    tree, fetching, most = host_tree(12), fetchings((1, 1)), []
    where = trainer.offer(28, jax.block_until_ready(on_trainer(tree)))
    join = device_transport._assemble

    def measured(box, pieces):
        joined = join(box, pieces)
        del pieces
        most.append(sum(array.nbytes for array in jax.live_arrays()) - before)
        return joined

    monkeypatch.setattr(device_transport, "_assemble", measured)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    got = fetching.fetch(28, where, [trainer.address], threading.Event())
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(got.params))
    assert most[-1] < 1.5 * whole, "the pieces are there as well"
    trainer.withdraw(28)
