"""Drawing a token: from which interval, with which log-prob, and among which tokens, beside a sort
in float64; and a row's draw is its own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrl_async.sampler.device.sampling import (
    BLOCK,
    Controls,
    Mix,
    invert_cdf,
    likely,
    ranks_of,
    sample,
)
from jaxrl_async.sampler.device.sampling_kernel import sample_by_kernel, takes_kernel

VOCABS = (1, 2, 100, BLOCK, BLOCK + 1, 1000, 4096)


@partial(jax.jit, static_argnames="truncated")
def kernel(
    logits: jax.Array,
    u: jax.Array,
    greedy: jax.Array | None = None,
    controls: Controls | None = None,
    *,
    truncated: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The TPU's kernel, interpreted: tokens, log-probs, and [S, V] bool what could be drawn."""
    rows = len(logits)
    ones, none = jnp.ones(rows), jnp.zeros(rows)
    if controls is None:
        temperature = ones if greedy is None else jnp.where(greedy, 0.0, 1.0)
        controls = Controls(temperature, none.astype(jnp.int32), ones, none)
    numbers = jnp.stack(
        [controls.temperature, controls.top_p, jnp.log(controls.min_p), u], axis=1
    ).astype(jnp.float32)
    tokens, logprobs, floor = sample_by_kernel(
        logits, numbers, jnp.asarray(controls.top_k)[:, None], truncated=truncated, interpret=True
    )
    return tokens, logprobs, (logits >= floor[:, None]) & (logits > -jnp.inf)


DRAWS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "xla": invert_cdf,
    "kernel": lambda *args: kernel(*args)[:2],
}


CASES = [
    pytest.param(
        form,
        vocab,
        marks=[pytest.mark.full, pytest.mark.exhaustive]
        if form == "kernel" and vocab != 1000
        else [],
    )
    for form in DRAWS
    for vocab in VOCABS
]


def kept_by_kernel(logits: jax.Array, controls: Controls) -> jax.Array:
    """What the kernel could draw, [S, V] bool."""
    return kernel(logits, jnp.zeros(len(logits)), None, controls, truncated=True)[2]


KEEPS = {"xla": jax.jit(likely), "kernel": kept_by_kernel}


def probabilities(logits: np.ndarray) -> np.ndarray:
    """[S, V] float64."""
    odds = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)


def logits_of(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Rows of all kinds: flat, peaked, with many equals, with tokens that cannot be."""
    scale = rng.choice([0.0, 0.1, 1.0, 4.0, 30.0], (rows, 1))
    logits = rng.normal(size=(rows, vocab)) * scale
    coarse = rng.random((rows, 1)) < 0.5
    logits = np.where(coarse, np.round(logits * 2) / 2, logits)
    absent = (rng.random((rows, vocab)) < rng.choice([0.0, 0.5, 0.999], (rows, 1))) & (
        np.arange(vocab) != rng.integers(vocab, size=(rows, 1))
    )
    return np.where(absent, -np.inf, logits).astype(np.float32)


@pytest.mark.full
@pytest.mark.parametrize(("form", "vocab"), CASES)
def test_a_token_is_the_one_whose_interval_holds_the_number(form: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits, u = logits_of(rng, 400, vocab), rng.random(400).astype(np.float32)
    tokens, logprobs = map(np.asarray, DRAWS[form](jnp.asarray(logits), jnp.asarray(u)))
    share = probabilities(logits)
    ends = share.cumsum(1)
    own, rows = share[np.arange(400), tokens], np.arange(400)
    assert (own > 0).all(), "a token that cannot be"
    end = ends[rows, tokens]
    assert (end - own <= u + 1e-5).all() and (u <= end + 1e-5).all()
    assert np.mean((end - own <= u) & (u < end)) > 0.98, "but for rounding at an edge"
    np.testing.assert_allclose(logprobs, np.log(own), atol=2e-5, rtol=1e-5)


@pytest.mark.full
def test_a_small_vocabulary_is_one_block_without_padding() -> None:
    """The same bits as with words behind it that cannot be, whatever their number."""
    rng = np.random.default_rng(3)
    for vocab in (1, 13, 64, 127):
        logits, u = logits_of(rng, 500, vocab), jnp.asarray(rng.random(500), jnp.float32)
        padded = np.pad(logits, ((0, 0), (0, BLOCK - vocab)), constant_values=-np.inf)
        mine, other = (jax.jit(invert_cdf)(jnp.asarray(x), u) for x in (logits, padded))
        np.testing.assert_array_equal(mine[0], other[0])
        np.testing.assert_array_equal(mine[1], other[1])
        text = jax.jit(invert_cdf).lower(jnp.asarray(logits), u).as_text()
        assert f"x{vocab}xf32>" in text and (f"x{BLOCK}xf32>" not in text)


@pytest.mark.full
@pytest.mark.parametrize(("form", "vocab"), CASES)
def test_a_greedy_row_takes_the_first_of_the_likeliest(form: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits, u = logits_of(rng, 64, vocab), rng.random(64).astype(np.float32)
    greedy = np.arange(64) % 2 == 0
    tokens, logprobs = DRAWS[form](jnp.asarray(logits), jnp.asarray(u), jnp.asarray(greedy))
    plain, _ = DRAWS[form](jnp.asarray(logits), jnp.asarray(u))
    np.testing.assert_array_equal(tokens, np.where(greedy, logits.argmax(1), plain))
    share = probabilities(logits)[np.arange(64), np.asarray(tokens)]
    np.testing.assert_allclose(logprobs, np.log(share), atol=2e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("form", DRAWS)
def test_numbers_at_both_ends_find_a_token_that_can_be(form: str) -> None:
    """Hardly any mass behind the likeliest, and blocks without any."""
    logits = np.full((3, 5 * BLOCK), -np.inf, np.float32)
    logits[0, 3 * BLOCK + 5], logits[1, BLOCK], logits[1, 4 * BLOCK - 1] = 7, 0, -40
    logits[2, :] = -100
    logits[2, 0] = 0
    for u in (0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0)))):
        tokens, _ = DRAWS[form](jnp.asarray(logits), jnp.full(3, u, jnp.float32))
        assert np.asarray(tokens).tolist() == [3 * BLOCK + 5, BLOCK, 0]


@pytest.mark.full
@pytest.mark.parametrize("form", DRAWS)
def test_draws_have_the_distribution_of_the_logits(form: str) -> None:
    """2,000 numbers at equal distances: each token comes as often as it is likely."""
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32) * 2
    n = 2_000
    rows = jnp.broadcast_to(jnp.asarray(logits), (n, 300))
    tokens, _ = DRAWS[form](rows, jnp.asarray((np.arange(n) + 0.5) / n, jnp.float32))
    counts = np.bincount(np.asarray(tokens), minlength=300)
    assert np.abs(counts - n * probabilities(logits[None])[0]).max() <= 2


@pytest.mark.full
def test_a_row_draws_the_same_whatever_rows_there_are_beside_it() -> None:
    rng = np.random.default_rng(1)
    logits = logits_of(rng, 32, 1000)
    controls = Controls(
        temperature=rng.choice([0.0, 0.5, 1.0], 32).astype(np.float32),
        top_k=rng.choice([0, 3, 40], 32).astype(np.int32),
        top_p=rng.choice([1.0, 0.9], 32).astype(np.float32),
        min_p=rng.choice([0.0, 0.05], 32).astype(np.float32),
    )
    keys = rng.integers(2**32, size=(32, 2), dtype=np.uint32)
    positions = rng.integers(99, size=32, dtype=np.int32)
    mix = Mix(truncated=True, greedy=True)

    def of(rows: np.ndarray) -> list[np.ndarray]:
        here = Controls(*(x[rows] for x in controls))
        new = sample(jnp.asarray(logits[rows]), here, keys[rows], positions[rows], mix)
        return [np.asarray(x) for x in new[:2]]

    together = of(np.arange(32))
    for rows in (np.arange(3), np.arange(32)[::-1], np.array([7])):
        for alone, beside in zip(of(rows), together, strict=True):
            np.testing.assert_array_equal(alone, beside[rows])


# ---- truncation


def sorted_set(logits: np.ndarray, k: int, p: float, m: float, slack: float) -> np.ndarray:
    """What a sort of one row [V] keeps, [V] bool, in float64, with its sums of probabilities
    lowered by `slack`: never a token that cannot be."""
    order = np.argsort(-logits, kind="stable")
    ranked = logits[order].astype(np.float64)
    kept = ranked >= ranked[k - 1] if 0 < k < len(ranked) else np.full(len(ranked), True)
    odds = np.where(kept, np.exp(ranked - ranked[0]), 0)
    before = (odds.cumsum() - odds) / odds.sum()
    if p < 1:
        kept &= before - slack < p
        kept |= ranked >= ranked[kept].min()  # equals of the last one
        kept &= ranked >= ranked[k - 1] if 0 < k < len(ranked) else True
    likely = logits >= np.float32(logits.max()) + np.log(np.float32(m)) if m else True
    return (logits >= ranked[kept].min()) & likely & (logits > -np.inf)


@pytest.mark.full
@pytest.mark.parametrize(
    "form", ["xla", pytest.param("kernel", marks=[pytest.mark.full, pytest.mark.exhaustive])]
)
@settings(deadline=None, max_examples=80)
@given(
    vocab=st.sampled_from((1, 2, 100)),
    seed=st.integers(0, 2**32 - 1),
    k=st.sampled_from((0, 1, 2, 7, 99, 100, 5000)),
    p=st.one_of(st.just(1.0), st.floats(1e-3, 1.0)),
    m=st.one_of(st.just(0.0), st.floats(1e-4, 0.99)),
)
@example(vocab=100, seed=0, k=0, p=1.0, m=0.0)
def test_what_is_kept_is_what_a_sort_keeps(
    form: str, vocab: int, seed: int, k: int, p: float, m: float
) -> None:
    """Equal but for tokens within the rounding of sums of the edge of top-p."""
    logits, p, m = logits_of(np.random.default_rng(seed), 8, vocab), np.float32(p), np.float32(m)
    controls = Controls(
        temperature=np.ones(8, np.float32),
        top_k=np.full(8, k, np.int32),
        top_p=np.full(8, p, np.float32),
        min_p=np.full(8, m, np.float32),
    )
    kept = np.asarray(KEEPS[form](jnp.asarray(logits), controls))
    for row, mine in zip(logits, kept, strict=True):
        fewer = sorted_set(row, k, p, m, -1e-5)
        more = sorted_set(row, k, p, m, 1e-5)
        assert (mine >= fewer).all() and (mine <= more).all()
        for value in np.unique(row):
            assert len(set(mine[row == value])) == 1, "equals are kept together"


def kept_by_definition(logits: np.ndarray, k: int, p: float, m: float) -> list[int]:
    """The tokens of one row that can be, likeliest first, as far as top-k, then top-p, then min-p
    let one in: one by one, in float64. Their logits differ."""
    able = [int(t) for t in np.argsort(-logits) if logits[t] > -np.inf]
    odds = np.exp(logits[able].astype(np.float64) - logits.max())
    able = able[:k] if k else able
    total, before, found = odds[: len(able)].sum(), 0.0, []
    for token, chance in zip(able, odds, strict=False):
        if before / total >= p or chance < m:
            break
        found.append(token)
        before += chance
    return sorted(found)


FORMS = {"xla": None, "kernel": partial(sample_by_kernel, interpret=True)}


@pytest.mark.full
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_token_that_cannot_be_is_never_kept(form: str, truncated: bool) -> None:
    """Rows in which 1 to all of 100 tokens can be, with top-k below and above their number."""
    rng, rows, vocab = np.random.default_rng(5), 96, 100
    logits = (rng.normal(size=(rows, vocab)) * 2).astype(np.float32)
    num_able = rng.choice([1, 2, 3, 6, 20, 99, 100], rows)
    for row, n in zip(logits, num_able, strict=True):
        row[rng.permutation(vocab)[n:]] = -np.inf
    controls = Controls(
        temperature=np.ones(rows, np.float32),
        top_k=rng.choice([0, 1, 4, 30, 99, 5000], rows).astype(np.int32),
        top_p=rng.choice([1.0, 0.95, 0.5], rows).astype(np.float32),
        min_p=rng.choice([0.0, 0.03], rows).astype(np.float32),
    )
    if not truncated:
        controls = controls._replace(
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
        )
    keys = rng.integers(2**32, size=(rows, 2), dtype=np.uint32)
    mix, positions = Mix(truncated=truncated, extras=True), np.zeros(rows, np.int32)
    draw = jax.jit(partial(sample, mix=mix, kernel=FORMS[form]))
    new = draw(jnp.asarray(logits), controls, keys, positions)
    assert new.extras is not None
    bits = np.unpackbits(np.asarray(new.extras.kept).view(np.uint8), axis=1, bitorder="little")
    for i, row in enumerate(logits):
        wanted = kept_by_definition(
            row, int(controls.top_k[i]), float(controls.top_p[i]), float(controls.min_p[i])
        )
        assert np.flatnonzero(bits[i]).tolist() == wanted and int(new.tokens[i]) in wanted
    if truncated:
        kept = np.asarray(KEEPS["xla"](jnp.asarray(logits), controls))
        assert not (kept & np.isneginf(logits)).any()


@pytest.mark.full
@pytest.mark.parametrize("form", KEEPS)
def test_equals_at_the_edge_are_kept_together(form: str) -> None:
    """By hand: 4 tokens of 2, 4 of 1, 92 of -9; top-k 2 and 5, top-p 0.4 and 0.7."""
    logits = np.full((4, 100), -9, np.float32)
    logits[:, 10:14], logits[:, 50:54] = 2, 1
    controls = Controls(
        temperature=np.ones(4, np.float32),
        top_k=np.array([2, 5, 0, 0], np.int32),
        top_p=np.array([1, 1, 0.4, 0.74], np.float32),
        min_p=np.zeros(4, np.float32),
    )
    assert np.asarray(KEEPS[form](jnp.asarray(logits), controls)).sum(1).tolist() == [4, 8, 4, 8]


def test_ranks_have_the_order_of_the_numbers() -> None:
    numbers = np.array(
        [-np.inf, -3e38, -1.5, -2e-38, -0.0, 0.0, 2e-38, 0.5, 1.0, 3e38, np.inf], np.float32
    )
    ranks = np.asarray(ranks_of(jnp.asarray(numbers)))
    assert ranks[4] == ranks[5]
    assert (np.diff(np.delete(ranks, 4).astype(np.int64)) > 0).all()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "vocab", "takes"),
    [
        ("TPU v5 lite", 360_448, True),
        ("TPU v5 lite", 360_449, False),
        ("TPU v6 lite", 360_448, True),
        ("TPU v4", 1_000, False),
        ("TPU v4 lite", 1_000, False),
    ],
)
def test_the_kernel_takes_the_vocabularies_that_its_memory_holds(
    kind: str, vocab: int, takes: bool
) -> None:
    device: Any = SimpleNamespace(platform="tpu", device_kind=kind)
    assert takes_kernel(device, vocab) is takes
    text = (Path(__file__).parents[3] / "docs/sampler.md").read_text("utf-8")
    assert "vocabularies to 360,448." in " ".join(text.split())
