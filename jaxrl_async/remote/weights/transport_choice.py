"""Choose the weight transport, from remote.transfer and whether both sides are on one machine."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import ConfigError, WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.remote.weights.assembly import Holdings
from jaxrl_async.remote.weights.device_transport import DevicePublisher, DevicePuller
from jaxrl_async.remote.weights.fetching import FetchTransports, PieceFetching
from jaxrl_async.remote.weights.file_transport import FolderFiles
from jaxrl_async.remote.weights.offering import OfferTransports, PieceOffering
from jaxrl_async.remote.weights.peer_authentication import PeerAuth
from jaxrl_async.remote.weights.piece_server import PieceServer, Publish
from jaxrl_async.remote.weights.protocols import Fetching, Offering
from jaxrl_async.remote.weights.shared_memory import SharedFiles
from jaxrl_async.remote.weights.tcp_transport import PullSettings
from jaxrl_async.remote.weights.transport_trial import TransportTrial
from jaxrl_async.remote.wire.address import advertised_address, parse_address
from jaxrl_async.remote.wire.tls import read_tls

log = logging.getLogger(__name__)
T = TypeVar("T")

SHARING = 64
"""Maximum number of samplers that share a machine and remote.data_port: each tries this many
ports."""
STREAMS = ("auto", "tcp", "device")
"""Values of remote.transfer that need a network route for pieces over TCP, even if another
transport is tried first."""


def make_offering(
    section: RemoteSection,
    *,
    run: str,
    secret: bytes = b"",
    local_samplers: bool = True,
    separate_machines: bool = False,
    all_agree: Callable[[bool], bool] = bool,
) -> Offering:
    """Create the trainer's side.

    Args:
        section: The settings.
        run: Name of the run, for file names.
        secret: The shared secret (remote.wire.secret.read_secret).
        local_samplers: True if samplers may be on this machine. With transfer=auto, False saves the
            copy into shared memory.
        separate_machines: True if samplers have separate machines. transfer=auto then also offers
            the weights from accelerator memory, and makes a host copy only on request.
        all_agree: Returns True if a value is True in every process of the trainer. All processes
            call it here, since they must offer the same transport.

    Raises WeightsError if it cannot listen, or if there is no shared memory; ConfigError for a
    missing secret or certificate.
    """
    holdings = Holdings()
    transfer = section.transfer
    shared = files = server = publisher = None
    if transfer == "folder":
        files = FolderFiles(_folder(section), run, jax.process_index())
    if transfer == "device":
        publisher = DevicePublisher(_host(section.listen, section.advertise))
    elif transfer == "auto" and separate_machines:
        publisher = _try_publisher(section, all_agree)
    if transfer == "shared_memory" or (transfer == "auto" and local_samplers and not publisher):
        shared = SharedFiles(run)
    if transfer in STREAMS:
        server = _server(
            section,
            holdings,
            secret,
            section.listen.rpartition(":")[0],
            section.advertise,
            publish=publisher.publish if publisher else None,
        )
    transports = OfferTransports(
        publisher=publisher,
        server=server,
        shared=shared,
        files=files,
        shared_is_optional=transfer == "auto",
    )
    return PieceOffering(holdings, transports)


def make_fetching(
    section: RemoteSection,
    target: Params,
    *,
    host: str = "127.0.0.1",
    advertise: str | None = None,
    secret: bytes = b"",
) -> Fetching:
    """Create a sampler's side, in each of its processes.

    Args:
        section: The settings.
        target: The sampler's arrays as jax.ShapeDtypeStruct with shardings (mesh.shapes_on).
        host: This machine's host at which it relays weights, on the first free port from
            remote.data_port on; IPv6 in brackets.
        advertise: Host name for other samplers; None: the same host, or this machine's name.
        secret: The shared secret.

    Raises WeightsError if it cannot listen, ConfigError for a missing secret or certificate.
    """
    holdings = Holdings()
    transfer = section.transfer
    tcp = server = puller = trial = None
    if transfer in STREAMS:
        tcp = PullSettings(auth=_auth(section, secret), silence_s=section.silence_s)
        server = _server(section, holdings, secret, host, advertise, ports=SHARING)
        devices = jax.tree.leaves(target)[0].sharding.device_set
        if transfer == "device":
            puller = DevicePuller(_host(f"{host}:0", advertise), tcp)
        elif _may_try_devices(section, devices):
            # decided per process: each pulls what its own devices need
            puller = _or_tcp(DevicePuller, _host(f"{host}:0", advertise), tcp)
            trial = TransportTrial() if puller is not None else None
    transports = FetchTransports(
        puller=puller,
        trial=trial,
        shared=transfer in ("auto", "shared_memory"),
        folder=_folder(section) if transfer == "folder" else None,
        tcp=tcp,
        timeout_s=section.transfer_timeout_s,
    )
    return PieceFetching(target, transports, holdings, server)


def _may_try_devices(section: RemoteSection, devices: Iterable[Any]) -> bool:
    """Return True if transfer=auto tries transfers from device to device: not between CPUs, where
    they are slower than TCP (docs/benchmarks.md), nor if connections must be encrypted.
    """
    encrypted = section.tls_certificate is not None
    return (
        section.transfer == "auto" and not encrypted and all(d.platform != "cpu" for d in devices)
    )


def _try_publisher(
    section: RemoteSection, all_agree: Callable[[bool], bool]
) -> DevicePublisher | None:
    """Return the publisher for transfers from device to device; None: this or another process of
    the trainer cannot offer them, so none does."""
    publisher = None
    if _may_try_devices(section, jax.local_devices()):
        publisher = _or_tcp(DevicePublisher, _host(section.listen, section.advertise))
    if all_agree(publisher is not None):
        return publisher
    if publisher is not None:
        log.warning(
            "remote.transfer=auto does not use transfer from device to device: another process of "
            "the trainer cannot offer it (see its log)"
        )
    return None


def _or_tcp(make: Callable[..., T], *arguments: object) -> T | None:
    """Create one side of the transfer from device to device; None: not available here."""
    try:
        return make(*arguments)
    except WeightsError as error:
        log.warning("remote.transfer=auto does not use transfer from device to device: %s", error)
        return None


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
    publish: Publish | None = None,
) -> PieceServer:
    """Serve on remote.data_port, or on one of the `ports` from there on."""
    return PieceServer(
        holdings,
        listen=f"{host}:{section.data_port}",
        ports=ports,
        advertise=advertise,
        auth=_auth(section, secret),
        silence_s=section.silence_s,
        publish=publish,
    )


def _host(listen: str, advertise: str | None) -> str:
    """Return the host name of this machine for other machines."""
    return advertised_address(parse_address(listen, what="remote.listen"), advertise).host


def _auth(section: RemoteSection, secret: bytes) -> PeerAuth:
    return PeerAuth(secret=secret, tls=read_tls(section))
