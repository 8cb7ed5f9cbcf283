"""A GGUF file's 4-bit blocks in the form of a frozen base (four_bits.py): the same codes and
scales, transposed from rows of inputs to columns.

    Q4_0   32 inputs: scale d, codes                              w = d (code - 8)
    Q4_1   32 inputs: scale d, minimum m, codes                   w = d code + m
    Q4_K   8 x 32 inputs: d, e, a scale s and a minimum t each    w = d s code - e t

llama.cpp, ggml/src/ggml-common.h. In Q4_0 and Q4_1, input i is in the lower half of byte i of its
block, and input i + 16 in the upper half. In Q4_K, 32 bytes hold two blocks, one in each half.
"""

from typing import NamedTuple

import numpy as np

from jaxrl_async.model.gguf_tensors import GgufPart

BLOCK = 32
"""Inputs that share a scale."""
SUPER = 8
"""Blocks of Q4_K that are stored together."""


class Blocks(NamedTuple):
    """A matrix [out, in] in blocks."""

    codes: np.ndarray  # [out, in / 32, 32] uint8, 0 to 15
    scales: np.ndarray  # [out, in / 32] float32
    least: np.ndarray  # [out, in / 32] float32, value of code 0


def kept_blocks(part: GgufPart, rows: slice, kind: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return rows of a matrix in the form of four_bits.pack_codes, [in / 2, out] and scales,
    without rounding. None: they are not stored in such blocks.

    kind: int4 or q4_1.
    """
    reader = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}.get(part.tensor.kind)
    if reader is None or kind not in KINDS.get(part.tensor.kind, ()):
        return None
    blocks = reader(part.stored(rows))
    low, high = np.split(blocks.codes.transpose(1, 2, 0), 2, axis=1)  # [in / 32, 16, out]
    packed = (low | (high << 4)).reshape(-1, low.shape[-1])
    if kind == "int4":
        return packed, np.ascontiguousarray(blocks.scales.T)
    scales = np.stack([blocks.scales.T, blocks.least.T], axis=1)  # [in / 32, 2, out]
    return packed, scales.reshape(-1, low.shape[-1])


KINDS = {"Q4_0": ("int4", "q4_1"), "Q4_1": ("q4_1",), "Q4_K": ("q4_1",)}
"""The forms of a base in which blocks of a type can be kept."""


def _q4_0(data: np.ndarray) -> Blocks:
    blocks = data.reshape(len(data), -1, 18)
    scales = _halves(blocks[..., :2])[..., 0]
    return Blocks(_codes(blocks[..., 2:]), scales, -8 * scales)


def _q4_1(data: np.ndarray) -> Blocks:
    blocks = data.reshape(len(data), -1, 20)
    scales = _halves(blocks[..., :4])
    return Blocks(_codes(blocks[..., 4:]), scales[..., 0], scales[..., 1])


def _q4_k(data: np.ndarray) -> Blocks:
    blocks = data.reshape(len(data), -1, 144)
    both = _halves(blocks[..., :4])
    scales, least = _six_bits(blocks[..., 4:16].astype(np.int32))
    pairs = blocks[..., 16:].reshape(len(data), -1, SUPER // 2, BLOCK)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-2)
    return Blocks(
        codes.reshape(len(data), -1, BLOCK),
        (both[..., :1] * scales).reshape(len(data), -1).astype(np.float32),
        (-both[..., 1:] * least).reshape(len(data), -1).astype(np.float32),
    )


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and the minima of 8 blocks from 12 bytes. For the first four blocks they
    are the lower 6 bits of bytes 0 to 3 and 4 to 7. For the last four blocks, the lower 4 bits are
    in the halves of bytes 8 to 11, and the upper 2 bits are the upper bits of bytes 0 to 7."""
    first, second, third = np.split(packed, 3, axis=-1)
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    least = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales, least


def _codes(packed: np.ndarray) -> np.ndarray:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _halves(data: np.ndarray) -> np.ndarray:
    """Return float16 numbers as float32."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)
