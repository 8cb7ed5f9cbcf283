"""Several adapters for one base, as one wide adapter in which each row uses its own columns.

    slot       1      2            P
    A    [ A_1 | A_2 | ... | A_P ]        [in, P * rank]
    B    [ B_1 ; B_2 ; ... ; B_P ]        [P * rank, out]

    x W + (x A, 0 outside the columns of the row's slot) B

A row of slot 0 uses no adapter, only the base. A slot is a fixed range of columns; an adapter is
loaded by writing to it, padded with 0 to the slot's rank. The product with all adapters reads each
weight once for any mix of rows. benchmarks/adapters.py compares the alternatives: copying each
row's matrices, and sorting rows by adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.config.lora_section import ALL_LINEAR, LoraSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.lora import Lora, adapter_table, lora_of
from jaxrl_async.model.spec import LORA_A, LORA_B, LORA_OWN, ModelSpec, Params, weight_table

MAX_SLOTS = 1024
"""Maximum number of adapters: with more, their products cost more than the model's."""
MAX_RANK = 65_536
"""Maximum rank of a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoom:
    """The capacity for adapters in addition to a base."""

    places: int  # maximum number of adapters
    rank: int = 32  # maximum rank of an adapter
    targets: str | tuple[str, ...] = ALL_LINEAR  # matrices that may be adapted, as in model.lora

    def __post_init__(self) -> None:
        for name, value, most in (
            ("places", self.places, MAX_SLOTS),
            ("rank", self.rank, MAX_RANK),
        ):
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(
                    f"AdapterRoom: {name} must be a whole number from 1 to {most}, not {value!r}."
                )
        named = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        if not named or not all(isinstance(target, str) for target in named):
            raise ConfigError(
                f"AdapterRoom: targets must be a text or several, not {self.targets!r:.80}."
            )
        if not isinstance(self.targets, str):  # hashable: compiled programs are cached by it
            object.__setattr__(self, "targets", named)


def stack_of(spec: ModelSpec, room: AdapterRoom) -> Lora:
    """Return the wide adapter that holds all slots. Raises ConfigError for a target that matches
    nothing."""
    lora = lora_of(spec, LoraSection(rank=room.rank, targets=room.targets))
    assert lora is not None
    return Lora(names=lora.names, rank=room.places * room.rank, scale=1.0)


def stack_table(spec: ModelSpec, room: AdapterRoom) -> dict[str, Any]:
    """Return the table of all slots' weights."""
    return adapter_table(spec, stack_of(spec, room))


def empty_stack(spec: ModelSpec, room: AdapterRoom, dtype: DTypeLike) -> list[Params]:
    """Return the empty slots of each layer."""
    table = stack_table(spec, room)
    shapes = {
        number: {name: weight.shape[1:] for name, weight in table.get(stack, {}).items()}
        for stack, numbers in spec.stacks.items()
        for number in numbers
    }
    return [{n: jnp.zeros(s, dtype) for n, s in shapes[i].items()} for i in range(spec.layers)]


def fitted_adapter(
    spec: ModelSpec, room: AdapterRoom, name: str, lora: Lora, adapter: Params
) -> Params:
    """Convert an adapter for a slot, float32 on the host: B is scaled, and matrices without an
    adapter and unused ranks are 0.

    Args:
        spec: spec of the base.
        room: the capacity for adapters.
        name: name of the adapter, for errors.
        lora: the matrices that it changes.
        adapter: its weights, in the tree of lora.adapter_table.

    Raises ConfigError for an adapter that does not fit, is for another base, or is not finite.
    """
    if lora.rank > room.rank:
        raise ConfigError(
            f"adapter {name!r} has rank {lora.rank}, but the maximum rank is {room.rank}. Start "
            "with a larger maximum (AdapterRoom.rank, --max-lora-rank)."
        )
    whole = stack_of(spec, room)
    outside = sorted(set(lora.names) - set(whole.names))
    if outside:
        raise ConfigError(
            f"adapter {name!r} changes {', '.join(outside)}, but only changes of "
            f"{', '.join(whole.names)} are supported (AdapterRoom.targets)."
        )
    table = adapter_table(spec, lora)
    if adapter.keys() != table.keys() or any(adapter[n].keys() != table[n].keys() for n in table):
        raise ConfigError(f"adapter {name!r} is not a tree of lora.adapter_table: its keys differ.")
    fitted = empty_adapter(spec, room)
    for stack, part in ((name, part) for name in table for part in table[name]):
        array = np.asarray(jax.device_get(adapter[stack][part]), np.float32)
        if array.shape != table[stack][part].shape:
            raise ConfigError(
                f"adapter {name!r}: {part} has shape {array.shape}, but this base needs "
                f"{table[stack][part].shape}. It belongs to another model."
            )
        if part.endswith(LORA_B):
            with np.errstate(all="ignore"):
                array = array * np.float32(lora.scale)
        if not np.isfinite(array).all():
            raise ConfigError(
                f"adapter {name!r}: {part} has values that are not finite (times its scale, "
                f"{lora.scale:g}), which would affect answers with other adapters. Use an earlier "
                "checkpoint of it."
            )
        fitted[stack][part][tuple(slice(0, n) for n in array.shape)] = array
    return fitted


def empty_adapter(spec: ModelSpec, room: AdapterRoom) -> Params:
    """Return an adapter for a slot that changes nothing."""
    names = stack_of(spec, room).names
    table = adapter_table(spec, Lora(names=names, rank=room.rank, scale=1.0))
    return {
        stack: {n: np.zeros(weight.shape, np.float32) for n, weight in weights.items()}
        for stack, weights in table.items()
    }


def put_adapter(
    spec: ModelSpec, room: AdapterRoom, stack: Sequence[Params], adapter: Params, slot: Array
) -> list[Params]:
    """Write an adapter (from fitted_adapter) to a slot, counted from 1; return the slots."""
    table = weight_table(spec)
    numbers = {i: (s, n) for s, own in spec.stacks.items() for n, i in enumerate(own)}

    def put(into: Array, part: str, layer: int) -> Array:
        of_stack, nth = numbers[layer]
        new = adapter[of_stack][part][nth]
        name = part.removesuffix(LORA_A).removesuffix(LORA_B)
        is_input = part.endswith(LORA_A)
        axis = into.ndim - 1 if is_input else table[of_stack][name].stacked - 1
        start = (slot - 1) * room.rank
        return jax.lax.dynamic_update_slice_in_dim(into, new.astype(into.dtype), start, axis)

    return [{n: put(x, n, i) for n, x in layer.items()} for i, layer in enumerate(stack)]


def own_columns(room: AdapterRoom, slots: Array) -> Array:
    """Return the columns of A that each row uses: slots [n] to [n, P * rank] bool."""
    columns = jnp.arange(room.places * room.rank) // room.rank
    return jnp.asarray(slots)[:, None] == columns + 1


def layers_with_stack(
    room: AdapterRoom | None,
    layers: Sequence[Params],
    stack: Sequence[Params],
    slots: Array | None,
) -> Sequence[Params]:
    """Add all adapters' weights to the layers' weights, for rows with these slots.

    Args:
        room: capacity for adapters. None: the layers are returned unchanged.
        layers: weights of the base.
        stack: weights of all slots.
        slots: [n] int32, slot of each row, 0 for the base; None: no row has an adapter.
    """
    if room is None or slots is None:
        return layers
    own = own_columns(room, slots)
    return [{**layer, **added, LORA_OWN: own} for layer, added in zip(layers, stack, strict=True)]
