"""Hugging Face directories: read safetensors directly onto the mesh, and write them.

Only this module and stored_tensors.py, which opens the files, import safetensors.

A stacked weight [L, ...] is filled layer by layer. Each device reads only the slices that it holds,
so the host never has a copy of the whole model.
"""

import dataclasses
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from jaxrl_async.data.gguf_file import POINTER, gguf_of
from jaxrl_async.errors import CheckpointError
from jaxrl_async.later import Later
from jaxrl_async.mesh import whole
from jaxrl_async.model.hf_config import hf_config_of, spec_from_hf
from jaxrl_async.model.own_code import OwnCode, save_code
from jaxrl_async.model.spec import ModelSpec, Params, Weight, named, stacks_in, weight_table
from jaxrl_async.model.stored_tensors import (
    HEAD,
    INDEX,
    SINGLE,
    StoredTensor,
    file_names,
    indexed_names,
    is_stale,
    open_files,
    open_tensors,
    read_json,
)
from jaxrl_async.whole_files import replacing

if TYPE_CHECKING:
    from jaxrl_async.model import mxfp4, tied_head
else:
    mxfp4 = Later("jaxrl_async.model.mxfp4")
    tied_head = Later("jaxrl_async.model.tied_head")

log = logging.getLogger(__name__)

_NUMBER = {"layers": "layer", "expert": "expert"}
"""Stacked dimension -> the field for its index in a tensor's name."""
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
GENERATION = "generation_config.json"
"""Generation settings for transformers and servers: end tokens, temperature and more."""
MAX_FILE_BYTES = 4 * 1024**3
DTYPES = ("F64", "F32", "F16", "BF16")
"""Types in which weights may be stored."""
NARROW = {"BF16": "bfloat16", "F16": "float16"}
"""The types that float32 represents exactly, with their names in jax."""
IGNORED = ("rotary_emb.inv_freq",)
"""Suffixes of tensors that some files contain and no model uses."""
DRAFTS = "mtp."
"""Prefix of tensors for multi-token prediction (Qwen3-Next), which this decoder lacks."""
VALUE_HEAD = "v_head."
"""Prefix of the tensors of a value head that TRL saves with a policy."""
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class OpenWeights:
    """The open files of a directory, which read one weight at a time."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    def __call__(self, weight: Weight, sharding: Any, dtype: DTypeLike) -> Array:
        """Return a weight on its devices."""
        return _load(weight, self._tensors, sharding, dtype)

    def stored(self, weight: Weight) -> list[StoredTensor]:
        """Return the tensors of a weight: one, or one per layer and expert, in order."""
        return [self._tensors[name] for name in _names(weight)]


class OtherContents(NamedTuple):
    """The contents of a directory in addition to its text model."""

    config: Callable[[dict[str, Any]], dict[str, Any]]  # the text model's config.json -> of all
    tensors: Callable[[Iterator[tuple[str, np.ndarray]]], Iterator[tuple[str, np.ndarray]]]


def load_spec(folder: Path) -> ModelSpec:
    """Return the model in config.json, with head and embedding tied according to the files. Raises
    CheckpointError."""
    file = folder / "config.json"
    if not folder.exists():
        raise CheckpointError(
            f"{folder}: there is no such folder, relative to {Path.cwd()}. Give the directory of a "
            "Hugging Face model, its name on the hub, OWNER/NAME, or FILE.gguf."
        )
    if not file.exists() and (files := sorted(folder.glob("*.gguf"))):
        raise CheckpointError(f"{file}: not found. Give the path of a GGUF file: {files[0]}.")
    return tied_head.tied_as_stored(folder, spec_from_hf(read_json(file), str(file)))


def stored_types(folder: Path, table: object) -> dict[str, str]:
    """Return the types of a table's tensors that a directory stores in a narrow type, bfloat16 or
    float16, by their names in files; empty for a GGUF file. Raises CheckpointError."""
    if gguf_of(folder) is not None:
        return {}
    with ExitStack() as files:
        shapes = _shapes(table)
        tensors = open_tensors(folder, files, shapes)
        types = {name: tensors[name].stored.dtype for name in shapes if name in tensors}
        return {name: NARROW[dtype] for name, dtype in types.items() if dtype in NARROW}


def load_generation(folder: Path) -> dict[str, Any]:
    """Read generation_config.json; empty if it does not exist. Raises CheckpointError."""
    file = folder / GENERATION
    return read_json(file) if file.exists() else {}


def save_generation(folder: Path, spec: ModelSpec, generation: Mapping[str, object]) -> None:
    """Write generation_config.json: `generation` with the spec's special tokens and the end tokens
    of both."""
    own = generation.get("eos_token_id")
    more = [i for i in (own if isinstance(own, list) else [own]) if type(i) is int and i >= 0]
    ends = dataclasses.replace(spec, eos_ids=tuple(dict.fromkeys([*spec.eos_ids, *more])))
    named = {key: value for key, value in ends.token_ids().items() if value is not None}
    content = json.dumps({**generation, **named}, indent=2)
    with replacing(folder) as new:
        (new / GENERATION).write_text(content, encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises CheckpointError."""
    return read_json(folder / "config.json")


def read_tensors(folder: Path, chosen: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """Read the tensors of a directory with chosen names, in their stored form. Raises
    CheckpointError."""
    with ExitStack() as files:
        tensors = {n: t for n, t in open_files(folder, files, SINGLE).items() if chosen(n)}
        if coded := sorted(n for n, t in tensors.items() if t.stored.dtype not in DTYPES):
            raise CheckpointError(f"{folder}: {coded[0]} is quantised, which is not supported.")
        return {name: np.asarray(t.file.get_tensor(t.name)) for name, t in tensors.items()}


def check_params(folder: str | Path, spec: ModelSpec) -> None:
    """Compare a directory's tensors with the model's, without reading them. Raises
    CheckpointError."""
    with ExitStack() as files:
        table = weight_table(spec)
        _check(Path(folder), table, open_tensors(Path(folder), files, _shapes(table)))


def load_params(
    folder: str | Path, spec: ModelSpec, shardings: object = None, dtype: DTypeLike = jnp.float32
) -> Any:
    """Load the parameters of a decoder, on `shardings` (a tree like weight_table's; None: the
    default device). Raises CheckpointError as load_weights does."""
    return load_weights(folder, weight_table(spec), shardings, dtype)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a model's weights. Raises CheckpointError."""
    file = gguf_of(folder)
    return [folder / name for name in file_names(folder, SINGLE)] if file is None else [file]


def load_weights(
    folder: str | Path,
    table: object,
    shardings: object = None,
    dtype: DTypeLike = jnp.float32,
    single: str = SINGLE,
) -> Any:
    """Load the weights of a table, on `shardings` (a tree like the table; None: the default
    device).

    All names and shapes are compared before any tensor is loaded. CheckpointError lists tensors
    that are missing, not part of the model, or of the wrong shape. single: name of the file, if the
    model is one file.
    """
    if shardings is None:
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: one, table, is_leaf=lambda w: isinstance(w, Weight))
    with open_weights(Path(folder), table, single) as read:
        return jax.tree.map(
            lambda w, s: read(w, s, dtype),
            table,
            shardings,
            is_leaf=lambda w: isinstance(w, Weight),
        )


@contextmanager
def open_weights(folder: Path, table: object, single: str = SINGLE) -> Iterator[OpenWeights]:
    """Open a directory with the tensors of a table, compared as in load_weights; yield a reader of
    one weight, or of one layer of it, by its name in the file. Raises CheckpointError."""
    with ExitStack() as files:
        tensors = open_tensors(folder, files, _shapes(table), single)
        _check(folder, table, tensors)
        yield OpenWeights(tensors)


def save_params(
    folder: str | Path,
    spec: ModelSpec,
    params: Params,
    others: OtherContents | None = None,
    stored: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write config.json and safetensors for transformers; several files above 4 GiB.

    Existing weights, their index and a GGUF file's pointer in the folder are replaced.

    others: contents in addition to the text model; None: nothing. stored: result of stored_types; a
    tensor is written in the type that it was read from if that changes no value. Raises
    CheckpointError for a folder that contains an adapter.
    """
    config = hf_config_of(spec)
    if others is not None:
        config = others.config(config)
    save_weights(folder, config, weight_table(spec), params, spec.own, others, stored)


def save_weights(
    folder: str | Path,
    config: Mapping[str, object],
    table: object,
    params: Params,
    code: OwnCode | None = None,
    others: OtherContents | None = None,
    stored: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write any table of weights and its config.json, as save_params does; also a copy of a user's
    own decoder, and the contents in addition to the weights.

    If the weights are distributed over processes, all must call it; the first one writes.
    """
    if jax.process_index() != 0:
        for _ in _export(table, params):
            pass
        return
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).exists():
        raise CheckpointError(
            f"{folder}: contains an adapter ({ADAPTER_CONFIG}), which transformers and PEFT would "
            "add to the saved weights. Save the model in another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = [_narrowed(*tensor, stored) for tensor in _export(table, params)]
    dtype = _type_of(folder, tensors, stored)
    config = {**config, "torch_dtype": dtype, "dtype": dtype}
    earlier = _earlier_files(folder)
    with replacing(folder) as new:
        _write(new, iter(tensors) if others is None else others.tensors(iter(tensors)))
        (new / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        if code is not None:
            save_code(code, new)
        written = {file.name for file in new.iterdir()}
        (folder / INDEX).unlink(missing_ok=True)  # it would mix old and new files
    for name in earlier - written:
        (folder / name).unlink(missing_ok=True)


def save_adapter(
    folder: str | Path, config: Mapping[str, object], table: object, params: Params
) -> None:
    """Write an adapter's table of weights as one file, with PEFT's adapter_config.json."""
    if jax.process_index() != 0:
        for _ in _export(table, params):
            pass
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as new:
        (new / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        _save_tensors(dict(_export(table, params)), new / ADAPTER)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read PEFT's adapter_config.json. Raises CheckpointError."""
    return read_json(folder / ADAPTER_CONFIG)


def _save_tensors(tensors: dict[str, np.ndarray], file: Path) -> None:
    """Write a safetensors file with the permissions of its folder: safetensors 0.8 gives them to
    the owner alone."""
    save_file(tensors, file, metadata={"format": "pt"})
    with suppress(OSError):  # a mounted share or bucket may have no modes
        file.chmod(file.parent.stat().st_mode & 0o666)


def _write(folder: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Write the files of a model's weights into an empty folder, with an index for several
    files."""
    shards = list(_in_shards(tensors))
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = names if count > 1 else [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        _save_tensors(shard, folder / name)
    if count > 1:
        where = {
            tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        total = sum(x.nbytes for shard in shards for x in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _earlier_files(folder: Path) -> set[str]:
    """Return the names of a folder's weight files, index and pointer."""
    named: set[str] = {INDEX, SINGLE, POINTER}
    if (folder / INDEX).exists():
        try:
            named |= set(indexed_names(folder))
        except CheckpointError as error:
            log.warning("%s; it is replaced", error)
    return named | {file.name for file in folder.iterdir() if SHARD.fullmatch(file.name)}


def _narrowed(name: str, array: np.ndarray, stored: Mapping[str, str]) -> tuple[str, np.ndarray]:
    """Return a tensor in the narrow type that it was read from, if that changes no value."""
    if name not in stored:
        return name, array
    narrow = array.astype(jnp.dtype(stored[name]))
    return name, narrow if np.array_equal(narrow.astype(array.dtype), array) else array


def _type_of(folder: Path, tensors: list[tuple[str, np.ndarray]], stored: Mapping[str, str]) -> str:
    """Return the type for config.json, in which readers load all tensors: the type of most values,
    or the wider type if any tensor no longer fits the type that it was read from."""
    types = {name: str(array.dtype) for name, array in tensors}
    wider = [n for n, dtype in types.items() if stored.get(n, dtype) != dtype]
    if wider:
        log.info(
            "%s: %d of %d tensors that were read from bfloat16 or float16 (%s) have values that "
            "these types cannot represent: they are saved in %s",
            *(folder, len(wider), len(stored), wider[0], types[wider[0]]),
        )
        return types[wider[0]]
    numbers: Counter[str] = Counter()
    for _, array in tensors:
        numbers[str(array.dtype)] += array.size
    return numbers.most_common(1)[0][0]


# ---- reading


def _shapes(table: object) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a table's tensors in files, by their names in files."""
    return {
        name: weight.hf_shape
        for weight in jax.tree.leaves(table, is_leaf=lambda w: isinstance(w, Weight))
        for name in _names(weight)
    }


def _check(folder: Path, table: object, tensors: Mapping[str, StoredTensor]) -> None:
    shapes = _shapes(table)
    missing = sorted(shapes.keys() - tensors.keys())
    extra = sorted(
        n
        for n in tensors.keys() - shapes.keys()
        if not n.endswith(IGNORED) and n != HEAD and not n.startswith((DRAFTS, VALUE_HEAD))
    )
    if is_stale(folder, {tensor.path for tensor in tensors.values()}):
        log.warning("%s: the files in %s do not exist; %s is read", folder, INDEX, SINGLE)
    if any(n.startswith(VALUE_HEAD) for n in tensors):
        log.warning("%s: the tensors %s* are a value head, and are ignored", folder, VALUE_HEAD)
    if drafts := [n for n in tensors if n.startswith(DRAFTS)]:
        log.info("%s: %d tensors for multi-token prediction are ignored", folder, len(drafts))
    extra = _without_drafts(folder, table, extra) if extra else extra
    known = {n: tensors[n].stored for n in sorted(shapes.keys() & tensors.keys())}
    wrong = [n for n, stored in known.items() if stored.shape != shapes[n]]
    coded = [n for n, stored in known.items() if stored.dtype not in DTYPES]
    problems = [
        *_describe(missing, "missing", lambda n: f"{n} {list(shapes[n])}"),
        *_describe(extra, "not part of this model", str),
        *_describe(
            wrong, "misshapen", lambda n: f"{n} is {list(known[n].shape)}, not {list(shapes[n])}"
        ),
        *_describe(coded, "quantised or not weights", lambda n: f"{n} is {known[n].dtype}"),
    ]
    if problems:
        raise CheckpointError(
            f"{folder}: "
            + "; ".join(problems)
            + ". config.json and the weights belong to different models, or to an unsupported one: "
            f"set model.path to a complete directory with {', '.join(DTYPES)} weights."
        )


def _without_drafts(folder: Path, table: Any, names: list[str]) -> list[str]:
    """Return the names without the layers for multi-token prediction after the last layer
    (GLM-4.5's num_nextn_predict_layers), which this decoder lacks."""
    file = folder / "config.json"
    more = read_json(file).get("num_nextn_predict_layers") if file.exists() else None
    if type(more) is not int or more < 1:
        return names
    layers = sum(len(next(iter(table[stack].values())).numbers) for stack in stacks_in(table))
    drafts = tuple(f"model.layers.{i}." for i in range(layers, layers + min(more, layers)))
    kept = [name for name in names if not name.startswith(drafts)]
    if len(kept) < len(names):
        ignored = len(names) - len(kept)
        log.info("%s: %d tensors for multi-token prediction are ignored", folder, ignored)
    return kept


def _describe(names: list[str], what: str, show: Any) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{len(names)} tensors {what} ({', '.join(show(n) for n in names[:3])}{more})"]


def _names(weight: Weight) -> list[str]:
    """Return the names in the file: one, or one per layer and expert, in order."""
    sizes = zip(weight.axes, weight.shape[: named(weight)], strict=False)
    ranges = ((axis == "layers" and weight.numbers) or range(size) for axis, size in sizes)
    numbers = itertools.product(*ranges)
    axes = [_NUMBER[axis] for axis in weight.axes[: named(weight)]]
    return [weight.hf.format(**dict(zip(axes, each, strict=True))) for each in numbers]


def _load(
    weight: Weight, tensors: Mapping[str, StoredTensor], sharding: Any, dtype: DTypeLike
) -> Array:
    """Load one weight onto its devices; each device's part is read separately."""
    stacked = named(weight)
    numbered, shape = weight.shape[:stacked], weight.shape[stacked:]
    names = np.array(_names(weight), object).reshape(numbered)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        selected, rest = np.asarray(names[index[:stacked]], object), index[stacked:]
        parts = [_slice(weight, shape, tensors[n], n, rest).astype(dtype) for n in selected.flat]
        return np.stack(parts).reshape(*selected.shape, *parts[0].shape)

    return jax.make_array_from_callback(weight.shape, sharding, part)


def _slice(
    weight: Weight,
    shape: tuple[int, ...],
    tensor: StoredTensor,
    name: str,
    index: tuple[slice, ...],
) -> np.ndarray:
    """Read a slice of one stored tensor: stored as [out, in], returned as [in, ...]; an embedding
    is not transposed.

    Reads at most the tensor of one layer. Raises CheckpointError if a value is not finite.
    """
    if weight.hf_every is not None:
        values = _of_all_experts(tensor, weight.hf_every, shape, index)
    else:
        if weight.hf_rows is None:
            stored = np.asarray(tensor.file.get_tensor(tensor.name))
        else:
            stored = np.asarray(tensor.file.get_slice(tensor.name)[slice(*weight.hf_rows)])
            stored = stored if weight.hf_columns is None else stored[:, slice(*weight.hf_columns)]
        transposed = stored.T if _is_transposed(weight) else stored
        values = np.ascontiguousarray(transposed.reshape(shape)[index])
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{name} contains NaN or infinite numbers: the model was saved incompletely, or its "
            "training failed. Use an earlier checkpoint, or copy it again."
        )
    return values


def _of_all_experts(
    tensor: StoredTensor, every: tuple[int, int], shape: tuple[int, ...], index: tuple[slice, ...]
) -> np.ndarray:
    """Read a slice of a tensor with all experts of a layer; other experts are not read.

    Args:
        tensor: [E, ..., numbers].
        every: start and step in the last dimension.
        shape: shape of the whole weight, [E, ...].
        index: the slice of the weight.
    """
    experts = slice(*index[0].indices(shape[0])[:2])
    numbers = slice(every[0], None, every[1])
    if isinstance(tensor.file, mxfp4.PackedTensor):
        stored = tensor.file.numbers(experts, numbers)
    else:
        stored = np.asarray(tensor.file.get_slice(tensor.name)[experts])[..., numbers]
    return np.ascontiguousarray(stored[:, *index[1:]])


def _is_transposed(weight: Weight) -> bool:
    """Return whether the file stores the matrix transposed, as for all Linear weights."""
    return len(weight.hf_shape) == 2 and weight.axes[0] != "vocab"


# ---- writing


def _export(table: object, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) as stored in files, one layer at a time; weights that files join in one
    matrix are joined."""
    weights = jax.tree.leaves(table, is_leaf=lambda w: isinstance(w, Weight))
    joined: dict[str, list[tuple[Weight, Any]]] = {}
    for weight, values in zip(weights, jax.tree.leaves(params), strict=True):
        if weight.hf_rows is None and weight.hf_every is None:
            joined[f"{len(joined)}"] = [(weight, values)]
        else:
            joined.setdefault(weight.hf, []).append((weight, values))
    for parts in joined.values():
        if parts[0][0].hf_every is not None:
            yield from _interleaved(parts)
            continue
        parts.sort(key=lambda part: part[0].hf_rows or (0, 0))
        each = zip(*(_exported(*part) for part in parts), strict=True)
        for tensors in each:
            (name, first), *rest = tensors
            yield name, np.concatenate([first, *(x for _, x in rest)]) if rest else first


def _interleaved(parts: list[tuple[Weight, Any]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of weights that are interleaved in tensors with all experts."""
    first = parts[0][0]
    for each, name in zip(np.ndindex(*first.shape[: named(first)]), _names(first), strict=True):
        arrays = [whole(values[each]) for _, values in parts]
        tensor = np.empty(first.hf_shape, arrays[0].dtype)
        for (weight, _), array in zip(parts, arrays, strict=True):
            start, step = weight.hf_every or (0, 1)
            tensor[..., start::step] = array
        yield name, tensor


def _exported(weight: Weight, values: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of one weight, one layer at a time."""
    first, last = weight.hf_rows or (0, weight.hf_shape[0])
    shape = (last - first, *weight.hf_shape[1:])
    left, right = weight.hf_columns or (0, weight.hf_shape[-1])
    around = ((0, 0), (left, weight.hf_shape[-1] - right))
    shape = shape if weight.hf_columns is None else (shape[0], right - left)
    numbers = np.ndindex(*weight.shape[: weight.stacked])
    for each, name in zip(numbers, _names(weight), strict=True):
        array = whole(values[each] if each else values)
        if _is_transposed(weight):
            array = array.reshape(shape[::-1]).T
        array = array.reshape(shape)
        yield name, np.ascontiguousarray(np.pad(array, around) if weight.hf_columns else array)


def _in_shards(tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    for name, array in tensors:
        if shard and sum(x.nbytes for x in shard.values()) + array.nbytes > MAX_FILE_BYTES:
            yield shard
            shard = {}
        shard[name] = array
    yield shard
