"""Programs belong to an EngineSpec: equal specs share them, and they keep no engine alive."""

import gc
import weakref
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import PARAMS, SPEC

from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.engine_spec import EngineSpec

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
