"""Weights over real sockets: torn, cut, slow, unresponsive, lying and foreign peers."""

import shutil
import socket
import struct
import subprocess
import threading
import time

import jax
import numpy as np
import pytest
from slow_tls import client_hello, dripped
from transport_rig import FetchProcess, Proxy, host_tree, on_trainer, same_bits, target_of

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights import fetching as fetching_module
from jaxrl_async.remote.weights import peer_authentication as guard_module
from jaxrl_async.remote.weights import piece_server as piece_server_module
from jaxrl_async.remote.weights import transport_choice as transports_module
from jaxrl_async.remote.weights.assembly import Assembly, Holdings, Part
from jaxrl_async.remote.weights.peer_authentication import PeerAuth
from jaxrl_async.remote.weights.piece_protocol import ANSWER, GREETING, HERE
from jaxrl_async.remote.weights.piece_server import PieceServer
from jaxrl_async.remote.weights.pieces import plan_pieces
from jaxrl_async.remote.weights.transport_choice import make_fetching, make_offering
from jaxrl_async.remote.wire.tls import read_tls

TREE = host_tree(rows=4096)
NUM_BYTES = sum(x.nbytes for x in jax.tree.leaves(TREE))
SECTION = RemoteSection(transfer="tcp", silence_s=0.5, transfer_timeout_s=20.0)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    def plan(manifest, holders, targets):
        return plan_pieces(manifest, holders, targets, 4096)

    monkeypatch.setattr(fetching_module, "plan_pieces", plan)


@pytest.fixture
def trainer():
    offering = make_offering(SECTION, run="tcp", secret=b"open sesame")
    yield offering
    offering.close()


@pytest.fixture
def sampler():
    made = []

    def make(section=SECTION, secret=b"open sesame", tree=TREE):
        made.append(make_fetching(section, target_of(tree, 1, 2), secret=secret))
        return made[-1]

    yield make
    for fetching in made:
        fetching.close()


def fetch(fetching, where, sources, version=0):
    got = fetching.fetch(version, where, sources, threading.Event())
    assert same_bits(got.params, TREE)
    return got


def flip_once(at):
    done = []

    def harm(passed, data):
        if done or passed + len(data) <= at:
            return data
        done.append(True)
        return bytes([data[0] ^ 4]) + data[1:]

    return harm


def cut_every(num_bytes):
    def harm(passed, data):
        return None if passed // num_bytes != (passed + len(data)) // num_bytes else data

    return harm


@pytest.mark.parametrize("harm", [flip_once(30_000), cut_every(20_000)], ids=["flipped", "cut"])
def test_a_torn_stream_is_noticed_and_what_has_come_is_kept(trainer, sampler, harm):
    where = trainer.offer(0, on_trainer(TREE))
    proxy = Proxy(trainer.address, harm)
    got = fetch(sampler(), where, [proxy.address, trainer.address])
    assert got.num_bytes == NUM_BYTES  # nothing is taken twice
    assert proxy.connections > 2  # the source that still sends is asked again
    proxy.close()


def test_a_bit_that_flips_in_the_memory_of_a_sampler_that_passes_on_is_found(trainer, sampler):
    where = trainer.offer(0, on_trainer(TREE))
    parts = [
        Part(array=n, box=tuple((0, s) for s in x.shape), data=x.view(f"u{x.itemsize}").copy())
        for n, x in enumerate(jax.tree.leaves(TREE))
    ]
    parts[2].data.reshape(-1)[7] ^= 16
    holdings = Holdings()
    manifest = fetching_module.manifest_of(TREE)
    holdings.add(0, Assembly.complete(manifest, parts))
    member = PieceServer(holdings, auth=trainer._transports.server._auth)
    fetching = sampler()
    fetch(fetching, where, [member.address, trainer.address])
    assert fetching.counts["torn_arrays"] == 1
    member.close()


def test_every_byte_is_fetched_from_the_member_and_none_from_the_trainer(trainer, sampler):
    where = trainer.offer(0, on_trainer(TREE))
    first, second = sampler(), sampler()
    fetch(first, where, [trainer.address])
    sent = trainer.counts["sent_bytes"]
    got = fetch(second, where, [first.address, trainer.address])
    assert got.source == first.address and sent == NUM_BYTES
    assert trainer.counts["sent_bytes"] == sent


def test_a_member_passes_pieces_on_while_it_still_fetches(trainer, sampler):
    where = trainer.offer(0, on_trainer(TREE))
    gate = threading.Event()

    def slow(passed, data):
        if passed > 40_000:
            assert gate.wait(10)
        return data

    proxy = Proxy(trainer.address, slow)
    patient = SECTION.model_copy(update={"silence_s": 15.0})
    first, second = sampler(patient), sampler(patient)
    results = []
    threads = [
        threading.Thread(target=lambda f=f, s=s: results.append(fetch(f, where, s)))
        for f, s in ((first, [proxy.address]), (second, [first.address]))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while not first._server.counts.get("sent_bytes") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first._server.counts.get("sent_bytes") and not results
    gate.set()
    for thread in threads:
        thread.join(20)
    assert [got.num_bytes for got in results] == [NUM_BYTES] * 2
    proxy.close()


@pytest.mark.full
@pytest.mark.parametrize("answer", [b"", b"x" * 4096, ANSWER.pack(HERE, 1 << 60, 0)])
def test_after_an_unresponsive_source_or_a_lying_one_the_next_is_used(trainer, sampler, answer):
    where = trainer.offer(0, on_trainer(TREE))
    server = socket.create_server(("127.0.0.1", 0))
    taken = []

    def speak():
        try:
            while True:
                one, _ = server.accept()
                taken.append(one)
                trainer._transports.server._auth.as_server(_after_greeting(one))
                one.sendall(answer)
        except OSError:
            pass

    thread = threading.Thread(target=speak)
    thread.start()
    liar = f"127.0.0.1:{server.getsockname()[1]}"
    got = fetch(sampler(), where, [liar, trainer.address])
    assert got.source == trainer.address and taken
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(10)
    for one in taken:
        one.close()


def _after_greeting(connection):
    assert connection.recv(8, socket.MSG_WAITALL)
    return connection


def test_a_wrong_secret_gets_no_byte_and_says_so(trainer, sampler):
    where = trainer.offer(0, on_trainer(TREE))
    with pytest.raises(WeightsError, match="JAXRL_ASYNC_SECRET"):
        fetch(sampler(secret=b"guess"), where, [trainer.address])
    counts = trainer.counts
    assert "sent_bytes" not in counts and counts["refused"] >= 1


@pytest.fixture
def certificates(tmp_path):
    """PEM files that one authority (the certificate itself) has signed."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    making = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    subprocess.run(
        [*making.split(), "-subj", "/CN=run", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    files = {"tls_certificate": certificate, "tls_key": key, "tls_authority": certificate}
    return {name: str(path) for name, path in files.items()}


def test_with_certificates_streams_are_encrypted_and_others_are_refused(certificates, sampler):
    section = SECTION.model_copy(update=certificates)
    offering = make_offering(section, run="tls", secret=b"open sesame")
    where = offering.offer(0, on_trainer(TREE))
    seen = []

    def listen(passed, data):
        seen.append(data)
        return data

    proxy = Proxy(offering.address, listen)
    assert fetch(sampler(section), where, [proxy.address]).num_bytes == NUM_BYTES
    assert TREE["head"].tobytes()[:64] not in b"".join(seen)
    with pytest.raises(WeightsError, match="no source"):
        fetch(sampler(), where, [offering.address])
    assert offering.counts["sent_bytes"] == NUM_BYTES
    proxy.close()
    offering.close()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"JXRLPCS1" + b"\xff" * 64]
)
def test_unauthenticated_connections_are_closed_and_delay_no_other(trainer, sampler, garbage):
    where = trainer.offer(0, on_trainer(TREE))
    host, port = trainer.address.split(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(20)]
    for one in connections:
        one.sendall(garbage)
    fetch(sampler(), where, [trainer.address])
    for one in connections:
        one.settimeout(10)
        try:
            while one.recv(4096):
                pass
        except ConnectionError:
            pass  # it was closed with bytes unread
        one.close()
    assert trainer.counts["refused"] >= 20


def test_weights_have_the_port_that_was_chosen_and_samplers_the_next_free_ones(sampler):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    section = SECTION.model_copy(update={"data_port": port})
    offering = make_offering(section, run="port", secret=b"open sesame")
    assert offering.address == f"127.0.0.1:{port}"
    with pytest.raises(WeightsError, match=rf"at 127.0.0.1:{port}: .*remote.data_port"):
        make_offering(section, run="another", secret=b"open sesame")
    where = offering.offer(0, on_trainer(TREE))
    first, second = sampler(section), sampler(section)
    ports = [int(one.address.rpartition(":")[2]) for one in (first, second)]
    assert port < ports[0] < ports[1] < port + transports_module.SHARING
    fetch(first, where, [offering.address])
    assert fetch(second, where, [first.address]).source == first.address
    offering.close()


@pytest.mark.full
@pytest.mark.parametrize("slow", ["greeting", "TLS", "proof"])
def test_a_new_connection_that_sends_a_byte_at_a_time_is_closed(certificates, monkeypatch, slow):
    monkeypatch.setattr(piece_server_module, "GREETING_S", 0.5)
    section = SECTION if slow == "proof" else SECTION.model_copy(update=certificates)
    offering = make_offering(section, run="slow", secret=b"open sesame")
    host, port = offering.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        if slow == "greeting":
            sent, data = dripped(connection, GREETING, 0.4), GREETING
        else:
            connection.sendall(GREETING)
            data = bytes(500)
            if slow == "TLS":
                data = client_hello(read_tls(section))
            sent = dripped(connection, data, 0.02)
    assert 0 < sent < len(data)
    end = time.monotonic() + 10
    while not offering.counts.get("refused") and time.monotonic() < end:
        time.sleep(0.01)
    assert offering.counts["refused"] == 1
    offering.close()


@pytest.mark.full
def test_a_source_whose_tls_drips_is_left_by_a_sampler(certificates, monkeypatch):
    monkeypatch.setattr(guard_module, "GREETING_S", 0.5)
    auth = PeerAuth(secret=b"open sesame", tls=read_tls(SECTION.model_copy(update=certificates)))
    ours, theirs = socket.socketpair()
    hello = b"\x16\x03\x03\x01\x00" + bytes(256)  # the head of a record that never ends
    dripping = threading.Thread(target=dripped, args=(theirs, hello, 0.05))
    dripping.start()
    with ours, pytest.raises(OSError):
        auth.as_client(ours)
    dripping.join(30)
    theirs.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        struct.pack("!BqIB", 1, 0, 10**6, 0),  # no such array
        struct.pack("!BqIB", 9, 0, 0, 0),  # no such kind
        struct.pack("!BqIB", 1, 0, 0, 200),  # 200 axes
        struct.pack("!BqIBQQQQ", 1, 0, 0, 2, 0, 2**60, 0, 1),  # outside the array
        struct.pack("!BqIBQQQQ", 1, 0, 0, 2, 5, 2, 0, 1),  # backwards
    ],
)
def test_requests_that_make_no_sense_end_the_connection(trainer, request_bytes):
    trainer.offer(0, on_trainer(TREE))
    host, port = trainer.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"JXRLPCS1")
        authenticated = trainer._transports.server._auth.as_client(connection)
        authenticated.settimeout(10)
        authenticated.sendall(request_bytes)
        assert authenticated.recv(1) == b""


@pytest.fixture
def slow_proxy(trainer):
    def slow(passed, data):
        time.sleep(0.01)
        return data

    proxy = Proxy(trainer.address, slow)
    yield proxy
    proxy.close()


def test_a_fetch_ends_at_the_limit(trainer, sampler, slow_proxy):
    where = trainer.offer(0, on_trainer(TREE))
    hurry = SECTION.model_copy(update={"transfer_timeout_s": 0.1})
    with pytest.raises(WeightsError, match="transfer_timeout_s"):
        sampler(hurry).fetch(0, where, [slow_proxy.address], threading.Event())


def test_a_fetch_ends_when_the_sampler_does(trainer, sampler, slow_proxy):
    where = trainer.offer(0, on_trainer(TREE))
    fetching = sampler()
    timer = threading.Timer(0.1, fetching.close)
    timer.start()
    with pytest.raises(WeightsError, match="the sampler stops"):
        fetching.fetch(0, where, [slow_proxy.address], threading.Event())
    timer.join()


def test_a_fetch_that_was_aborted_continues_with_what_was_received(trainer, sampler, slow_proxy):
    where = trainer.offer(0, on_trainer(TREE))
    fetching, abort = sampler(), threading.Event()

    def abort_in_the_middle():
        while slow_proxy.passed < 60_000:
            time.sleep(0.001)
        abort.set()

    thread = threading.Thread(target=abort_in_the_middle)
    thread.start()
    with pytest.raises(WeightsError, match="aborted"):
        fetching.fetch(0, where, [slow_proxy.address], abort)
    thread.join()
    got = fetch(fetching, where, [trainer.address])  # the second try takes only what is missing
    assert got.num_bytes < NUM_BYTES and fetching.counts["resumed"] == 1


def test_a_version_that_no_source_has_is_an_error_that_names_the_sources(trainer, sampler):
    where = trainer.offer(5, on_trainer(TREE))
    trainer.withdraw(5)
    trainer.offer(6, on_trainer(TREE))
    with pytest.raises(WeightsError, match=f"{trainer.address} lacks"):
        sampler().fetch(5, where, [trainer.address], threading.Event())


def test_another_models_weights_are_refused_before_any_piece_is_sent(trainer, sampler):
    where = trainer.offer(0, on_trainer(TREE))
    other = {**TREE, "head": TREE["head"][:, :-1]}
    with pytest.raises(WeightsError, match=r"'head': published .* one model section for both"):
        sampler(tree=other).fetch(0, where, [trainer.address], threading.Event())
    assert "sent_bytes" not in trainer.counts


def test_earlier_weights_keep_their_values_while_later_ones_come_and_go(trainer, sampler):
    fetching, kept = sampler(), {}
    for version in range(6):
        tree = host_tree(seed=version, rows=4096)
        where = trainer.offer(version, on_trainer(tree))
        got = fetching.fetch(version, where, [trainer.address], threading.Event())
        trainer.withdraw(version)
        kept[version] = (got.params, tree)
        kept.pop(version - 2, None)
        for params, same in kept.values():
            assert same_bits(params, same)
    large = TREE["head"].nbytes
    assert sum(size * count for size, count in fetching._pool._in_use.items()) <= 3 * large
    assert np.asarray(kept[5][0]["head"]).shape == TREE["head"].shape


@pytest.mark.full
def test_a_sampler_process_that_is_killed_in_mid_transfer_is_left_for_the_next(trainer, sampler):
    """Real processes: trainer -> first (slow, killed) -> second."""
    where = trainer.offer(0, on_trainer(TREE))
    plain = make_offering(RemoteSection(transfer="tcp"), run="killed")
    where = plain.offer(0, on_trainer(TREE))

    def slow(passed, data):
        time.sleep(0.002)
        return data

    proxy = Proxy(plain.address, slow)
    process = FetchProcess(transfer="tcp")
    process.tell(4096)
    member = process.hear()
    process.tell([0, where, [proxy.address]])
    fetching, results = sampler(secret=b""), []
    thread = threading.Thread(
        target=lambda: results.append(fetch(fetching, where, [member, plain.address]))
    )
    deadline = time.monotonic() + 20
    while proxy.passed < 30_000 and time.monotonic() < deadline:
        time.sleep(0.005)
    thread.start()
    time.sleep(0.1)
    process.kill()
    thread.join(20)
    assert results and results[0].num_bytes == NUM_BYTES
    proxy.close()
    plain.close()
