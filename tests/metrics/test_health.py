"""What a process reports to a cluster: /healthz."""

import socket
import urllib.error
import urllib.request

import pytest

from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.health import HEALTH_VARIABLE, Progress, checked_health, health_endpoint


def ask(port: int, path: str = "/healthz") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.full
def test_it_answers_ok_until_a_check_finds_something(monkeypatch):
    monkeypatch.setenv(HEALTH_VARIABLE, "127.0.0.1:0")
    found: list[str | None] = [None]
    with health_endpoint() as port:
        assert ask(port) == (200, "ok\n")
        with checked_health(lambda: found[0]):
            assert ask(port) == (200, "ok\n")
            found[0] = "the engine has died"
            assert ask(port) == (503, "the engine has died\n")
        assert ask(port) == (200, "ok\n"), "what is over counts no more"
        with checked_health(lambda: 1 / 0):
            assert ask(port) == (503, "ZeroDivisionError: division by zero\n")
        assert ask(port, "/")[0] == 404
    with pytest.raises(OSError):
        ask(port)


def test_without_the_variable_nothing_listens(monkeypatch):
    monkeypatch.delenv(HEALTH_VARIABLE, raising=False)
    with health_endpoint() as port:
        assert port is None


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:x", "127.0.0.1:70000", "192.0.2.1:80"])
def test_an_address_that_cannot_be_had_is_refused(monkeypatch, address):
    monkeypatch.setenv(HEALTH_VARIABLE, address)
    with pytest.raises(ConfigError, match="nothing can listen there"), health_endpoint():
        pass


def test_a_port_that_is_taken_is_refused(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv(HEALTH_VARIABLE, f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="nothing can listen"), health_endpoint():
            pass


def test_work_without_progress_is_found_and_a_wait_for_work_is_not():
    now, reading = [0.0], [(0, True)]
    check = Progress(lambda: reading[0], 10.0, lambda: now[0], "the sampler")
    assert check() is None
    now[0] = 10.0
    assert check() is None, "the limit itself is allowed"
    now[0] = 11.0
    assert check() == "the sampler has work and has done nothing for 11 s"
    reading[0] = (1, True)
    assert check() is None
    now[0], reading[0] = 100.0, (1, False)
    assert check() is None, "nothing to do"
    reading[0] = (1, True)
    now[0] = 105.0
    assert check() is None, "work has come just now"
    now[0] = 111.0
    assert check() is not None
