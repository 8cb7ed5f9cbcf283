"""Attention sinks: a logit of each head that no token stands for, in every form of attention."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError
from jaxrl_async.model import cache, kernels
from jaxrl_async.model.attention import (
    PART_ATTENTION,
    obstacle,
    ragged_paged_reference,
    reference,
    tree_reference,
    tree_splash,
    visible_until,
)
from jaxrl_async.model.gpu_packed import cudnn
from jaxrl_async.model.kernels import PLAIN, Scoring
from jaxrl_async.model.layout import Layout
from jaxrl_async.sampler.setup import uses_ragged
from jaxrl_async.testing.interpreted import interpreted_kernels

B, T, H, N, K = 2, 24, 4, 2, 16
SINKS = jnp.asarray([-1.0, 0.5, 2.0, 3.0])


def rows(*, B: int = B) -> tuple[jax.Array, ...]:
    """q, k, v and segment ids: two segments, and padding behind them."""
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, K)), jnp.float32) for n in (H, N, N))
    segments = jnp.asarray([[1] * 9 + [2] * 11 + [0] * 4] * B, jnp.int32)
    return q, k, v, segments


def with_gradients(function: Any, q: Any, k: Any, v: Any, extent: Any, real: Any) -> list[Any]:
    """The output at real tokens, and the gradients of a random projection, that of SINKS last."""

    def run(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return function(q, k, v, extent, PLAIN, sinks)

    out, pull = jax.vjp(run, q, k, v, SINKS)
    real = np.asarray(real)[..., None, None]
    grads = pull(jnp.asarray(np.random.default_rng(9).normal(size=out.shape) * real, out.dtype))
    return [np.asarray(x) for x in (out * real, *grads)]


def same(got: list[Any], wanted: list[Any]) -> None:
    assert np.abs(wanted[-1]).min() > 0.01, "every sink has a gradient"
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5)


@pytest.mark.full
def test_the_reference_is_a_softmax_with_one_more_logit() -> None:
    q, k, v, segments = rows()
    out = reference(q, k, v, segments, Scoring(window=5), SINKS)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for t in range(20):
        seen = [s for s in range(max(0, t - 4), t + 1) if segments[0, s] == segments[0, t]]
        for h in range(H):
            odds = np.exp(k[0, seen, h // 2] @ q[0, t, h] / math.sqrt(K))
            expected = odds / (odds.sum() + np.exp(float(SINKS[h]))) @ v[0, seen, h // 2]
            np.testing.assert_allclose(out[0, t, h], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_a_sink_far_above_the_scores_takes_everything_and_one_far_below_nothing() -> None:
    inputs = rows()
    assert not np.any(reference(*inputs, PLAIN, jnp.full(H, 1e4)))
    without = reference(*inputs, PLAIN, jnp.full(H, -1e4))
    np.testing.assert_allclose(without[:, :20], reference(*inputs)[:, :20], rtol=1e-5)


@pytest.mark.exhaustive
def test_splash_and_its_gradient_equal_the_reference() -> None:
    q, k, v, segments = rows()
    wanted = with_gradients(reference, q, k, v, segments, segments > 0)
    with interpreted_kernels():
        got = with_gradients(
            jax.jit(kernels.splash, static_argnums=4), q, k, v, segments, segments > 0
        )
    same(got, wanted)


@pytest.mark.exhaustive
def test_splash_of_shared_prefixes_equals_the_reference() -> None:
    q, k, v, segments = rows()
    position = jnp.asarray([[*range(9), *range(4, 15), *range(4)]] * B)
    until = visible_until(position, segments)
    wanted = with_gradients(tree_reference, q, k, v, until, segments > 0)
    with interpreted_kernels():
        got = with_gradients(jax.jit(tree_splash, static_argnums=4), q, k, v, until, segments > 0)
    same(got, wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 4}, {"context": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", ["reference", "splash"])
def test_meshes_divide_the_sinks_as_heads(axes, name) -> None:
    q, k, v, segments = rows(B=4)
    mesh = mesh_of(**axes)
    whole = {"reference": reference, "splash": kernels.splash}[name]
    sharded = jax.jit(kernels.per_shard(whole, mesh, PART_ATTENTION[name]), static_argnums=4)
    order = Layout(mesh).order(T)
    turned = [x[:, order] for x in (q, k, v, segments)]
    wanted = with_gradients(reference, q, k, v, segments, segments > 0)
    with interpreted_kernels():
        got = sharded(*turned, PLAIN, SINKS)
    real = np.asarray(segments > 0)[..., None, None]
    back = np.argsort(order)
    np.testing.assert_allclose(np.asarray(got)[:, back] * real, wanted[0], atol=3e-5)


@pytest.mark.full
def test_decode_and_prefill_equal_the_reference() -> None:
    q, k, v, _ = rows()
    ones = jnp.ones((B, T), jnp.int32)
    wanted = reference(q, k, v, ones, PLAIN, SINKS)
    keys, values = jnp.moveaxis(k, 1, 3), jnp.swapaxes(v, 1, 2)
    last = cache.attend_columns(q[:, -1], keys, values, jnp.ones((B, T), bool), 0.0, SINKS)
    np.testing.assert_allclose(last, wanted[:, -1], atol=1e-5)
    new = jnp.tril(jnp.ones((8, 8), bool))[None]
    before = jnp.ones((B, 1, T - 8), bool)
    chunk = cache.attend_chunk(
        q[:, -8:],
        k[:, -8:],
        v[:, -8:],
        new,
        (keys[..., :-8], values[:, :, :-8]),
        before,
        0.0,
        SINKS,
    )
    np.testing.assert_allclose(chunk, wanted[:, -8:], atol=1e-5)
    pages = jnp.stack([k[0], v[0]], axis=2).reshape(T // 8, 8, 2 * N, K)
    paged = partial(
        ragged_paged_reference,
        q[0, -1:],
        pages,
        jnp.asarray([T]),
        jnp.arange(3)[None],
        jnp.asarray([0, 1]),
        jnp.asarray([1]),
    )
    np.testing.assert_allclose(paged(PLAIN, SINKS)[0], wanted[0, -1], atol=1e-5)


@pytest.mark.full
def test_kernels_without_sinks_say_so() -> None:
    q, k, v, segments = rows()
    with pytest.raises(ConfigError, match="cudnn has no attention sinks"):
        cudnn(q, k, v, segments, PLAIN, SINKS)
    h100 = SimpleNamespace(platform="gpu", compute_capability="9.0")
    assert "sinks" in str(obstacle("cudnn", h100, jnp.bfloat16, 64, sinks=True))
    assert obstacle("cudnn", h100, jnp.bfloat16, 64) is None
    chip = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]))
    narrow, wide = (SimpleNamespace(sinks=True, latent=None, head_dim=n) for n in (64, 128))
    auto = schema.SamplerSection()
    assert uses_ragged(auto, chip, narrow) and not uses_ragged(auto, chip, wide)
    assert uses_ragged(auto, chip, SimpleNamespace(sinks=False, latent=None, head_dim=128))
    assert uses_ragged(auto, chip, SimpleNamespace(sinks=False, latent=None, head_dim=256))
