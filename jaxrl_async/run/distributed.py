"""Several processes, one per host, that form one JAX: their ranks, and how they find each other.

    distributed.* of the configuration     all three of coordinator, num_processes, process_id
    else JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
    else our manifests for GKE             JOBSET_*, JOB_COMPLETION_INDEX (launch/gke.py)
    else GKE and Cloud TPU                 TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, MEGASCALE_*
    else the metadata server of a TPU VM   the same facts
    else one process: nothing is started

The first source with any value is used and must be complete; later ones must not contradict it.
"""

import importlib
import logging
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxrl_async.config.processes import run_devices_per_process
from jaxrl_async.config.schema import Config, DistributedSection
from jaxrl_async.errors import ConfigError, MeshError
from jaxrl_async.host import has_tpu

PORT = 8482
"""Port of JAX's coordinator if the environment names only its host."""
METADATA_S = 5.0
"""Timeout of the metadata server, seconds."""
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRank:
    """This process among all processes of the run."""

    coordinator: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int  # from 0
    source: str  # where it was read, for people


RETRY_S = 0.5
"""Wait between two attempts to reach the coordinator, seconds."""

Ask = Callable[[str], str | None]
"""Name of an attribute of the host -> its text; None if there is no metadata server."""


def join_processes(config: Config) -> Config:
    """Start jax.distributed if several processes make the run; call it before JAX's first use.

    Returns the configuration with the number of processes. Raises ConfigError if the settings are
    partial or contradictory, MeshError if the other processes do not start.
    """
    rank = find(config.distributed, os.environ, ask_metadata if has_tpu() else _no_metadata)
    if rank is None or rank.num_processes == 1:
        log.info("one process")
        return config
    section = config.distributed
    label = f"process {rank.process_id} of {rank.num_processes}, found in {rank.source}"
    meeting = f"meeting the others at {rank.coordinator} within {section.wait_s} s"
    print(f"{label}: {meeting}", file=sys.stderr, flush=True)
    try:
        run_devices_per_process(config, rank.num_processes)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    _start_jax(rank, section)
    known = section.model_copy(update={"num_processes": rank.num_processes})
    return config.model_copy(update={"distributed": known})


def join_sampler_processes(section: DistributedSection) -> ProcessRank | None:
    """Start jax.distributed if several processes make one sampler; call it before JAX's first use.

    Returns this process's rank; None: it is the only one. Raises as join_processes does.
    """
    rank = find(section, os.environ, ask_metadata if has_tpu() else _no_metadata)
    if rank is None or rank.num_processes == 1:
        return None
    label = f"process {rank.process_id} of a sampler of {rank.num_processes}"
    print(f"{label}, found in {rank.source}", file=sys.stderr, flush=True)
    _start_jax(rank, section)
    return rank


def _start_jax(rank: ProcessRank, section: DistributedSection) -> None:
    """Connect to the other processes. Raises MeshError if process 0 does not start."""
    jax = importlib.import_module("jax")  # late: wrong settings are reported without its import
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # without effect elsewhere
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from Stop
    if rank.process_id:
        _wait_for(rank, section.wait_s)
    jax.distributed.initialize(  # exits the process if the others do not start
        rank.coordinator,
        rank.num_processes,
        rank.process_id,
        initialization_timeout=section.wait_s,
        heartbeat_timeout_seconds=section.heartbeat_s,
    )


def _wait_for(rank: ProcessRank, wait_s: float) -> None:
    """Wait until a process listens at the coordinator's address. Raises MeshError."""
    host, _, port = rank.coordinator.rpartition(":")
    end, error = time.monotonic() + wait_s, ""
    while time.monotonic() < end:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=wait_s).close()
            return
        except OSError as failure:
            error = str(failure)
            time.sleep(RETRY_S)
    raise MeshError(
        f"process {rank.process_id} of {rank.num_processes}, found in {rank.source}: no "
        f"answer at the coordinator {rank.coordinator} within distributed.wait_s ({wait_s} s): "
        f"{error}. Check that process 0 was started, and that the port is open between the "
        "hosts."
    )


def is_shared() -> bool:
    """Return whether this process is one of several, without importing JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and bool(jax.distributed.is_initialized())


def leave(code: int) -> int:
    """Return the exit code; exit here immediately if this one of several processes failed.

    An orderly exit would wait for the others, which wait for this one.
    """
    if code and is_shared():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def find(section: DistributedSection, env: Mapping[str, str], ask: Ask) -> ProcessRank | None:
    """Find this process's rank; None if no source names several processes. Raises ConfigError."""
    ranks = [from_settings(section)]
    if section.detect:
        ranks += [from_jax(env), from_jobset(env)]
        ranks.append(from_tpu(env.get, "the environment of a TPU pod or GKE"))
        if ranks[-1] is None and not env.get("TPU_SKIP_MDS_QUERY"):
            ranks.append(from_tpu(_of_tpu_vm(ask), "the TPU VM's metadata"))
    named = [rank for rank in ranks if rank is not None]
    for other in named[1:]:
        _check_same(named[0], other)
    return named[0] if named else None


def from_settings(section: DistributedSection) -> ProcessRank | None:
    """Read the rank from the configuration."""
    return _complete(
        {
            "distributed.coordinator": section.coordinator,
            "distributed.num_processes": section.num_processes,
            "distributed.process_id": section.process_id,
        },
        "the configuration",
    )


def from_jax(env: Mapping[str, str]) -> ProcessRank | None:
    """Read the rank from JAX's own environment variables."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, *numbers = names
    values: dict[str, str | int | None] = {address: env.get(address) or None}
    values |= {name: _number(env, name) for name in numbers}
    return _complete(values, "JAX_* of the environment")


def from_jobset(env: Mapping[str, str]) -> ProcessRank | None:
    """Read the rank from the variables of launch/gke.py: process = Job * pods per Job + pod."""
    coordinator = env.get("JOBSET_COORDINATOR")
    if not coordinator:
        return None
    names = ("JOBSET_JOBS", "JOBSET_PODS_PER_JOB", "JOBSET_JOB_INDEX", "JOB_COMPLETION_INDEX")
    numbers = [_number(env, name) for name in names]
    missing = [name for name, number in zip(names, numbers, strict=True) if number is None]
    if missing:
        raise ConfigError(
            f"JOBSET_COORDINATOR is set in the environment, but not {' and '.join(missing)}. Set "
            "them all, as the manifests of jaxrl_async.launch.gke do, or none."
        )
    jobs, pods, job, pod = (int(number or 0) for number in numbers)
    return _check(
        ProcessRank(
            coordinator=f"{coordinator}:{PORT}",
            num_processes=jobs * pods,
            process_id=job * pods + pod,
            source="the JobSet's environment",
        )
    )


def from_tpu(get: Callable[[str], str | None], where: str) -> ProcessRank | None:
    """Read the rank from the variables of one or several TPU slices."""
    hosts = [h for h in (get("TPU_WORKER_HOSTNAMES") or "").split(",") if h]
    if not hosts:
        return None
    slices = _number_of(get("MEGASCALE_NUM_SLICES"), "MEGASCALE_NUM_SLICES", where)
    slice_id = _number_of(get("MEGASCALE_SLICE_ID"), "MEGASCALE_SLICE_ID", where)
    address = get("MEGASCALE_COORDINATOR_ADDRESS")
    given = [slices is not None, slice_id is not None, bool(address)]
    if any(given) and not all(given):
        raise ConfigError(
            f"{where} names several slices, but not all of MEGASCALE_NUM_SLICES, "
            "MEGASCALE_SLICE_ID and MEGASCALE_COORDINATOR_ADDRESS are set. Set them together, or "
            "none of them for one slice."
        )
    worker = _number_of(get("TPU_WORKER_ID"), "TPU_WORKER_ID", where)
    if worker is None and len(hosts) == 1:
        worker = 0
    if worker is None:
        raise ConfigError(
            f"{where} names {len(hosts)} hosts in TPU_WORKER_HOSTNAMES, but TPU_WORKER_ID, the "
            "index of this one, is missing. Set it, or set distributed.coordinator, num_processes "
            "and process_id."
        )
    count = len(hosts) * (slices or 1)
    return _check(
        ProcessRank(
            coordinator=f"{_host_of(address or hosts[0])}:{PORT}",
            num_processes=count,
            process_id=(slice_id or 0) * len(hosts) + worker,
            source=where,
        )
    )


def _host_of(address: str) -> str:
    """Return the host of HOST, HOST:PORT, [IPv6] or [IPv6]:PORT, IPv6 in brackets."""
    if address.startswith("["):
        return address.partition("]")[0] + "]"
    return f"[{address}]" if address.count(":") > 1 else address.partition(":")[0]


def ask_metadata(name: str) -> str | None:
    """Read an attribute of this TPU VM; None, with a warning, if the server does not answer."""
    request = urllib.request.Request(METADATA + name, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=METADATA_S) as answer:
            text: str = answer.read().decode()
            return text
    except OSError as error:
        log.warning("no answer from the metadata server on %s: %s", name, error)
        return None


def _no_metadata(name: str) -> None:
    return None


def _of_tpu_vm(ask: Ask) -> Callable[[str], str | None]:
    """Return a pod's variables from a TPU VM's metadata, reading each attribute once."""
    endpoints = ask("worker-network-endpoints")
    if not endpoints:
        return _no_metadata
    parts = [endpoint.split(":") for endpoint in endpoints.split(",")]
    lines = [line.partition(":") for line in (ask("tpu-env") or "").splitlines()]
    known: dict[str, str | None] = {
        "TPU_WORKER_HOSTNAMES": ",".join(p[2] if len(p) == 3 else p[0] for p in parts),
        "TPU_WORKER_ID": ask("agent-worker-number"),
        **{
            key.strip(): value.strip().strip("'")
            for key, _, value in lines
            if key.strip().startswith("MEGASCALE_")
        },
    }
    return known.get


def _complete(values: Mapping[str, str | int | None], where: str) -> ProcessRank | None:
    """Return the rank if all three values are given, None if none is; else raise ConfigError."""
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        given = [name for name in values if name not in missing]
        raise ConfigError(
            f"{where} gives {' and '.join(given)}, but not {' and '.join(missing)}. Several "
            "processes need all three; one process needs none."
        )
    coordinator, num_processes, process_id = values.values()
    return _check(
        ProcessRank(
            coordinator=str(coordinator),
            num_processes=int(num_processes or 0),
            process_id=int(process_id or 0),
            source=where,
        )
    )


def _check(rank: ProcessRank) -> ProcessRank:
    if not 0 <= rank.process_id < rank.num_processes:
        raise ConfigError(
            f"{rank.source}: process {rank.process_id} is not one of {rank.num_processes}; "
            f"they are numbered from 0 to {rank.num_processes - 1}."
        )
    if not rank.coordinator.rpartition(":")[2].isdigit():
        raise ConfigError(
            f"{rank.source}: the coordinator {rank.coordinator!r} has no port. Give HOST:PORT."
        )
    return rank


def _check_same(first: ProcessRank, other: ProcessRank) -> None:
    """Raise ConfigError if two sources disagree on the number of processes or on this one's index.

    Their addresses may differ: a host has several.
    """
    used, second = ((p.process_id, p.num_processes) for p in (first, other))
    if used != second and other.num_processes > 1:
        raise ConfigError(
            f"{first.source} says process {used[0]} of {used[1]}, and {other.source} says "
            f"process {second[0]} of {second[1]}. Correct one of them, or set "
            "distributed.detect=false to use the configuration alone."
        )


def _number(env: Mapping[str, str], name: str) -> int | None:
    return _number_of(env.get(name), name, "the environment")


def _number_of(text: str | None, name: str, where: str) -> int | None:
    if not text:
        return None
    if not text.strip().isdigit():
        raise ConfigError(f"{where}: {name}={text!r} must be a whole number.")
    return int(text)


def main() -> int:
    """Print the number of processes of a run here: python -m jaxrl_async.run.distributed."""
    try:
        rank = find(DistributedSection(), os.environ, ask_metadata if has_tpu() else _no_metadata)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    print(rank.num_processes if rank else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
