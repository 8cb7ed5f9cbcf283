"""The sampler's own CPU kernels against float64, and what happens where they cannot be built."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from jaxrl_async.cpu.kernel_calls import (
    NewTokens,
    attend_new_tokens,
    attend_pages,
    packed,
    packed_product,
    rotated,
)
from jaxrl_async.cpu.kernel_library import SAMPLING, kernels_are_there
from jaxrl_async.model import layers
from jaxrl_async.model.kernels import Scoring

NEEDED = "needs g++ or clang++ and a processor with AVX2"

needs_kernels = pytest.mark.skipif("not has_kernels()", reason=NEEDED)


def has_kernels() -> bool:
    return kernels_are_there(SAMPLING)


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (33, 32), (64, 96), (1030, 161)])
def test_products_are_those_of_float64_and_each_row_is_alone(inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(inputs)
    x = rng.normal(size=(40, inputs)).astype(np.float32)
    weight = rng.normal(size=(outputs, inputs)).astype(np.float32)
    ready = jax.jit(packed)(weight)

    def product(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(jax.jit(lambda r: packed_product(r, ready, outputs))(rows))

    whole = product(x)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(weight.T))
    assert (np.abs(whole - exact) <= bound).all()
    for count in (1, 2, 3, 5, 12, 13, 24, 31):
        assert (product(x[:count]) == whole[:count]).all(), count
    for used in (np.arange(40) < 17, rng.random(40) < 0.4, np.zeros(40, bool)):
        part = np.asarray(packed_product(x, ready, outputs, jnp.asarray(used)))
        assert (part[used] == whole[used]).all() and not part[~used].any()
    assert packed_product(x.reshape(4, 10, inputs), ready, outputs).shape == (4, 10, outputs)


def in_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Round to bfloat16."""
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32), np.float64)


def in_eight_bits(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round each row to whole numbers up to 127, and return them and what one of them is worth."""
    scale = (np.abs(x).max(axis=1) / np.float32(127)).astype(np.float32)
    return np.round(x / scale[:, None]).astype(np.int8), scale


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (64, 96), (1030, 161)])
def test_products_of_fewer_bits_are_those_of_float64_with_the_rounded_numbers(
    inputs: int, outputs: int, kind: str, rounds: bool
) -> None:
    """Weights alone are rounded, or tokens, too: one token, as many as share what is widened, and
    more; each is alone, and one that is no number spoils no other."""
    rng = np.random.default_rng(inputs)
    x = rng.normal(size=(40, inputs)).astype(np.float32) * np.linspace(0.1, 9, 40)[:, None]
    x, weight = x.astype(np.float32), rng.normal(size=(outputs, inputs)).astype(np.float32)
    rows, scales = x.astype(np.float64), None
    if kind == "bfloat16":
        ready, kept = packed(jnp.asarray(weight, jnp.bfloat16)), in_bfloat16(weight)
        rows = in_bfloat16(x) if rounds else rows
    else:
        whole, scales = in_eight_bits(weight)
        ready, kept = packed(jnp.asarray(whole)), whole * scales[:, None].astype(np.float64)
        if rounds:
            whole, each = in_eight_bits(x)
            rows = whole * each[:, None].astype(np.float64)
    exact = rows @ kept.T
    bound = 2e-6 * (np.abs(rows) @ np.abs(kept.T))

    @jax.jit
    def product(rows: jax.Array, used: jax.Array | None = None) -> jax.Array:
        return packed_product(rows, ready, outputs, used, scales=scales, rounds=rounds)

    all_rows = np.asarray(product(x))
    assert (np.abs(all_rows - exact) <= bound).mean() > 0.999, "but for ties of the rounding"
    np.testing.assert_allclose(all_rows, exact, atol=0.02 * bound.max() / 2e-6)
    for count in (1, 2, 3, 12, 13, 31):
        assert (np.asarray(product(x[:count])) == all_rows[:count]).all(), count
    used = rng.random(40) < 0.4
    part = np.asarray(product(x, jnp.asarray(used)))
    assert (part[used] == all_rows[used]).all() and not part[~used].any()
    x[3, 2] = np.nan
    spoilt = np.asarray(product(x))
    assert np.isnan(spoilt[3]).all() and (np.delete(spoilt - all_rows, 3, 0) == 0).all()


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.int8, jnp.float32])
def test_a_row_among_many_is_what_it_is_among_few(kind: DTypeLike, rounds: bool) -> None:
    """Many rows take many panels at a time, the last of them not whole."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(150, 100)), jnp.float32)
    weight, scales = jnp.asarray(rng.normal(size=(1399, 100)) * 20), None
    if kind == jnp.int8:
        weight, scales = jnp.clip(weight, -127, 127), jnp.asarray(rng.random(1399), jnp.float32)
    ready = packed(weight.astype(kind))
    product = partial(packed_product, scales=scales, rounds=rounds and kind != jnp.float32)
    whole = np.asarray(product(x, ready, 1399))
    few = [product(x[i : i + 30], ready, 1399) for i in range(0, 150, 30)]
    assert (np.concatenate(few) == whole).all()
    exact = np.asarray(x, np.float64) @ np.asarray(weight.astype(kind), np.float64).T
    exact = exact if scales is None else exact * np.asarray(scales)
    assert np.abs(whole - exact).max() < (0.02 if rounds else 1e-5) * np.abs(exact).max()


@needs_kernels
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_heads_are_rotated_as_layers_rotate_them(share: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 3, 24)).astype(np.float32)
    angles = rng.normal(size=(9, int(24 * share) // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    wanted = layers.rotate(jnp.asarray(x), jnp.asarray(cos), jnp.asarray(sin))
    np.testing.assert_allclose(jax.jit(rotated)(x, cos, sin), wanted, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "page", "scoring", "has_sinks"),
    [
        (8, 2, 64, 32, Scoring(), False),
        (4, 4, 8, 4, Scoring(window=5, cap=3.0), True),
        (6, 2, 80, 16, Scoring(), True),
        (16, 1, 128, 32, Scoring(window=40), False),
        (2, 1, 40, 48, Scoring(cap=20.0), False),
    ],
)
def test_attention_on_pages_is_that_of_float64(
    heads: int, kv_heads: int, width: int, page: int, scoring: Scoring, has_sinks: bool
) -> None:
    rng = np.random.default_rng(heads)

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.normal(size=shape).astype(np.float32)

    rows, most, pages = 6, 6, 40
    positions = np.array([0, page - 1, page, -1, most * page - 1, 3 * page + 2], np.int32)
    tables = rng.permutation(pages)[: rows * most].reshape(rows, most).astype(np.int32)
    tables[positions < 0] = pages  # no page, as of an empty row
    keys, values = normal(pages, kv_heads, width, page), normal(pages, kv_heads, page, width)
    q, k, v = normal(rows, heads, width), *(normal(rows, kv_heads, width) for _ in range(2))
    sinks = normal(heads) if has_sinks else None

    @jax.jit
    def attended(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, keys, values = arrays
        return attend_pages(q, (k, v), (keys, values), tables, positions, scoring, sinks)

    out, new_keys, new_values = map(np.asarray, attended(q, k, v, keys, values))
    for row in np.flatnonzero(positions >= 0):
        number, column = tables[row, positions[row] // page], positions[row] % page
        keys[number, :, :, column], values[number, :, column] = k[row], v[row]
    assert (new_keys == keys).all() and (new_values == values).all(), "these, and no others"
    assert not out[positions < 0].any()
    for row in np.flatnonzero(positions >= 0):
        wanted = _attended(q[row], keys, values, tables[row], int(positions[row]), scoring, sinks)
        np.testing.assert_allclose(out[row], wanted, atol=3e-6)


def _attended(
    q: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    table: NDArray[np.int32],
    position: int,
    scoring: Scoring,
    sinks: NDArray[np.float32] | None,
) -> NDArray[np.float64]:
    """Attend with one row's queries [H, K] in float64."""
    begin = max(0, position + 1 - scoring.window) if scoring.window else 0
    seen = slice(begin, position + 1)
    each_k = np.concatenate([keys[t].swapaxes(1, 2) for t in table], axis=1)[:, seen]
    each_v = np.concatenate([values[t] for t in table], axis=1)[:, seen].astype(np.float64)
    out = []
    for head, query in enumerate(q.astype(np.float64)):
        group = head // (len(q) // len(each_k))
        scores = each_k[group].astype(np.float64) @ query / np.sqrt(len(query))
        if scoring.cap:
            scores = scoring.cap * np.tanh(scores / scoring.cap)
        odds = np.exp(scores)
        total = odds.sum() + (0 if sinks is None else np.exp(np.float64(sinks[head])))
        out.append(odds @ each_v[group] / total)
    return np.stack(out)


@needs_kernels
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "page", "scoring", "has_sinks"),
    [
        (8, 2, 64, 32, Scoring(), False),
        (4, 4, 8, 4, Scoring(window=5, cap=3.0), True),
        (6, 2, 80, 16, Scoring(), True),
        (5, 1, 40, 16, Scoring(window=40), False),
    ],
)
def test_new_tokens_see_their_pages_and_each_other_as_in_float64(
    heads: int, kv_heads: int, width: int, page: int, scoring: Scoring, has_sinks: bool
) -> None:
    """Sequences of uneven lengths, with nothing, part of a page and several pages before them."""
    rng = np.random.default_rng(heads)

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.normal(size=shape).astype(np.float32)

    starts = np.array([0, page // 2, 2 * page, 3 * page + 1, 0], np.int32)
    lengths = np.array([1, 70, 33, 5, 0], np.int32)  # the last is padding
    begins = np.concatenate([[0], np.cumsum(lengths)[:-2], [0]]).astype(np.int32)
    n, most, pages = int(lengths.sum()) + 4, 4, 20
    tables = rng.permutation(pages).reshape(5, most).astype(np.int32)
    keys, values = normal(pages, kv_heads, width, page), normal(pages, kv_heads, page, width)
    q, k, v = normal(n, heads, width), *(normal(n, kv_heads, width) for _ in range(2))
    sinks = normal(heads) if has_sinks else None

    @jax.jit
    def attended(*arrays: jax.Array) -> jax.Array:
        q, k, v, keys, values = arrays
        tokens = NewTokens(*map(jnp.asarray, (begins, starts, lengths, tables)))
        return attend_new_tokens(q, (k, v), (keys, values), tokens, scoring, sinks)

    out = np.asarray(attended(q, k, v, keys, values))
    assert not out[lengths.sum() :].any()
    for begin, start, length, table in zip(begins, starts, lengths, tables, strict=True):
        new = slice(begin, begin + length)
        before = [np.concatenate([a[t].swapaxes(1, 2) for t in table], 1) for a in (keys,)]
        before += [np.concatenate([values[t] for t in table], 1)]
        all_k, all_v = (
            np.concatenate([old[:, :start], np.swapaxes(x[new], 0, 1)], axis=1)
            for old, x in zip(before, (k, v), strict=True)
        )
        for i in range(length):
            wanted = _attended(
                q[begin + i], all_k.swapaxes(1, 2)[None], all_v[None], np.zeros(1, np.int32),
                int(start) + i, scoring, sinks,
            )  # fmt: skip
            np.testing.assert_allclose(out[begin + i], wanted, atol=3e-6)


@needs_kernels
def test_large_scores_and_a_lone_token_are_exact() -> None:
    """Scores of hundreds neither overflow nor lose the largest."""
    q = np.full((1, 1, 16), 40.0, np.float32)
    keys, values = np.zeros((2, 1, 16, 16), np.float32), np.zeros((2, 1, 16, 16), np.float32)
    keys[0, 0, :, 3], values[0, 0, 3] = 10.0, 7.0
    new = np.zeros((1, 1, 16), np.float32)
    table, position = np.array([[0, 1]], np.int32), np.array([20], np.int32)
    out, *_ = jax.jit(lambda *a: attend_pages(a[0], (new, new), (a[1], a[2]), table, position))(
        q, keys, values
    )
    assert (np.asarray(out) == 7.0).all()


SAYS = """
from jaxrl_async.cpu.kernel_library import SAMPLING, TRAINING, kernels_are_there
print(kernels_are_there(SAMPLING), kernels_are_there(TRAINING))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("compiler", "message"),
    [("no-such-compiler", "none of no-such-compiler is installed"), ("false", "false failed")],
)
def test_without_a_compiler_the_log_says_what_to_do(
    compiler: str, message: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "CXX": compiler, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr.count("apt-get install g++") == 1, "logged once"
    assert message in done.stderr and "apt-get install g++" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.full
@needs_kernels
def test_kernels_that_cannot_be_kept_in_the_cache_go_to_a_spare_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    environment = {**os.environ, "XDG_CACHE_HOME": str(file), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True"]
    assert str(file) in done.stderr and "set XDG_CACHE_HOME to a folder" in done.stderr
    assert "g++" not in done.stderr


@pytest.mark.full
@pytest.mark.exhaustive
@needs_kernels
def test_the_library_is_built_once(tmp_path: Path) -> None:
    """By two processes at once, and found by a third."""
    (spare := tmp_path / "temporary").mkdir()  # kernels of earlier runs may be in the usual one
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(spare)}
    times = set()
    for together in (2, 1):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", SAYS], env=environment, text=True, stdout=subprocess.PIPE
            )
            for _ in range(together)
        ]
        assert [p.communicate()[0].split() for p in started] == [["True", "True"]] * together
        libraries = sorted(tmp_path.rglob("*.so"))
        assert len(libraries) == 2, "of samplers, of the trainer"
        times.add(tuple(library.stat().st_mtime_ns for library in libraries))
    assert len(times) == 1, "the third process found it"
