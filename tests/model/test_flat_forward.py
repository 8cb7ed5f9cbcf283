"""What comes after the last layer's attention is computed for the tokens that are asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_params, tiny_spec

from jaxrl_async.model.adapter_stack import AdapterRoom, empty_stack, layers_with_stack
from jaxrl_async.model.attention import reference
from jaxrl_async.model.decoder import flat_forward, split_layers
from jaxrl_async.model.delta_layer import read_states
from jaxrl_async.model.layout import ONE_DEVICE
from jaxrl_async.model.spec import ModelSpec

pytestmark = pytest.mark.full

VOCAB, TOKENS = 40, 48
IDS = np.arange(TOKENS, dtype=np.int32) * 7 % VOCAB
LAST = np.array([13, 30, 47], np.int32)
SIZES = {"width": 64, "mlp": 256, "layers": 2}
SPECS = {
    "dense": tiny_spec(VOCAB, **SIZES),
    "experts": tiny_spec(VOCAB, **SIZES, family="qwen3_moe", experts=4),
    "norms after": tiny_spec(VOCAB, **SIZES, family="gemma2"),
    "latent": tiny_spec(
        VOCAB, **SIZES, family="deepseek_v3", experts=4, kv_heads=4, head_dim=12, tied=False
    ),
    "gates": tiny_spec(VOCAB, **{**SIZES, "layers": 4}, family="qwen3_next", experts=4),
    "delta net": tiny_spec(VOCAB, **{**SIZES, "layers": 3}, family="qwen3_next", experts=4),
}


def forward(spec: ModelSpec, layers: Any, last: Any = None) -> Any:
    """The compiled forward pass of IDS, and its result."""
    one = jnp.ones((1, TOKENS), jnp.int32)

    def attend(i: int, q: Any, k: Any, v: Any) -> Any:
        return reference(q[None], k[None], v[None], one)[0]

    def read(i: int, inputs: Any, weights: Any) -> Any:
        return read_states(ONE_DEVICE, one, inputs, weights)

    def program(params: Any, layers: Any) -> Any:
        positions = jnp.arange(TOKENS)
        some = None if last is None else (last, last >= 0)
        return flat_forward(spec, params, layers, IDS, positions, attend, read=read, last=some)

    given = tiny_params(spec), layers
    compiled = jax.jit(program).lower(*given).compile()
    return compiled, np.asarray(compiled(*given))


@pytest.mark.parametrize("name", SPECS)
def test_the_last_layer_computes_what_is_asked_for_alone(name: str) -> None:
    layers = split_layers(SPECS[name], tiny_params(SPECS[name]))
    whole, wanted = forward(SPECS[name], layers)
    some, found = forward(SPECS[name], layers, LAST)
    np.testing.assert_allclose(found, wanted[LAST], atol=1e-5)
    assert np.abs(np.diff(found, axis=0)).max() > 0.1, "tokens differ"
    flops = [program.cost_analysis()["flops"] for program in (whole, some)]
    assert flops[1] < (1 - 0.5 / SPECS[name].layers) * flops[0], "half of a layer"


def test_each_of_them_keeps_its_own_adapter() -> None:
    spec, room = SPECS["dense"], AdapterRoom(places=3, rank=2)
    stack = [
        {n: jax.random.normal(jax.random.key(len(n)), w.shape) / 8 for n, w in layer.items()}
        for layer in empty_stack(spec, room, jnp.float32)
    ]
    slots = np.repeat(np.array([1, 0, 3], np.int32), [14, 17, 17])
    layers = split_layers(spec, tiny_params(spec))
    _, base = forward(spec, layers, LAST)
    mixed = layers_with_stack(room, layers, stack, slots)
    (_, wanted), (_, found) = forward(spec, mixed), forward(spec, mixed, LAST)
    np.testing.assert_allclose(found, wanted[LAST], atol=1e-5)
    moved = np.abs(found - base).max(axis=1)
    assert moved[0] > 0.1 and moved[2] > 0.1
