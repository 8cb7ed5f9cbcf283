"""TPU slices of GKE: generations, topologies, hosts, and the usable parts of a slice."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import model_validator

from jaxrl_async.config.section import Positive, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A TPU generation in GKE's terms, and its slices."""

    accelerator: str  # value of the node label cloud.google.com/gke-tpu-accelerator
    machine: str  # machine type without its number of chips
    max_chips: int  # in a slice
    flat: bool  # topologies have two numbers, not three
    hosts: Mapping[int, tuple[int, int]]  # chips of a host -> its vCPUs, and its memory in GB
    devices: int = 1  # JAX devices of a chip
    divisible: bool = False  # programs may run on a part of a slice of several hosts


GENERATIONS = {
    "v4": Generation(
        accelerator="tpu-v4-podslice",
        machine="ct4p-hightpu",
        hosts={4: (240, 407)},
        max_chips=4096,
        flat=False,
        divisible=True,
    ),
    "v5e": Generation(
        accelerator="tpu-v5-lite-podslice",
        machine="ct5lp-hightpu",
        hosts={1: (24, 48), 4: (112, 192), 8: (224, 384)},
        max_chips=256,
        flat=True,
    ),
    "v5p": Generation(
        accelerator="tpu-v5p-slice",
        machine="ct5p-hightpu",
        hosts={4: (208, 448)},
        max_chips=6144,
        flat=False,
        divisible=True,
    ),
    "v6e": Generation(
        accelerator="tpu-v6e-slice",
        machine="ct6e-standard",
        hosts={1: (44, 176), 4: (180, 720), 8: (180, 1440)},
        max_chips=256,
        flat=True,
    ),
    "tpu7x": Generation(
        accelerator="tpu7x",
        machine="tpu7x-standard",
        hosts={4: (224, 960)},
        max_chips=9216,
        flat=False,
        devices=2,
        divisible=True,
    ),
}
"""divisible: as the TPU compiler of jax 0.10.2 reports, for slices of up to 64 chips. A run checks
it again at its start (mesh.check_collective)."""
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
"""Topologies of v5e and v6e."""
SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
"""Topologies of the other generations whose numbers are not all multiples of 4."""
HOST_CHIPS = {"1x1": (1,), "2x2": (4,), "2x4": (8, 4)}
"""Chips per host, default first; 4 for every other topology."""


REQUESTED_MEMORY = 0.7
"""Share of a host's memory that a pod requests."""


class Tpu(Section):
    generation: Literal["v4", "v5e", "v5p", "v6e", "tpu7x"]
    """Generation of the chips."""
    topology: str
    """Chips of a slice in each direction, such as 4x4 (v5e, v6e) or 2x2x4 (the others)."""
    slices: Positive = 1
    """Number of slices that form one mesh, joined by the data center network."""
    chips_per_host: Positive | None = None
    """Chips per node; null: the default for the topology."""

    @property
    def chips(self) -> int:
        """Chips of one slice: the product of its topology."""
        return math.prod(int(n) for n in self.topology.split("x"))

    @property
    def host_chips(self) -> int:
        """Chips of one host."""
        return self.chips_per_host or HOST_CHIPS.get(self.topology, (4,))[0]

    @property
    def hosts(self) -> int:
        """Hosts of one slice."""
        return self.chips // self.host_chips

    @property
    def host_devices(self) -> int:
        """JAX devices of one host."""
        return self.host_chips * GENERATIONS[self.generation].devices

    @property
    def host_requests(self) -> dict[str, str]:
        """Resources that a pod requests in addition to the chips: half of the host's processors,
        and REQUESTED_MEMORY of its memory; the rest is for the node's own pods and sidecars."""
        cpus, memory_gb = GENERATIONS[self.generation].hosts[self.host_chips]
        return {"cpu": str(cpus // 2), "memory": f"{int(memory_gb * REQUESTED_MEMORY)}G"}

    @property
    def machine_type(self) -> str:
        """Machine type of the node pool."""
        return f"{GENERATIONS[self.generation].machine}-{self.host_chips}t"

    @model_validator(mode="after")
    def _check_slice(self) -> "Tpu":
        generation = GENERATIONS[self.generation]
        if not _is_topology(self.topology, generation):
            raise ValueError(
                f"tpu.topology={self.topology} is not a slice of {self.generation}; these are: "
                + (
                    f"{', '.join(FLAT)}."
                    if generation.flat
                    else f"{', '.join(SMALL)} and AxBxC with multiples of 4, A <= B <= C, up to "
                    f"{generation.max_chips} chips."
                )
            )
        possible = HOST_CHIPS.get(self.topology, (4,))
        if self.host_chips not in possible:
            raise ValueError(
                f"tpu.chips_per_host={self.host_chips}: hosts of a {self.topology} slice of "
                f"{self.generation} have {' or '.join(map(str, possible))} chips. Leave it out for "
                f"{possible[0]}."
            )
        if self.slices > 1 and self.hosts == 1:
            raise ValueError(
                f"tpu.slices={self.slices}: GKE joins only slices of several hosts, and "
                f"{self.topology} has one. Use a larger topology."
            )
        return self


def _is_topology(text: str, generation: Generation) -> bool:
    if generation.flat or text in SMALL:
        return text in (FLAT if generation.flat else SMALL)
    parts = text.split("x")
    if len(parts) != 3 or not all(p.isdigit() for p in parts):
        return False
    numbers = [int(p) for p in parts]
    in_cubes = all(n and n % 4 == 0 for n in numbers) and numbers == sorted(numbers)
    return in_cubes and math.prod(numbers) <= generation.max_chips
