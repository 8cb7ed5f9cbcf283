"""Certificates, made here with the openssl command: which sides may connect."""

import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
from slow_tls import client_hello, dripped

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import ConfigError, Disconnected, JoinRefused
from jaxrl_async.remote.wire.client import dial
from jaxrl_async.remote.wire.listener import Hub
from jaxrl_async.remote.wire.messages import Hello, Live, Welcome
from jaxrl_async.remote.wire.session import WireLimits, WireSession
from jaxrl_async.remote.wire.tls import TlsFiles, read_tls

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl command to make certificates"
)
SECRET = b"a secret that only these tests know"
LIMITS = WireLimits(silence_s=5.0, join_s=2.0)
WELCOME = Welcome(config={}, spec={}, mesh={}, seed=0, run="run-1")


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, each with a certificate for this machine."""
    folder = tmp_path_factory.mktemp("tls")
    for owner in ("ours", "theirs"):
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        authority = ("-keyout", folder / f"{owner}-ca.key", "-out", folder / f"{owner}-ca.pem")
        openssl("req", "-x509", *key, *authority, "-days", "2", "-subj", f"/CN={owner}")
        openssl(
            "req", "-x509", *key, "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-addext", "basicConstraints=critical,CA:FALSE",
            "-CA", folder / f"{owner}-ca.pem", "-CAkey", folder / f"{owner}-ca.key",
            "-keyout", folder / f"{owner}.key", "-out", folder / f"{owner}.pem",
        )  # fmt: skip
    return folder


def files(folder: Path, owner: str, authority: str | None = None) -> TlsFiles:
    made = read_tls(
        RemoteSection(
            tls_certificate=str(folder / f"{owner}.pem"),
            tls_key=str(folder / f"{owner}.key"),
            tls_authority=str(folder / f"{authority or owner}-ca.pem"),
        )
    )
    assert made is not None
    return made


def make_hub(tls: TlsFiles | None, got: threading.Event, limits: WireLimits = LIMITS) -> Hub:
    def on_join(session: WireSession, hello: Hello) -> Welcome:
        session.on(Live, lambda message: got.set())
        return WELCOME

    return Hub("127.0.0.1:0", secret=SECRET, tls=tls, limits=limits, on_join=on_join)


def join(
    hub: Hub, tls: TlsFiles | None, *, host: str = "127.0.0.1", timeout_s: float = 0.7
) -> WireSession:
    session, _ = dial(
        f"{host}:{hub.address.port}",
        Hello(name="s0"),
        secret=SECRET,
        tls=tls,
        limits=LIMITS,
        timeout_s=timeout_s,
    )
    return session


def test_both_sides_with_certificates_of_one_authority_connect(folder: Path) -> None:
    got = threading.Event()
    hub = make_hub(files(folder, "ours"), got)
    for host in ("127.0.0.1", "localhost"):
        session = join(hub, files(folder, "ours"), host=host, timeout_s=20)
        session.send(Live(version=1))
        assert got.wait(20)
        session.end("done")
    hub.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("trainer", "sampler"),
    [
        (("ours", None), ("theirs", None)),  # neither trusts the other
        (("theirs", "ours"), ("ours", None)),  # the sampler does not trust the trainer
        (("ours", None), ("theirs", "ours")),  # the trainer does not trust the sampler
        (("ours", None), None),  # the sampler does not encrypt
        (None, ("ours", None)),  # the trainer does not
    ],
)
def test_anybody_else_is_refused(
    folder: Path,
    trainer: tuple[str, str | None] | None,
    sampler: tuple[str, str | None] | None,
) -> None:
    hub = make_hub(files(folder, *trainer) if trainer else None, threading.Event())
    wrong_authority = trainer is not None and sampler in (("theirs", None), ("ours", None))
    expected = JoinRefused if wrong_authority else Disconnected
    with pytest.raises(expected, match="tls_authority" if wrong_authority else "no trainer let"):
        join(hub, files(folder, *sampler) if sampler else None)
    hub.close()


@pytest.mark.full
def test_a_certificate_of_another_name_is_refused(folder: Path) -> None:
    hub = make_hub(files(folder, "ours"), threading.Event())
    with pytest.raises((JoinRefused, Disconnected), match=r"127\.0\.0\.2|name"):
        join(hub, files(folder, "ours"), host="127.0.0.2")
    hub.close()


@pytest.mark.full
def test_a_client_whose_tls_comes_a_byte_at_a_time_is_hung_up_on(folder: Path) -> None:
    tls = files(folder, "ours")
    hub = make_hub(tls, threading.Event(), WireLimits(join_s=0.5))
    hello = client_hello(tls)
    with socket.create_connection(("127.0.0.1", hub.address.port)) as connection:
        assert 0 < dripped(connection, hello, 0.02) < len(hello)
    hub.close()


@pytest.mark.parametrize("client", ["ours", "theirs"])
def test_plain_sockets_check_both_certificates(folder: Path, client: str) -> None:
    here, there = socket.socketpair()
    server_errors: list[Exception] = []

    def serve() -> None:
        try:
            with (
                files(folder, "ours")
                .socket_context(server=True)
                .wrap_socket(there, server_side=True) as sock
            ):
                sock.sendall(sock.recv(5))
        except OSError as error:
            server_errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    context = (
        files(folder, client, "ours").socket_context(server=False)
        if client == "ours"
        else (files(folder, client).socket_context(server=False))
    )
    try:
        with context.wrap_socket(here) as sock:
            sock.sendall(b"hello")
            assert sock.recv(5) == b"hello"
        assert client == "ours"
    except ssl.SSLError:
        assert client == "theirs"
    thread.join(20)
    assert bool(server_errors) == (client == "theirs")


def test_files_that_are_missing_or_do_not_go_together_are_named(folder: Path) -> None:
    assert read_tls(RemoteSection()) is None
    ours = str(folder / "ours.pem")
    with pytest.raises(ConfigError, match=r"set remote\.tls_key and remote\.tls_authority"):
        read_tls(RemoteSection(tls_certificate=ours))
    for key, problem in (
        (str(folder / "none.pem"), r"remote\.tls_key=.* cannot be read: No such file"),
        (__file__, "is not a PEM file"),
        (str(folder / "theirs.key"), "do not match"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_tls(RemoteSection(tls_certificate=ours, tls_key=key, tls_authority=ours))
