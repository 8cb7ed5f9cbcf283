"""The settings that all updates on one slice share, and the sizes of their micro-batches."""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_async.config import schema
from jaxrl_async.config.model_section import BalanceSection
from jaxrl_async.mesh import TRAINER_RULES, Rules, num_shards
from jaxrl_async.model.decoder import DecoderSettings, settings_on
from jaxrl_async.model.lora import Lora, trained_table
from jaxrl_async.model.spec import ModelSpec

STEP = 4
"""Quotient of two consecutive sizes."""
MAX_SIZES = 3
"""Maximum number of sizes. Each is compiled separately."""
MOST_EMPTY = 0.1
"""Maximum share of padding rows that is accepted to compute fewer micro-batches."""


@dataclass(frozen=True, slots=True)
class MicroSizes:
    """The possible numbers of rows of a micro-batch, the largest first.

    Few sizes are compiled, and little padding is computed:

        sizes  32, 8, 2      28 rows  ->  8 8 8 2 2      30 rows  ->  32      70 rows  ->  32 32 8
    """

    sizes: tuple[int, ...]

    @classmethod
    def up_to(cls, most: int, multiple: int = 1) -> "MicroSizes":
        """Return the sizes from `most` down, each a multiple of `multiple`, as `most` must be.

        >>> MicroSizes.up_to(32), MicroSizes.up_to(6, 2), MicroSizes.up_to(1)
        (MicroSizes(sizes=(32, 8, 2)), MicroSizes(sizes=(6, 2)), MicroSizes(sizes=(1,)))
        """
        sizes = [most]
        while len(sizes) < MAX_SIZES and sizes[-1] > multiple:
            sizes.append(max(multiple, round(sizes[-1] / STEP / multiple) * multiple))
        return cls(tuple(sizes))

    @property
    def most(self) -> int:
        """Rows of the largest micro-batch."""
        return self.sizes[0]

    def cover(self, rows: int) -> tuple[int, ...]:
        """Return the sizes of micro-batches that hold these rows, the largest first; at least one.

        The fewest micro-batches with a share of at most MOST_EMPTY padding rows; if none has, those
        with the fewest padding rows. Depends only on the arguments: a resumed run divides rows as
        before.

        >>> MicroSizes((32, 8, 2)).cover(28), MicroSizes((32, 8, 2)).cover(30)
        ((8, 8, 8, 2, 2), (32,))
        """
        whole, rest = divmod(max(rows, 1), self.most)
        if not rest:
            return (self.most,) * whole

        def cost(counts: tuple[int, ...]) -> tuple[float, int, int]:
            held = sum(n * size for n, size in zip(counts, self.sizes, strict=True))
            if held < rest:
                return (float("inf"), 0, 0)
            computed = whole * self.most + held
            empty = (held - rest) / computed
            return (0.0 if empty <= MOST_EMPTY else empty, sum(counts), held)

        numbers = (range(-(-self.most // size) + 1) for size in self.sizes[1:])
        counts = min(product(range(2), *numbers), key=cost)
        ends = (size for n, size in zip(counts, self.sizes, strict=True) for _ in range(n))
        return (*(self.most for _ in range(whole)), *ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """The slice, its sharding rules, and how decoders run and learn there."""

    mesh: Mesh
    row_length: int  # tokens of a packed row
    trainer: schema.TrainerSection = field(default_factory=schema.TrainerSection)
    rules: Rules = field(default_factory=lambda: TRAINER_RULES)
    dtype: DTypeLike = jnp.float32  # of activations
    param_dtype: Any = jnp.float32  # of weights
    remat: str = "none"  # activations that the backward pass recomputes
    attention: str = "auto"  # a name of model.attention
    lora: Lora | None = None  # the trained adapter; None: all weights are trained
    balance: BalanceSection = field(default_factory=BalanceSection)  # of a mixture's experts
    temperatures: tuple[float, ...] = ()  # of each task, if they differ: by PackedBatch.task_ids

    @property
    def num_row_shards(self) -> int:
        """Devices over which the rows of a micro-batch are divided."""
        return num_shards(self.mesh, self.rules, "batch")

    def micro_sizes(self, rows_are_independent: bool = True) -> MicroSizes:
        """Return the sizes of micro-batches.

        Dependent rows have a single size of at least two rows: each answer of a pair may fill a
        row.
        """
        together = 1 if rows_are_independent else 2
        tokens = max(self.trainer.micro_batch_tokens, together * self.row_length)
        most = rows_per_micro_batch(tokens, self.row_length, self.num_row_shards)
        return MicroSizes.up_to(most, self.num_row_shards if rows_are_independent else most)

    def table(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the declared weights of a policy that are trained."""
        return trained_table(spec, self.lora)

    def decoder(self, spec: ModelSpec, temperature: float = 1.0) -> DecoderSettings:
        """Return the settings of this decoder on the slice.

        temperature: the sampler's; 0 counts as 1. Raises ConfigError if the attention cannot run on
        the mesh.
        """
        return settings_on(
            self.mesh,
            spec,
            dtype=self.dtype,
            attention=self.attention,
            shares_prefixes=bool(self.trainer.share_prefixes),
            cpu_kernels=self.trainer.cpu_kernels,
            remat=self.remat,
            chunk=self.trainer.logprob_chunk,
            temperature=temperature or 1.0,
            temperatures=self.temperatures,
            learns_load=self.balance.loss > 0,
        )


def rows_per_micro_batch(micro_batch_tokens: int, row_length: int, num_row_shards: int) -> int:
    """Return the rows within the token budget: the same number on each device, at least one."""
    return max(1, micro_batch_tokens // row_length // num_row_shards) * num_row_shards
