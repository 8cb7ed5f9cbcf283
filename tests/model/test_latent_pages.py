"""Our own TPU kernel for latent attention on pages, interpreted, against float64."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of
from jax.sharding import Mesh
from tpu_interpreter import LATE, no_races

from jaxrl_async.model import latent_pages
from jaxrl_async.model.latent_pages import attend_latent_pages

pytestmark = pytest.mark.full

P, G, T = 40, 8, 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences, of which `counted` count: tokens of each, and how many are queries."""

    lengths: tuple[int, ...] = (1, G * T, 17, G, 30)
    queries: tuple[int, ...] = (1, 1, 1, 1, 1)
    counted: int = 5
    H: int = 4
    rank: int = 16
    K: int = 24
    padding: int = 0  # queries of none
    in_parts: bool = False  # a block holds two pages, not all
    rows: int = 512  # of a program


CASES = {
    "decode": Case(),
    "decode in parts": Case(in_parts=True),
    "decode as wide as DeepSeek-V3": Case(H=20, rank=512, K=576),
    "rows that do not count": Case(counted=3),
    "chunks": Case(queries=(1, 20, 5, 8, 30), padding=7),
    "chunks in parts": Case(queries=(1, 20, 5, 8, 30), padding=7, in_parts=True, rows=48),
    "chunks that do not count": Case(queries=(1, 48, 0, 8, 0), counted=4, padding=30, rows=64),
    "many heads": Case(queries=(1, 7, 3, 2, 30), H=130, rank=130, K=140, rows=64),
}


def in_float64(case: Case, q: np.ndarray, pages: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """[t, H, rank], query by query."""
    out = np.zeros((*q.shape[:2], case.rank))
    first = 0
    for row in range(case.counted):
        kv = pages[tables[row]].reshape(-1, pages.shape[-1])[:, : case.K].astype(np.float64)
        for i in range(case.queries[row]):
            seen = kv[: case.lengths[row] - case.queries[row] + i + 1]
            scores = q[first].astype(np.float64) @ seen.T * case.K**-0.5
            odds = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[first] = odds @ seen[:, : case.rank] / odds.sum(axis=1, keepdims=True)
            first += 1
    return out


def both(
    case: Case,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    mesh: Mesh | None = None,
    interpret: Any = True,
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel and float64 make of the same numbers."""
    rng = np.random.default_rng(0)
    width, S = -(-case.K // 128) * 128, len(case.lengths)
    t = sum(case.queries) + case.padding
    q = jnp.asarray(rng.normal(size=(t, case.H, case.K)), dtype)
    kv = rng.normal(size=(P, G, width))
    kv[..., case.K :] = 0
    pages = jnp.asarray(kv, dtype)
    tables = np.stack([rng.permutation(P)[:T] for _ in range(S)]).astype(np.int32)
    monkeypatch.setattr(latent_pages, "MOST_ROWS", case.rows)
    if case.in_parts:
        monkeypatch.setattr(latent_pages, "BUFFER_BYTES", 2 * pages[0].nbytes)
    got = attend_latent_pages(
        q,
        pages,
        jnp.asarray(case.lengths, jnp.int32),
        jnp.asarray(tables),
        jnp.cumsum(jnp.array([0, *case.queries]), dtype=jnp.int32),
        jnp.array([case.counted], jnp.int32),
        rank=case.rank,
        mesh=mesh,
        interpret=interpret,
    )
    exact = in_float64(case, np.asarray(q, np.float64), np.asarray(pages, np.float64), tables)
    return np.asarray(got, np.float64), exact


FEW = ("decode in parts", "chunks in parts")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else pytest.mark.full) for n in CASES]
)
def test_each_query_attends_to_the_tokens_up_to_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got, wanted = both(CASES[name], "float32", monkeypatch)
    np.testing.assert_allclose(got, wanted, atol=3e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else pytest.mark.full) for n in CASES]
)
def test_it_waits_for_each_copy_before_it_uses_what_is_copied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_races():
        got, wanted = both(CASES[name], "float32", monkeypatch, interpret=LATE)
    np.testing.assert_allclose(got, wanted, atol=3e-6)


@pytest.mark.parametrize("name", ["decode as wide as DeepSeek-V3", "chunks in parts"])
def test_in_bfloat16_shares_and_results_are_rounded_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is rounded to 8 bits, 2 ** -9 of it at most: of values to 4.5, weighted by shares."""
    got, wanted = both(CASES[name], "bfloat16", monkeypatch)
    np.testing.assert_allclose(got, wanted, atol=2 * 4.5 * 2**-9)


@pytest.mark.parametrize("heads", [4, 5])
def test_on_a_mesh_tensor_divides_the_heads_if_it_can(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASES["chunks in parts"], H=heads)
    got, wanted = both(case, "float32", monkeypatch, mesh_of(data=2, tensor=2))
    np.testing.assert_allclose(got, wanted, atol=3e-6)
