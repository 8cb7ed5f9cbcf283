"""The per-token columns: every array that has one entry per token, declared once.

    packed rows ──pack──> PackedBatch ──┐
    weights     ──aggregate────────────>├──> DeviceBatch ──update──> TokenInputs ──> loss
    passes      ──before the update────>┘         (policy log-probs, entropy ... join here)

To add a column, add its row to `COLUMNS` and its field to the tuples that carry it. The import
fails if a tuple and the table disagree.
"""

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from jax import Array
from numpy.typing import NDArray

from jaxrl_async.types import NOT_DRAWN, PackedBatch

ALL_BITS = 0xFF
"""A byte of a sampling mask at a token that was not sampled: all tokens allowed."""
UNKNOWN_EXPERT = -1
"""The expert id of a token whose routing the sampler did not report."""

Columns = dict[str, NDArray[Any]]
"""Host arrays [rows, length, ...] by column name, in addition to a PackedBatch."""


class Source(Enum):
    """The producer of a column."""

    PACK = "trainer.pack, from episodes: a field of PackedBatch"
    AGGREGATE = "algorithm.aggregate, from the packed batch"
    PASS = "a forward pass before the update, or what is computed from one"
    UPDATE = "the update itself, on the devices"


class Column(NamedTuple):
    """One array [rows, length] of a batch."""

    name: str
    dtype: str
    source: Source
    fill: int | float | bool = 0  # value of padding
    on_device: bool = True  # a field of DeviceBatch; False also for columns of the update
    in_loss: bool = False  # a field of losses.TokenInputs
    optional: bool = False  # None in runs that do not need it
    per_token: str = ""  # axes after [rows, length]
    policy_alone: bool = False  # must not be given to a reference, teacher or critic
    of_context: bool = False  # the same in every context that shares the token


def _loss_only(name: str, *, optional: bool = False, dtype: str = "float32") -> Column:
    """Declare a column that the update computes for the losses."""
    return Column(name, dtype, Source.UPDATE, on_device=False, in_loss=True, optional=optional)


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("token_ids", "int32", Source.PACK, of_context=True),
        Column("positions", "int32", Source.PACK, of_context=True),
        Column("segment_ids", "int32", Source.PACK, in_loss=True),
        Column("mask", "bool", Source.PACK, False, in_loss=True),
        Column("behavior_logprobs", "float32", Source.PACK, 0.0, in_loss=True),
        Column("versions", "int32", Source.PACK, NOT_DRAWN, in_loss=True),
        Column("advantages", "float32", Source.PACK, 0.0, in_loss=True),
        Column("weights", "float32", Source.AGGREGATE),
        Column("supervised_weights", "float32", Source.AGGREGATE, optional=True),
        Column(
            "component_weights", "float32", Source.AGGREGATE, optional=True,
            per_token="components",
        ),
        Column("rewards", "float32", Source.PASS, in_loss=True, optional=True),
        Column("proximal_logprobs", "float32", Source.PASS, in_loss=True, optional=True),
        Column("reference_logprobs", "float32", Source.PASS, in_loss=True, optional=True),
        Column("covariance_rank", "float32", Source.PASS, in_loss=True, optional=True),
        Column("teacher_ids", "int32", Source.PASS, optional=True, per_token="k"),
        Column("teacher_logprobs", "float32", Source.PASS, optional=True, per_token="k"),
        Column("teacher_weights", "float32", Source.PASS, optional=True, per_token="teachers"),
        Column("teacher_spans", "int32", Source.PASS, -1, optional=True, per_token="teachers"),
        Column(
            "teacher_span_logprobs", "float32", Source.PASS, optional=True, per_token="teachers"
        ),
        Column("kept", "uint8", Source.PACK, ALL_BITS, optional=True, per_token="vocab / 8"),
        Column(
            "expert_ids", "int8", Source.PACK, UNKNOWN_EXPERT, optional=True,  # or int16
            per_token="layers, k", policy_alone=True, of_context=True,
        ),
        Column("image_begins", "int32", Source.PACK, -1, optional=True, of_context=True),
        Column(
            "embeddings", "float32", Source.PACK, 0.0, optional=True, per_token="width",
            of_context=True,
        ),
        Column("task_ids", "int32", Source.PACK, optional=True, of_context=True),
        Column("sequence_ids", "int32", Source.PACK, -1, on_device=False),
        Column("group_ids", "int32", Source.PACK, -1, on_device=False, of_context=True),
        Column("supervised", "bool", Source.PACK, False, on_device=False),
        Column("offsets", "int32", Source.PACK, on_device=False, optional=True),
        _loss_only("policy_logprobs"),
        _loss_only("entropy"),
        _loss_only("anchor_logprobs", optional=True),
        _loss_only("ages", optional=True, dtype="int32"),
        _loss_only("reference_divergence", optional=True),
        _loss_only("teacher_divergence", optional=True),
    )
}  # fmt: skip
"""All columns by name; DeviceBatch's columns are in the order of its fields."""


class DeviceBatch(NamedTuple):
    """A micro-batch on the devices; [rows, length] each, sharded by mesh.batch_sharding."""

    token_ids: Array
    positions: Array
    segment_ids: Array
    mask: Array
    behavior_logprobs: Array
    versions: Array
    advantages: Array
    weights: Array  # of the policy loss
    supervised_weights: Array | None = None  # of -log policy: demonstrations mixed in
    component_weights: Array | None = None  # [rows, length, components] of algorithm.losses
    rewards: Array | None = None  # of the token's answer, if algorithm.losses has components
    proximal_logprobs: Array | None = None  # of the weights at the start of the step
    reference_logprobs: Array | None = None  # if they are computed before the update
    covariance_rank: Array | None = None  # as in losses.TokenInputs
    teacher_ids: Array | None = None  # [rows, length, k] the teacher's most likely tokens
    teacher_logprobs: Array | None = None  # [rows, length, k]
    teacher_weights: Array | None = None  # [rows, length, teachers]: k of each; None: one teacher
    teacher_spans: Array | None = None  # [rows, length, teachers], as distill.TeacherSpans
    teacher_span_logprobs: Array | None = None  # [rows, length, teachers]
    kept: Array | None = None  # [rows, length, ceil(vocab / 8)] sampling masks
    expert_ids: Array | None = None  # [rows, length, layers, k]
    image_begins: Array | None = None  # as in PackedBatch
    embeddings: Array | None = None  # [rows, length, width]
    task_ids: Array | None = None  # as in PackedBatch


def names_of(*sources: Source) -> tuple[str, ...]:
    """Return the names of the columns that these sources produce."""
    return tuple(c.name for c in COLUMNS.values() if c.source in sources)


def check_fields(carrier: str, fields: Iterable[str], declared: Iterable[str]) -> None:
    """Raise TypeError if a carrier's fields differ from its columns in COLUMNS."""
    if differing := sorted({*fields} ^ {*declared}):
        raise TypeError(f"{carrier} and algorithms.columns.COLUMNS differ in {differing}")


def for_other_models(batch: PackedBatch) -> PackedBatch:
    """Return the batch without the columns that only the policy may see."""
    hidden: dict[str, Any] = {c.name: None for c in COLUMNS.values() if c.policy_alone}
    return replace(batch, **hidden)


check_fields("PackedBatch", PackedBatch.__dataclass_fields__, names_of(Source.PACK))
check_fields("DeviceBatch", DeviceBatch._fields, (n for n, c in COLUMNS.items() if c.on_device))
