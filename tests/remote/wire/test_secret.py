"""Proofs of the secret over plain sockets, and where it comes from."""

import socket
import threading
from collections.abc import Callable

import pytest

from jaxrl_async.errors import ConfigError, JoinRefused
from jaxrl_async.remote.wire.secret import (
    check_proof,
    check_secret,
    proof,
    prove_secret,
    read_secret,
)

PURPOSE = b"weights"


def both(
    asks: Callable[[socket.socket], None], answers: Callable[[socket.socket], None]
) -> tuple[BaseException | None, BaseException | None]:
    """Run the two sides of a connection; return what each raised."""
    here, there = socket.socketpair()
    raised: list[BaseException | None] = [None, None]

    def side(index: int, work: Callable[[socket.socket], None], sock: socket.socket) -> None:
        try:
            work(sock)
        except (JoinRefused, OSError) as error:
            raised[index] = error
        finally:
            sock.close()

    thread = threading.Thread(target=side, args=(0, asks, here))
    thread.start()
    side(1, answers, there)
    thread.join(20)
    assert not thread.is_alive()
    return raised[0], raised[1]


@pytest.mark.parametrize(
    ("mine", "theirs", "fits"),
    [(b"s", b"s", True), (b"", b"", True), (b"s", b"t", False), (b"s", b"", False)],
)
def test_both_sides_prove_the_same_secret(mine: bytes, theirs: bytes, fits: bool) -> None:
    errors = both(
        lambda sock: prove_secret(sock, mine, purpose=PURPOSE, timeout_s=5),
        lambda sock: check_proof(sock, theirs, purpose=PURPOSE, timeout_s=5),
    )
    assert [error is None for error in errors] == [fits, fits]
    if not fits:
        assert all("JAXRL_ASYNC_SECRET" in str(error) for error in errors)


def test_a_proof_is_for_one_purpose() -> None:
    errors = both(
        lambda sock: prove_secret(sock, b"s", purpose=b"weights", timeout_s=5),
        lambda sock: check_proof(sock, b"s", purpose=b"session", timeout_s=5),
    )
    assert all(isinstance(error, JoinRefused) for error in errors)


def test_the_one_who_asks_is_not_fooled_by_its_own_proof() -> None:
    """A side without the secret that sends everything back proves nothing."""

    def mirror(sock: socket.socket) -> None:
        while data := sock.recv(100):
            sock.sendall(data)

    error, _ = both(lambda sock: prove_secret(sock, b"s", purpose=PURPOSE, timeout_s=5), mirror)
    assert isinstance(error, JoinRefused)


def test_a_side_that_dawdles_gets_no_more_time() -> None:
    def dawdle(sock: socket.socket) -> None:
        for _ in range(100):
            sock.sendall(b"x")
            if stop.wait(0.05):
                return

    stop = threading.Event()

    def check(sock: socket.socket) -> None:
        try:
            check_proof(sock, b"s", purpose=PURPOSE, timeout_s=0.3)
        finally:
            stop.set()

    _, error = both(dawdle, check)
    assert "in time" in str(error)


def test_proofs_differ_by_secret_purpose_side_and_nonces() -> None:
    base = (b"s", PURPOSE, b"asks", b"a" * 32, b"b" * 32)
    others = [(*base[:i], b"z" * len(base[i]), *base[i + 1 :]) for i in range(5)]
    assert len({proof(*parts) for parts in (base, *others)}) == 6


def test_the_secret_is_the_environments() -> None:
    assert read_secret({"JAXRL_ASYNC_SECRET": "abc\n"}) == b"abc"
    assert read_secret({}) == b""
    check_secret(b"", "127.0.0.1:0", loopback=True)
    with pytest.raises(ConfigError, match="openssl rand"):
        check_secret(b"", "10.0.0.1:0", loopback=False)
    with pytest.raises(ConfigError, match="is shorter than 16 characters: set"):
        check_secret(b"password", "10.0.0.1:0", loopback=False)
    check_secret(b"password", "127.0.0.1:0", loopback=True)
    check_secret(b"0123456789abcdef", "10.0.0.1:0", loopback=False)
