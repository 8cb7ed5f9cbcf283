"""The hosts and devices that a role needs of a cluster."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxrl_async.errors import ConfigError
from jaxrl_async.launch.gke_slices import Tpu

FORMS = (
    "cpu:CORES or gpu:COUNT, with xHOSTS if there are several (gpu:8x2: 8 on each of 2 hosts), or "
    "tpu:GENERATION:TOPOLOGY such as tpu:v6e:4x4"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hosts of a trainer, or of one sampler."""

    kind: Literal["cpu", "gpu", "tpu"]
    per_host: int  # cores, GPUs or chips
    hosts: int = 1
    tpu: Tpu | None = None  # the slice, of kind tpu

    @property
    def devices(self) -> int | None:
        """JAX devices of all hosts; None: as many as requested from JAX (CPU)."""
        if self.kind == "cpu":
            return None
        each = self.tpu.host_devices if self.tpu is not None else self.per_host
        return each * self.hosts

    def __str__(self) -> str:
        """Return the form that parse_hardware reads."""
        if self.tpu is not None:
            return f"tpu:{self.tpu.generation}:{self.tpu.topology}"
        hosts = f"x{self.hosts}" if self.hosts > 1 else ""
        return f"{self.kind}:{self.per_host}{hosts}"


def parse_hardware(text: str) -> Hardware:
    """Parse cpu:2, gpu:8, gpu:8x2 (two hosts) or tpu:v6e:4x4. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    if kind == "tpu":
        generation, _, topology = rest.partition(":")
        try:
            tpu = Tpu.model_validate({"generation": generation, "topology": topology})
        except ValueError as error:
            reason = str(error).splitlines()[-2 if "\n" in str(error) else 0].strip()
            raise ConfigError(f"hardware {text!r}: {reason} Give {FORMS}.") from None
        return Hardware(kind="tpu", per_host=tpu.host_chips, hosts=tpu.hosts, tpu=tpu)
    numbers = rest.split("x")
    known = kind in ("cpu", "gpu") and len(numbers) <= 2
    if not known or not all(n.isdecimal() and 0 < int(n) <= 65_536 for n in numbers):
        raise ConfigError(f"unknown hardware {text!r}: give {FORMS}.")
    counts = [int(n) for n in numbers]
    return Hardware(
        kind="cpu" if kind == "cpu" else "gpu", per_host=counts[0], hosts=math.prod(counts[1:])
    )


def parse_range(text: str) -> tuple[int, int]:
    """Parse LEAST:MOST, or one number for both. Raises ConfigError."""
    parts = text.split(":")
    if len(parts) > 2 or not all(p.isdecimal() and 0 < int(p) <= 65_536 for p in parts):
        raise ConfigError(f"--samplers {text}: give LEAST:MOST, such as 2:8, or one number.")
    least, most = int(parts[0]), int(parts[-1])
    if least > most:
        raise ConfigError(
            f"--samplers {text}: the minimum ({least}) is above the maximum ({most})."
        )
    return least, most
