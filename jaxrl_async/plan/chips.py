"""TPU chips by generation, and their slices. Public numbers.

Peak, HBM and ICI are the "system architecture" tables of cloud.google.com/tpu/docs (v4, v5e, v5p,
v6e, tpu7x; read November 2026). ICI is given there in both directions, all links of a chip
together; v4's is that of the scaling book (jax-ml.github.io/scaling-book/tpus), 45 GB/s a link and
direction. DCN is a pod's, or a host's NICs', by its chips.

`usable_bytes` is what libtpu's compiler lets a program have ("exceeds available HBM (15.75G)"),
a little less than the chip has. `clock_hz` turns the compiler's cycles into seconds: the peak,
divided by the products that the matrix units make in a cycle.
"""

from dataclasses import dataclass
from math import ceil, log2, prod

from jaxrl_async.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One generation. Rates are per second and per JAX device (a tpu7x chip is two devices)."""

    generation: str
    devices: int  # per chip
    peak_flops: float  # bf16
    usable_bytes: float  # HBM that programs may have
    hbm_bytes_per_s: float
    ici_bytes_per_s: float  # both directions, all links
    dcn_bytes_per_s: float  # out of the slice
    clock_hz: float
    torus_dims: int
    wrap_side: int  # a side of the slice this long, or a multiple, is a ring
    megacore: bool  # two cores are one device: an option of the compiler


def _chip(
    generation: str,
    tflops: float,
    usable_gib: float,
    hbm_gb: float,
    ici_gb: float,
    dcn_gb: float,
    clock_mhz: float,
    *,
    devices: int = 1,
    dims: int = 3,
    megacore: bool = False,
) -> Chip:
    """Make a Chip; usable_gib is per device, all else per chip."""
    return Chip(
        generation=generation,
        devices=devices,
        peak_flops=tflops * 1e12 / devices,
        usable_bytes=usable_gib * GIB,
        hbm_bytes_per_s=hbm_gb * 1e9 / devices,
        ici_bytes_per_s=ici_gb * 1e9 / devices,
        dcn_bytes_per_s=dcn_gb * 1e9 / devices,
        clock_hz=clock_mhz * 1e6,
        torus_dims=dims,
        wrap_side=16 if dims == 2 else 4,
        megacore=megacore,
    )


CHIPS = {
    chip.generation: chip
    for chip in (
        _chip("v4", 275, 30.75, 1200, 540, 3.1, 1050, megacore=True),
        _chip("v5e", 197, 15.75, 819, 400, 3.1, 1500, dims=2),
        _chip("v5p", 459, 95.74, 2765, 1200, 6.2, 1750),
        _chip("v6e", 918, 31.25, 1638, 800, 12.5, 1750, dims=2),
        _chip("tpu7x", 2307, 94.75, 7380, 1200, 12.5, 2200, devices=2),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A TPU slice: a box of chips of one generation; or a part of one, for one of its roles; or
    several such slices, joined by the data center network."""

    chip: Chip
    shape: tuple[int, ...]  # chips on each side
    part: str = ""  # the slice that it is a part of, and which of its devices; "": it is whole
    count: int = 1  # slices of this shape

    @property
    def num_chips(self) -> int:
        """Number of chips, of all slices together."""
        return prod(self.shape) * self.count

    @property
    def num_devices(self) -> int:
        """Number of JAX devices."""
        return self.num_chips * self.chip.devices

    @property
    def name(self) -> str:
        """The usual name: v5e-64, or 2 x v5e-64."""
        return f"{self._times}{self.chip.generation}-{prod(self.shape)}"

    @property
    def topology(self) -> str:
        """The name for libtpu: v5e:8x8; of a part, which devices of which slice."""
        return self.part or f"{self._times}{self.chip.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def _times(self) -> str:
        return f"{self.count} x " if self.count > 1 else ""

    def link_share(self, group: int) -> float:
        """Return the share of a chip's links that a collective among `group` devices can use.

        These are the sides of the slice that such a group spans; one that is no ring counts half.
        """
        sides = len(self.sides)
        within = self.num_devices // self.count
        spanned = max(1, ceil(log2(max(group, 2)) / log2(max(within, 2)) * sides))
        rings = [1.0 if side % self.chip.wrap_side == 0 else 0.5 for side in self.sides]
        return sum(sorted(rings)[:spanned]) / self.chip.torus_dims

    @property
    def sides(self) -> tuple[int, ...]:
        """The sides longer than one chip; (1,) for a single chip."""
        return tuple(s for s in self.shape if s > 1) or (1,)


def parse_slice(name: str) -> Slice:
    """Parse `v5e-64`, or `v5e:4x16` with an explicit shape. Raises ConfigError.

    The number counts chips (Google Cloud's own names of v4 and v5p slices count TensorCores, two
    per chip).
    """
    chip, sides = _parsed(name)
    return Slice(chip=chip, shape=sides if len(sides) > 1 else _box(chip, sides[0], name))


def parse_chips(name: str) -> tuple[Chip, int]:
    """Parse any number of chips, which need not be one slice. Raises ConfigError."""
    chip, sides = _parsed(name)
    return chip, prod(sides)


def _parsed(name: str) -> tuple[Chip, tuple[int, ...]]:
    generation, sep, size = name.replace(":", "-", 1).partition("-")
    chip = CHIPS.get({"v7x": "tpu7x", "v5litepod": "v5e"}.get(generation, generation))
    if chip is None or not sep:
        raise ConfigError(
            f"unknown topology {name!r}: give GENERATION-CHIPS, such as v5e-64, or "
            f"GENERATION:SHAPE, such as v5e:8x8; generations are {', '.join(CHIPS)}."
        )
    sides = size.split("x")
    if not all(s.isdecimal() and 0 < int(s) <= 2**16 for s in sides):
        raise ConfigError(
            f"unknown topology {name!r}: {size!r} is neither a number of chips nor a shape such as "
            f"{'4x4x8' if chip.torus_dims == 3 else '8x8'}."
        )
    if len(sides) not in (1, chip.torus_dims):
        raise ConfigError(
            f"topology {name!r} has {len(sides)} sides, and {chip.generation} slices have "
            f"{chip.torus_dims}: give {chip.generation}-{prod(map(int, sides))}, or a shape such "
            f"as {chip.generation}:{'4x4x4' if chip.torus_dims == 3 else '4x4'}."
        )
    return chip, tuple(map(int, sides))


def _box(chip: Chip, count: int, name: str) -> tuple[int, ...]:
    """Return the most cubic box of powers of two that cloud.google.com/tpu/docs lists."""
    largest = 256 if chip.torus_dims == 2 else 4096
    if count == 2:
        raise ConfigError(
            f"topology {name!r}: there is no slice of 2 chips, the compiler describes hosts of 4. "
            f"Take {chip.generation}-1 or {chip.generation}-4."
        )
    if count & (count - 1) or count > largest:
        near = min(largest, 1 << (count.bit_length() - 1))
        raise ConfigError(
            f"topology {name!r}: {chip.generation} slices have a power of two of chips, {largest} "
            f"at most; the next below is {chip.generation}-{near}. Other shapes: "
            f"{chip.generation}:{'4x4x12' if chip.torus_dims == 3 else '4x16'}."
        )
    sides = [1] * chip.torus_dims
    while prod(sides) < count:
        sides[sides.index(min(sides))] *= 2
    return tuple(sides) if 1 in sides[:-1] or sides[-1] == 1 else tuple(sorted(sides))


def is_slice(chip: Chip, count: int) -> bool:
    """Return whether so many chips of this generation can be one slice."""
    try:
        parse_slice(f"{chip.generation}-{count}")
    except ConfigError:
        return False
    return True
