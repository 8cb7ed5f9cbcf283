"""Weights in FP8 with one scale per block, as DeepSeek-V3, Kimi K2 and Qwen's -FP8 are published.

X.weight [rows, columns] E4M3 and X.weight_scale_inv [ceil(rows / R), ceil(columns / C)]: despite
the name, a value is the stored number times the scale of its block of R x C
(quantization_config.weight_block_size in config.json; 128 x 128 in DeepSeek-V3, arXiv:2412.19437,
sec. 3.3.2). Read as float32.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_async.errors import CheckpointError
from jaxrl_async.model.tensorfile import Stored, data_offset

SCALE_OF = "_scale_inv"
"""Suffix of a weight's name in the name of its scales."""
FP8 = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F16")
USUAL_BLOCK = (128, 128)


def fp8_numbers(stored: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return [rows, columns] E4M3 with one scale per block as [rows, columns] float32."""
    rows, columns = stored.shape
    each = np.repeat(scales.astype(np.float32), block[0], axis=0)[:rows]
    numbers = stored.astype(np.float32)
    for first in range(0, columns, block[1]):  # no second array of the weight's size
        part = slice(first, first + block[1])
        numbers[:, part] *= each[:, first // block[1], None]
    return numbers


@dataclass(frozen=True, slots=True)
class Fp8Tensor:
    """A matrix in FP8 in a file, and its scales in an open file."""

    path: Path
    stored: Stored
    scales: tuple[Any, str]  # the open file, and the tensor's name in it
    block: tuple[int, int]

    def get_tensor(self, name: str) -> np.ndarray:
        """Return the matrix, [rows, columns] float32."""
        begin = data_offset(self.path) + self.stored.begin
        size = self.stored.end - self.stored.begin
        flat = np.fromfile(self.path, np.uint8, size, offset=begin)
        file, scales = self.scales
        numbers = flat.view(ml_dtypes.float8_e4m3fn).reshape(self.stored.shape)
        return fp8_numbers(numbers, np.asarray(file.get_tensor(scales)), self.block)

    def get_slice(self, name: str) -> np.ndarray:
        """Return the whole matrix, for slicing."""
        return self.get_tensor(name)


def fp8_names(tensors: Mapping[str, Stored]) -> list[str]:
    """Return the names of the weights in FP8 with scales per block."""
    names: Iterable[str] = (n for n, stored in tensors.items() if stored.dtype == FP8)
    return sorted(name for name in names if name + SCALE_OF in tensors)


def number_of(name: str, stored: Stored, scales: Stored, block: tuple[int, int]) -> Stored:
    """Return the float32 form of a weight in FP8. Raises CheckpointError unless it has one scale
    per block."""
    blocks = tuple(-(-size // each) for size, each in zip(stored.shape, block, strict=False))
    if len(stored.shape) != 2 or scales.shape != blocks or scales.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{name} is FP8 {list(stored.shape)}, and its scales are {scales.dtype} "
            f"{list(scales.shape)}: they must be {', '.join(SCALE_DTYPES)} {list(blocks)}, one for "
            f"each block of {block[0]} x {block[1]} (quantization_config.weight_block_size of "
            "config.json). Copy the directory again, or use the model's bfloat16 files."
        )
    return Stored(dtype="F32", shape=stored.shape, begin=stored.begin, end=stored.end)


def block_of(config: Mapping[str, object], where: str) -> tuple[int, int]:
    """Return the rows and columns of a block from a config.json. Raises CheckpointError."""
    section = config.get("quantization_config")
    block = section.get("weight_block_size") if isinstance(section, dict) else None
    if block is None:
        return USUAL_BLOCK
    if not isinstance(block, list) or [type(x) for x in block] != [int, int] or min(block) < 1:
        raise CheckpointError(
            f"{where}: quantization_config.weight_block_size must be two whole numbers, such as "
            "[128, 128]. Copy the file again."
        )
    return block[0], block[1]
