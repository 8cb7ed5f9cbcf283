"""Checks at startup that sampler processes will be able to join."""

import os
import socket

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.remote.weights.transport_choice import STREAMS
from jaxrl_async.remote.wire.address import Address, parse_address
from jaxrl_async.remote.wire.secret import check_secret, read_secret
from jaxrl_async.remote.wire.tls import read_tls
from jaxrl_async.run.lockstep import Lockstep


def check_listening(config: Config, lockstep: Lockstep) -> None:
    """Check certificates, secret and ports early; they are first used after the warm start. Raises
    ConfigError."""
    remote = config.remote_settings
    if not config.mesh.remote or config.sampler.engine != "native":
        return
    read_tls(remote)
    address = parse_address(remote.listen, what="remote.listen")
    if config.mesh.samplers_in == "external":  # else the run generates a secret
        check_secret(read_secret(), remote.listen, loopback=address.is_loopback)
    if lockstep.plays:
        _check_free(address, f"remote.listen={remote.listen}")
    if remote.transfer in STREAMS:
        _check_free(Address(address.host, remote.data_port), f"remote.data_port={remote.data_port}")


def _check_free(address: Address, setting: str) -> None:
    """Raise ConfigError if the address cannot be listened on now."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise ConfigError(
            f"{setting}: cannot listen at {address} ({why}). Choose another port (0 takes a "
            "free one), or set remote.listen to an address of this machine."
        ) from error
