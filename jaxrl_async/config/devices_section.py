"""Settings of processes, and of the slices of devices. Needs no JAX."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from jaxrl_async.config.section import Count, NonNegative, Positive, Section, check


class DistributedSection(Section):
    """Several processes, one per host, that make one run."""

    detect: bool = True
    """If nothing below is set, read a TPU pod's or GKE's settings from the environment."""
    coordinator: str | None = Field(None, pattern=r"^\S+:\d{1,5}$")
    """HOST:PORT of process 0; set together with the next two fields or not at all."""
    num_processes: Positive | None = None
    """Number of processes in the run."""
    process_id: NonNegative | None = None
    """Index of this process, from 0."""
    wait_s: Positive = 300
    """Timeout for the other processes to join, seconds."""
    heartbeat_s: Positive = 100
    """Silence of one process after which the others exit, seconds."""


class AxesSection(Section):
    data: Count = 1
    """Devices that hold copies of the weights (data parallel)."""
    fsdp: Count = 1
    """Devices that shard each weight and the optimizer state."""
    expert: Count = 1
    """Devices that shard experts and rows (expert parallel); mixture-of-experts models only."""
    context: Count = 1
    """Devices that shard the length of each row (context parallel); trainer only."""
    tensor: Count = 1
    """Devices that shard each layer's heads and MLP columns (tensor parallel)."""

    @property
    def num_devices(self) -> int:
        """data * fsdp * expert * context * tensor."""
        return self.row_shards * self.context * self.tensor

    @property
    def row_shards(self) -> int:
        """Devices that the rows of a micro-batch are divided over: data * fsdp * expert."""
        return self.data * self.fsdp * self.expert

    @property
    def row_parts(self) -> int:
        """Equal parts that a row divides into: two for each device of the context axis."""
        return 2 * self.context if self.context > 1 else 1


class MeshSection(Section):
    trainer: AxesSection = AxesSection()
    """Shape of the trainer's slice."""
    sampler: AxesSection = AxesSection()
    """Shape of one sampler's slice: tensor and expert divide its work, other axes only repeat
    it."""
    samplers: Count = 1
    """Independent samplers, each on its own slice; for small models several beat one wide
    sampler."""
    colocated: bool = False
    """Run trainer and sampler alternately on the same devices, still asynchronously; with several
    processes, each has one sampler."""
    samplers_in: Literal["threads", "processes", "external"] = "threads"
    """Where the samplers run: in threads of this process, in processes that the run starts on this
    machine, or in external processes that join by `python -m jaxrl_async.sample --join
    HOST:PORT`."""

    @property
    def remote(self) -> bool:
        """Whether the samplers run in separate processes: the mesh is then only the trainer's."""
        return self.samplers_in != "threads"

    @property
    def num_devices(self) -> int:
        """Devices that the run's own process needs: the larger slice if colocated, else all slices;
        only the trainer's if the samplers run in separate processes."""
        if self.remote:
            return self.trainer.num_devices
        both = (self.trainer.num_devices, self.samplers * self.sampler.num_devices)
        return max(both) if self.colocated else sum(both)

    @property
    def without_samplers(self) -> "MeshSection":
        """Only the trainer's slice, for jobs without a sampler."""
        return MeshSection(trainer=self.trainer, samplers_in="external")

    @check
    def a_sampler_has_no_context_axis(self) -> Iterator[str]:
        """Require no context axis in a sampler: decoding has no sequence length to divide."""
        context = self.sampler.context
        if context > 1:
            yield (
                f"mesh.sampler.context ({context}) must be 1: a sampler decodes one token of each "
                "sequence at a time and has no length to divide. Use mesh.sampler.tensor, or "
                "mesh.samplers for several samplers."
            )

    @check
    def one_sampler_is_colocated(self) -> Iterator[str]:
        """Require at most one sampler on the trainer's devices, in each process."""
        if self.colocated and self.samplers > 1:
            yield (
                f"mesh.colocated puts one sampler on the trainer's devices of each process; "
                f"mesh.samplers is {self.samplers}. Set mesh.samplers=1 or mesh.colocated=false."
            )

    @check
    def colocated_samplers_are_threads(self) -> Iterator[str]:
        """Require samplers on the trainer's devices to be threads of its process."""
        if self.colocated and self.remote:
            yield (
                f"mesh.colocated puts the sampler on the trainer's devices, and mesh.samplers_in="
                f"{self.samplers_in} gives it separate devices. Set one of them to its default."
            )
