"""TPU chips and NVIDIA cards by generation, and their slices. Published numbers.

TPUs. Peak, HBM and ICI are from the "system architecture" tables of cloud.google.com/tpu/docs (v4,
v5e, v5p, v6e, tpu7x; read November 2026). ICI is given there in both directions, all links of a
chip together; v4's is from the scaling book (jax-ml.github.io/scaling-book/tpus), 45 GB/s a link
and direction. DCN is a pod's, or a host's NICs', divided by its chips.

`usable_bytes` is what libtpu's compiler lets a program have ("exceeds available HBM (15.75G)"),
a little less than the chip has. `clock_hz` converts the compiler's cycles to seconds: the peak
divided by the products that the matrix units compute in a cycle.

NVIDIA cards. Peak (bfloat16, without sparsity), bandwidth and NVLink (both directions, all links of
a card together) are from NVIDIA's data sheets: nvidia.com/data-center/h100 (SXM), h200 (SXM),
a100 (SXM, 80 GB), hgx (B200), l4, which has PCIe 4.0 x16. Memory is what CUDA reports, a little
less than the card has: H100, A100 and B200 as in openxla.org's device descriptions
(github.com/openxla/xla, xla/backends/gpu/target_config/specs), H200 and L4 as PyTorch reports it in
its out-of-memory messages (139.8 and 22.03 GiB; nvidia-smi shows 22.49 for L4). The network out of
a host is a card's own NIC of a DGX (A100: 200 Gb/s, the others: 400 Gb/s), and an eighth of
the 100 Gb/s of Google Cloud's g2-standard-96 for L4. All read November 2026.

Programs may use the share of a card's memory that JAX takes, which the environment sets: see
memory_share.
"""

from dataclasses import dataclass, replace
from math import ceil, log2, prod

from jaxrl_async.errors import ConfigError
from jaxrl_async.host import LARGE_GPU_SHARE, gpu_memory

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One generation. Rates are per second and per JAX device (a tpu7x chip is two devices)."""

    generation: str
    devices: int = 1  # per chip
    peak_flops: float  # bf16
    usable_bytes: float  # memory that programs may use
    hbm_bytes_per_s: float
    ici_bytes_per_s: float  # both directions, all links; for a card: NVLink or PCIe
    dcn_bytes_per_s: float  # out of the slice; for a card: out of its host
    clock_hz: float = 0.0  # of a TPU
    torus_dims: int = 2
    wrap_side: int = 1  # a side of the slice this long, or a multiple, is a ring
    megacore: bool = False  # two cores are one device: an option of the compiler
    host_cards: int = 0  # NVIDIA cards in a host; 0: a TPU
    memory_bytes: float = 0.0  # for a card, as CUDA reports it

    @property
    def is_card(self) -> bool:
        """Whether this is an NVIDIA card."""
        return self.host_cards > 0

    @property
    def word(self) -> str:
        """The word for one unit: card or chip."""
        return "card" if self.is_card else "chip"


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
    """Make a Chip; usable_gib is per device, everything else per chip."""
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


def _card(
    generation: str,
    tflops: float,
    memory_bytes: float,
    hbm_gb: float,
    link_gb: float,
    nic_gb: float,
) -> Chip:
    """Make the Chip of an NVIDIA card; a host has eight."""
    return Chip(
        generation=generation,
        peak_flops=tflops * 1e12,
        usable_bytes=LARGE_GPU_SHARE * memory_bytes,
        hbm_bytes_per_s=hbm_gb * 1e9,
        ici_bytes_per_s=link_gb * 1e9,
        dcn_bytes_per_s=nic_gb * 1e9,
        host_cards=8,
        memory_bytes=memory_bytes,
    )


CARDS = {
    card.generation: card
    for card in (
        _card("h100", 989.4, 84_942_979_072, 3352, 900, 50),
        _card("h200", 989.4, 139.8 * GIB, 4800, 900, 50),
        _card("a100", 312, 85_100_068_864, 2039, 600, 25),
        _card("b200", 2250, 191_514_411_008, 7672, 1800, 50),
        _card("l4", 121, 22.03 * GIB, 300, 64, 1.56),
    )
}


def memory_share() -> float:
    """Return the share of a card's memory that programs may use: from the environment, as JAX reads
    it, or else LARGE_GPU_SHARE. Raises ConfigError."""
    memory = gpu_memory()
    if memory.problem:
        raise ConfigError(memory.problem)
    return memory.planned_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A TPU slice (a box of chips of one generation), or hosts of NVIDIA cards, or a part of one
    for one of its roles, or several TPU slices that are joined by the data center network."""

    chip: Chip
    shape: tuple[int, ...]  # chips on each side; for cards: hosts, and the cards of each
    part: str = ""  # its slice and which devices of it; "": not a part
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
        """The name for the compiler: v5e:8x8, h100:1x8; for a part, its slice and devices."""
        return self.part or f"{self._times}{self.chip.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def _times(self) -> str:
        return f"{self.count} x " if self.count > 1 else ""

    def sent_bytes_per_s(self, group: int, near: int = 0, *, in_a_ring: bool = True) -> float:
        """Return how many bytes a device sends per second in a collective.

        Args:
            group: number of devices that communicate.
            near: how many of them are cards in the same host; a group in several hosts sends
            through
                the network cards. 0 (TPUs): hosts do not matter.
            in_a_ring: whether each byte leaves a host once, through any of its cards in the group.
        """
        one_way = self.chip.ici_bytes_per_s / 2
        if not self.chip.is_card:
            return one_way * self.link_share(group)
        if near == group:
            return one_way
        return min(one_way, self.chip.dcn_bytes_per_s * (near if in_a_ring else 1))

    def link_share(self, group: int) -> float:
        """Return the share of a TPU's links that a collective among `group` devices can use.

        These are the sides of the slice that such a group spans; a side that is not a ring counts
        half.
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
    """Parse `v5e-64`, or `v5e:4x16` with an explicit shape; or `h100-8`, or `h100:2x8` (hosts, and
    the cards of each). Raises ConfigError.

    The number counts chips (Google Cloud's own names of v4 and v5p slices count TensorCores, two
    per chip).
    """
    chip, sides = _parsed(name)
    if chip.is_card:
        return Slice(chip=chip, shape=_hosts(chip, sides, name))
    return Slice(chip=chip, shape=sides if len(sides) > 1 else _box(chip, sides[0], name))


def parse_chips(name: str) -> tuple[Chip, int]:
    """Parse any number of chips or cards, which need not form a slice. Raises ConfigError."""
    chip, sides = _parsed(name)
    return chip, prod(sides)


def _parsed(name: str) -> tuple[Chip, tuple[int, ...]]:
    generation, sep, size = name.replace(":", "-", 1).partition("-")
    generation = {"v7x": "tpu7x", "v5litepod": "v5e"}.get(generation, generation)
    chip = CHIPS.get(generation) or CARDS.get(generation)
    if chip is None or not sep:
        raise ConfigError(
            f"unknown topology {name!r}: give GENERATION-CHIPS, such as v5e-64 or h100-8, or "
            f"GENERATION:SHAPE, such as v5e:8x8; generations are {', '.join((*CHIPS, *CARDS))}."
        )
    if chip.is_card:
        chip = replace(chip, usable_bytes=memory_share() * chip.memory_bytes)
    sides = size.split("x")
    if not all(s.isdecimal() and 0 < int(s) <= 2**16 for s in sides):
        raise ConfigError(
            f"unknown topology {name!r}: {size!r} is neither a number of {chip.word}s nor a shape "
            f"such as {'2x8' if chip.is_card else '4x4x8' if chip.torus_dims == 3 else '8x8'}."
        )
    if len(sides) not in (1, chip.torus_dims):
        raise ConfigError(
            f"topology {name!r} has {len(sides)} sides, and {chip.generation} slices have "
            f"{chip.torus_dims}: give {chip.generation}-{prod(map(int, sides))}, or a shape such "
            f"as {chip.generation}:{'4x4x4' if chip.torus_dims == 3 else '4x4'}."
        )
    return chip, tuple(map(int, sides))


def _hosts(chip: Chip, sides: tuple[int, ...], name: str) -> tuple[int, int]:
    """Return the number of hosts and of cards in each. Raises ConfigError."""
    most = chip.host_cards
    if len(sides) == 2:
        hosts, cards = sides
    else:
        hosts, cards = (1, sides[0]) if sides[0] <= most else (sides[0] // most, most)
    if cards > most or hosts * cards != prod(sides):
        raise ConfigError(
            f"topology {name!r}: a host has at most {most} cards, and with several hosts each has "
            f"{most}. Give {chip.generation}-1 to {chip.generation}-{most}, or "
            f"{chip.generation}-{2 * most}, {chip.generation}-{4 * most} and so on."
        )
    return hosts, cards


def _box(chip: Chip, count: int, name: str) -> tuple[int, ...]:
    """Return the most cubic box of powers of two that cloud.google.com/tpu/docs lists."""
    largest = 256 if chip.torus_dims == 2 else 4096
    if count == 2:
        raise ConfigError(
            f"topology {name!r}: slices of 2 chips do not exist, since the compiler describes "
            f"hosts of 4. Use {chip.generation}-1 or {chip.generation}-4."
        )
    if count & (count - 1) or count > largest:
        near = min(largest, 1 << (count.bit_length() - 1))
        raise ConfigError(
            f"topology {name!r}: the number of chips of a {chip.generation} slice is a power of "
            f"two, at most {largest}; the next lower one is {chip.generation}-{near}. Other "
            f"shapes: {chip.generation}:{'4x4x12' if chip.torus_dims == 3 else '4x16'}."
        )
    sides = [1] * chip.torus_dims
    while prod(sides) < count:
        sides[sides.index(min(sides))] *= 2
    return tuple(sides) if 1 in sides[:-1] or sides[-1] == 1 else tuple(sorted(sides))


def is_slice(chip: Chip, count: int) -> bool:
    """Return whether `count` chips, or cards, of this generation can form one slice."""
    try:
        parse_slice(f"{chip.generation}-{count}")
    except ConfigError:
        return False
    return True
