"""The tensors of a Hugging Face directory by name, independent of their stored form.

    files ─► tensors ─► MXFP4 and FP8 unpacked (mxfp4.py, fp8.py)
          ─► the text part of a model with images ─► experts one by one (joined_experts.py)
    a GGUF file ─► its tensors by the names of Hugging Face files (gguf_tensors.py)

Only headers are read here; tensors are read on access, as a whole or in part.
"""

import json
import logging
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from jaxrl_async.data.gguf_file import gguf_of
from jaxrl_async.errors import CheckpointError
from jaxrl_async.later import Later
from jaxrl_async.model.tensorfile import Stored, read_header
from jaxrl_async.whole_files import UNFINISHED

if TYPE_CHECKING:
    from jaxrl_async.model import fp8, gguf_tensors, joined_experts, mxfp4
else:
    fp8 = Later("jaxrl_async.model.fp8")
    gguf_tensors = Later("jaxrl_async.model.gguf_tensors")
    joined_experts = Later("jaxrl_async.model.joined_experts")
    mxfp4 = Later("jaxrl_async.model.mxfp4")

log = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
MAX_JSON_BYTES = 64 * 1024**2
"""Maximum size of a config.json or index."""
TEXT_PARTS = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes of the text model's tensors in a model with images, and in a text model."""
BODY = "model."
"""Prefix of the names of a model's tensors, except its head's."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEADS = (HEAD, "score.weight", "score.bias")
"""Tensors after the last layer, whose names have no prefix."""


class StoredTensor(NamedTuple):
    """A stored tensor, the open file that reads it, and its name in that file."""

    stored: Stored
    file: Any
    name: str
    path: Path


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object of at most MAX_JSON_BYTES. Raises CheckpointError."""
    try:
        if file.exists() and not file.is_file():
            raise CheckpointError(f"{file}: not a regular file. Copy the model's directory again.")
        with file.open("rb") as stream:
            content = json.loads(stream.read(MAX_JSON_BYTES + 1).decode())
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: not found. model.path must be a Hugging Face directory with config.json and "
            "*.safetensors."
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON: {error}. Copy the file again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: must contain a JSON object. Copy the file again.")
    return content


def file_names(folder: Path, single: str) -> list[str]:
    """Return the files that hold the weights. Raises CheckpointError, also for two sets of files:
    transformers would read one, and vLLM the other."""
    indexed = single == SINGLE and (folder / INDEX).exists()
    exists = (folder / single).exists()
    if not indexed:
        if not exists:
            raise CheckpointError(f"{folder}: no {single} found. {_advice(folder)}")
        return [single]
    names = indexed_names(folder)
    if exists and single not in names:
        if not any((folder / name).exists() for name in names):
            return [single]
        raise CheckpointError(
            f"{folder}: contains two models: {single}, and {names[0]} with the other files in "
            f"{INDEX}. Remove the older one: {single}, or {INDEX} and the files in it."
        )
    return names


def is_stale(folder: Path, read: Collection[Path]) -> bool:
    """Return whether a folder's index was ignored because it names none of the files that exist."""
    indexed = folder / SINGLE in read and (folder / INDEX).exists()
    return indexed and SINGLE not in indexed_names(folder)


def indexed_names(folder: Path) -> list[str]:
    """Return the files in a folder's index. Raises CheckpointError."""
    named = read_json(folder / INDEX).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CheckpointError(f"{folder / INDEX}: has no weight_map. Copy the file again.")
    for name in named.values():
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{folder / INDEX}: names the file {str(name)[:80]!r}, which is not a "
                "*.safetensors in this folder. Copy the file again."
            )
    return sorted(set(named.values()))


def _advice(folder: Path) -> str:
    if (folder / UNFINISHED).exists() or any(folder.glob("model-*.safetensors")):
        return (
            f"Saving or copying the model was interrupted: the weights lack their {INDEX}. "
            f"Save or copy the whole model again."
        )
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.pt*")
    )
    if not pickles:
        return "Copy the whole directory, or save the model with save_pretrained."
    loaded = "AutoModelForCausalLM.from_pretrained(FOLDER)"
    if pickles[0].startswith("adapter_"):
        loaded = "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)"
    return (
        f"{pickles[0]} may be a pickle, which can run any code and is never loaded. If you trust "
        f"it, convert it: {loaded}.save_pretrained(NEW)."
    )


def open_tensors(
    folder: Path, files: ExitStack, wanted: Mapping[str, object], single: str = SINGLE
) -> dict[str, StoredTensor]:
    """Open all files; return each tensor of the text model by its name. Raises CheckpointError.

    Args:
        folder: the Hugging Face directory.
        files: closes them.
        wanted: the names that tensors must have, with their shapes.
        single: name of the file, if the model is one file.
    """
    if (file := gguf_of(folder)) is not None:
        return _of_gguf(file, wanted)
    tensors = _in_numbers(folder, _made_whole(open_files(folder, files, single)))
    return _with_embedding(_one_by_one(_text_part(tensors), wanted), wanted)


def open_files(folder: Path, files: ExitStack, single: str) -> dict[str, StoredTensor]:
    """Open all files; return each tensor by its name in them. Raises CheckpointError."""
    tensors: dict[str, StoredTensor] = {}
    for name in file_names(folder, single):
        path = folder / name
        header = read_header(path)
        if twice := sorted(header.keys() & tensors.keys()):
            raise CheckpointError(
                f"{path}: contains {twice[0]}, which another file also contains. Remove the files "
                f"that are not part of this model, and correct {INDEX}."
            )
        try:
            file = files.enter_context(safe_open(path, framework="numpy"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: cannot be read as safetensors: {error}. Copy the file again."
            ) from None
        tensors |= {name: StoredTensor(stored, file, name, path) for name, stored in header.items()}
    return tensors


def _of_gguf(path: Path, wanted: Mapping[str, object]) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file, dequantised when read. Raises CheckpointError."""
    parts = gguf_tensors.open_gguf(path, wanted)
    stored = {n: Stored(dtype="F32", shape=part.shape, begin=0, end=0) for n, part in parts.items()}
    return {name: StoredTensor(stored[name], part, name, path) for name, part in parts.items()}


def _made_whole(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors, with the two parts of each MXFP4 tensor joined. Raises
    CheckpointError."""
    packed = mxfp4.packed_names(tensors)
    made = {}
    for name in packed:
        blocks, scales = tensors[name + mxfp4.BLOCKS], tensors[name + mxfp4.SCALES]
        file = mxfp4.PackedTensor((blocks.file, blocks.name), (scales.file, scales.name))
        made[name] = StoredTensor(
            mxfp4.whole_of(name, blocks.stored, scales.stored), file, name, blocks.path
        )
    return mxfp4.without_packed(tensors, packed) | made


def _text_part(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors by the names of a text model; for a model with images, only its text part
    and its head."""
    parts = {
        new + name.removeprefix(old): tensor
        for name, tensor in tensors.items()
        for old, new in TEXT_PARTS.items()
        if name.startswith(old)
    }
    heads = {n: t for n, t in tensors.items() if n in HEADS}
    if not parts and EMBEDDING.removeprefix(BODY) in tensors:  # AutoModel saves it without a head
        return {BODY + n: t for n, t in tensors.items() if n not in heads} | heads
    return parts | heads if parts else tensors


def _with_embedding(
    tensors: dict[str, StoredTensor], wanted: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """Return the tensors; a tied model whose files contain only the head also uses it as the
    embedding."""
    if EMBEDDING not in wanted or EMBEDDING in tensors or HEAD in wanted or HEAD not in tensors:
        return tensors
    log.info("%s: has no embedding: %s is used for both", tensors[HEAD].path, HEAD)
    return tensors | {EMBEDDING: tensors[HEAD]}


def _in_numbers(folder: Path, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors, with those in FP8 dequantised when read. Raises CheckpointError."""
    coded = fp8.fp8_names({name: tensor.stored for name, tensor in tensors.items()})
    if not coded:
        return tensors
    file = folder / "config.json"
    block = fp8.block_of(read_json(file), str(file))
    made = dict(tensors)
    for name in coded:
        weight, scales = tensors[name], made.pop(name + fp8.SCALE_OF)
        stored = fp8.number_of(name, weight.stored, scales.stored, block)
        reader = fp8.Fp8Tensor(weight.path, weight.stored, (scales.file, scales.name), block)
        made[name] = weight._replace(stored=stored, file=reader)
    log.info("%s: %d tensors in FP8 are read as float32", folder, len(coded))
    return made


def _one_by_one(
    tensors: dict[str, StoredTensor], wanted: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """Return the tensors, with joined experts split into the wanted tensors of single experts."""
    stored = {name: tensor.stored for name, tensor in tensors.items()}
    locations = joined_experts.locations(wanted, stored)
    joined = {location.tensor for location in locations.values()}
    split = {name: tensor for name, tensor in tensors.items() if name not in joined}
    for name, location in locations.items():
        every = tensors[location.tensor]
        one = joined_experts.OneExpert(every.file, every.name, location)
        split[name] = every._replace(stored=joined_experts.one_of(every.stored, location), file=one)
    return split
