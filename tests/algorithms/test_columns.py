"""One table declares the per-token columns; the tuples that carry them follow it."""

import dataclasses

import numpy as np
import pytest

from jaxrl_async.algorithms.columns import (
    COLUMNS,
    DeviceBatch,
    Source,
    check_fields,
    for_other_models,
    names_of,
)
from jaxrl_async.algorithms.losses import TokenInputs, token_inputs
from jaxrl_async.algorithms.preflight import tiny_inputs
from jaxrl_async.config.schema import AlgorithmSection
from jaxrl_async.trainer.pack import pack_pairs
from jaxrl_async.types import PackedBatch

BATCH = pack_pairs([(np.arange(3, dtype=np.int32), np.array([False, True, True]))], 4)


def test_a_micro_batch_lists_its_columns_in_the_tables_order():
    """Compiled programs take their arguments in this order."""
    assert DeviceBatch._fields == tuple(n for n, c in COLUMNS.items() if c.on_device)


def test_exactly_the_optional_columns_of_a_micro_batch_may_be_missing():
    optional = {name for name in DeviceBatch._fields if COLUMNS[name].optional}
    assert set(DeviceBatch._field_defaults) == optional


def test_rows_are_packed_in_the_dtypes_and_fills_of_the_table():
    for name in names_of(Source.PACK):
        values = getattr(BATCH, name)
        assert (values is None) == COLUMNS[name].optional
        if values is not None:
            assert values.dtype == COLUMNS[name].dtype
            assert values[0, -1] == COLUMNS[name].fill, name


def test_the_tiny_batch_has_the_type_of_every_column_of_a_loss():
    x = tiny_inputs(AlgorithmSection(kl_coefficient=0.1))
    absent = {name for name in TokenInputs._fields if getattr(x, name) is None}
    assert absent == {"anchor_logprobs", "reference_divergence", "teacher_divergence"}
    for name in set(TokenInputs._fields) - absent:
        assert getattr(x, name).dtype == COLUMNS[name].dtype


def test_a_field_that_the_table_does_not_know_is_refused():
    with pytest.raises(TypeError, match=r"Carrier and .* differ in \['other'\]"):
        check_fields("Carrier", ("mask", "other"), ("mask",))
    with pytest.raises(KeyError, match="other"):
        token_inputs({"other": np.zeros((1, 2))})


def test_other_models_do_not_see_the_policys_own_columns():
    experts = np.zeros((*BATCH.mask.shape, 2, 1), np.int8)
    seen = for_other_models(dataclasses.replace(BATCH, expert_ids=experts))
    assert seen.expert_ids is None
    shared = [name for name in PackedBatch.__dataclass_fields__ if name != "expert_ids"]
    assert all(getattr(seen, name) is getattr(BATCH, name) for name in shared)
