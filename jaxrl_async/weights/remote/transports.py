"""Choose how weights travel: remote.transfer, and whether both sides are on one machine."""

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.model.spec import Params
from jaxrl_async.weights.remote.assembly import Holdings
from jaxrl_async.weights.remote.fetching import FetchWays, PieceFetching
from jaxrl_async.weights.remote.guard import Guard
from jaxrl_async.weights.remote.offering import OfferWays, PieceOffering
from jaxrl_async.weights.remote.piece_server import PieceServer
from jaxrl_async.weights.remote.seams import Fetching, Offering
from jaxrl_async.weights.remote.shared_memory import SharedFiles
from jaxrl_async.weights.remote.tcp import PullSettings
from jaxrl_async.wire.tls import read_tls


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
    only_shared = section.transfer == "shared_memory"
    shared = None
    if only_shared or (section.transfer == "auto" and local_samplers):
        shared = SharedFiles(run)
    server = (
        None
        if only_shared
        else _server(section, holdings, secret, section.listen, section.advertise)
    )
    ways = OfferWays(server=server, shared=shared, may_lack_shared=not only_shared)
    return PieceOffering(holdings, ways)


def make_fetching(
    section: RemoteSection,
    target: Params,
    *,
    listen: str = "127.0.0.1:0",
    advertise: str | None = None,
    secret: bytes = b"",
) -> Fetching:
    """Make a sampler's side, in each of its processes.

    Args:
        section: The settings.
        target: The sampler's arrays as jax.ShapeDtypeStruct with shardings (mesh.shapes_on).
        listen: HOST:PORT at which it passes weights on; any free port is taken.
        advertise: Host under which other samplers reach it; None: that of `listen`, or this
            machine's name.
        secret: The shared secret.

    Raises WeightsError if it cannot listen, ConfigError for a missing secret or certificate.
    """
    holdings = Holdings()
    only_shared = section.transfer == "shared_memory"
    tcp = (
        None
        if only_shared
        else PullSettings(guard=_guard(section, secret), silence_s=section.silence_s)
    )
    ways = FetchWays(
        shared=section.transfer in ("auto", "shared_memory"),
        tcp=tcp,
        timeout_s=section.transfer_timeout_s,
    )
    server = None if only_shared else _server(section, holdings, secret, listen, advertise)
    return PieceFetching(target, ways, holdings, server)


def _server(
    section: RemoteSection, holdings: Holdings, secret: bytes, listen: str, advertise: str | None
) -> PieceServer:
    """Serve at the interface of `listen`, on any free port."""
    host = listen.rpartition(":")[0]
    return PieceServer(
        holdings,
        listen=f"{host}:0",
        advertise=advertise,
        guard=_guard(section, secret),
        silence_s=section.silence_s,
    )


def _guard(section: RemoteSection, secret: bytes) -> Guard:
    return Guard(secret=secret, tls=read_tls(section))
