"""Rules about samplers in separate processes (mesh.samplers_in, remote). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config

rule = RuleBook()


@rule("mesh")
def colocated_samplers_are_threads(config: Config) -> Iterator[str]:
    """Require samplers on the trainer's devices to be threads of its process."""
    mesh = config.mesh
    if mesh.colocated and mesh.remote:
        yield (
            f"mesh.colocated puts the sampler on the trainer's devices, and mesh.samplers_in="
            f"{mesh.samplers_in} gives it separate devices. Set one of them to its default."
        )


@rule(job="rl")
def a_replay_has_its_samplers_in_threads(config: Config) -> Iterator[str]:
    """Require the samplers of a replay in this process: other processes are not recorded."""
    if config.run.replay_schedule is not None and config.mesh.remote:
        yield (
            f"run.replay_schedule prescribes the order of each sampler's events, which samplers of "
            f"mesh.samplers_in={config.mesh.samplers_in} cannot follow. Set it to threads; at "
            "staleness.max_staleness=0 the numbers are the same, bit for bit."
        )


@rule("remote")
def the_folder_transfer_has_a_folder(config: Config) -> Iterator[str]:
    """Require a folder exactly for transfer=folder."""
    remote = config.remote
    if (remote.transfer == "folder") != (remote.folder is not None):
        yield (
            f"remote.folder ({remote.folder}) and remote.transfer ({remote.transfer}) do not match:"
            " set a folder that all machines see exactly with transfer=folder."
        )


@rule("remote")
def weights_have_a_port_of_their_own(config: Config) -> Iterator[str]:
    """Require different ports for weights and for requests."""
    remote = config.remote
    if remote.data_port and remote.listen.endswith(f":{remote.data_port}"):
        yield (
            f"remote.data_port ({remote.data_port}) is the port of remote.listen ({remote.listen}),"
            " where samplers join: weights need a different port. Change one of them."
        )


@rule("remote")
def encryption_reaches_the_weights(config: Config) -> Iterator[str]:
    """Refuse certificates with a transfer that cannot use them."""
    remote = config.remote
    if remote.transfer == "device" and remote.tls_certificate is not None:
        yield (
            "remote.transfer=device moves the weights through JAX's own server, which does not "
            "encrypt, and remote.tls_certificate asks for encryption. Set remote.transfer=tcp, or "
            "remove remote.tls_certificate, tls_key and tls_authority."
        )


@rule("remote")
def tls_has_all_its_files(config: Config) -> Iterator[str]:
    """Require all three files for encrypted connections, or none."""
    files = {
        f"remote.tls_{name}": getattr(config.remote, f"tls_{name}")
        for name in ("certificate", "key", "authority")
    }
    missing = [key for key, file in files.items() if file is None]
    if missing and len(missing) < len(files):
        yield (
            f"{' and '.join(missing)} must be set, too: encrypted connections need a certificate, "
            "its key, and the authority of the other side."
        )


@rule(job="rl")
def the_least_number_of_samplers_is_started(config: Config) -> Iterator[str]:
    """Require the run to start as many processes as it waits for."""
    mesh, least = config.mesh, config.remote.min_samplers
    if mesh.samplers_in == "processes" and least > mesh.samplers:
        yield (
            f"remote.min_samplers ({least}) is more than the {mesh.samplers} processes that "
            "mesh.samplers starts: the run would never begin. Lower it, or raise mesh.samplers."
        )
