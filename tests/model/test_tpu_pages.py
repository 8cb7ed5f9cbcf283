"""Our own TPU kernel for decoding on pages, interpreted, against float64."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tpu_interpreter import LATE, no_races

from jaxrl_async.model import tpu_pages
from jaxrl_async.model.kernels import PLAIN, Scoring
from jaxrl_async.model.tpu_pages import attend_wide_pages

pytestmark = pytest.mark.full

R, P, G, T = 5, 40, 8, 6
LENGTHS = np.array([1, G * T, 17, G, 30], np.int32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Heads, and what they see."""

    H: int
    N: int
    K: int = 256
    scoring: Scoring = PLAIN
    sinks: bool = False
    in_parts: bool = False  # a block holds two pages, not all


CASES = {
    "wide": Case(H=4, N=2),
    "a window in parts": Case(H=8, N=4, scoring=Scoring(window=13), in_parts=True),
    "sinks in a window": Case(H=8, N=2, K=64, scoring=Scoring(window=13), sinks=True),
    "a cap": Case(H=4, N=2, scoring=Scoring(cap=5.0), sinks=True, in_parts=True),
    "one head": Case(H=4, N=1, in_parts=True),
    "three heads": Case(H=6, N=3, in_parts=True),
}


def in_float64(
    case: Case, q: np.ndarray, pages: np.ndarray, tables: np.ndarray, sinks: np.ndarray
) -> np.ndarray:
    """[R, H, K], token by token."""
    out = np.zeros(q.shape)
    for row in range(R):
        kv = pages[tables[row]].reshape(-1, 2 * case.N, pages.shape[-1])[..., : case.K]
        kv = kv[: LENGTHS[row]][-case.scoring.window :].astype(np.float64)
        for head in range(case.H):
            n = head // (case.H // case.N)
            scores = kv[:, 2 * n] @ q[row, head].astype(np.float64) * case.K**-0.5
            if case.scoring.cap:
                scores = case.scoring.cap * np.tanh(scores / case.scoring.cap)
            odds = np.exp(scores)
            sink = np.exp(sinks[head]) if case.sinks else 0.0
            out[row, head] = odds @ kv[:, 2 * n + 1] / (odds.sum() + sink)
    return out


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("a window in parts",) else pytest.mark.full)
        for name in CASES
    ],
)
@pytest.mark.parametrize("interpret", [True, LATE], ids=["", "late copies"])
def test_each_query_attends_to_what_its_row_sees(
    name: str, interpret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, rng = CASES[name], np.random.default_rng(0)
    width = -(-case.K // 128) * 128
    q = rng.normal(size=(R, case.H, case.K)).astype(np.float32)
    pages = rng.normal(size=(P, G, 2 * case.N, width)).astype(np.float32)
    pages[..., case.K :] = 0
    tables = np.stack([rng.permutation(P)[:T] for _ in range(R)]).astype(np.int32)
    sinks = rng.normal(size=case.H).astype(np.float32)
    if case.in_parts:
        monkeypatch.setattr(tpu_pages, "BUFFER_BYTES", 2 * pages[0].nbytes)
    with nullcontext() if interpret is True else no_races():
        got = np.asarray(
            attend_wide_pages(
                jnp.asarray(q),
                jnp.asarray(pages),
                jnp.asarray(LENGTHS),
                jnp.asarray(tables),
                case.scoring,
                jnp.asarray(sinks) if case.sinks else None,
                interpret=interpret,
            )
        )
    wanted = in_float64(case, q, pages, tables, sinks)
    np.testing.assert_allclose(got, wanted, atol=4e-6)
