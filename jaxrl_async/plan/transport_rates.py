"""Measured rates of this package's transports of weights, and the transfers that follow from them.

One trainer process to one sampler process, both on one machine with two cores and no network
between them (docs/benchmarks.md, "Weights to samplers in other processes"). A plan gives a process
no more than that, even if its network cards allow more. More cores may carry more, which was not
measured. The cards' line rate is an upper bound; no transport here has reached it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_async.config import schema
from jaxrl_async.plan.chip_placement import Placement
from jaxrl_async.plan.pipeline import TransferTree

HOST_LINK_BYTES_PER_S = 8e9
"""Assumed bandwidth between a device and its host's memory (PCIe), in one direction."""
HOP_S = 0.01
"""Assumed delay of a piece of weights in a sampler that forwards it, seconds."""


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
    on_one_machine = config.mesh.samplers_in == "processes"
    auto = "shared_memory" if on_one_machine else "tcp"
    transfer = config.remote_settings.transfer
    return TRANSPORTS[auto if transfer == "auto" else transfer]


def carried_bytes_per_s(transport: Transport, hosts: int, network_bytes_per_s: float) -> float:
    """Return the total rate of `hosts` processes, one on each host, at the same time.

    network_bytes_per_s: rate of all their network cards together.
    """
    if transport.bytes_per_s is None:
        return network_bytes_per_s
    return min(network_bytes_per_s, hosts * transport.bytes_per_s)


def transfer_of(
    config: schema.Config, placement: Placement, copy_bytes: float, *, measured: bool = True
) -> tuple[float, TransferTree | None]:
    """Estimate the transfer to all samplers, seconds, and the tree that it follows.

    Between threads it uses the slice's links, with a copy for each sampler. Between processes it
    passes through the hosts: along the tree, or through the memory of the one host. Samplers that
    span hosts, or that pull from the trainer's devices, do not forward weights: the trainer sends
    to each of them.

    Args:
        config, placement: The run.
        copy_bytes: One sampler's weights.
        measured: Use the rates of this package's transports (TRANSPORTS). False: use
            the line rate of the hosts' network cards, the upper bound.
    """
    trainer, sampler = placement.trainer.chip, placement.sampler.chip
    sends, receives = placement.slices.trainer.size, placement.slices.sampler.size
    how = config.mesh.samplers_in
    if how == "threads":
        sent_s = copy_bytes * placement.num_samplers / (sends * trainer.ici_bytes_per_s / 2)
        return max(sent_s, copy_bytes / (receives * sampler.ici_bytes_per_s / 2)), None
    is_external, hosts = how == "external", hosts_of(placement.slices.sampler)
    rates = [sends * trainer.dcn_bytes_per_s, receives * sampler.dcn_bytes_per_s]
    if not is_external:
        rates = [TRANSPORTS["shared_memory"].bytes_per_s or 0.0] * 2
    elif measured:
        transport, processes = transport_of(config), (hosts_of(placement.slices.trainer), hosts)
        rates = [
            carried_bytes_per_s(transport, n, rate)
            for n, rate in zip(processes, rates, strict=True)
        ]
    passed_on = is_external and hosts == 1 and config.remote_settings.transfer in ("auto", "tcp")
    tree = TransferTree(
        num_bytes=copy_bytes,
        trainer_bytes_per_s=rates[0],
        sampler_bytes_per_s=rates[1],
        fanout=config.remote_settings.fanout if passed_on else placement.num_samplers,
        offer_s=copy_bytes / (sends * HOST_LINK_BYTES_PER_S),
        hop_s=HOP_S,
        stage_s=copy_bytes / (receives * HOST_LINK_BYTES_PER_S),
    )
    return tree_s(tree, placement.num_samplers), tree


def hosts_of(mesh: Any) -> int:
    """Return the number of hosts, and so of processes, that a mesh's devices belong to."""
    return len({device.process_index for device in mesh.devices.flat})


def tree_s(tree: TransferTree, samplers: int) -> float:
    """Return the seconds from publish until the last sampler has the weights."""
    depth, level, reached = 1, tree.fanout, tree.fanout
    while reached < samplers:
        level *= tree.fanout
        depth, reached = depth + 1, reached + level
    first = tree.trainer_bytes_per_s / min(samplers, tree.fanout)
    later = tree.sampler_bytes_per_s / min(max(1, samplers - tree.fanout), tree.fanout)
    rate = min(first, tree.sampler_bytes_per_s, later if depth > 1 else first)
    return tree.offer_s + tree.num_bytes / rate + depth * tree.hop_s + tree.stage_s
