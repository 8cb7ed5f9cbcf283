"""The frozen base of an adapter in 8 or 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

The base is quantised once, when it is read or made. Trainer and samplers hold the same values and
scales, so quantisation adds no mismatch of their log-probs. The matrices of a file are read,
quantised and dropped one layer at a time: the unquantised base is never in memory as a whole. A
GGUF file's 4-bit blocks are kept unchanged if form and group size match (gguf_blocks.py).
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.later import Later
from jaxrl_async.mesh import TRAINER_RULES, shardings
from jaxrl_async.model.hf import OpenWeights, open_weights
from jaxrl_async.model.lora import Lora, change_of
from jaxrl_async.model.quantize import (
    PACKED,
    computed_in,
    is_matrix,
    is_quantized,
    quantized_table,
    restored,
    rounded,
    scales_among,
)
from jaxrl_async.model.spec import (
    LORA_A,
    LORA_B,
    SCALE,
    ModelSpec,
    Params,
    Weight,
    contracted,
    is_stack,
    named,
    stacks_in,
    weight_table,
)

if TYPE_CHECKING:
    from jaxrl_async.model import four_bits, gguf_blocks, gguf_tensors
else:
    gguf_blocks = Later("jaxrl_async.model.gguf_blocks")
    gguf_tensors = Later("jaxrl_async.model.gguf_tensors")
    four_bits = Later("jaxrl_async.model.four_bits")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseForm:
    """The form of a frozen base's matrices."""

    kind: Literal["int8", "nf4", "int4", "q4_1"]
    group: int  # maximum inputs per scale in 4 bits; int8 has one scale per output

    @property
    def ending(self) -> str:
        """Suffix of the names of the scales."""
        return SCALE if self.kind == "int8" else PACKED[self.kind]


def form_of(section: LoraSection | None) -> BaseForm | None:
    """Return a configuration's form of the frozen base; None: not quantised."""
    if section is None or section.base == "full":
        return None
    return BaseForm(kind=section.base, group=section.group_size)


def base_table(table: dict[str, Any], form: BaseForm | None) -> dict[str, Any]:
    """Return a decoder's table for a base of this form, including scales. Raises ConfigError if a
    matrix cannot be divided into groups."""
    if form is None:
        return table
    if form.kind == "int8":
        return quantized_table(table)
    return {**table, **{stack: _packed_table(table[stack], form) for stack in stacks_in(table)}}


def _packed_table(table: dict[str, Weight], form: BaseForm) -> dict[str, Weight]:
    layers = dict(table)
    for name, weight in table.items():
        if is_matrix(name, weight):
            layers[name] = _with_inputs(weight, 2)
            layers[name + form.ending] = replace(
                _scales_of(name, weight, form), init="ones", decays=False
            )
    return layers


def _scales_of(name: str, weight: Weight, form: BaseForm) -> Weight:
    """Return the Weight of a matrix's 4-bit scales. Raises ConfigError."""
    assert form.kind != "int8"
    return _with_inputs(
        weight, four_bits.inputs_per_scale(form.kind, group_of(name, weight, form.group))
    )


def _with_inputs(weight: Weight, parts: int) -> Weight:
    """Return a matrix with its inputs divided by `parts`."""
    last = contracted(weight).stop - 1
    shape = (*weight.shape[:last], weight.shape[last] // parts, *weight.shape[last + 1 :])
    return replace(weight, shape=shape)


def group_of(name: str, weight: Weight, most: int) -> int:
    """Return the size of a matrix's groups: the largest even divisor, up to `most`, of its
    innermost input dimension (such as the head width). Raises ConfigError if that is odd."""
    inputs = weight.shape[contracted(weight).stop - 1]
    size = _largest_group(inputs, most)
    if not size:
        raise ConfigError(
            f"model.lora.base: {name} has {inputs} inputs, an odd number, but 4 bits need pairs "
            "of inputs. Set model.lora.base=int8."
        )
    return size


def _largest_group(inputs: int, most: int) -> int:
    """Return the largest even divisor up to `most`; 0 without one."""
    sizes = (size for size in range(2, min(most, inputs) + 1, 2) if inputs % size == 0)
    return max(sizes, default=0)


def base_shapes(spec: ModelSpec, form: BaseForm | None, dtype: DTypeLike) -> Params:
    """Return a base as jax.ShapeDtypeStructs; dtype: type of weights that are not quantised."""
    table = weight_table(spec)
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype), table, is_leaf=_is_weight)
    if form is None:
        return shapes
    for stack in stacks_in(table):
        for name, weight in table[stack].items():
            if is_matrix(name, weight):
                made = jax.eval_shape(partial(_in_form, name, weight, form), shapes[stack][name])
                shapes[stack] |= made
    return shapes


def base_bytes(spec: ModelSpec, form: BaseForm | None, dtype: DTypeLike) -> int:
    """Return the size of a base in bytes; dtype: type of weights that are not quantised."""
    shapes = jax.tree.leaves(base_shapes(spec, form, dtype))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes)


def check_groups(spec: ModelSpec, form: BaseForm | None, mesh: Mesh, where: str) -> None:
    """Raise ConfigError if the axis `tensor` of a mesh (`where`: mesh.trainer or mesh.sampler)
    would split a group of an expert's inputs that share a scale."""
    ways = mesh.shape["tensor"]
    table = weight_table(spec)
    downs = [table[stack]["down"] for stack in stacks_in(table) if "router" in table[stack]]
    if form is None or form.kind == "int8" or not downs or ways == 1 or spec.mlp % ways:
        return
    group = group_of("down", downs[0], form.group)
    if (spec.mlp // ways) % group:
        fitting = _largest_group(spec.mlp // ways, group)
        raise ConfigError(
            f"{where}.tensor ({ways}) splits an expert's inner width of {spec.mlp} within a group "
            f"of model.lora.group_size ({group}) inputs. "
            + (f"Set model.lora.group_size={fitting}, or " if fitting else "Set ")
            + f"another {where}.tensor."
        )


# ---- making


def quantized_base(spec: ModelSpec, params: Params, form: BaseForm, where: Any) -> Params:
    """Return all weights of a decoder as a base; unquantised weights are not copied.

    where: shardings in the tree of base_table.
    """
    table, stacks = weight_table(spec), {stack: dict(params[stack]) for stack in stacks_in(params)}
    for stack, layers in stacks.items():
        for name, weight in table[stack].items():
            if is_matrix(name, weight):
                placed = {part: where[stack][part] for part in (name, name + form.ending)}
                make = jax.jit(partial(_in_form, name, weight, form), out_shardings=placed)
                layers |= make(params[stack][name])
    return {**params, **stacks}


def read_base(
    folder: str | Path, spec: ModelSpec, form: BaseForm, mesh: Mesh | None, dtype: DTypeLike
) -> Params:
    """Read a Hugging Face directory as a base on a trainer's mesh, its matrices layer by layer.
    Raises CheckpointError, ConfigError.

    Args:
        folder: the directory.
        spec: spec of the model in it.
        form: form of the matrices.
        mesh: mesh of the weights; None: the default device.
        dtype: type of the other weights, and of matrices before quantisation.
    """
    table = weight_table(spec)
    where = _placed(base_table(table, form), mesh)
    kept = []  # for each matrix of a layer: whether the file's blocks are kept
    with open_weights(Path(folder), table) as read:

        def matrix(name: str, one: Weight) -> Array | dict[str, np.ndarray]:
            blocks = _kept(name, one, form, read)
            kept.append(blocks is not None)
            return read(one, _placed(one, mesh), dtype) if blocks is None else blocks

        def stack_of(weights: dict[str, Weight], places: Any) -> dict[str, Array]:
            layers: dict[str, Array] = {}
            for name, weight in weights.items():
                if is_matrix(name, weight):
                    parts = map(partial(matrix, name), _one_by_one(weight))
                    placed = {part: places[part] for part in (name, name + form.ending)}
                    layers |= _stacked(partial(_in_form, name, form=form), weight, parts, placed)
                else:
                    layers[name] = read(weight, places[name], dtype)
            return layers

        base = {
            name: stack_of(part, where[name]) if is_stack(name) else read(part, where[name], dtype)
            for name, part in table.items()
        }
    if any(kept):
        num = f"{sum(kept)} of {len(kept)}"
        log.info("%s: %s matrices keep the file's 4-bit blocks", folder, num)
    return base


def _kept(
    name: str, weight: Weight, form: BaseForm, read: OpenWeights
) -> dict[str, np.ndarray] | None:
    """Return a layer's matrix from the 4-bit blocks of a GGUF file, by name like _in_form. None if
    it is not stored in blocks of this form."""
    if form.kind == "int8" or group_of(name, weight, form.group) != gguf_blocks.BLOCK:
        return None
    rows = slice(None) if weight.hf_rows is None else slice(*weight.hf_rows)
    parts = [tensor.file for tensor in read.stored(weight)]
    if weight.hf_columns is not None or not all(
        isinstance(part, gguf_tensors.GgufPart) for part in parts
    ):
        return None
    blocks = [
        kept for p in parts if (kept := gguf_blocks.kept_blocks(p, rows, form.kind)) is not None
    ]
    if len(blocks) < len(parts):
        return None
    packed, scales = (np.stack(each) for each in zip(*blocks, strict=True))
    return {
        name: packed.reshape(_with_inputs(weight, 2).shape),
        name + form.ending: scales.reshape(_scales_of(name, weight, form).shape),
    }


def _placed(table: object, mesh: Mesh | None) -> Any:
    if mesh is not None:
        return shardings(table, mesh, TRAINER_RULES)
    one = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: one, table, is_leaf=_is_weight)


def _one_by_one(weight: Weight) -> Iterator[Weight]:
    """Yield the layers of a stacked weight, each with its name in a file."""
    for number in weight.numbers:
        name = weight.hf.format(layer=number, expert="{expert}")
        yield replace(_of_one(weight), hf=name)


def _of_one(weight: Weight, stacked: int = 1) -> Weight:
    """Return a weight without its first `stacked` dimensions."""
    return replace(weight, shape=weight.shape[stacked:], axes=weight.axes[stacked:])


def _stacked(
    made: Callable[..., dict[str, Array]],
    weight: Weight,
    parts: Iterator[Array | dict[str, np.ndarray]],
    placed: object,
) -> dict[str, Array]:
    """Convert a matrix's layers one after the other and stack the results.

    Args:
        made: returns values and scales of a matrix (`weight`, `array`).
        weight: the stacked matrix.
        parts: its layers, or their values and scales if already converted.
        placed: shardings of the stacked values and scales.
    """
    one = _of_one(weight)

    def put(stacks: dict[str, Array], array: object, layer: Array) -> dict[str, Array]:
        of_layer = array if isinstance(array, dict) else made(weight=one, array=array)
        return {part: stack.at[layer].set(of_layer[part]) for part, stack in stacks.items()}

    whole = jax.ShapeDtypeStruct(weight.shape, jnp.float32)
    shapes = jax.eval_shape(lambda array: made(weight=weight, array=array), whole)
    fill = jax.jit(put, donate_argnums=(0,), out_shardings=placed)
    stacks = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=placed
    )()
    for layer, array in enumerate(parts):
        stacks = fill(stacks, array, np.int32(layer))
        jax.block_until_ready(stacks)  # frees this layer before the next is read
    return stacks


def _in_form(name: str, weight: Weight, form: BaseForm, array: Array) -> dict[str, Array]:
    """Convert a matrix, stacked or not, to this form: values and scales by name."""
    if form.kind == "int8":
        values, scales = rounded(array, weight, "int8")
        return {name: values, name + form.ending: scales}
    group, outputs = group_of(name, weight, form.group), weight.shape[contracted(weight).stop :]
    flat = array.reshape(*weight.shape[: weight.stacked], -1, math.prod(outputs))
    packed, scales = four_bits.pack_codes(flat, form.kind, group)
    return {
        name: packed.reshape(_with_inputs(weight, 2).shape),
        name + form.ending: scales.reshape(_scales_of(name, weight, form).shape),
    }


def _is_weight(node: object) -> bool:
    return isinstance(node, Weight)


def sent_base(base: Params, dtype: DTypeLike) -> Params:
    """Return a new copy of a base for samplers: the same values and scales, the rest in dtype."""
    return {
        name: computed_in(dtype, {n: jnp.array(w, copy=True) for n, w in part.items()})
        if is_stack(name)
        else jnp.array(part, dtype, copy=True)
        for name, part in base.items()
    }


# ---- dequantising


def restored_params(spec: ModelSpec, params: Params) -> Params:
    """Return all weights of a base, dequantised to the type of the unquantised weights. Additional
    weights, such as a head, are unchanged."""
    if not is_quantized(params):
        return params
    table, dtype = weight_table(spec), params["embed"].dtype

    def all_of(stacks: Params) -> Params:
        return {
            stack: {
                name: restored(weight, layers, name).astype(dtype)
                if is_matrix(name, weight)
                else layers[name]
                for name, weight in table[stack].items()
            }
            for stack, layers in stacks.items()
        }

    stacks = {stack: params[stack] for stack in stacks_in(params)}
    where = {
        stack: {name: getattr(layers[name], "sharding", None) for name in table[stack]}
        for stack, layers in stacks.items()
    }
    return {**params, **jax.jit(all_of, out_shardings=where)(stacks)}


class MergedMatrix:
    """A stacked matrix of a quantised base merged with its adapter, computed one layer (or expert)
    at a time on access, since the whole may not fit in memory."""

    def __init__(
        self, name: str, weight: Weight, lora: Lora | None, layers: Params, dtype: DTypeLike
    ) -> None:
        """layers: the weights of base and adapter together; dtype: type of the results; lora:
        None: no adapter."""
        one, own = _of_one(weight, named(weight)), (name, *_part_names(name, layers))
        self._layers = {part: layers[part] for part in own}
        self.dtype = jnp.dtype(dtype)

        def make(parts: Params) -> Array:
            whole = restored(one, parts, name)
            if lora is not None and name + LORA_A in parts:
                whole = whole + change_of(one, lora, parts, name)
            return whole.astype(dtype)

        self._make = jax.jit(make)

    def __getitem__(self, each: tuple[int, ...]) -> Array:
        """Return the matrix of a layer, or of one of its experts."""
        made: Array = self._make({part: array[each] for part, array in self._layers.items()})
        return made


def _part_names(name: str, layers: Params) -> list[str]:
    """Return the names of a matrix's scales and adapter among weights of layers."""
    ends = (scales_among(layers), LORA_A, LORA_B)
    return [name + end for end in ends if end and name + end in layers]


def merged_by_layer(spec: ModelSpec, lora: Lora | None, base: Params, adapter: Params) -> Params:
    """Return lora.merged for a quantised base, for saving: matrices are MergedMatrix. lora: None:
    only the base, without an adapter."""
    table, dtype = weight_table(spec), base["embed"].dtype
    stacks: Params = {}
    for stack in stacks_in(base):
        layers = {**base[stack], **adapter.get(stack, {})}
        stacks[stack] = {
            name: MergedMatrix(name, weight, lora, layers, dtype)
            if is_matrix(name, weight)
            else layers[name]
            for name, weight in table[stack].items()
        }
    return {**base, **adapter, **stacks}
