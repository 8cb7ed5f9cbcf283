"""The division of a program's tokens over a mesh, and their order.

Outside attention a decoder works on tokens in one axis, [B, T, ...] -> [B * T, ...] (the gradient
of [B, T, D] @ W is three times slower on a CPU). If C devices share the length of a row, each takes
two of its 2 C parts, the c-th from the front and the c-th from the back. This balances causal
attention over the devices; with contiguous parts the last device would have twice the mean work.
Tokens are then ordered by device: the ids are put in that order once, the results are put back at
the end, and hidden states are never moved.

    natural    [B, T]       part 0 1 2 3                    C = 2
    balanced   [B, T]       part 0 3 | 1 2
    tokens     [C * B * T / C]
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from jaxrl_async.mesh import (
    devices_here,
    divided,
    is_in_slice,
    num_shards,
    placement,
    spec_for,
    trainer_rules,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of tokens on a trainer's mesh; mesh None: one device, natural order."""

    mesh: Mesh | None = None

    def ways(self, length: int) -> int:
        """Return the number of devices that share rows of this length; 1 if the length does not
        divide into two parts for each."""
        context = 1 if self.mesh is None else self.mesh.shape["context"]
        return 1 if length % (2 * context) else context

    def token_ways(self, tokens: int) -> int:
        """Return the number of devices over which this many tokens are divided."""
        ways = 1 if self.mesh is None else num_shards(self.mesh, trainer_rules(), "tokens")
        return 1 if tokens % ways else ways

    def vocab_ways(self, vocab: int) -> int:
        """Return the number of devices over which a vocabulary is divided."""
        ways = 1 if self.mesh is None else num_shards(self.mesh, trainer_rules(), "vocab")
        return 1 if vocab % ways else ways

    @property
    def shares_weights(self) -> bool:
        """Whether weights are sharded over several devices and gathered for use."""
        return self.mesh is not None and num_shards(self.mesh, trainer_rules(), "embed") > 1

    def order(self, length: int) -> NDArray[np.int32]:
        """Return [T] int32: the natural position of each position in the balanced order."""
        positions = np.arange(length, dtype=np.int32)
        if (ways := self.ways(length)) == 1:
            return positions
        parts = positions.reshape(2 * ways, -1)
        return np.stack([parts[:ways], parts[: -ways - 1 : -1]], axis=1).reshape(-1)

    def flat(self, x: Array) -> Array:
        """Convert [B, T, ...] in natural order to tokens [B * T, ...]."""
        B, T = x.shape[:2]
        if (ways := self.ways(T)) > 1:
            parts = x.reshape(B, 2 * ways, -1, *x.shape[2:])
            x = jnp.stack([parts[:, :ways], parts[:, : -ways - 1 : -1]], axis=2).reshape(x.shape)
        return self.fold(x)

    def rows(self, x: Array, batch: int) -> Array:
        """Convert tokens [B * T, ...] to [B, T, ...] in natural order."""
        x = self.unfold(x, batch)
        return self.place(natural(x, self.ways(x.shape[1])), "batch", "length")

    def fold(self, x: Array) -> Array:
        """Convert [B, T, ...] in balanced order to tokens [B * T, ...]; no data moves."""
        B, T = x.shape[:2]
        ways = self.ways(T)
        if ways > 1:
            x = jnp.moveaxis(x.reshape(B, ways, T // ways, *x.shape[2:]), 1, 0)
        return self.place(x.reshape(B * T, *x.shape[3 if ways > 1 else 2 :]), "tokens")

    def unfold(self, x: Array, batch: int) -> Array:
        """Convert tokens [B * T, ...] to [B, T, ...] in balanced order; no data moves."""
        T = x.shape[0] // batch
        ways = self.ways(T)
        if ways > 1:
            x = jnp.moveaxis(x.reshape(ways, batch, T // ways, *x.shape[1:]), 0, 1)
        return x.reshape(batch, T, *x.shape[3 if ways > 1 else 1 :])

    def place(self, x: Array, *axes: str | None) -> Array:
        """Constrain x's sharding by the logical names of its first dimensions (None: replicated);
        the compiler chooses for the others."""
        if self.mesh is None or devices_here(self.mesh) == 1:
            return x
        spec = spec_for(x.shape[: len(axes)], axes, self.mesh, trainer_rules())
        rest = (P.UNCONSTRAINED for _ in x.shape[len(axes) :])
        return jax.lax.with_sharding_constraint(x, placement(self.mesh, P(*spec, *rest)))

    def rows_of(self, table: Array, ids: Array) -> Array:
        """Return the rows of a table [V, D] divided as ("vocab", "embed"): ids [n] -> [n, D].

        In a part of the axis data each device looks up the rows that it holds, since XLA's
        partitioner aborts for a table divided over both (spmd_partitioner_util.cc,
        ExpandDeviceGroups; jaxlib 0.12.0). Elsewhere XLA divides the lookup.
        """
        if self.mesh is None or not is_in_slice():
            return table[ids]
        vocab, embed = spec_for(table.shape, ("vocab", "embed"), self.mesh, trainer_rules())
        if vocab is None or embed is None:
            return table[ids]
        (of_ids,) = spec_for(ids.shape, ("looked_up",), self.mesh, trainer_rules())

        def local(held: Array, ids: Array) -> Array:
            at = ids - jax.lax.axis_index(vocab) * held.shape[0]
            is_held = (at >= 0) & (at < held.shape[0])
            found = jnp.where(is_held[:, None], held[jnp.where(is_held, at, 0)], 0)
            return jax.lax.psum(found, vocab)

        return divided(local, self.mesh, (P(vocab, embed), P(of_ids)), P(of_ids, embed))(table, ids)

    def gathered(self, weight: Array, axes: tuple[str, ...]) -> Array:
        """Gather a weight over fsdp; its gradient is reduce-scattered."""
        if self.mesh is None or devices_here(self.mesh) == 1:
            return weight
        rules = trainer_rules()
        shared, whole = (
            placement(self.mesh, spec_for(weight.shape, axes, self.mesh, each))
            for each in (rules, {**rules, "embed": None})
        )
        return weight if shared == whole else _gathered(weight, whole, shared)


def natural(x: Array, ways: int) -> Array:
    """Reorder [B, T, ...] from the balanced order of `ways` devices to natural order."""
    if ways == 1:
        return x
    parts = x.reshape(x.shape[0], ways, 2, -1, *x.shape[2:])
    return jnp.concatenate([parts[:, :, 0], parts[:, ::-1, 1]], axis=1).reshape(x.shape)


ONE_DEVICE = Layout()


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(weight: Array, whole: object, shared: object) -> Array:
    """All-gather with a reduce-scatter as its gradient: with a plain constraint each device would
    sum the whole gradient."""
    return jax.lax.with_sharding_constraint(weight, whole)


def _gathered_forward(weight: Array, whole: object, shared: object) -> tuple[Array, None]:
    return jax.lax.with_sharding_constraint(weight, whole), None


def _gathered_backward(whole: object, shared: object, _: None, gradient: Array) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(gradient, shared),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
