"""Choose how weights travel: remote.transfer, and whether both sides are on one machine."""

from collections.abc import Callable

import jax

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.spec import Params
from jaxrl_async.weights.remote.assembly import Holdings
from jaxrl_async.weights.remote.boxes import Box
from jaxrl_async.weights.remote.bucket import FolderFiles
from jaxrl_async.weights.remote.device import DevicePublisher, DevicePuller
from jaxrl_async.weights.remote.fetching import FetchWays, PieceFetching
from jaxrl_async.weights.remote.offering import OfferWays, PieceOffering
from jaxrl_async.weights.remote.peer_guard import Guard
from jaxrl_async.weights.remote.piece_server import PieceServer
from jaxrl_async.weights.remote.seams import Fetching, Offering
from jaxrl_async.weights.remote.shared_memory import SharedFiles
from jaxrl_async.weights.remote.tcp import PullSettings
from jaxrl_async.wire.address import advertised_address, parse_address
from jaxrl_async.wire.tls import read_tls

SHARING = 64
"""Most samplers that share a machine and a remote.data_port: each tries so many ports."""
STREAMS = ("auto", "tcp", "device")
"""remote.transfer that need a route: pieces over TCP, also if another way is tried first."""


def make_offering(
    section: RemoteSection, *, run: str, secret: bytes = b"", local_samplers: bool = True
) -> Offering:
    """Make the trainer's side.

    Args:
        section: The settings.
        run: Name of the run, for file names.
        secret: The shared secret (wire.secret.read_secret).
        local_samplers: Whether samplers may be on this machine; False saves, with transfer=auto,
            the copy into shared memory.

    Raises WeightsError if it cannot listen, or if there is no shared memory; ConfigError for a
    missing secret or certificate.
    """
    holdings = Holdings()
    transfer = section.transfer
    shared = files = server = publisher = None
    if transfer == "folder":
        files = FolderFiles(_folder(section), run, jax.process_index())
    if transfer == "shared_memory" or (transfer == "auto" and local_samplers):
        shared = SharedFiles(run)
    if transfer == "device":
        publisher = DevicePublisher(_host(section.listen, section.advertise))
    if transfer in STREAMS:
        server = _server(
            section,
            holdings,
            secret,
            _host_of(section.listen),
            section.advertise,
            publish=publisher.publish if publisher else None,
        )
    ways = OfferWays(
        publisher=publisher,
        server=server,
        shared=shared,
        files=files,
        may_lack_shared=transfer == "auto",
    )
    return PieceOffering(holdings, ways)


def make_fetching(
    section: RemoteSection,
    target: Params,
    *,
    host: str = "127.0.0.1",
    advertise: str | None = None,
    secret: bytes = b"",
) -> Fetching:
    """Make a sampler's side, in each of its processes.

    Args:
        section: The settings.
        target: The sampler's arrays as jax.ShapeDtypeStruct with shardings (mesh.shapes_on).
        host: Of this machine, where it passes weights on, at the first free port from
            remote.data_port on; IPv6 in brackets.
        advertise: Host under which other samplers reach it; None: the same, or this machine's name.
        secret: The shared secret.

    Raises WeightsError if it cannot listen, ConfigError for a missing secret or certificate.
    """
    holdings = Holdings()
    transfer = section.transfer
    tcp = server = puller = None
    if transfer in STREAMS:
        tcp = PullSettings(guard=_guard(section, secret), silence_s=section.silence_s)
        server = _server(section, holdings, secret, host, advertise, ports=SHARING)
        if transfer == "device":
            puller = DevicePuller(_host(f"{host}:0", advertise), tcp)
    ways = FetchWays(
        puller=puller,
        shared=transfer in ("auto", "shared_memory"),
        folder=_folder(section) if transfer == "folder" else None,
        tcp=tcp,
        timeout_s=section.transfer_timeout_s,
    )
    return PieceFetching(target, ways, holdings, server)


def _folder(section: RemoteSection) -> str:
    if not section.folder:
        raise ConfigError(
            "remote.transfer=folder needs remote.folder: a folder or mounted bucket that the "
            "trainer can write to and every sampler can read"
        )
    return section.folder


def _server(
    section: RemoteSection,
    holdings: Holdings,
    secret: bytes,
    host: str,
    advertise: str | None,
    *,
    ports: int = 1,
    publish: Callable[[int, int, Box], int | None] | None = None,
) -> PieceServer:
    """Serve at remote.data_port, or at one of the `ports` from there on."""
    return PieceServer(
        holdings,
        listen=f"{host}:{section.data_port}",
        ports=ports,
        advertise=advertise,
        guard=_guard(section, secret),
        silence_s=section.silence_s,
        publish=publish,
    )


def _host_of(listen: str) -> str:
    return listen.rpartition(":")[0]


def _host(listen: str, advertise: str | None) -> str:
    """Return the host under which others reach this machine."""
    return advertised_address(parse_address(listen, what="remote.listen"), advertise).host


def _guard(section: RemoteSection, secret: bytes) -> Guard:
    return Guard(secret=secret, tls=read_tls(section))
