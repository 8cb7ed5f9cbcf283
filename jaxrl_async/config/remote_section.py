"""Settings of samplers in separate processes: how they join, how weights travel. Needs no JAX."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jaxrl_async.config.section import Count, Positive, ReadWith, Section, check


class RemoteSection(Section):
    """Samplers in separate processes (mesh.samplers_in: processes or external)."""

    listen: str = Field("127.0.0.1:0", pattern=r"^\S+:\d{1,5}$")
    """HOST:PORT at which the trainer waits for samplers; port 0: any free one. Addresses other than
    loopback need a shared secret in JAXRL_ASYNC_SECRET."""
    advertise: str | None = None
    """Host name or address under which samplers reach the trainer; null: the host of `listen`, or
    this machine's name if that is 0.0.0.0."""
    data_port: Annotated[int, ReadWith("transfer", ("auto", "tcp", "device"))] = Field(
        0, ge=0, le=65535
    )
    """TCP port of weights at the trainer and at the samplers that forward them; 0: any free one.
    Each sampler of a machine takes the next free port."""
    min_samplers: Count = 1
    """Samplers that must have joined before the run begins; with mesh.samplers_in=processes all
    must."""
    wait_s: float = Field(600.0, gt=0)
    """Maximum time without any sampler, seconds; then the run saves and ends."""
    silence_s: float = Field(20.0, gt=0)
    """Time without a message after which a connection counts as lost, seconds."""
    transfer: Literal["auto", "shared_memory", "tcp", "device", "folder"] = "auto"
    """How weights reach the samplers: shared_memory, tcp, device (jax.experimental.transfer) or
    folder (remote.folder). auto: shared memory on the trainer's machine, else TCP, or device
    between accelerators where it is faster."""
    folder: str | None = None
    """Folder or mounted bucket that all machines see, for transfer=folder."""
    fanout: Count = 2
    """Number of samplers to which the trainer, and each sampler, sends the weights directly; they
    forward them."""
    transfer_timeout_s: float = Field(300.0, gt=0)
    """Timeout of one transfer of the weights to one sampler, seconds; then it is retried."""
    max_message_mib: Positive = 256
    """Maximum size of a message from another process, MiB."""
    tls_certificate: str | None = None
    """PEM file of this side's certificate; null: no encryption."""
    tls_key: str | None = None
    """PEM file of its private key."""
    tls_authority: str | None = None
    """PEM file of the authority that signed the other side's certificate."""

    @check
    def the_folder_transfer_has_a_folder(self) -> Iterator[str]:
        """Require a folder exactly for transfer=folder."""
        if (self.transfer == "folder") != (self.folder is not None):
            yield (
                f"remote.folder ({self.folder}) and remote.transfer ({self.transfer}) do not match:"
                " set a folder that all machines see exactly with transfer=folder."
            )

    @check
    def weights_have_a_port_of_their_own(self) -> Iterator[str]:
        """Require different ports for weights and for requests."""
        if self.data_port and self.listen.endswith(f":{self.data_port}"):
            yield (
                f"remote.data_port ({self.data_port}) is the port of remote.listen ({self.listen}),"
                " where samplers join: weights need a different port. Change one of them."
            )

    @check
    def encryption_reaches_the_weights(self) -> Iterator[str]:
        """Refuse certificates with a transfer that cannot use them."""
        if self.transfer == "device" and self.tls_certificate is not None:
            yield (
                "remote.transfer=device moves the weights through JAX's own server, which does not "
                "encrypt, and remote.tls_certificate asks for encryption. Set remote.transfer=tcp, "
                "or remove remote.tls_certificate, tls_key and tls_authority."
            )

    @check
    def tls_has_all_its_files(self) -> Iterator[str]:
        """Require all three files for encrypted connections, or none."""
        files = {
            f"remote.tls_{name}": getattr(self, f"tls_{name}")
            for name in ("certificate", "key", "authority")
        }
        missing = [key for key, file in files.items() if file is None]
        if missing and len(missing) < len(files):
            yield (
                f"{' and '.join(missing)} must be set, too: encrypted connections need a "
                "certificate, its key, and the authority of the other side."
            )
