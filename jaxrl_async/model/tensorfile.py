"""Parsing of a safetensors header, with checks before any tensor is mapped or allocated.

    8 bytes: length of the header │ header: JSON {name: {dtype, shape, data_offsets}} │ data

The size of each tensor is exactly its shape times its type. The tensors follow each other without
gaps or overlaps and end with the last byte of the data.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_async.errors import CheckpointError, in_a_line

MAX_HEADER_BYTES = 16 * 1024**2
"""Maximum size of a header: enough for more than 100,000 tensors."""
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Types of the format with their sizes; types smaller than a byte are not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor in a file."""

    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    begin: int  # first byte in the data
    end: int  # end of its bytes, exclusive


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name. Raises CheckpointError."""
    try:
        if not path.is_file():
            raise CheckpointError(
                f"{path}: not found, or not a file. Copy the model's directory again."
            )
        with path.open("rb") as file:
            length, size = file.read(8), path.stat().st_size
            header_bytes = int.from_bytes(length, "little")
            if len(length) < 8 or header_bytes > size - 8:
                raise _torn(path, f"it ends within its header ({size} bytes in total)")
            if header_bytes > MAX_HEADER_BYTES:
                raise _torn(path, f"a header of {header_bytes} bytes, above {MAX_HEADER_BYTES}")
            header = file.read(header_bytes)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read: {error}. Copy the file again.") from None
    return parse_header(header, size - 8 - header_bytes, path)


def data_offset(path: Path) -> int:
    """Return the offset of the data in a file, in bytes; the header must be valid."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def parse_header(header: bytes, data_bytes: int, path: Path) -> dict[str, Stored]:
    """Return the tensors in a header.

    data_bytes: size of the data after the header. Raises CheckpointError, which names the path and
    the first invalid tensor.
    """
    try:
        described = json.loads(header.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _torn(path, f"its header is not JSON ({in_a_line(error, 80)})") from None
    if not isinstance(described, dict):
        raise _torn(path, "its header is not a JSON object")
    tensors = {
        name: _stored(path, name, entry)
        for name, entry in described.items()
        if name != "__metadata__"
    }
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if tensor.begin != end:
            kind = "overlaps the previous one" if tensor.begin < end else "leaves a gap before it"
            raise _torn(path, f"the tensor {_name(name)} {kind}")
        end = tensor.end
    if end != data_bytes:
        raise _torn(path, f"its tensors need {end} bytes, but it has {data_bytes}")
    return tensors


def _stored(path: Path, name: str, entry: object) -> Stored:
    """Check one entry of the header. Raises CheckpointError."""
    if not isinstance(entry, dict):
        raise _torn(path, f"the entry of {_name(name)} is not an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _torn(
            path,
            f"the tensor {_name(name)} has the type {str(dtype)[:20]!r}, which is not supported",
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _torn(path, f"the tensor {_name(name)} has no valid shape and data_offsets")
    begin, end = offsets
    if math.prod(shape) * DTYPE_BYTES[dtype] != end - begin:
        raise _torn(
            path,
            f"the tensor {_name(name)}, {dtype}{shape[:8]}, does not fit its {end - begin} bytes",
        )
    return Stored(dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _are_sizes(values: object) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 32
        and all(type(v) is int and 0 <= v < 2**63 for v in values)
    )


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("duplicate name")
    return entries


def _name(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _torn(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: not a complete safetensors file: {what}. Copy the file again, or save the model "
        "again with save_pretrained."
    )
