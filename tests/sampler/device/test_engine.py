"""Programs belong to an EngineSpec: equal specs share them, and they keep no engine alive."""

import gc
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import PARAMS, SPEC

from jaxrl_async.config.schema import ArchitectureSection
from jaxrl_async.model import decoder
from jaxrl_async.model.attention import has_cpu_kernels
from jaxrl_async.model.quantize import quantize
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.sampler.device import insertion
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.engine_spec import EngineSpec

pytestmark = pytest.mark.full

SMALL = EngineSpec(model=SPEC, slots=3, reserve=2, max_length=16, pages=7, page_tokens=4)


def test_engines_of_equal_specs_share_their_compiled_programs():
    spec = replace(SMALL, pages=9)
    first, second = Engine(spec), Engine(replace(spec, dtype=np.float32, on_tpu=False))
    assert first.spec == second.spec and hash(first.spec) == hash(second.spec)
    before = first.num_compiled
    first.prepare(PARAMS)
    assert second.num_compiled == first.num_compiled == before + 1
    second.prepare(PARAMS)
    assert first.num_compiled == before + 1


@pytest.mark.parametrize("form", ["float32", "mixed", "int8", "float8_e4m3fn"])
def test_layers_prepared_one_by_one_are_those_prepared_together(form, monkeypatch):
    """Above FEW_LAYERS on a CPU: one small program for all layers, to the bit what one large
    program makes."""
    if not has_cpu_kernels(jax.devices()[0], "float32"):
        pytest.skip("no compiler for the CPU's kernels here")
    model = ModelSpec.from_architecture(
        ArchitectureSection(
            family="qwen3", layers=5, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64, tied=True
        ),
        40,
    )
    params = decoder.init_params(model, jax.random.key(1))
    if "8" in form:
        params = quantize(weight_table(model), params, form, jnp.float32)
    mixed, pages = form == "mixed", 20 + len(form)  # programs of its own for each form
    spec = replace(SMALL, model=model, cpu_products=True, mixed=mixed, pages=pages)
    whole = Engine(spec).prepare(params)
    monkeypatch.setattr(insertion, "FEW_LAYERS", 4)
    engine = Engine(spec)
    before = engine.num_compiled
    parts = engine.prepare(params)
    assert engine.num_compiled == before + 2, "the rest, and a layer"
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    assert len(parts.layers) == 5


@pytest.mark.parametrize(
    "other", [{"reserve": 1}, {"dtype": jnp.bfloat16}, {"mixed": True}, {"one_thread": True}]
)
def test_engines_of_other_specs_count_their_own_programs(other):
    one, another = Engine(SMALL), Engine(replace(SMALL, **other))
    one.init_decode_state()
    before = one.num_compiled
    another.init_decode_state()
    assert one.num_compiled == before and one.spec != another.spec


def test_programs_keep_no_engine_and_no_array_alive():
    engine = Engine(SMALL)
    state, weights = engine.init_decode_state(), engine.prepare(PARAMS)
    gone = [weakref.ref(x) for x in (engine, state.logits, state.kv.k[0], weights.layers[0]["o"])]
    del engine, state, weights
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_a_spec_has_numpys_type_and_knows_its_device():
    assert SMALL.dtype == np.dtype(np.float32) and SMALL.on_tpu is False
    assert (SMALL.total_slots, SMALL.num_pages(9), SMALL.fused) == (5, 3, True)
