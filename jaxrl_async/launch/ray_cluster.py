"""Hosts of a Ray cluster: placement groups, and an actor on each host. The only module that uses
ray.

Ray finds the hosts and reports which have died; each actor runs its command as a separate process
(launch/host_process.py). Tested with ray 2.60, in which TPU slices are alpha.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_async.errors import extra_module
from jaxrl_async.launch.hardware import Hardware
from jaxrl_async.launch.host_process import HostProcess
from jaxrl_async.launch.supervisor import LOST, HostTask

CALL_S = 60.0
"""Timeout of an actor's answer, seconds; after it, the host counts as lost."""
END_S = 15.0
"""Time that processes have to end when their hosts are released, seconds."""
HEAD_S = 2.0
"""Timeout of one attempt to find a free TPU slice, seconds."""

log = logging.getLogger(__name__)


def ray_api() -> Any:
    """Import ray. Raises MissingExtraError."""
    return extra_module("ray", "ray", "jaxrl_async.launch.ray needs ray")


class RayCluster:
    """A Ray cluster, joined by this process: Cluster of launch/supervisor.py."""

    def __init__(self, address: str | None, folder: str) -> None:
        """Join a cluster, or start one on this machine.

        Args:
            address: auto, HOST:PORT, or local for a new one; None: RAY_ADDRESS, otherwise a cluster
                that runs on this machine, otherwise a new one.
            folder: the commands' working directory, on hosts that have it.

        Raises MissingExtraError; ConnectionError if there is no answer at the address.
        """
        self._folder = folder
        ray_api().init(address=address, include_dashboard=False if address == "local" else None)

    def place(self, hardware: Hardware, name: str) -> "RayGroup":
        """Request the hosts of a group. Does not wait for them."""
        return RayGroup(hardware, name, self._folder)

    def close(self) -> None:
        """Leave the cluster; end it if it was started here."""
        ray_api().shutdown()


class RayGroup:
    """The processes of a trainer or of one sampler: Group of launch/supervisor.py."""

    def __init__(self, hardware: Hardware, name: str, folder: str) -> None:
        """Request the hosts."""
        self._hardware, self._name, self._folder = hardware, name, folder
        self._slice: Any = None  # SlicePlacementGroup, for TPUs
        self._placement: Any = None
        self._ready: Any = None  # Ray's answer that the hosts are reserved; requested once
        self._actors: list[Any] = []  # in the order of the hosts
        self._hosts: list[str] = []  # their addresses
        self._ports: list[int] = []  # free on the first host: for joining, and for the coordinator
        self._request_hosts()

    def _request_hosts(self) -> None:
        """Request the hosts from Ray; a TPU slice that is not free is requested again later."""
        hardware = self._hardware
        if hardware.tpu is None:
            kind = "GPU" if hardware.kind == "gpu" else "CPU"
            bundle = {"CPU": 1, **{kind: hardware.per_host}}
            module = importlib.import_module("ray.util.placement_group")
            strategy = "STRICT_SPREAD" if hardware.hosts > 1 else "STRICT_PACK"
            self._placement = module.placement_group([bundle] * hardware.hosts, strategy=strategy)
            return
        module = importlib.import_module("ray.util.tpu")
        version = "v5litepod" if hardware.tpu.generation == "v5e" else hardware.tpu.generation
        try:
            self._slice = module.SlicePlacementGroup(
                topology=hardware.tpu.topology,
                accelerator_version=version.replace("tpu7x", "v7x"),
                chips_per_vm=hardware.per_host,
                head_reservation_timeout_s=HEAD_S,
            )
            self._placement = self._slice.placement_group
        except (TimeoutError, RuntimeError) as error:
            log.info("%s: no slice is free: %s", self._name, error)

    def placed(self) -> bool:
        """Return whether an actor answers on each of the hosts. Does not wait for hosts."""
        ray = ray_api()
        if self._hosts:
            return True  # a restarted trainer listens at the same address
        if self._placement is None:
            self._request_hosts()
        if self._placement is None:
            return False
        if not self._actors:
            if self._ready is None:  # a new request each time would never be ready immediately
                self._ready = self._placement.ready()
            ready, _ = ray.wait([self._ready], timeout=0)
            if not ready:
                return False
            self._actors = [self._actor(n) for n in range(self._hardware.hosts)]
        try:
            hosts = ray.get([actor.describe.remote() for actor in self._actors], timeout=CALL_S)
        except ray.exceptions.RayError as error:
            log.warning("%s: a host was lost while it was set up: %s", self._name, error)
            self._release()
            return False
        order = sorted(range(len(hosts)), key=lambda n: hosts[n][0])
        self._actors = [self._actors[n] for n in order]
        self._hosts = [hosts[n][1] for n in order]
        self._ports = hosts[order[0]][2]
        return True

    def _actor(self, bundle: int) -> Any:
        module = importlib.import_module("ray.util.scheduling_strategies")
        strategy = module.PlacementGroupSchedulingStrategy(
            placement_group=self._placement, placement_group_bundle_index=bundle
        )
        hardware = self._hardware
        cpus = hardware.per_host if hardware.kind == "cpu" else 1
        gpus = hardware.per_host if hardware.kind == "gpu" else 0
        chips = {"TPU": self._slice.devices_per_host} if self._slice is not None else None
        actor_class = ray_api().remote(RayHost).options(
            num_cpus=0 if chips else cpus,
            num_gpus=gpus,
            resources=chips,
            scheduling_strategy=strategy,
            max_restarts=0,  # the supervisor decides
        )  # fmt: skip
        return actor_class.remote(self._folder)

    def address(self) -> str:
        """Return HOST:PORT for the trainer: the first host, and a port that was free on it."""
        return f"{self._hosts[0]}:{self._ports[0]}"

    def start(self, tasks: Callable[[str], Sequence[HostTask]]) -> None:
        """Start a process on each host; a process that still runs there is killed."""
        each = tasks(f"{self._hosts[0]}:{self._ports[1]}")
        calls = [a.start.remote(task) for a, task in zip(self._actors, each, strict=True)]
        try:
            ray_api().get(calls, timeout=CALL_S)
        except ray_api().exceptions.RayError as error:
            log.warning("%s: not started on every host: %s", self._name, error)  # codes() says LOST

    def codes(self) -> tuple[int | None, ...]:
        """Return each process's exit code; None: it is running, LOST: its host is gone."""
        ray = ray_api()
        calls = [actor.code.remote() for actor in self._actors]
        codes: list[int | None] = []
        for call in calls:
            try:
                codes.append(ray.get(call, timeout=CALL_S))
            except ray.exceptions.RayError as error:
                log.info("%s: %s", self._name, error)
                codes.append(LOST)
        return tuple(codes)

    def send(self, number: int) -> None:
        """Send a signal to all running processes."""
        for actor in self._actors:
            actor.send.remote(number)

    def tail(self, path: str) -> bytes:
        """Return the end of a file on the first host; b"" if the file or the host is missing."""
        try:
            piece: bytes = ray_api().get(self._actors[0].tail.remote(path), timeout=CALL_S)
        except ray_api().exceptions.RayError as error:
            log.info("%s: %s", self._name, error)
            return b""
        return piece

    def close(self) -> None:
        """End all processes and release the hosts."""
        ray = ray_api()
        calls = [actor.end.remote(END_S) for actor in self._actors]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=END_S + 5)
        self._release()

    def _release(self) -> None:
        ray = ray_api()
        for actor in self._actors:
            ray.kill(actor)
        if self._slice is not None:
            self._slice.shutdown()
        elif self._placement is not None:
            importlib.import_module("ray.util.placement_group").remove_placement_group(
                self._placement
            )
        self._actors, self._hosts = [], []
        self._slice = self._placement = self._ready = None


class RayHost(HostProcess):
    """A HostProcess that knows where Ray has placed it."""

    def describe(self) -> tuple[int, str, list[int]]:
        """Return this host's index in its TPU slice, its address, and two free ports."""
        address: str = ray_api().util.get_node_ip_address()
        return self.slice_index(), address, [self.free_port(), self.free_port()]
