"""The decoder over whole sequences: who sees whom, and what must not change the numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.model.attention import reference
from jaxrl_async.model.decoder import hidden_states, init_params, output_head
from jaxrl_async.model.spec import ModelSpec

VOCAB, T = 23, 10
FAMILIES = ("llama", "qwen2", "qwen3")


def spec_of(family: str = "qwen3", layers: int = 2, **sizes: Any) -> ModelSpec:
    sizes = {"width": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 24, **sizes}
    return ModelSpec.from_architecture(
        schema.ArchitectureSection(family=family, layers=layers, **sizes), VOCAB
    )


def random_params(spec: ModelSpec) -> Any:
    """Random everywhere: biases and norms too."""
    params = init_params(spec, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def token_rows(rows: int = 1, length: int = T, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)


run = jax.jit(hidden_states, static_argnames=("spec", "dtype", "remat"))


def of_one_segment(spec: ModelSpec, params: Any, ids: np.ndarray) -> np.ndarray:
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return np.asarray(run(spec, params, ids, positions, np.ones_like(ids)))


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_changes_what_comes_at_and_after_it_and_nothing_before(family):
    spec = spec_of(family)
    params, ids = random_params(spec), token_rows()
    other = ids.copy()
    other[0, 4] = (ids[0, 4] + 1) % VOCAB
    before, after = of_one_segment(spec, params, ids), of_one_segment(spec, params, other)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (np.abs(before[0, 4:] - after[0, 4:]).max(axis=-1) > 1e-4).all()


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_segments_in_one_row_equal_each_alone(family):
    spec = spec_of(family)
    params = random_params(spec)
    first, second = token_rows(length=3, seed=1), token_rows(length=5, seed=2)
    ids = np.concatenate([first, second, np.zeros((1, 2), np.int32)], axis=1)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4, 0, 0]], np.int32)
    together = np.asarray(run(spec, params, ids, positions, segments))
    np.testing.assert_allclose(together[:, :3], of_one_segment(spec, params, first), atol=1e-5)
    np.testing.assert_allclose(together[:, 3:8], of_one_segment(spec, params, second), atol=1e-5)


@pytest.mark.full
def test_padding_changes_nothing_whatever_it_holds():
    spec = spec_of()
    params, ids = random_params(spec), token_rows(length=6)
    alone = of_one_segment(spec, params, ids)
    for filler in (0, VOCAB - 1):
        padded = np.full((1, T), filler, np.int32)
        padded[:, :6] = ids
        segments = (np.arange(T)[None] < 6).astype(np.int32)
        positions = np.arange(T, dtype=np.int32)[None]
        out = np.asarray(run(spec, params, padded, positions, segments))
        np.testing.assert_allclose(out[:, :6], alone, atol=1e-5)
        assert np.isfinite(out).all()


@pytest.mark.full
def test_padding_gives_no_gradient():
    spec = spec_of()
    params, ids = random_params(spec), token_rows(length=T)
    segments = (np.arange(T)[None] < 6).astype(np.int32)
    positions = np.arange(T, dtype=np.int32)[None]
    ids[:, 6:] = VOCAB - 1
    ids[:, :6] %= VOCAB - 1  # the last token stands in the padding only

    def total(params: Any) -> Any:
        out = hidden_states(spec, params, ids, positions, segments)
        return jnp.sin(out * segments[..., None]).sum()

    embed = jax.grad(total)(params)["embed"]
    assert not np.asarray(embed[VOCAB - 1]).any() and np.asarray(embed[ids[0, 0]]).any()


@pytest.mark.full
def test_rows_do_not_see_each_other():
    spec = spec_of()
    params, ids = random_params(spec), token_rows(rows=3)
    together = of_one_segment(spec, params, ids)
    for row in range(3):
        alone = of_one_segment(spec, params, ids[row : row + 1])
        np.testing.assert_allclose(together[row : row + 1], alone, atol=1e-5)


@pytest.mark.full
def test_only_distances_between_positions_count():
    spec = spec_of()
    params, ids = random_params(spec), token_rows()
    positions = np.arange(T, dtype=np.int32)[None]
    here, there = (
        np.asarray(run(spec, params, ids, positions + shift, np.ones_like(ids)))
        for shift in (0, 100)
    )
    np.testing.assert_allclose(here, there, atol=1e-4)
    stretched = run(spec, params, ids, 3 * positions, np.ones_like(ids))
    assert np.abs(here - np.asarray(stretched)).max() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("layers", [1, 5])
def test_the_compiled_scan_equals_its_layers_one_by_one(layers):
    """Fewer and more layers than one turn of the scan; each asks for attention once."""
    spec = spec_of(layers=layers)
    params, ids = random_params(spec), token_rows(length=4)
    positions = np.arange(4, dtype=np.int32)[None]
    asked = []

    def counted(q: Any, k: Any, v: Any, segments: Any, scoring: Any, sinks: Any = None) -> Any:
        asked.append((q.shape, k.shape))
        return reference(q, k, v, segments, scoring)

    with jax.disable_jit():
        ones = np.ones_like(ids)
        separate = hidden_states(spec, params, ids, positions, ones, attention=counted)
    assert asked == [((1, 4, 4, 8), (1, 4, 2, 8))] * layers
    np.testing.assert_allclose(of_one_segment(spec, params, ids), separate, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["layer", "attention", "dots"])
def test_remat_changes_neither_the_numbers_nor_the_gradient(remat):
    spec = spec_of(layers=5)
    params, ids = random_params(spec), token_rows()

    def total(params: Any, remat: str) -> Any:
        positions = np.arange(T, dtype=np.int32)[None]
        out = hidden_states(spec, params, ids, positions, np.ones_like(ids), remat=remat)
        return jnp.sin(out).sum()

    gradient = jax.jit(jax.value_and_grad(total), static_argnums=1)
    (value, grads), (expected, expected_grads) = gradient(params, remat), gradient(params, "none")
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected_grads)


def test_bfloat16_computes_in_bfloat16_from_float32_weights():
    spec = spec_of()
    params, ids = random_params(spec), token_rows()
    positions = np.arange(T, dtype=np.int32)[None]
    low = run(spec, params, ids, positions, np.ones_like(ids), dtype=jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    high = of_one_segment(spec, params, ids)
    assert np.abs(np.asarray(low, np.float32) - high).max() < 0.05 * np.abs(high).max()


def test_a_weights_first_value_depends_on_its_name_only():
    small, large = (init_params(spec_of(layers=n), jax.random.key(3)) for n in (1, 2))
    np.testing.assert_array_equal(small["embed"], large["embed"])
    assert not np.array_equal(init_params(spec_of(), jax.random.key(4))["embed"], large["embed"])


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embedding_where_they_are_tied(tied):
    spec = spec_of(tied=tied)
    params = init_params(spec, jax.random.key(0))
    assert ("lm_head" in params) is not tied
    same = np.array_equal(output_head(spec, params), np.asarray(params["embed"]).T)
    assert same is tied and output_head(spec, params).shape == (16, VOCAB)
