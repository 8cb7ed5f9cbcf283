"""Estimate the time of an instruction of a compiled program, seconds. Pure functions.

The TPU compiler reports it, in cycles; instructions that it cannot estimate take their roofline.
The compiler for NVIDIA cards reports nothing. There the time is computed: the longer of products at
PRODUCT_SHARE of the peak and bytes at BYTES_SHARE of the bandwidth, plus LAUNCH_S for each kernel.
"""

import re
from collections.abc import Callable

from jaxrl_async.plan.chips import Chip
from jaxrl_async.plan.hlo import NO_ESTIMATE, Instruction, arrays_of
from jaxrl_async.sampler.device.sampling_kernel import LANES, PLAIN, ROWS, TILES, TRUNCATED

PRODUCT_SHARE = 0.7
"""Assumed share of a card's peak that matrix products reach. This project measured nothing, and no
source gives Triton's share for these shapes. An H100 reaches about 0.8 in cuBLAS' largest products,
less in smaller ones.
"""
BYTES_SHARE = 0.8
"""Assumed share of a card's bandwidth that kernels reach if they only move memory. An H100 reaches
0.9 in copies of a gigabyte."""
COLLECTIVE_OPCODES = ("all-", "reduce-scatter", "collective-", "async-")
"""Prefixes of communication opcodes, whose time is counted separately."""
LAUNCH_S = 2e-6
"""Assumed time from one kernel to the next, seconds, in a command buffer (CUDA graph)."""

SAMPLING_CYCLES = {PLAIN: 290, TRUNCATED: 3100}
"""Cycles of the kernel that samples tokens, for eight rows and each chunk of its loops, from the
compiler's schedule for v5e and v6e (2 x 32 iterations of 35 and 50 cycles to truncate)."""

Pace = Callable[[Instruction, float, float], float]
"""Returns the time of an instruction from its matrix-product FLOPs and the bytes that it moves."""


def sampling_cycles(i: Instruction) -> float:
    """Return the cycles of a TPU's sampling kernel; 0 for other instructions."""
    each = SAMPLING_CYCLES.get(re.sub(r"[.\d]+$", "", i.name), 0)
    operands = re.search(r"operand_layout_constraints=\{(.*)", i.rest)
    if not each or not operands:
        return 0.0
    rows, vocab = arrays_of(operands[1])[0][1]
    return float(each * -(-rows // ROWS) * -(-vocab // (TILES * LANES)))


def pace_of(chip: Chip) -> Pace:
    """Return the function that gives an instruction's time on a chip or a card."""

    def of_chip(i: Instruction, flops: float, num_bytes: float) -> float:
        if i.cycles == NO_ESTIMATE:
            return max(flops / chip.peak_flops, num_bytes / chip.hbm_bytes_per_s)
        return (i.cycles + sampling_cycles(i)) / chip.clock_hz

    if not chip.is_card:
        return of_chip
    products, memory = chip.peak_flops * PRODUCT_SHARE, chip.hbm_bytes_per_s * BYTES_SHARE

    def of_card(i: Instruction, flops: float, num_bytes: float) -> float:
        if not (flops or num_bytes) or i.opcode.startswith(COLLECTIVE_OPCODES):
            return 0.0
        return LAUNCH_S + max(flops / products, num_bytes / memory)

    return of_card
