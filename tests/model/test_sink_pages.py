"""Sinks in the TPU's paged kernel, a page of keys before every sequence; windows of few pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError
from jaxrl_async.model import kernels
from jaxrl_async.model.attention import ragged_paged_reference
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.kernels import PLAIN, Scoring, page_head_dim, sinks_page
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import kv_plan
from jaxrl_async.testing.interpreted import interpreted_kernels
from jaxrl_async.types import Request, SamplingParams

SINKS = jnp.asarray([-1.0, 0.5, 2.0, 30.0])
VOCAB = 40


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype", [pytest.param(jnp.float32, marks=pytest.mark.exhaustive), jnp.bfloat16], ids=str
)
def test_the_kernel_with_a_page_of_sinks_equals_the_reference(dtype) -> None:
    rng, (G, N, H, K) = np.random.default_rng(0), (4, 2, 4, 16)
    q = jnp.asarray(rng.normal(size=(3, H, K)), dtype)
    pages = jnp.asarray(rng.normal(size=(6, G, 2 * N, K)), dtype)
    pages = jnp.pad(pages, ((0, 0), (0, 0), (0, 0), (0, page_head_dim(K) - K)))
    pages = jnp.concatenate([pages, sinks_page(G, 2 * N, K, dtype)])
    lengths, tables = jnp.asarray([1, 8, 11]), jnp.asarray([[0, 0, 0], [1, 2, 0], [3, 4, 5]])
    rows = lengths, tables, jnp.arange(4), jnp.asarray([3])
    exact = [x.astype(jnp.float32) for x in (q, pages)]
    wanted = ragged_paged_reference(*exact, *rows, PLAIN, SINKS)
    assert not np.allclose(wanted, ragged_paged_reference(*exact, *rows), atol=0.1)
    with interpreted_kernels():
        got = kernels.ragged_paged(q, pages, *rows, PLAIN, SINKS)
    bound = 1e-5 if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(got.astype(np.float32), wanted, atol=bound)


def test_heads_without_spare_columns_and_windows_are_refused() -> None:
    rest = [jnp.zeros(1)] * 5
    with pytest.raises(ConfigError, match=r"attention sinks for heads of width 128.*gathered"):
        kernels.ragged_paged(jnp.zeros((1, 4, 128)), *rest, PLAIN, SINKS)
    with pytest.raises(ConfigError, match="not support attention sinks with a window"):
        kernels.ragged_paged(jnp.zeros((1, 4, 64)), *rest, Scoring(window=5), SINKS)


@pytest.mark.full
def test_a_budget_holds_as_many_pages_as_heads_padded_to_registers_leave() -> None:
    sizes = schema.ArchitectureSection(layers=2, width=16, heads=4, kv_heads=2, head_dim=64, mlp=24)
    spec = ModelSpec.from_architecture(sizes, VOCAB)
    plans = [
        kv_plan(spec, schema.SamplerSection(kv_memory_mib=8, attention=name), jnp.float32)
        for name in ("gathered", "ragged")
    ]
    assert plans[1].pages == plans[0].pages // 2
    assert plans[1].page_bytes == 2 * 2 * 2 * 128 * 4 * plans[1].page_tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_pages_of_windows_and_sinks_draw_what_gathered_ones_draw(family) -> None:
    """Windows of 5 in pages of 4: most of a sequence lies behind them."""
    sizes = schema.ArchitectureSection(
        family=family, layers=2, width=16, heads=4, kv_heads=2, head_dim=8, mlp=24, window=5,
        experts=4 if family == "gpt_oss" else 0,
    )  # fmt: skip
    spec = ModelSpec.from_architecture(sizes, VOCAB)
    params = init_params(spec, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(
        lambda path, w: w + 1.5 if "sinks" in str(path) else w, params
    )
    requests = [
        Request(
            request_id=f"r{i}",
            token_ids=np.arange(2 + 9 * i, dtype=np.int32) % VOCAB,
            max_new_tokens=14,
            sampling=SamplingParams(temperature=0.0),
            key=(i, 0),
        )
        for i in range(3)
    ]
    results = []
    for attention in ("gathered", "ragged"):
        section = schema.SamplerSection(
            slots=2, max_length=48, max_new_tokens=24, block=3, page_tokens=4, attention=attention
        )
        with Sampler((spec, params), section=section) as sampler:
            results.append(sampler.generate(requests))
    for one, other in zip(*results, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
