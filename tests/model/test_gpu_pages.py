"""The GPU's kernel on pages, in Pallas' interpreter, against attention in numpy and float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.attention import has_triton
from jaxrl_async.model.gpu_pages import attend_pages, column_parts, tiles
from jaxrl_async.model.kernels import PLAIN, Scoring
from jaxrl_async.model.query_blocks import plan_of
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.setup import kv_plan, uses_ragged


@dataclass(frozen=True)
class Case:
    """Sequences of so many tokens, of which the last ones are queries."""

    lengths: Sequence[int]
    queries: Sequence[int]
    heads: int = 4
    kv_heads: int = 2
    width: int = 32
    page: int = 8
    scoring: Scoring = PLAIN
    sinks: bool = False
    latent: bool = False  # keys are values
    new: bool = False  # the queries' own keys are not in the pages
    padding: int = 0  # queries behind the last one
    counted: int | None = None  # sequences that count; None: all
    bfloat16: bool = False


def exact(case: Case, q, cells, sinks) -> np.ndarray:
    """Attention of each query in float64; cells: of each sequence, [tokens, rows of a page, K]."""
    out = np.zeros(q.shape)
    group, first = case.heads // case.kv_heads, 0
    for cell, length, count in zip(cells, case.lengths, case.queries, strict=True):
        for i, position in enumerate(range(length - count, length)):
            begin = max(0, position - case.scoring.window + 1) if case.scoring.window else 0
            for head in range(case.heads):
                row = 0 if case.latent else 2 * (head // group)
                seen = cell[begin : position + 1]
                keys, values = seen[:, row], seen[:, row if case.latent else row + 1]
                scores = keys @ q[first + i, head] * case.width**-0.5
                if cap := case.scoring.cap:
                    scores = cap * np.tanh(scores / cap)
                if sinks is not None:
                    scores = np.append(scores, sinks[head])
                odds = np.exp(scores - scores.max())
                out[first + i, head] = (odds / odds.sum())[: len(keys)] @ values
        first += count
    return out


def arrays_of(case: Case, seed: int = 0):
    """Queries, pages in random order, where they are, and the right result."""
    rng = np.random.default_rng(seed)
    rows = 1 if case.latent else 2 * case.kv_heads
    width = max(-(-n // case.page) for n in case.lengths) + 1
    count = len(case.lengths) * width + 2
    dtype = jnp.bfloat16 if case.bfloat16 else np.float32
    pages = np.asarray(rng.normal(size=(count, case.page, rows, case.width)), dtype)
    tables = rng.permutation(count)[: len(case.lengths) * width].reshape(-1, width)
    begins = np.concatenate([[0], np.cumsum(case.queries)]).astype(np.int32)
    tokens = int(begins[-1]) + case.padding
    q = np.asarray(rng.normal(size=(tokens, case.heads, case.width)), dtype)
    sinks = rng.normal(size=case.heads).astype(np.float32) if case.sinks else None
    cells = [
        pages[table].reshape(-1, rows, case.width)[:n].astype(np.float64)
        for table, n in zip(tables, case.lengths, strict=True)
    ]
    counted = len(case.lengths) if case.counted is None else case.counted
    wanted = exact(case, q.astype(np.float64), cells, sinks)
    wanted[begins[counted] :] = 0
    new = None
    if case.new:
        new = np.zeros((tokens, rows, case.width), dtype)
        for table, n, begin, end in zip(tables, case.lengths, begins, begins[1:], strict=False):
            for i in range(begin, end):
                position = n - end + i
                cell = table[position // case.page], position % case.page
                new[i], pages[cell] = pages[cell], 1e4  # what must not be read
    layout = (
        np.asarray(case.lengths, np.int32),
        tables.astype(np.int32),
        begins,
        np.asarray([counted], np.int32),
    )
    return q, pages, layout, sinks, new, wanted


def differs(case: Case, mesh=None) -> float:
    q, pages, layout, sinks, new, wanted = arrays_of(case)
    run = jax.jit(
        lambda q, pages, *layout: attend_pages(
            q, pages, *layout, case.scoring, sinks, new, mesh=mesh, interpret=True
        )
    )
    got = np.asarray(run(q, pages, *layout), np.float64)
    assert np.isfinite(got).all()
    return float(np.abs(got - wanted).max())


WINDOWED = Scoring(window=7, cap=3.0)
CASES = {
    "decode": Case((5, 17, 30, 1), (1, 1, 1, 1)),
    "decode in splits": Case((5, 1200, 1), (1, 1, 1), heads=6, width=64),
    "decode in splits, a window, sinks": Case(
        (5, 1200, 400), (1, 1, 1), width=64, scoring=Scoring(window=600), sinks=True
    ),
    "decode of some rows": Case((9, 4, 6, 8), (1, 1, 1, 1), counted=2),
    "prompts": Case((5, 17, 70, 9), (5, 10, 40, 2), padding=3),
    "prompts with a window, a cap and sinks": Case(
        (5, 17, 70), (5, 1, 40), heads=8, kv_heads=1, width=24, page=5, scoring=WINDOWED, sinks=True
    ),
    "prompts whose pages lack them": Case(
        (5, 17, 70), (5, 1, 40), page=5, scoring=WINDOWED, sinks=True, new=True, padding=2
    ),
    "latent": Case((5, 17, 9), (5, 1, 4), heads=20, kv_heads=1, width=144, latent=True),
    "latent, as wide as DeepSeek's": Case(
        (5, 40), (3, 1), heads=20, kv_heads=1, width=576, page=16, latent=True
    ),
    "heads of 256": Case((5, 40, 33), (1, 1, 1), heads=6, width=256, page=16),
    "heads of 80, seven for one": Case((5, 40), (5, 20), heads=7, kv_heads=1, width=80),
}
USUAL = ("decode in splits, a window, sinks", "prompts whose pages lack them", "latent")


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [n if n in USUAL else pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES],
)
def test_the_kernel_computes_attention_to_float32(name) -> None:
    assert differs(CASES[name]) < 3e-6


def splits_of(case: Case) -> int:
    """Among how many programs the kernel divides the keys of a query."""
    q, pages, (_, tables, *_), *_ = arrays_of(case)
    key_bytes = case.width * pages.dtype.itemsize
    shape = (len(q), len(tables), case.heads, case.kv_heads, key_bytes, tables.shape[1] * case.page)
    return tiles(*shape).splits


@pytest.mark.parametrize("name", [n for n in CASES if "splits" in n])
def test_keys_are_divided_where_a_case_requires_it(name) -> None:
    assert splits_of(CASES[name]) == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["decode in splits", "prompts whose pages lack them"])
def test_in_bfloat16_it_rounds_shares_and_results_alone(name) -> None:
    case = Case(**{**vars(CASES[name]), "bfloat16": True})
    assert 1e-4 < differs(case) < 0.03


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [
        Case((5, 17, 30), (1, 1, 1), heads=8, kv_heads=2),
        Case((5, 17), (5, 3), heads=8, kv_heads=1, width=48, latent=True),
        Case((5, 17), (5, 3), heads=6, kv_heads=3, sinks=True),
        Case((9, 17), (5, 3), heads=8, kv_heads=2, sinks=True, scoring=WINDOWED, new=True),
    ],
    ids=["divided", "latent", "not divided", "all"],
)
def test_devices_have_heads_of_their_own(case) -> None:
    """Two devices: with one kv head for all, query heads alone are divided; three cannot be."""
    assert differs(case, mesh_of(tensor=2)) < 3e-6


PLANS = jax.jit(plan_of, static_argnums=(0, 1))


@pytest.mark.full
@given(
    lengths=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    most=st.sampled_from([1, 8, 32]),
    counted=st.integers(1, 6),
)
def test_each_query_is_in_one_block(lengths, most, counted) -> None:
    begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    before = 3
    plan = PLANS(250, most, np.asarray(lengths, np.int32) + before, begins, np.asarray([counted]))
    found = [
        (int(s), int(first) + i, int(position) + i, int(begin))
        for s, first, queries, position, begin, _ in zip(*map(np.asarray, plan), strict=True)
        for i in range(queries)
    ]
    assert found == [
        (s, begins[s] + i, before + i, before) for s in range(counted) for i in range(lengths[s])
    ]
    assert np.asarray(plan.queries).max() <= most
    read = np.where(plan.queries, plan.position + plan.queries, 0)
    assert (plan.end == read).all(), "where there are no queries no page is read"
    assert (plan.end <= np.asarray(lengths)[plan.sequence] + before).all()


@given(st.integers(1, 700))
def test_parts_of_a_heads_width_are_powers_of_two_and_lack_nothing(width) -> None:
    parts = column_parts(width)
    sizes = [part.stop - part.start for part in parts]
    assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)
    assert [part.start for part in parts] == [sum(sizes[:i]) for i in range(len(parts))]
    assert width <= sum(sizes) < width + 16


@given(
    tokens=st.sampled_from([1, 8, 256, 2048]),
    sequences=st.sampled_from([1, 8, 64, 256]),
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 128),
    shape=st.sampled_from([(16, 2), (64, 2), (80, 2), (128, 2), (256, 2), (576, 1)]),
)
def test_tiles_hold_their_queries_and_fit_a_multiprocessor(
    tokens, sequences, kv_heads, group, shape
) -> None:
    width, sides = shape
    tile = tiles(tokens, sequences, group * kv_heads, kv_heads, 2 * width, 4096, sides)
    assert 1 <= tile.heads <= group and tile.queries * tile.heads <= tile.rows
    assert tile.rows * width * 4 <= 36 * 2**10, "sums in registers, of 256 KiB"
    cells = 2 * sides * tile.keys * width * 2
    assert cells + tile.rows * width * 2 <= 99 * 2**10, "shared memory of the smallest card"
    assert tile.splits == 1 or tokens == sequences


def device(platform: str, capability: str = "9.0"):
    """A device, and a mesh of it."""
    one = SimpleNamespace(
        platform=platform, compute_capability=capability, device_kind=f"{platform} {capability}"
    )
    return one, SimpleNamespace(devices=np.asarray([one]), size=1, shape={"tensor": 1})


def a_model(family: str, width: int, **more: object) -> ModelSpec:
    shape = schema.ArchitectureSection(
        family=family, layers=2, width=16, heads=4, kv_heads=2, head_dim=width, mlp=24, **more
    )
    return ModelSpec.from_architecture(shape, 40)


LARGE = {"slots": 8, "reserve": 0.0, "max_length": 128, "block": 4, "page_tokens": 16}


def test_gpus_since_ampere_decode_on_the_pages_whatever_the_model() -> None:
    """Also heads wider than a TPU's register and sinks in windows; older ones copy pages, which
    are counted: 8 rows, for each of two layers 128 columns and 4 of the block, two of 256 numbers
    each."""
    gemma = a_model("gemma2", 256, window=8)
    oss = a_model("gpt_oss", 128, window=8, experts=4)
    latent = a_model("deepseek_v3", 12, experts=4)
    h100, new = device("gpu")
    t4, old = device("gpu", "7.5")
    assert has_triton(h100) and not has_triton(t4)
    plain = a_model("qwen3", 256)
    section = schema.SamplerSection(**LARGE)
    for spec in (gemma, oss, latent, plain):
        assert uses_ragged(section, new, spec) and not uses_ragged(section, old, spec)
        plan = kv_plan(spec, section, "float32", mesh=new)
        sides, heads, width = spec.cached_shape
        assert plan.page_bytes == 16 * sides * heads * width * 4 * plan.layout.arrays
        assert not plan.copy_bytes
    copies = kv_plan(plain, section, "float32", mesh=old).copy_bytes
    assert copies == 8 * 2 * (128 + 4) * (2 * 2 * 256) * 4
    with pytest.raises(ConfigError, match=r"8\.0 or newer.*gpu 7\.5.*attention=gathered"):
        uses_ragged(section.model_copy(update={"attention": "ragged"}), old, plain)
    assert not uses_ragged(section.model_copy(update={"attention": "gathered"}), new, plain)


def test_of_layers_with_a_window_its_pages_alone_are_copied() -> None:
    """A window of 8 sees two pages of 16 tokens at most."""
    _, old = device("gpu", "7.5")
    gemma = a_model("gemma2", 32, window=8)
    plan = kv_plan(gemma, schema.SamplerSection(**LARGE), "float32", mesh=old)
    assert plan.copy_bytes == 8 * ((128 + 4) + (2 * 16 + 4)) * (2 * 2 * 32) * 4
