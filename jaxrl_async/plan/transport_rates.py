"""Measured rates of this package's transports of weights between processes.

One trainer process to one sampler process, both on one machine with two cores and no network
between them (docs/benchmarks.md, "Weights to samplers in other processes"). A plan gives a process
no more than that, even if its network cards allow more. More cores may carry more, which was not
measured. The cards' line rate is an upper bound; no transport here has reached it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrl_async.config import schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One transport of weights between two processes."""

    name: str
    bytes_per_s: float | None  # of one process; None: never run, the network's rate is used
    send_cpu_s_per_gb: float | None = None  # of the trainer's processes; None: not measured
    take_cpu_s_per_gb: float | None = None  # of a sampler's


TRANSPORTS: Mapping[str, Transport] = {
    "shared_memory": Transport(
        name="shared memory", bytes_per_s=6.1e9, send_cpu_s_per_gb=0.21, take_cpu_s_per_gb=0.19
    ),
    "tcp": Transport(name="TCP", bytes_per_s=2.2e9, send_cpu_s_per_gb=0.33, take_cpu_s_per_gb=0.23),
    "folder": Transport(name="a folder", bytes_per_s=3.5e9),
    # 0.42e9 between CPU devices, which copy through gRPC; never run between accelerators
    "device": Transport(name="device to device, never measured", bytes_per_s=None),
}
"""Transports by remote.transfer."""


def transport_of(config: schema.Config) -> Transport:
    """Return the transport of weights to samplers in separate processes."""
    here = config.mesh.samplers_in == "processes"
    auto = "shared_memory" if here else "tcp"
    transfer = config.remote_settings.transfer
    return TRANSPORTS[auto if transfer == "auto" else transfer]


def carried_bytes_per_s(transport: Transport, hosts: int, network_bytes_per_s: float) -> float:
    """Return the total rate of `hosts` processes, one on each host, at the same time.

    network_bytes_per_s: rate of all their network cards together.
    """
    if transport.bytes_per_s is None:
        return network_bytes_per_s
    return min(network_bytes_per_s, hosts * transport.bytes_per_s)
