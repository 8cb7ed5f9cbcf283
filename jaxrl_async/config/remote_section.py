"""Settings of samplers in processes of their own: how they join, what travels how. Needs no JAX."""

from typing import Literal

from pydantic import Field

from jaxrl_async.config.section import Count, Positive, Section


class RemoteSection(Section):
    """Samplers in processes of their own (mesh.samplers_in: processes or external)."""

    listen: str = Field("127.0.0.1:0", pattern=r"^\S+:\d{1,5}$")
    """HOST:PORT at which the trainer waits for samplers; port 0 takes any free one. Any address but
    loopback needs a shared secret in the environment variable JAXRL_ASYNC_SECRET; on loopback the
    trainer makes one, which samplers of the same user find."""
    advertise: str | None = None
    """Host name or address under which samplers reach the trainer; null: that of `listen`, or this
    machine's name if it is 0.0.0.0."""
    data_port: int = Field(0, ge=0, le=65535)
    """TCP port at which the trainer hands out weights, at the host of `listen`, and samplers pass
    them on; 0 takes any free one. Of samplers that share a machine each takes the next free one."""
    min_samplers: Count = 1
    """Samplers that must have joined before the run begins; of those that it starts itself
    (mesh.samplers_in: processes), all must."""
    wait_s: float = Field(600.0, gt=0)
    """Longest time without any sampler, seconds; then the run saves and ends, and can be
    resumed."""
    silence_s: float = Field(20.0, gt=0)
    """Silence after which the other side of a connection counts as lost, seconds."""
    transfer: Literal["auto", "shared_memory", "tcp", "device", "folder"] = "auto"
    """How weights reach the samplers: through shared memory (on one machine), streams over TCP,
    jax.experimental.transfer (device), or files in remote.folder. auto: shared memory on the
    trainer's machine, TCP elsewhere; between accelerators of samplers elsewhere, without
    certificates, device and TCP are each tried twice, and the faster is kept."""
    folder: str | None = None
    """Folder or mounted bucket that all machines see, for transfer=folder."""
    fanout: Count = 2
    """Samplers to which the trainer, and each sampler, sends the weights itself; those pass them
    on."""
    transfer_timeout_s: float = Field(300.0, gt=0)
    """Longest time for one transfer of the weights to one sampler, seconds; then it begins
    again. A transfer from device to device has half of it, and TCP the rest."""
    max_message_mib: Positive = 256
    """Largest message that is accepted from another process, MiB."""
    tls_certificate: str | None = None
    """PEM file of this side's certificate; null: connections are not encrypted."""
    tls_key: str | None = None
    """PEM file of its private key."""
    tls_authority: str | None = None
    """PEM file of the authority that signed the other side's certificate."""
