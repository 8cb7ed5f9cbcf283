"""Processes that know no secret: they get no place of a member, no line of the log and no code of
theirs executed."""

import hashlib
import json
import logging
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from endpoint_rig import Speaker, closed, serve
from joined_run import free_port, joined_run
from other_users import as_root, one_who_is_nobody
from tiny import SPEC

from jaxrl_async import private_folder as folders
from jaxrl_async import sample
from jaxrl_async.endpoint.service import EndpointLimits
from jaxrl_async.errors import ConfigError, Disconnected, JoinRefused, printable, shown
from jaxrl_async.metrics.json_logs import logs_as
from jaxrl_async.model.own_code import OwnCode
from jaxrl_async.private_folder import made_private
from jaxrl_async.remote.run import remote_samplers
from jaxrl_async.remote.weights.peer_authentication import PeerAuth
from jaxrl_async.remote.weights.piece_protocol import GREETING, PeerLink, PieceRequest
from jaxrl_async.remote.weights.piece_server import PieceServer
from jaxrl_async.remote.wire import handshake
from jaxrl_async.remote.wire.address import (
    Address,
    locate_trainer,
    share_secret_by_port,
    write_join_file,
)
from jaxrl_async.remote.wire.client import dial
from jaxrl_async.remote.wire.frames import FRAME_BYTES, FrameInbox, Outbox
from jaxrl_async.remote.wire.grpc_link import OPTIONS, PATH, grpc
from jaxrl_async.remote.wire.listener import Hub
from jaxrl_async.remote.wire.messages import PROTOCOL, Hello, Welcome
from jaxrl_async.remote.wire.pending_connections import PendingConnections, site_of
from jaxrl_async.remote.wire.session import WireLimits
from jaxrl_async.run.lockstep import Lockstep

SECRET = b"0123456789abcdef" * 2
LIMITS = WireLimits()
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this test a cache folder of its own, and no secret in the environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXRL_ASYNC_SECRET", raising=False)
    return tmp_path / "cache"


@contextmanager
def a_hub(secret: bytes, welcome: Welcome | None = None, **more: object) -> Iterator[Hub]:
    """Make a trainer's end that lets in whoever knows the secret."""
    told = welcome or Welcome(config={}, spec={}, mesh={}, seed=0, run="r")
    hub = Hub(
        "127.0.0.1:0", secret=secret, tls=None, limits=LIMITS, on_join=lambda *_: told, **more
    )
    try:
        yield hub
    finally:
        hub.close()


def joins(where: str, secret: bytes = b"", name: str = "s") -> bytes:
    """Join and leave; return the secret that both sides have proved."""
    session, _ = dial(
        where, Hello(name=name), secret=secret, tls=None, limits=LIMITS, timeout_s=WAIT_S
    )
    session.end("done")
    return session.secret


# ---- whom a sampler dials, and whose code it runs


def test_another_machine_is_dialled_only_with_a_secret() -> None:
    for where in ("192.0.2.1:7077", "trainer.example:7077", "[2001:db8::1]:7077"):
        with pytest.raises(ConfigError, match=r"is missing\. Set the environment variable JAXRL_"):
            joins(where)
        with pytest.raises(ConfigError, match="is shorter than 16 characters"):
            joins(where, b"password")


def test_the_folder_of_a_run_elsewhere_needs_a_secret_too(tmp_path: Path) -> None:
    write_join_file(tmp_path, Address("192.0.2.1", 7077), "r")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:7077: a trainer on another machine"):
        joins(str(tmp_path))


def of_a_stranger(tmp_path: Path) -> tuple[Welcome, Path, str]:
    """Return a Welcome that names a file which marks that it was executed, the mark, the file."""
    mark, file = tmp_path / "executed", tmp_path / "planted.py"
    file.write_text(f"open({str(mark)!r}, 'w').close()\nclass Layer: pass\n")
    own = OwnCode(
        name="Layer", sha256=hashlib.sha256(file.read_bytes()).hexdigest(), file=str(file)
    )
    welcome = Welcome(config={}, spec=asdict(replace(SPEC, own=own)), mesh={}, seed=0, run="r")
    return welcome, mark, str(file)


def test_a_trainer_that_proves_nothing_has_no_file_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    welcome, mark, file = of_a_stranger(tmp_path)
    with a_hub(b"", welcome) as hub:
        words = ["--join", str(hub.address), "--once", "--wait", "5"]
        assert sample.main(words) == 2
        assert f"--decoder {file}:Layer" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize(
    ("secret", "executed"), [(b"", False), (b"password", False), (SECRET, True)]
)
def test_a_proved_secret_lets_a_file_be_executed(
    tmp_path: Path, secret: bytes, executed: bool
) -> None:
    from jaxrl_async.remote.run.sampler_parts import check_code

    welcome, mark, _ = of_a_stranger(tmp_path)
    if executed:
        check_code(welcome, secret)
    else:
        with pytest.raises(ConfigError, match="the file is not executed"):
            check_code(welcome, secret)
    assert not mark.exists(), "the check itself executes nothing"


def test_a_file_that_its_user_has_named_is_executed(tmp_path: Path) -> None:
    from jaxrl_async.model.own_code import load_code
    from jaxrl_async.remote.run.sampler_parts import check_code

    welcome, mark, file = of_a_stranger(tmp_path)
    load_code(f"{file}:Layer", "--decoder")
    assert mark.exists()
    check_code(welcome, b"")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match="the file is not executed"):
        check_code(of_a_stranger(other)[0], b"")


# ---- the secret that a trainer on loopback makes


def test_this_users_samplers_find_the_secret_by_folder_and_by_port(
    tmp_path: Path, caches: Path
) -> None:
    with a_hub(SECRET) as hub, share_secret_by_port(hub.address, SECRET):
        file = write_join_file(tmp_path, hub.address, "r", SECRET)
        assert file.stat().st_mode & 0o777 == 0o600
        by_port = caches / "jaxrl_async" / "join" / f"{hub.address.port}.json"
        assert by_port.stat().st_mode & 0o777 == 0o600
        assert by_port.parent.stat().st_mode & 0o777 == 0o700
        for where in (str(tmp_path), f"file:{file}", str(hub.address)):
            assert joins(where) == SECRET
        assert joins(f"localhost:{hub.address.port}") == SECRET
    assert not by_port.exists(), "it is gone with its trainer"


def test_a_secret_that_others_wrote_or_can_read_does_not_count(tmp_path: Path) -> None:
    file = write_join_file(tmp_path, Address("127.0.0.1", 7), "r", SECRET)
    assert locate_trainer(str(tmp_path)).secret == SECRET
    file.chmod(0o640)
    assert locate_trainer(str(tmp_path)).secret == b""
    file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(file, 65534, 65534)
        assert locate_trainer(str(tmp_path)).secret == b""


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"secret": 3}', '{"secret": "\\u00e4"}', "[" * 99999]
)
def test_a_torn_file_by_port_is_no_secret(caches: Path, content: str) -> None:
    with share_secret_by_port(Address("127.0.0.1", 7), SECRET):
        file = caches / "jaxrl_async" / "join" / "7.json"
        file.write_text(content)
        assert locate_trainer("127.0.0.1:7").secret == b""


@as_root
@pytest.mark.parametrize("closed_off", ["join.json", "run"])
def test_another_users_sampler_hears_at_once_that_it_may_not_read_the_secret(
    closed_off: str,
) -> None:
    """It waited ten minutes."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        run = Path(made) / "run"
        run.mkdir(mode=0o700 if closed_off == "run" else 0o755)
        secret = SECRET if closed_off == "join.json" else b""
        write_join_file(run, Address("127.0.0.1", 7), "r", secret)
        with (
            one_who_is_nobody(),
            pytest.raises(ConfigError, match=r"may not read .*join\.json.* JAXRL_ASYNC_SECRET"),
        ):
            joins(str(run))


def test_the_secret_is_found_by_port_where_no_folder_of_caches_can_be_had(
    tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders._fallback.cache_clear()
    with share_secret_by_port(Address("127.0.0.1", 7), SECRET):
        assert locate_trainer("127.0.0.1:7").secret == SECRET
    folders._fallback.cache_clear()


def test_who_looks_for_a_secret_leaves_no_folder(tmp_path: Path, caches: Path) -> None:
    assert locate_trainer("127.0.0.1:7").secret == b"" and not caches.exists()


def test_the_files_by_port_of_killed_trainers_go_after_a_week(caches: Path) -> None:
    folder = made_private(caches / "jaxrl_async" / "join")
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.create_server(("", 0)) as gone:
        live, dead = (one.getsockname()[1] for one in (alive, gone))
        gone.close()
        young = folder / "1.json"
        old = [folder / f"{live}.json", folder / f"{dead}.json", folder / f".{dead}.json.77"]
        for file in (young, *old):
            file.write_text("{}")
        for file in old:
            os.utime(file, (time.time() - 8 * 24 * 3600,) * 2)
        with share_secret_by_port(Address("127.0.0.1", 2), SECRET):
            names = {file.name for file in folder.iterdir()}
    assert names == {"1.json", "2.json", f"{live}.json"}


class Process(Lockstep):
    """One of two processes of a trainer, that the other gave this message."""

    def __init__(self, index: int, other: str) -> None:
        self._set_rank(index, 2, first_plays=True)
        self._other = other

    def gather_json(self, value: object) -> list:
        return [value, self._other] if self.index == 0 else [self._other, value]


def test_the_processes_of_a_trainer_agree_on_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without one waited for ever for those with one."""
    told: list[str] = []

    def tell(text: str, *, leads: bool) -> str:
        told.append(text)
        return text if leads else "made by process 0"

    monkeypatch.setattr(remote_samplers, "broadcast_text", tell)
    agreed, of = remote_samplers._agreed_secret, hashlib.sha256(SECRET).hexdigest()
    for index in (0, 1):
        assert agreed(SECRET, Process(index, of)) == SECRET and not told
        for given, other in ((SECRET, ""), (b"", of), (b"another", of)):
            with pytest.raises(ConfigError, match="JAXRL_ASYNC_SECRET is set in processes"):
                agreed(given, Process(index, other))
    assert not told, "no process waits for a message that does not come"
    assert agreed(b"", Process(0, "")).decode() == told[0]
    assert agreed(b"", Process(1, "")) == b"made by process 0"
    assert agreed(SECRET, Lockstep()) == SECRET != agreed(b"", Lockstep())


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("knows", ["trainer", "trainer-1"])
def test_two_processes_of_which_one_has_a_secret_both_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: str
) -> None:
    with joined_run(tmp_path, "mesh.trainer.fsdp=2", "run.steps=1") as run:
        meeting = f"distributed.coordinator=127.0.0.1:{free_port()}"
        for index, name in enumerate(("trainer", "trainer-1")):
            monkeypatch.delenv("JAXRL_ASYNC_SECRET", raising=False)
            if name == knows:
                monkeypatch.setenv("JAXRL_ASYNC_SECRET", SECRET.decode())
            place = ("distributed.num_processes=2", f"distributed.process_id={index}")
            run.train(meeting, *place, name=name)
        for name in ("trainer", "trainer-1"):
            assert run.code(name) != 0
        said = "".join(run.said(name) for name in ("trainer", "trainer-1"))
        assert f"is set in processes [{int(knows != 'trainer')}]; set it to the same value" in said


def test_a_prepared_draft_is_not_written_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    (tmp_path / f".join.json.{os.getpid()}").symlink_to(elsewhere)
    write_join_file(tmp_path, Address("127.0.0.1", 7), "r", SECRET)
    assert elsewhere.read_text() == ""
    assert json.loads((tmp_path / "join.json").read_text())["secret"] == SECRET.decode()


@pytest.mark.full
def test_a_sampler_waits_for_the_secret_of_a_trainer_that_starts_again(tmp_path: Path) -> None:
    """The new trainer listens at the old port a moment before it writes its new secret."""
    with a_hub(SECRET) as hub:
        write_join_file(tmp_path, hub.address, "r", b"of the start before it")
        late = threading.Timer(0.5, write_join_file, (tmp_path, hub.address, "r", SECRET))
        late.start()
        assert joins(str(tmp_path)) == SECRET
        late.join()


def test_a_wrong_secret_of_the_environment_is_refused_at_once() -> None:
    with (
        a_hub(SECRET) as hub,
        share_secret_by_port(hub.address, SECRET),
        pytest.raises(JoinRefused, match="different secrets"),
    ):
        joins(str(hub.address), b"another secret, of the environment")


# ---- the places of members


def test_the_address_with_most_places_loses_its_oldest_silent_connection() -> None:
    places, gone = PendingConnections(4), []
    held = []

    def come(name: str, host: str) -> None:
        held.append(places.track(host, lambda: gone.append(name)))
        came[name] = held[-1].__enter__()

    came: dict = {}
    come("member", "10.0.0.1")
    for name in ("a", "b", "c"):
        come(name, "10.0.0.2")
    came["a"].greeted = True
    come("d", "10.0.0.2")
    assert gone == ["b"]
    come("e", "10.0.0.2")
    assert gone == ["b", "c"]
    came["d"].greeted = came["e"].greeted = True
    come("f", "10.0.0.2")
    assert gone == ["b", "c", "f"], "a silent one goes, though it is the newest"
    come("member 2", "10.0.0.3")
    assert gone == ["b", "c", "f", "a"], "the address that holds three"
    for place in held:
        place.__exit__(None, None, None)
    come("alone", "10.0.0.4")
    assert len(gone) == 4, "the others have left"


def test_the_addresses_of_one_ipv6_network_count_as_one() -> None:
    assert site_of("2001:db8::1") == site_of("2001:db8::ffff:1") != site_of("2001:db8:0:1::1")
    assert site_of("::ffff:10.0.0.1") == site_of("10.0.0.1") != site_of("10.0.0.2")
    assert site_of("fe80::1%eth0") == site_of("fe80::2%eth1")


class Numbers:
    """An assembly of one array of ten numbers, and the holdings that have it."""

    def find(self, version, patience, waiting):
        return self

    def read(self, array, box, patience, waiting):
        return np.arange(10, dtype=np.uint32)[box[0][0] : box[0][1]]

    def sum_of(self, array, box, piece):
        return 0


@pytest.mark.full
def test_a_flood_of_silent_connections_starves_no_member_of_weights() -> None:
    server = PieceServer(Numbers(), auth=PeerAuth(secret=SECRET))
    host, port = server.address.rsplit(":", 1)
    silent, stop = [], threading.Event()

    def flood() -> None:
        while not stop.wait(0.002):
            silent.append(socket.create_connection((host, int(port)), timeout=WAIT_S))
            if len(silent) > 300:
                silent.pop(0).close()

    def fetched() -> bool:
        raw = socket.create_connection((host, int(port)), timeout=WAIT_S)
        with raw:
            raw.sendall(GREETING)
            line = PeerLink(PeerAuth(secret=SECRET).as_client(raw), WAIT_S)
            line.send(PieceRequest(version=1, array=0, box=((0, 2),)).encoded())
            return line.receive_answer(8)[0]

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        while len(silent) < 200:
            time.sleep(0.01)
        served = [fetched() for _ in range(50)]
    finally:
        stop.set()
        thread.join()
        for one in silent:
            one.close()
        server.close()
    assert served == [True] * 50


@pytest.mark.full
def test_a_connection_that_does_not_greet_is_closed() -> None:
    server = PieceServer(Numbers(), auth=PeerAuth(secret=SECRET))
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as silent:
        assert silent.recv(1) == b""
    assert server.counts["refused"] == 1
    server.close()


def test_silent_calls_keep_no_member_from_joining() -> None:
    """More of them than places: the oldest give way to newcomers."""
    never = threading.Event()

    def says_nothing() -> Iterator[bytes]:
        never.wait()
        yield from ()

    with a_hub(SECRET) as hub:
        calls = []
        for _ in range(LIMITS.max_joining + 40):
            channel = grpc.insecure_channel(str(hub.address), options=OPTIONS)
            calls.append((channel, channel.stream_stream(PATH)(says_nothing())))
        end = time.monotonic() + WAIT_S
        while hub.refused < 40 and time.monotonic() < end:
            time.sleep(0.02)
        assert hub.refused >= 40, "the oldest lost their places"
        began = time.monotonic()
        assert joins(str(hub.address), SECRET) == SECRET
        assert time.monotonic() - began < LIMITS.join_s, "it did not wait for their end"
        never.set()
        for channel, call in calls:
            call.cancel()
            channel.close()


def test_many_small_pieces_of_a_message_are_refused() -> None:
    whole, outbox = memoryview(bytes(3 * FRAME_BYTES)), Outbox()
    outbox.put(whole)
    honest, inbox = [], FrameInbox(1 << 30)
    while outbox:
        honest += list(inbox.take(outbox.next_frame()))
    assert honest == [whole]
    small = bytes([2]) + len(whole).to_bytes(8, "little") + b"x" * 20
    with pytest.raises(ValueError, match="a piece of 20 bytes, which is not the last"):
        list(FrameInbox(1 << 30).take(small))


def test_idle_connections_keep_no_caller_from_the_endpoint(monkeypatch) -> None:
    monkeypatch.setattr("jaxrl_async.endpoint.http_server.MORE_CONNECTIONS", 30)
    limits = EndpointLimits(max_open_calls=1)
    rig = serve(Speaker(byte_tokenizer(CHATML), []), byte_tokenizer(CHATML), limits)
    assert rig.http.get("/health").status_code == 200  # this one stays open
    where = rig.endpoint.host, rig.endpoint.port
    idle = [socket.create_connection(where, timeout=WAIT_S) for _ in range(100)]
    for _ in range(3):
        with httpx.Client(base_url=rig.endpoint.address) as caller:
            assert caller.get("/health").status_code == 200
    assert rig.http.get("/health").status_code == 200
    for one in idle:
        one.close()
    closed(rig)


# ---- lines of the log

FORGED = "\n2026-01-01 INFO all is well\x1b[31m\u202e\u2028"


def test_what_a_stranger_says_is_one_clean_line(caplog: pytest.LogCaptureFixture) -> None:
    greeting = handshake._OPEN.pack(handshake.MAGIC, PROTOCOL, os.urandom(32))
    frame = handshake.OPEN + greeting + FORGED.encode()[: handshake.PACKAGE_BYTES]
    with a_hub(SECRET) as hub, grpc.insecure_channel(str(hub.address), options=OPTIONS) as channel:
        list(channel.stream_stream(PATH)(iter([frame])))
    (told,) = [r.getMessage() for r in caplog.records if "was refused" in r.getMessage()]
    assert "all is well" in told and told.isprintable()


@pytest.mark.parametrize("name", [FORGED, "x" * 1000, "a\tb"])
def test_a_name_that_would_forge_a_line_is_refused(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with a_hub(SECRET) as hub, pytest.raises(JoinRefused, match="Give it another --name"):
        joins(str(hub.address), SECRET, name=name)
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_a_member_ends_with_a_clean_reason() -> None:
    ended: list[str] = []
    heard = threading.Event()

    def on_join(session, hello):
        session.on_end(lambda reason: (ended.append(reason), heard.set()))
        return Welcome(config={}, spec={}, mesh={}, seed=0, run="r")

    hub = Hub("127.0.0.1:0", secret=SECRET, tls=None, limits=LIMITS, on_join=on_join)
    session, _ = dial(
        str(hub.address), Hello(name="s"), secret=SECRET, tls=None, limits=LIMITS, timeout_s=WAIT_S
    )
    session.end(FORGED)
    assert heard.wait(WAIT_S)
    hub.close()
    assert ended[0].isprintable() and "all is well" in ended[0]


def test_a_message_of_several_lines_cannot_look_like_another_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("jaxrl_async.attack")
    with logs_as("text"):
        log.warning("the program said: %s", "done" + FORGED)
        try:
            raise ValueError(FORGED)
        except ValueError:
            log.exception("a call failed")
    first, second = caplog.records
    lines = first.getMessage().split("\n")
    assert lines[0] == "the program said: done"
    assert re.fullmatch(r"    2026-01-01 INFO all is well +\[31m +", lines[1])
    shown = logging.Formatter("%(message)s").format(second).split("\n")
    assert shown[:2] == ["a call failed", "Traceback (most recent call last):"]
    assert all(line.startswith("    ") for line in shown[2:])
    assert all(line.isprintable() for line in shown)
    log.warning("after it")
    assert type(caplog.records[-1]) is logging.LogRecord


def test_printable_keeps_letters_of_all_languages() -> None:
    assert printable("Zürich 東京 \N{SNOWMAN}") == "Zürich 東京 \N{SNOWMAN}"
    assert printable("a\r\nb\0c\udc80") == "a  b c "
    assert shown("a\n\x1b[31mb\tc") == "a\n [31mb    c"


def test_a_trainer_that_never_comes_is_still_waited_for(tmp_path: Path) -> None:
    with pytest.raises(Disconnected, match=r"join\.json, which a trainer writes"):
        dial(str(tmp_path), Hello(name="s"), secret=b"", tls=None, limits=LIMITS, timeout_s=0.2)
