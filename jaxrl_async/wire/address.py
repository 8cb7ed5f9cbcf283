"""Where a trainer listens, and how a sampler finds it: by address, by DNS name, or by a file that
the trainer writes."""

import ipaddress
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from jaxrl_async.errors import ConfigError, Disconnected

JOIN_FILE = "join.json"
"""Name of the file in a run's folder that says where its trainer listens."""
EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Address:
    """A host name or IP address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPlace:
    """Where a trainer can be reached now."""

    address: Address
    run: str | None  # name of its run; None: not known


def parse_address(text: str, *, what: str = "address") -> Address:
    """Read HOST:PORT or [IPv6]:PORT. Raises ConfigError, which calls it `what`."""
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{what}={text!r} is not HOST:PORT, with a port from 0 to 65535")
    if ":" in host and not bracketed:
        raise ConfigError(f"{what}={text!r}: write an IPv6 address in brackets, [{host}]:{port}")
    return Address(host, int(port))


def advertised_address(listening: Address, advertise: str | None) -> Address:
    """Return the address under which samplers reach a trainer.

    Args:
        listening: with the port that was really taken.
        advertise: remote.advertise: a host, or HOST:PORT where something forwards another port.
    """
    if advertise is None:
        host = socket.getfqdn() if listening.host in EVERYWHERE else listening.host
        return Address(host, listening.port)
    host = advertise.removeprefix("[").removesuffix("]")
    if _is_ip(host) or ":" not in host:
        return Address(host, listening.port)
    return parse_address(advertise, what="remote.advertise")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def write_join_file(folder: Path, address: Address, run: str) -> Path:
    """Say in a run's folder where its trainer listens; a reader sees all of it or the last one."""
    path = folder / JOIN_FILE
    draft = folder / f".{JOIN_FILE}.{os.getpid()}"
    draft.write_text(json.dumps({"address": str(address), "run": run}) + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def locate_trainer(where: str) -> JoinPlace:
    """Return where the trainer is now. Look again before each try: it may have moved.

    Args:
        where: HOST:PORT, a run's folder, or file:PATH of such a folder or of its join.json.

    Raises:
        Disconnected: the file is not there yet, or is torn.
        ConfigError: `where` is none of these.
    """
    path = Path(where.removeprefix("file:"))
    if not where.startswith("file:") and not ("/" in where or path.is_dir()):
        return JoinPlace(address=parse_address(where, what="--join"), run=None)
    if path.suffix != ".json":
        path = path / JOIN_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        address = parse_address(str(content["address"]), what=str(path))
        return JoinPlace(address=address, run=str(content["run"]))
    except OSError as error:
        raise Disconnected(f"{path}, which a trainer writes: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Disconnected(f"{path} does not say where the trainer is: {error}") from error
