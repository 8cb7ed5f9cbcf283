"""An adapter that was not trained changes nothing."""

from typing import Any

import jax
import numpy as np
import pytest
from whole_rows import row_states

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.config.schema import ArchitectureSection
from jaxrl_async.model.decoder import init_params, init_table
from jaxrl_async.model.lora import adapter_table, joined, lora_of, scale_of
from jaxrl_async.model.spec import ModelSpec

pytestmark = pytest.mark.full

SIZES: dict[str, Any] = {
    "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 48,
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)
ROWS = (IDS, np.tile(np.arange(12), (2, 1)), np.ones_like(IDS))


def both(family: str) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states of the base, and with a new adapter."""
    spec = ModelSpec.from_architecture(ArchitectureSection(family=family, **SIZES), 64)
    base = init_params(spec, jax.random.key(0))
    lora = lora_of(spec, LoraSection(rank=4))
    adapter = init_table(adapter_table(spec, lora), jax.random.key(0), np.float32)
    given = (base, joined(lora, base, adapter))
    return tuple(np.asarray(row_states(spec, params, *ROWS)) for params in given)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_it_changes_no_bit(family: str) -> None:
    np.testing.assert_array_equal(*both(family))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3"])
def test_it_changes_no_bit_where_the_compiler_fuses_the_sum_into_a_norm(family: str) -> None:
    """On a CPU, XLA fuses `k + change` into the sum of squares of the norm of k, which it then adds
    up in another order. Step by step, without fusion, no bit differs."""
    with jax.disable_jit():
        np.testing.assert_array_equal(*both(family))
    np.testing.assert_allclose(*both(family), rtol=0, atol=4e-6)


def test_an_adapter_is_scaled_by_its_rank_or_by_the_root_of_it():
    assert scale_of(LoraSection(rank=16, alpha=8)) == 0.5
    assert scale_of(LoraSection(rank=16, alpha=8, rslora=True)) == 2.0
