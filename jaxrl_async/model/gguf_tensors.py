"""The tensors of a GGUF file by their Hugging Face names, each read on access.

    wanted name ──gguf's table──> llama.cpp's name ──> rows in their order ──> float32 ──> less 1?

llama.cpp keeps the experts of a layer in one tensor, stores the rows of queries and keys of some
families in another order (gguf_config.Architecture), and stores 1 + weight for Gemma's norms.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_async.data.gguf_config import EXTRA_TENSORS, architecture_of
from jaxrl_async.data.gguf_file import GgufFile, GgufTensor, gguf_name, numbers_of, read_gguf

ONE_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
QUERIES, KEYS = re.compile(r".+\.attn_q\.(weight|bias)"), re.compile(r".+\.attn_k\.(weight|bias)")
MERGED = {".block_sparse_moe.": ".feed_forward.", "model.layers.": "layers."}
"""Replacements in Mixtral's expert names for gguf's table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPart:
    """One tensor in its Hugging Face form: a GGUF tensor, or one expert of it."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None
    order: np.ndarray | None = None  # [rows] index of each row in the file; None: the same order
    offset: float = 0.0  # added to the values

    def get_tensor(self, name: str) -> np.ndarray:
        """Return the whole tensor, float32."""
        return self[:]

    def get_slice(self, name: str) -> "GgufPart":
        """Return the tensor, which can be indexed by rows."""
        return self

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return rows, float32; other rows are not read."""
        return self.of_rows(rows, numbers_of(self.tensor.kind, self.stored(rows))) + self.offset

    def stored(self, rows: slice) -> np.ndarray:
        """Return rows in their stored form, in Hugging Face's order."""
        data = self.tensor.data if self.expert is None else self.tensor.data[self.expert]
        data = data[None] if data.ndim < len(self.shape) else data
        return data[rows if self.order is None else self.order[rows]]

    def of_rows(self, rows: slice, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of these rows in their shape."""
        return numbers.reshape(len(range(*rows.indices(self.shape[0]))), *self.shape[1:])


def open_gguf(path: Path, wanted: Mapping[str, Any]) -> dict[str, GgufPart]:
    """Return the tensors of a file by the wanted names, and other tensors by their names in the
    file. Raises CheckpointError.

    wanted: the shapes of a model's tensors by their Hugging Face names.
    """
    file = read_gguf(path)
    orders = _orders(file)
    found, used = {}, set(EXTRA_TENSORS)
    for name, shape in wanted.items():
        stored, expert = _location(file, name)
        if stored in file.tensors:
            assert stored is not None
            used.add(stored)
            found[name] = _part(file, stored, expert, orders.get(stored), shape)
    rest = {name: _part(file, name, None, None, None) for name in file.tensors.keys() - used}
    return found | rest


def _location(file: GgufFile, name: str) -> tuple[str | None, int | None]:
    """Return llama.cpp's name of a tensor, and the index of the expert in it, if any."""
    layers = file.whole("block_count")
    match = ONE_EXPERT.fullmatch(name)
    if match is None:
        return gguf_name(file.architecture, layers, name), None
    merged = f"{match[1]}.experts.{match[3]}.weight"
    for old, new in MERGED.items() if ".block_sparse_moe." in merged else ():
        merged = merged.replace(old, new)
    return gguf_name(file.architecture, layers, merged), int(match[2])


def _part(
    file: GgufFile,
    stored: str,
    expert: int | None,
    order: np.ndarray | None,
    expected: tuple[int, ...] | None,
) -> GgufPart:
    """Return a tensor, or one expert of it; expected: its shape in Hugging Face files, if known."""
    tensor = file.tensors[stored]
    shape = tensor.shape if expert is None else tensor.shape[1:]
    if expected == (1, *shape):  # llama.cpp drops the dimension
        shape = expected
    offset = -1.0 if architecture_of(file).offset_norms and stored.endswith("norm.weight") else 0.0
    return GgufPart(tensor=tensor, shape=shape, expert=expert, order=order, offset=offset)


def _orders(file: GgufFile) -> dict[str, np.ndarray]:
    """Return the order of the rows of queries and keys where it differs, by tensor name."""
    if not architecture_of(file).pairs_neighbours:
        return {}
    queries = file.whole("attention.head_count")
    keys = file.whole("attention.head_count_kv", queries)
    return dict(_of_heads(file.tensors, queries, keys))


def _of_heads(
    tensors: Mapping[str, GgufTensor], queries: int, keys: int
) -> Iterator[tuple[str, np.ndarray]]:
    for name, tensor in tensors.items():
        for pattern, heads in ((QUERIES, queries), (KEYS, keys)):
            if pattern.fullmatch(name) and tensor.shape[0] % (2 * heads) == 0:
                rows = np.arange(tensor.shape[0]).reshape(heads, -1, 2)
                yield name, rows.swapaxes(1, 2).reshape(-1)
