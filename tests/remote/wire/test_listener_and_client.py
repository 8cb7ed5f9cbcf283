"""A hub and samplers over real sockets, in this process and in others."""

import gc
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import wire_peer

import jaxrl_async
from jaxrl_async.errors import ConfigError, Disconnected, JoinRefused
from jaxrl_async.remote.wire import handshake
from jaxrl_async.remote.wire import listener as hub_module
from jaxrl_async.remote.wire.address import write_join_file
from jaxrl_async.remote.wire.client import dial
from jaxrl_async.remote.wire.frames import FRAME_LIMIT
from jaxrl_async.remote.wire.grpc_link import PATH
from jaxrl_async.remote.wire.listener import Hub
from jaxrl_async.remote.wire.messages import Answers, Beat, Hello, Live, Start, Welcome
from jaxrl_async.remote.wire.session import WireLimits, WireSession
from jaxrl_async.remote.wire.tls import TlsFiles
from jaxrl_async.types import Request

WAIT_S = 30.0
SECRET = b"a secret that only these tests know"
LIMITS = WireLimits(silence_s=1.5, queue_bytes=1 << 20, join_s=1.0, max_joining=4)
WELCOME = Welcome(config={"a": 1}, spec={}, mesh={}, seed=3, run="run-1")


@dataclass
class Trainer:
    """A hub that lets everybody in, and what it saw."""

    hub: Hub
    joined: "queue.SimpleQueue[WireSession]" = field(default_factory=queue.SimpleQueue)
    ends: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    received: "queue.SimpleQueue[object]" = field(default_factory=queue.SimpleQueue)

    @property
    def where(self) -> str:
        return str(self.hub.address)

    def session(self) -> WireSession:
        """Wait for the next sampler."""
        return self.joined.get(timeout=WAIT_S)


@contextmanager
def a_trainer(
    *,
    limits: WireLimits = LIMITS,
    secret: bytes = SECRET,
    tls: TlsFiles | None = None,
    refuses: Exception | None = None,
    listen: str = "127.0.0.1:0",
    welcome: Welcome = WELCOME,
) -> Iterator[Trainer]:
    def on_join(session: WireSession, hello: Hello) -> Welcome:
        if refuses is not None:
            raise refuses
        for kind in (Answers, Live, Beat):
            session.on(kind, trainer.received.put)
        session.on_end(trainer.ends.put)
        trainer.joined.put(session)
        return welcome

    hub = Hub(listen, secret=secret, tls=tls, limits=limits, on_join=on_join)
    trainer = Trainer(hub)
    try:
        yield trainer
    finally:
        hub.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with a_trainer() as made:
        yield made


def join(
    where: str,
    *,
    name: str = "s0",
    secret: bytes = SECRET,
    tls: TlsFiles | None = None,
    timeout_s: float = 10.0,
) -> WireSession:
    session, welcome = dial(
        where, Hello(name=name), secret=secret, tls=tls, limits=LIMITS, timeout_s=timeout_s
    )
    assert welcome == WELCOME
    return session


@contextmanager
def a_process(where: str, mode: str) -> Iterator["subprocess.Popen[str]"]:
    """Start a sampler in a process of its own; return when it has joined."""
    child = subprocess.Popen(
        [sys.executable, wire_peer.__file__, where, mode, str(LIMITS.silence_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAXRL_ASYNC_SECRET": SECRET.decode()},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "joined run-1\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def request(number: int, tokens: int = 200) -> Request:
    return Request(
        request_id=f"g{number}/m0/t0", token_ids=np.zeros(tokens, np.int32), max_new_tokens=8
    )


def ends_itself(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


# ---- another process


@pytest.mark.full
def test_a_process_answers_and_leaves(trainer: Trainer) -> None:
    with a_process(trainer.where, "echo") as child:
        session = trainer.session()
        for count in range(1, 65):
            session.send(Start(requests=tuple(request(i) for i in range(count))))
        lengths = []
        for _ in range(64):
            answers = trainer.received.get(timeout=WAIT_S)
            assert isinstance(answers, Answers)
            lengths.append(len(answers.completions[0].token_ids))
        assert lengths == list(range(1, 65))
        assert child.stdin is not None
        child.stdin.write("end\n")
        child.stdin.flush()
        assert trainer.received.get(timeout=WAIT_S) == Live(version=99)
        assert trainer.ends.get(timeout=WAIT_S) == "it was told to"
        assert ends_itself(child) == "ended it was told to"


@pytest.mark.full
def test_a_killed_process_is_noticed_at_once_in_mid_message(trainer: Trainer) -> None:
    with a_process(trainer.where, "torrent") as child:
        trainer.session()
        trainer.received.get(timeout=WAIT_S)  # it is in the middle of the next ones
        child.kill()
        assert "torrent" in trainer.ends.get(timeout=WAIT_S)
        others = join(trainer.where)  # and others go on
        assert others.ended is None
        others.end("done")


@pytest.mark.full
def test_a_stopped_process_counts_as_lost_and_learns_it_when_it_wakes(trainer: Trainer) -> None:
    with a_process(trainer.where, "echo") as child:
        trainer.session()
        child.send_signal(signal.SIGSTOP)
        assert trainer.ends.get(timeout=WAIT_S) == "nothing received from echo for 1.5 s"
        child.send_signal(signal.SIGCONT)
        assert ends_itself(child).startswith("ended ")


@pytest.mark.full
def test_a_process_that_reads_too_slowly_counts_as_lost(trainer: Trainer) -> None:
    with a_process(trainer.where, "slow"):
        session = trainer.session()
        with pytest.raises(Disconnected, match=r"has taken nothing for 1\.5 s"):
            for _ in range(1000):
                session.send(Start(requests=(request(0, 100_000),)))


@pytest.mark.full
def test_a_trainer_that_dies_is_noticed(trainer: Trainer) -> None:
    with a_process(trainer.where, "echo") as child:
        trainer.session()
        trainer.hub.close("the run is over")
        assert ends_itself(child) == "ended the run is over"
    with pytest.raises(Disconnected, match=r"no trainer let this sampler join within 0\.5 s"):
        join(trainer.where, timeout_s=0.5)


@pytest.mark.full
def test_the_error_of_a_failed_join_keeps_no_call_of_grpc(trainer: Trainer) -> None:
    """Deleted as the process ends, a call could wait for ever for a lock of a frozen thread."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        addresses = (trainer.where, f"127.0.0.1:{deaf.getsockname()[1]}")
        gc.collect()
        before = [known for known in gc.get_objects() if issubclass(type(known), grpc.Call)]
        for where, kind in zip(addresses, (JoinRefused, Disconnected), strict=True):
            with pytest.raises(kind) as error:
                join(where, secret=b"no secret of this trainer", timeout_s=1.2)
            there = [each for each in gc.get_objects() if issubclass(type(each), grpc.Call)]
            assert error.value.__traceback__ is not None
            assert all(any(call is known for known in before) for call in there)


@pytest.mark.full
def test_a_hub_that_closes_waits_once_for_all_who_do_not_take_it() -> None:
    patient = replace(LIMITS, silence_s=600.0)
    with (
        a_trainer(limits=patient) as trainer,
        a_process(trainer.where, "echo") as first,
        a_process(trainer.where, "echo") as second,
    ):
        for child in (first, second):
            child.send_signal(signal.SIGSTOP)
        closing = threading.Thread(target=trainer.hub.close, args=("the run is over", 0.2))
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert [trainer.ends.get(timeout=WAIT_S) for _ in range(2)] == ["the run is over"] * 2


FAILING_TRAINER = """
import sys
from jaxrl_async.remote.wire.listener import Hub
from jaxrl_async.remote.wire.messages import Welcome
from jaxrl_async.remote.wire.session import WireLimits

welcome = Welcome(config={"a": 1}, spec={}, mesh={}, seed=3, run="run-1")
hub = Hub("127.0.0.1:0", secret=b"", tls=None, limits=WireLimits(), on_join=lambda *_: welcome)
print(hub.address, flush=True)
sys.stdin.readline()
raise SystemExit(3)
"""


@pytest.mark.full
def test_a_trainer_that_fails_exits_with_its_sessions_open() -> None:
    """No thread of gRPC keeps it alive."""
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    command = [sys.executable, "-c", FAILING_TRAINER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        session = join(child.stdout.readline().strip(), secret=b"")
        session.on_end(ended.put)
        child.stdin.write("fail\n")
        child.stdin.flush()
        assert child.wait(WAIT_S) == 3
    assert "trainer" in ended.get(timeout=WAIT_S)


# ---- who is let in


@pytest.mark.parametrize("theirs", [b"another", b""])
def test_a_wrong_secret_is_refused_with_what_to_do(trainer: Trainer, theirs: bytes) -> None:
    with pytest.raises(JoinRefused, match="JAXRL_ASYNC_SECRET to the same"):
        join(trainer.where, secret=theirs)
    assert trainer.hub.refused == 1
    join(trainer.where).end("done")


def test_a_trainer_without_the_secret_is_not_joined() -> None:
    """It cannot make a sampler believe that it has the secret, whatever it accepts."""
    steps = handshake.ask_to_join(SECRET, Hello(name="s0"))
    trainer = handshake.admit_sampler(b"guessed")
    next(trainer)
    challenge = trainer.send(next(steps))
    steps.send(challenge)
    with pytest.raises(JoinRefused, match="different secrets"):
        steps.send(handshake.PROOF + b"\0" * 32)


def test_a_proof_fits_no_other_connection() -> None:
    first, second = handshake.admit_sampler(SECRET), handshake.admit_sampler(SECRET)
    sampler = handshake.ask_to_join(SECRET, Hello(name="s0"))
    greeting = next(sampler)
    for side in (first, second):
        next(side)
    recorded = sampler.send(first.send(greeting))
    second.send(greeting)
    with pytest.raises(JoinRefused, match="different secrets"):
        second.send(recorded)


@pytest.mark.parametrize("change", ["protocol", "package"])
def test_another_version_is_refused_with_what_to_install(
    trainer: Trainer, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greet(nonce: bytes) -> bytes:
        protocol, package = (9, jaxrl_async.__version__) if change == "protocol" else (1, "0.0.1")
        head = handshake._OPEN.pack(handshake.MAGIC, protocol, nonce)
        return handshake.OPEN + head + package.encode()

    monkeypatch.setattr(handshake, "_open_frame", greet)
    with pytest.raises(JoinRefused, match=f"install jaxrl_async {jaxrl_async.__version__}"):
        join(trainer.where)


def test_a_trainer_that_refuses_gives_its_reason() -> None:
    with (
        a_trainer(refuses=JoinRefused("there are 4 samplers already")) as trainer,
        pytest.raises(JoinRefused, match="there are 4 samplers already"),
    ):
        join(trainer.where)
    with (
        a_trainer(refuses=RuntimeError("a bug")) as trainer,
        pytest.raises(JoinRefused, match="a bug"),
    ):
        join(trainer.where)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_without_a_secret_only_loopback_is_listened_on(listen: str) -> None:
    def never(session: WireSession, hello: Hello) -> Welcome:
        raise AssertionError

    with pytest.raises(ConfigError, match="set the environment variable JAXRL_ASYNC_SECRET"):
        Hub(listen, secret=b"", tls=None, limits=LIMITS, on_join=never)
    with a_trainer(secret=b"") as trainer:
        join(trainer.where, secret=b"").end("done")


def test_a_taken_port_is_an_error(trainer: Trainer) -> None:
    with (
        pytest.raises(ConfigError, match="cannot listen there"),
        a_trainer(listen=trainer.where),
    ):
        pass


# ---- unauthenticated connections


def unauthenticated_calls(where: str, frames: list[bytes]) -> list[bytes]:
    """Send frames without a handshake; return what came back until the end."""
    with grpc.insecure_channel(where) as channel:
        call = channel.stream_stream(PATH)(iter(frames), timeout=WAIT_S)
        try:
            return list(call)
        except grpc.RpcError:
            return []


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\0" * 100],
        [handshake.OPEN + b"jaxrl_async\0"],
        [b"\x01" * FRAME_LIMIT],
        [b"\x01" * (FRAME_LIMIT + 1000)],
        [handshake.HELLO + b"{}"],
    ],
)
def test_garbage_ends_only_its_own_connection(trainer: Trainer, frames: list[bytes]) -> None:
    session = join(trainer.where)
    assert unauthenticated_calls(trainer.where, frames) == []
    assert session.ended is None
    session.send(Live(version=1))
    assert trainer.received.get(timeout=WAIT_S) == Live(version=1)
    session.end("done")


def test_compressed_bytes_are_not_even_unpacked(trainer: Trainer) -> None:
    with grpc.insecure_channel(trainer.where) as channel:
        call = channel.stream_stream(PATH)(
            iter([bytes(FRAME_LIMIT)]), compression=grpc.Compression.Gzip, timeout=WAIT_S
        )
        with pytest.raises(grpc.RpcError) as raised:
            next(call)
    assert raised.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)


def test_a_message_that_is_too_large_ends_the_session_and_both_know_why(trainer: Trainer) -> None:
    """The sampler's own bound is larger than the trainer's."""
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    with a_trainer(limits=replace(LIMITS, max_message_bytes=2 << 20)) as small:
        session = join(small.where)
        session.on_end(ended.put)
        session.send(Answers(completions=(wire_peer.completion(500_000),)))
        for reason in (ended.get(timeout=WAIT_S), small.ends.get(timeout=WAIT_S)):
            assert "remote.max_message_mib" in reason


def test_a_flood_stops_no_sampler_and_fills_no_log(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    session = join(trainer.where)
    host, port = trainer.hub.address.host, trainer.hub.address.port
    sockets = [garbage_socket(host, port, number) for number in range(100)]
    for _ in range(50):
        unauthenticated_calls(trainer.where, [b"garbage"])
    session.send(Live(version=1))
    assert trainer.received.get(timeout=WAIT_S) == Live(version=1)
    join(trainer.where, name="another").end("done")
    for sock in sockets:
        sock.close()
    assert trainer.hub.refused == 50
    assert len([r for r in caplog.records if "was refused" in r.message]) <= 2
    session.end("done")


def garbage_socket(host: str, port: int, number: int) -> "socket.socket":
    sock = socket.create_connection((host, port))
    kinds = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(5000), b"", b"PRI * HTTP/2.0\r\n\r\n")
    sock.sendall(kinds[number % len(kinds)])
    return sock


@pytest.mark.full
def test_connections_without_a_frame_are_replaced(trainer: Trainer) -> None:
    """Four connections at most; eight that send no frame; a sampler joins after join_s."""
    hold = threading.Event()

    def no_frames() -> Iterator[bytes]:
        hold.wait(WAIT_S)
        yield b""

    channels = [grpc.insecure_channel(trainer.where, [("c", n)]) for n in range(8)]
    calls = [channel.stream_stream(PATH)(no_frames()) for channel in channels]
    for _ in range(100):
        if trainer.hub.refused >= 4:  # the other four were asked to retry
            break
        time.sleep(0.05)
    join(trainer.where).end("done")
    for call in calls:
        with pytest.raises(grpc.RpcError):
            next(call)
    hold.set()
    for channel in channels:
        channel.close()


# ---- finding the trainer


@pytest.mark.full
def test_an_address_without_an_answer_is_distinguished_from_one_without_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(Disconnected, match=f"last try: {where} gave no answer in time"):
            join(where, timeout_s=1.5)


@pytest.mark.full
def test_a_trainer_is_found_by_a_file_that_appears_and_changes(tmp_path: Path) -> None:
    joined: queue.SimpleQueue[WireSession] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: joined.put(join(f"file:{tmp_path}")))
    thread.start()
    with a_trainer() as gone:
        stale = gone.hub.address
    with a_trainer(welcome=Welcome(config={}, spec={}, mesh={}, seed=0, run="x")) as x:
        write_join_file(tmp_path, stale, "run-1")
        time.sleep(0.3)
        write_join_file(tmp_path, x.hub.address, "run-1")  # another run has that port now
        x.session()
        with a_trainer() as trainer:
            write_join_file(tmp_path, trainer.hub.address, "run-1")
            joined.get(timeout=WAIT_S).end("done")
            thread.join()


def test_open_files_are_allowed_for_all_connections_as_far_as_the_system_lets(monkeypatch, caplog):
    caplog.set_level("INFO")
    limits, asked = [1024, 4096], []

    def allow(kind, wanted):
        asked.append(wanted)
        limits[:] = wanted

    monkeypatch.setattr(hub_module.resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(hub_module.resource, "setrlimit", allow)
    assert hub_module._half_of_files(6000) == 2048 and asked == [(4096, 4096)]
    assert "4096 open files (ulimit -n) allow 2048 sampler connections" in caplog.text
    limits[:] = [1024, 20_000]
    assert hub_module._half_of_files(6000) == 6000 and asked[-1] == (12_000, 20_000)
    assert hub_module._half_of_files(6000) == 6000 and len(asked) == 2
    limits[:] = [1024, 20_000]
    monkeypatch.setattr(hub_module.resource, "setrlimit", refuse_limit)
    assert hub_module._half_of_files(6000) == 512


def refuse_limit(kind, wanted):
    raise ValueError("not allowed to raise maximum limit")
