"""Weights in 8 bits: each output's own scale, and products that differ by its rounding alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_spec
from whole_rows import row_states

from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.quantize import is_quantized, quantize, quantized_table
from jaxrl_async.model.spec import Weight, contracted, weight_table

pytestmark = pytest.mark.full

DENSE = tiny_spec(40, layers=2, mlp=24, tied=False)
ROUTED = tiny_spec(40, layers=2, mlp=24, tied=False, family="qwen3_moe", experts=4)
KINDS = {"int8": 1 / 254, "float8_e4m3fn": 1 / 16}
"""Largest rounding of a weight: of the output's largest one; of the weight itself."""


def leaves(table: dict) -> dict[str, Weight]:
    return dict(table["layers"])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("spec", [DENSE, ROUTED], ids=["dense", "experts"])
def test_each_weight_is_its_value_times_the_scale_of_its_output(kind, spec):
    table, params = weight_table(spec), init_params(spec, jax.random.key(0))
    found = quantize(table, params, kind, jnp.float32)
    for name, weight in leaves(table).items():
        got, array = found["layers"][name], np.asarray(params["layers"][name])
        if weight.init != "normal" or name == "router":
            np.testing.assert_array_equal(got, array)
            continue
        inputs = contracted(weight)
        axes = tuple(range(inputs.start, inputs.stop))
        scale = np.expand_dims(np.asarray(found["layers"][name + "_scale"]), axes)
        back = np.asarray(got, np.float32) * scale
        largest = np.abs(array).max(axis=axes, keepdims=True)
        limit = KINDS[kind] * (largest if kind == "int8" else np.abs(array) + largest / 448)
        assert str(got.dtype) == kind and (np.abs(back - array) <= limit * 1.001).all(), name
    for name in ("embed", "lm_head", "final_norm"):
        np.testing.assert_array_equal(found[name], params[name])


@pytest.mark.parametrize("spec", [DENSE, ROUTED], ids=["dense", "experts"])
def test_the_table_has_the_tree_and_the_shapes(spec):
    table = weight_table(spec)
    found = quantize(table, init_params(spec, jax.random.key(0)), "int8", jnp.bfloat16)
    declared = quantized_table(table)
    assert {n: w.shape for n, w in leaves(declared).items()} == {
        n: x.shape for n, x in found["layers"].items()
    }
    assert all(len(w.axes) == len(w.shape) for w in leaves(declared).values())
    assert is_quantized(found) and is_quantized(declared) and not is_quantized(table)
    assert sum(x.nbytes for x in jax.tree.leaves(found["layers"])) < 0.6 * sum(
        2 * np.prod(w.shape) for w in leaves(table).values()
    )


@pytest.mark.parametrize("spec", [DENSE, ROUTED], ids=["dense", "experts"])
def test_the_decoder_multiplies_with_what_the_weights_stand_for(spec):
    table, params = weight_table(spec), init_params(spec, jax.random.key(0))
    found = quantize(table, params, "int8", jnp.float32)
    back = {**found, "layers": {}}
    for name, weight in leaves(table).items():
        array = found["layers"][name].astype(jnp.float32)
        if name + "_scale" in found["layers"]:
            inputs = contracted(weight)
            axes = tuple(range(inputs.start, inputs.stop))
            array = array * jnp.expand_dims(found["layers"][name + "_scale"], axes)
        back["layers"][name] = array
    ids = np.arange(12, dtype=np.int32)[None]
    arrays = (ids, ids, np.ones_like(ids))
    out = row_states(spec, found, *arrays)
    np.testing.assert_allclose(out, row_states(spec, back, *arrays), atol=2e-5)
    assert np.abs(out - row_states(spec, params, *arrays)).max() > 1e-4
