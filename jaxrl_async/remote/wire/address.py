"""Where a trainer listens, and how a sampler finds it: by address, by DNS name, or by a file that
the trainer writes. The file of a trainer on loopback holds the secret that it made for this start;
a copy for this user's other processes, by port, serves those that know the address alone."""

import contextlib
import ipaddress
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl_async.errors import ConfigError, Disconnected, in_a_line
from jaxrl_async.private_folder import private_folder, readable_folders
from jaxrl_async.remote.wire.secret import SECRET_VARIABLE

log = logging.getLogger(__name__)

JOIN_FILE = "join.json"
"""Name of the file in a run's folder that says where its trainer listens."""
BY_PORT = "join"
"""Private folder of this user (private_folder) with a file for each port of loopback at which a
trainer listens that made its own secret."""
BY_PORT_KEPT_S = 7 * 24 * 3600.0
"""Age at which a file by port is removed if nothing listens at its port, seconds: its trainer was
killed. A younger one may be of another container or machine with the same folder."""
EVERYWHERE = ("0.0.0.0", "::")
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Bits of a mode with which others can read a file, or more."""


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
    secret: bytes = field(default=b"", repr=False)  # that it made for its samplers; empty: none


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


def write_join_file(folder: Path, address: Address, run: str, secret: bytes = b"") -> Path:
    """Say in a run's folder where its trainer listens; a reader sees all of it or the last one.

    secret: that the trainer made for this start. The file then has mode 0600; where the file system
    does not keep that, the secret is left out, and the log says so. Raises OSError.
    """
    path = folder / JOIN_FILE
    content = {"address": str(address), "run": run}
    if not secret:
        _write(path, content, 0o666)
    elif not _write(path, {**content, "secret": secret.decode()}, 0o600):
        log.warning("%s does not say how to join: others could read the secret there", path)
        _write(path, content, 0o666)
    return path


@contextlib.contextmanager
def known_to_this_user(listening: Address, secret: bytes) -> Iterator[None]:
    """Let other processes of this user join by the address alone while the body runs.

    Args:
        listening: where the trainer listens.
        secret: that it made for this start; empty: nothing is written.
    """
    path = None
    if secret:
        try:
            wanted = private_folder(BY_PORT) / f"{listening.port}.json"
            _remove_forgotten(wanted.parent)
            path = wanted if _write(wanted, {"secret": secret.decode()}, 0o600) else None
        except OSError as error:
            log.warning("samplers find the secret only by --join RUN_FOLDER: %s", in_a_line(error))
    try:
        yield
    finally:
        if path is not None and _secret_in(path) == secret:
            path.unlink(missing_ok=True)


def locate_trainer(where: str) -> JoinPlace:
    """Return where the trainer is now. Look again before each try: it may have moved.

    Args:
        where: HOST:PORT, a run's folder, or file:PATH of such a folder or of its join.json.

    Raises:
        Disconnected: the file is not there yet, or is torn.
        ConfigError: `where` is none of these, or this user may not read the file.
    """
    path = Path(where.removeprefix("file:"))
    if not where.startswith("file:") and not ("/" in where or path.is_dir()):
        address = parse_address(where, what="--join")
        return JoinPlace(address=address, run=None, secret=_secret_at(address))
    if path.suffix != ".json":
        path = path / JOIN_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        address = parse_address(str(content["address"]), what=str(path))
        secret = _secret_in(path) or _secret_at(address)
        return JoinPlace(address=address, run=str(content["run"]), secret=secret)
    except PermissionError as error:
        raise ConfigError(
            f"--join {where}: this user may not read {path}, which holds the secret that the "
            "trainer has made for its own user. Start the sampler as that user, or set the "
            f"environment variable {SECRET_VARIABLE} to the same value for the trainer and for "
            "every sampler, and give the trainer's address, --join HOST:PORT."
        ) from error
    except OSError as error:
        raise Disconnected(f"{path}, which a trainer writes: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Disconnected(f"{path} does not say where the trainer is: {error}") from error


def _secret_at(address: Address) -> bytes:
    """Return the secret of this user's trainer at this port of loopback; empty: no such trainer."""
    if not address.is_loopback:
        return b""
    files = (folder / f"{address.port}.json" for folder in readable_folders(BY_PORT))
    return next(filter(None, map(_secret_in, files)), b"")


def _remove_forgotten(folder: Path) -> None:
    """Remove the files of trainers that were killed."""
    for file in folder.iterdir():
        with contextlib.suppress(OSError, ValueError):
            if time.time() - file.stat().st_mtime > BY_PORT_KEPT_S and not _listens(file):
                file.unlink()


def _listens(file: Path) -> bool:
    """Return whether something listens at the port of a file's name; drafts have none."""
    try:
        socket.create_connection(("localhost", int(file.stem)), timeout=1.0).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _secret_in(path: Path) -> bytes:
    """Return the secret in a file; empty: it has none, or another user wrote it or can read it."""
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return b""
    secret = content.get("secret") if isinstance(content, dict) else None
    if not isinstance(secret, str) or not secret.isascii():
        return b""
    if found.st_uid != os.geteuid() or found.st_mode & OTHERS:
        log.warning(
            "the secret in %s does not count: others wrote the file, or can read it (owner %d, "
            "mode %o)", path, found.st_uid, stat.S_IMODE(found.st_mode),
        )  # fmt: skip
        return b""
    return secret.encode()


def _write(path: Path, content: dict[str, str], mode: int) -> bool:
    """Replace a file; return False, with nothing written, if others could read it and the mode says
    that they must not. A file that others prepared under the draft's name is not written to."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        kept = bool(mode & OTHERS) or not os.fstat(file.fileno()).st_mode & OTHERS
        if kept:
            file.write(json.dumps(content) + "\n")
    if kept:
        draft.replace(path)
    else:
        draft.unlink()
    return kept
