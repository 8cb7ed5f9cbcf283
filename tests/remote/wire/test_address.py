"""Where a trainer listens, and where a sampler looks for it."""

import json
import threading
from pathlib import Path

import pytest

from jaxrl_async.errors import ConfigError, Disconnected
from jaxrl_async.remote.wire.address import (
    Address,
    advertised_address,
    locate_trainer,
    parse_address,
    write_join_file,
)


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:65535", "::1", 65535, True),
        ("[fe80::1]:1", "fe80::1", 1, False),
        ("trainer-0.run.svc.cluster.local:9000", "trainer-0.run.svc.cluster.local", 9000, False),
        ("0.0.0.0:1", "0.0.0.0", 1, False),
        ("127.0.0.1.example.com:1", "127.0.0.1.example.com", 1, False),
    ],
)
def test_an_address_is_read_and_written(text: str, host: str, port: int, loopback: bool) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == text
    assert address.is_loopback == loopback


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:65536", "host:-1", "host:x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"remote\.listen=.* is not HOST:PORT"):
        parse_address(text, what="remote.listen")
    with pytest.raises(ConfigError, match=r"write an IPv6 address in brackets, \[::1\]:80"):
        parse_address("::1:80")


def test_the_advertised_address() -> None:
    listening = Address("127.0.0.1", 9000)
    assert advertised_address(listening, None) == listening
    assert advertised_address(listening, "trainer") == Address("trainer", 9000)
    assert advertised_address(listening, "trainer:1") == Address("trainer", 1)
    assert advertised_address(listening, "fe80::1") == Address("fe80::1", 9000)
    assert advertised_address(listening, "[fe80::1]:7") == Address("fe80::1", 7)
    assert advertised_address(Address("0.0.0.0", 9000), None).host not in ("0.0.0.0", "")


def test_a_run_folder_says_where_its_trainer_is(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    folder.mkdir(parents=True)
    for where in (str(folder), f"file:{folder}", f"file:{folder / 'join.json'}"):
        with pytest.raises(Disconnected, match=r"join\.json, which a trainer writes: No such file"):
            locate_trainer(where)
    path = write_join_file(folder, Address("host", 1), "run-1")
    assert path.parent == folder and list(folder.iterdir()) == [path]
    for where in (str(folder), f"file:{folder}", f"file:{path}"):
        trainer = locate_trainer(where)
        assert (trainer.address, trainer.run) == (Address("host", 1), "run-1")
    assert locate_trainer("host:2").run is None


@pytest.mark.parametrize("torn", ["", "{", "[]", "{}", '{"address": 3, "run": ""}', "\xff"])
def test_a_torn_file_is_looked_at_again(tmp_path: Path, torn: str) -> None:
    (tmp_path / "join.json").write_bytes(torn.encode("latin-1"))
    with pytest.raises(Disconnected, match="does not say where the trainer is"):
        locate_trainer(f"file:{tmp_path}")


@pytest.mark.full
def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    write_join_file(tmp_path, Address("host", 0), "run")
    done = threading.Event()

    def write() -> None:
        for port in range(300):
            write_join_file(tmp_path, Address("host", port), "run" * 100)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        assert json.loads((tmp_path / "join.json").read_text())["address"].startswith("host:")
    thread.join()
