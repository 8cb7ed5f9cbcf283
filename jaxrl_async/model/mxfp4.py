"""Weights in MXFP4, as gpt-oss is published, read as bfloat16.

OCP Microscaling Formats 1.0: 32 numbers share a scale, a power of two stored as its exponent + 127
(E8M0). Each number is one of 16 (E2M1: sign, two exponent bits, one mantissa bit), two in a byte,
the first in the lower half.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_async.errors import CheckpointError
from jaxrl_async.model.tensorfile import Stored

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of the two stored tensors of a packed tensor."""
HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = np.array([*HALF, *(-x for x in HALF)], np.float32)
"""Values of the 4-bit codes (the specification's table 5)."""
GROUP_BYTES = 16
"""Bytes of the 32 numbers that share a scale."""
NOT_A_NUMBER = 255
"""The stored scale for NaN."""


def mxfp4_numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return blocks [..., G, 16] uint8 with scales [..., G] uint8 as numbers [..., 32 G] float32;
    a scale of 255 gives NaN."""
    pairs = np.stack([NUMBERS[blocks & 15], NUMBERS[blocks >> 4]], axis=-1)
    numbers = pairs.reshape(*scales.shape, 2 * GROUP_BYTES)
    powers = np.where(scales == NOT_A_NUMBER, 0, scales).astype(np.int32) - 127
    out = np.ldexp(numbers, powers[..., None])
    out = np.where((scales == NOT_A_NUMBER)[..., None], np.float32(np.nan), out)
    return out.reshape(*scales.shape[:-1], -1)


class PackedTensor:
    """A tensor [E, inputs, outputs], stored as two tensors, [E, outputs, G, 16] and [E, outputs,
    G]."""

    def __init__(self, blocks: tuple[Any, str], scales: tuple[Any, str]) -> None:
        """Store the open files with the names of the tensors in them."""
        self._parts = (blocks, scales)

    def numbers(self, experts: slice, outputs: slice) -> np.ndarray:
        """Return some outputs of some experts, [e, inputs, outputs] bfloat16. Experts are read one
        after the other, which limits memory."""
        blocks, scales = (file.get_slice(name)[experts][:, outputs] for file, name in self._parts)
        shape = (len(blocks), scales.shape[2] * 2 * GROUP_BYTES, scales.shape[1])
        out = np.empty(shape, ml_dtypes.bfloat16)
        for i in range(len(blocks)):
            out[i] = mxfp4_numbers(blocks[i], scales[i]).T
        return out


def packed_names(names: Iterable[str]) -> list[str]:
    """Return the names of the tensors in MXFP4 among the names of stored tensors."""
    known = set(names)
    ends = (name.removesuffix(BLOCKS) for name in known if name.endswith(BLOCKS))
    return sorted(name for name in ends if name + SCALES in known)


def whole_of(name: str, blocks: Stored, scales: Stored) -> Stored:
    """Return the unpacked form of two stored tensors. Raises CheckpointError if they do not fit
    together."""
    fits = (
        blocks.dtype == scales.dtype == "U8"
        and len(blocks.shape) == 4
        and blocks.shape == (*scales.shape, GROUP_BYTES)
    )
    if not fits:
        raise CheckpointError(
            f"{name}: its {BLOCKS} ({blocks.dtype} {list(blocks.shape)}) and {SCALES} "
            f"({scales.dtype} {list(scales.shape)}) must be U8 [experts, outputs, groups, "
            f"{GROUP_BYTES}] and [experts, outputs, groups]. Copy the files again."
        )
    experts, outputs, groups = scales.shape
    shape = (experts, groups * 2 * GROUP_BYTES, outputs)
    return Stored(dtype="BF16", shape=shape, begin=blocks.begin, end=blocks.end)


def without_packed(names: Mapping[str, object], wholes: Iterable[str]) -> dict[str, Any]:
    """Return tensors by name without the stored parts of tensors in MXFP4."""
    parts = {name + end for name in wholes for end in (BLOCKS, SCALES)}
    return {name: tensor for name, tensor in names.items() if name not in parts}
