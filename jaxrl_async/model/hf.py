"""Hugging Face directories: read safetensors straight onto the mesh, and write them.

The only module that imports safetensors.

A stacked weight [L, ...] is filled layer by layer: each device reads only the slices that it
holds, so that no host copy of the whole model ever exists.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_async.errors import CheckpointError
from jaxrl_async.mesh import whole
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.model.tensorfile import Stored, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
_NUMBER = {"layers": "layer", "expert": "expert"}
"""Stacked dimension -> the field of its number in a tensor's name."""
GENERATION = "generation_config.json"
"""How transformers and servers draw from the model: end tokens, temperature and more."""
MAX_FILE_BYTES = 4 * 1024**3
MAX_JSON_BYTES = 64 * 1024**2
"""Longest config.json or index that is read."""
DTYPES = ("F64", "F32", "F16", "BF16")
"""Types in which weights may be stored."""
IGNORED = ("rotary_emb.inv_freq",)
"""Endings of tensors that some files hold and no model uses."""


def load_spec(folder: Path) -> ModelSpec:
    """Return the model that config.json describes. Raises CheckpointError."""
    file = folder / "config.json"
    return ModelSpec.from_hf_config(_read_json(file), str(file))


def load_generation(folder: Path) -> dict[str, Any]:
    """Read generation_config.json; empty if there is none. Raises CheckpointError."""
    file = folder / GENERATION
    return _read_json(file) if file.exists() else {}


def save_generation(folder: Path, spec: ModelSpec, generation: Mapping[str, Any]) -> None:
    """Write generation_config.json: `generation` with the spec's special tokens and the end tokens
    of both."""
    own = generation.get("eos_token_id")
    more = [i for i in (own if isinstance(own, list) else [own]) if type(i) is int]
    ends = dataclasses.replace(spec, eos_ids=tuple(dict.fromkeys([*spec.eos_ids, *more])))
    named = {key: value for key, value in ends.token_ids().items() if value is not None}
    content = json.dumps({**generation, **named}, indent=2)
    (folder / GENERATION).write_text(content, encoding="utf-8")


def check_params(folder: str | Path, spec: ModelSpec) -> None:
    """Compare the directory's tensors with the model's without reading them. Raises
    CheckpointError."""
    with ExitStack() as files:
        _check(Path(folder), weight_table(spec), _open_all(Path(folder), files))


def load_params(
    folder: str | Path, spec: ModelSpec, shardings: Any = None, dtype: Any = jnp.float32
) -> Any:
    """Load the parameters of a decoder, on `shardings` (a tree like weight_table's; None: the
    default device). Raises CheckpointError as load_weights does."""
    return load_weights(folder, weight_table(spec), shardings, dtype)


def load_weights(
    folder: str | Path, table: Any, shardings: Any = None, dtype: Any = jnp.float32
) -> Any:
    """Load the weights of a table, on `shardings` (a tree like the table; None: the default
    device).

    All names and shapes are compared before any tensor is loaded: CheckpointError lists what is
    missing, not part of the model, or of the wrong shape.
    """
    folder = Path(folder)
    if shardings is None:
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: one, table, is_leaf=lambda w: isinstance(w, Weight))
    with ExitStack() as files:
        tensors = _open_all(folder, files)
        _check(folder, table, tensors)
        return jax.tree.map(
            lambda w, s: _load(w, tensors, s, dtype),
            table,
            shardings,
            is_leaf=lambda w: isinstance(w, Weight),
        )


def save_params(folder: str | Path, spec: ModelSpec, params: Any) -> None:
    """Write config.json and safetensors that transformers loads; several files above 4 GiB."""
    save_weights(folder, spec.to_hf_config(), weight_table(spec), params)


def save_weights(folder: str | Path, config: dict[str, Any], table: Any, params: Any) -> None:
    """Write any table of weights and its config.json, as save_params does.

    If several processes hold the weights together, all must call it; the first one writes.
    """
    if jax.process_index() != 0:
        for _ in _export(table, params):
            pass
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(jax.tree.leaves(params)[0].dtype)
    config = {**config, "torch_dtype": dtype, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    shards = list(_in_shards(_export(table, params)))
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(x.nbytes for shard in shards for x in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


# ---- reading


class _Tensor(NamedTuple):
    """A stored tensor and the open file that reads it."""

    stored: Stored
    file: Any


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if file.exists() and not file.is_file():
            raise CheckpointError(f"{file}: is not a file. Copy the model's directory again.")
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
        raise CheckpointError(f"{file}: must hold a JSON object. Copy the file again.")
    return content


def _file_names(folder: Path) -> list[str]:
    """Return the files that hold the weights. Raises CheckpointError."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder}: no {SINGLE} here. {_advice(folder)}")
        return [SINGLE]
    named = _read_json(folder / INDEX).get("weight_map")
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
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.pt*")
    )
    if not pickles:
        return "Copy the whole directory, or save the model with save_pretrained."
    return (
        f"{pickles[0]} may be a pickle, which can run any code and is never loaded. Convert it "
        "where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)."
    )


def _open_all(folder: Path, files: ExitStack) -> dict[str, _Tensor]:
    """Open all files; return each tensor by name. Raises CheckpointError."""
    tensors: dict[str, _Tensor] = {}
    for name in _file_names(folder):
        path = folder / name
        header = read_header(path)
        if twice := sorted(header.keys() & tensors.keys()):
            raise CheckpointError(
                f"{path}: holds {twice[0]}, which another file holds too. Remove the files that "
                f"are not part of this model, and correct {INDEX}."
            )
        try:
            file = files.enter_context(safe_open(path, framework="numpy"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: cannot be read as safetensors: {error}. Copy the file again."
            ) from None
        tensors |= {tensor: _Tensor(stored, file) for tensor, stored in header.items()}
    return tensors


def _check(folder: Path, table: Any, tensors: Mapping[str, _Tensor]) -> None:
    wanted = {
        name: weight.hf_shape
        for weight in jax.tree.leaves(table, is_leaf=lambda w: isinstance(w, Weight))
        for name in _names(weight)
    }
    missing = sorted(wanted.keys() - tensors.keys())
    extra = sorted(
        n
        for n in tensors.keys() - wanted.keys()
        if not n.endswith(IGNORED) and n != "lm_head.weight"
    )
    there = {n: tensors[n].stored for n in sorted(wanted.keys() & tensors.keys())}
    wrong = [n for n, stored in there.items() if stored.shape != wanted[n]]
    coded = [n for n, stored in there.items() if stored.dtype not in DTYPES]
    problems = [
        *_describe(missing, "missing", lambda n: f"{n} {list(wanted[n])}"),
        *_describe(extra, "not part of this model", str),
        *_describe(
            wrong, "misshapen", lambda n: f"{n} is {list(there[n].shape)}, not {list(wanted[n])}"
        ),
        *_describe(coded, "quantised or no weights", lambda n: f"{n} is {there[n].dtype}"),
    ]
    if problems:
        raise CheckpointError(
            f"{folder}: "
            + "; ".join(problems)
            + ". config.json and the weights belong to different models, or one that is not "
            f"supported: point model.path at a complete directory with {', '.join(DTYPES)} weights."
        )


def _describe(names: list[str], what: str, show: Any) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{len(names)} tensors {what} ({', '.join(show(n) for n in names[:3])}{more})"]


def _names(weight: Weight) -> list[str]:
    """Return the names in the file: one, or one per layer and expert, in their order."""
    numbers = itertools.product(*(range(size) for size in weight.shape[: weight.stacked]))
    axes = [_NUMBER[axis] for axis in weight.axes[: weight.stacked]]
    return [weight.hf.format(**dict(zip(axes, each, strict=True))) for each in numbers]


def _load(weight: Weight, tensors: Mapping[str, _Tensor], sharding: Any, dtype: Any) -> Array:
    """Load one weight onto its devices; each device's part is read by itself."""
    stacked = weight.stacked
    numbered, shape = weight.shape[:stacked], weight.shape[stacked:]
    names = np.array(_names(weight), object).reshape(numbered)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        selected, rest = np.asarray(names[index[:stacked]], object), index[stacked:]
        parts = [_slice(weight, shape, tensors[n], n, rest).astype(dtype) for n in selected.flat]
        return np.stack(parts).reshape(*selected.shape, *parts[0].shape)

    return jax.make_array_from_callback(weight.shape, sharding, part)


def _slice(
    weight: Weight, shape: tuple[int, ...], tensor: _Tensor, name: str, index: tuple[slice, ...]
) -> np.ndarray:
    """Read a slice of one stored tensor: stored as [out, in], returned as [in, ...]; an embedding
    is stored as it is returned.

    Reads at most the tensor of one layer. Raises CheckpointError if a number is not finite.
    """
    stored = np.asarray(tensor.file.get_tensor(name))
    turned = stored.T if _is_turned(weight) else stored
    ours = np.ascontiguousarray(turned.reshape(shape)[index])
    if not np.isfinite(ours).all():
        raise CheckpointError(
            f"{name} holds NaN or infinite numbers: the model was not saved whole, or its training "
            "failed. Take an earlier checkpoint, or copy it again."
        )
    return ours


def _is_turned(weight: Weight) -> bool:
    """Return whether the file stores the matrix transposed: all Linear weights do."""
    return len(weight.hf_shape) == 2 and weight.axes[0] != "vocab"


# ---- writing


def _export(table: Any, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) as stored in files, one layer at a time."""
    weights = jax.tree.leaves(table, is_leaf=lambda w: isinstance(w, Weight))
    for weight, values in zip(weights, jax.tree.leaves(params), strict=True):
        numbers = np.ndindex(*weight.shape[: weight.stacked])
        for each, name in zip(numbers, _names(weight), strict=True):
            ours = whole(values[each] if each else values)
            if _is_turned(weight):
                ours = ours.reshape(weight.hf_shape[::-1]).T
            yield name, np.ascontiguousarray(ours.reshape(weight.hf_shape))


def _in_shards(tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    for name, array in tensors:
        if shard and sum(x.nbytes for x in shard.values()) + array.nbytes > MAX_FILE_BYTES:
            yield shard
            shard = {}
        shard[name] = array
    yield shard
