"""cuDNN's attention by offsets: the offsets, and the call, with a reference in cuDNN's place."""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention64 import arrays, assert_close, attention64, got, packed_mask, row_of
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.model import gpu_packed
from jaxrl_async.model.gpu_packed import Offsets, cudnn, cudnn_attention, num_runs, offsets_of
from jaxrl_async.model.kernels import PLAIN, Scoring

Segments = list[tuple[int, int]]  # start and length


def runs(ids: list[int]) -> Segments:
    """The runs of equal ids, token by token."""
    found: Segments = []
    for place, number in enumerate(ids):
        if place and number == ids[place - 1]:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((place, 1))
    return found


@given(st.tuples(*[st.lists(st.integers(1, 5), max_size=6)] * 2))
def test_offsets_say_where_each_run_begins_and_how_long_it_is(rows):
    ids = [row_of(lengths, 32) for lengths in rows]
    offsets = offsets_of(jnp.asarray(ids), 8)
    assert int(num_runs(jnp.asarray(ids))) == max(len(runs(row)) for row in ids)
    for row, starts, lengths in zip(ids, *map(np.asarray, offsets[::-1]), strict=True):
        found = runs(row)
        missing = [-1] * (8 - len(found))
        assert starts.tolist() == [s for s, _ in found] + missing + [-1]
        assert lengths.tolist() == [n for _, n in found] + missing


def test_jax_hands_cudnn_each_segment_of_all_rows_in_order():
    """What JAX makes of our offsets for cuDNN: those of all rows, in numbers of the arrays, which
    are those of the keys only if keys have as many heads as queries."""
    fixed = cudnn_attention()._fix_seqlen_offsets
    ids = jnp.asarray([row_of([3, 2], 8), row_of([8], 8)])
    lengths, starts = offsets_of(ids, 4)
    q = jnp.zeros((2, 8, 4, 16))
    q_lengths, kv_lengths, q_starts, kv_starts = fixed(lengths, lengths, starts, starts, q, q)
    end = 2 * 8
    assert q_lengths.ravel().tolist() == kv_lengths.ravel().tolist() == [3, 2, 3, 8, 0, 0, 0, 0]
    wanted = [x * 4 * 16 for x in (0, 3, 5, 8, *[end] * 6)]
    assert q_starts.ravel().tolist() == kv_starts.ravel().tolist() == wanted


def in_place_of_cudnn(
    q: Any, k: Any, v: Any, offsets: Offsets, scale: float, window: int, calls: list[int]
) -> Any:
    """What cuDNN computes: each segment by itself, causal from its own first token, nothing else.

    The rows must be whole multiples of 8 tokens, and kv heads as many as query heads.
    """
    assert q.shape[1] % 8 == 0 and q.shape[2] == k.shape[2]
    calls.append(offsets.lengths.shape[1])
    T = q.shape[1]
    place = jnp.arange(T)[:, None]
    begins, lengths = offsets.starts[:, None, :-1], offsets.lengths[:, None, :]
    member = (begins >= 0) & (place >= begins) & (place < begins + lengths)  # [B, T, most]
    same = jnp.einsum("btm,bsm->bts", member, member, preferred_element_type=jnp.int32) > 0
    seen = same & (place >= place.T)
    if window:
        seen &= place - place.T < window
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * scale
    shares = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", shares, v)


@pytest.mark.parametrize("many", [False, True], ids=["by offsets", "of more segments"])
@pytest.mark.parametrize(("T", "window"), [(37, 0), (64, 0), (50, 6)])
def test_the_wrapper_gives_what_float64_gives(T, window, many):
    """Padding, lengths that are no multiple of 8, grouped heads, windows; and rows of more segments
    than cuDNN is given."""
    most = gpu_packed.MOST_SEGMENTS
    lengths = [1] * (most + 1) if many else [T // 4, 2, T // 3]
    segments = np.array([row_of(lengths, T), row_of([T], T)], np.int32)
    q, k, v, up = arrays(T)
    up = up * (segments > 0)[..., None, None]
    wanted = attention64(q, k, v, packed_mask(segments, window), up)
    calls: list[int] = []

    def packed(q: Any, k: Any, v: Any) -> Any:
        attend = partial(in_place_of_cudnn, calls=calls)
        return cudnn(q, k, v, jnp.asarray(segments), Scoring(window), attend=attend)

    assert_close(got(packed, q, k, v, up), wanted)
    assert set(calls) == {most}


def test_padding_of_a_row_is_defined():
    """Every token is in a segment, so cuDNN leaves no output or gradient unwritten."""
    ids = jnp.asarray([row_of([3], 8), row_of([], 8), row_of([1] * 7, 8)])
    lengths, starts = offsets_of(ids, 8)
    covered = [[s + i for s, n in zip(r, m, strict=False) if s >= 0 for i in range(n)]
               for r, m in zip(starts.tolist(), lengths.tolist(), strict=True)]  # fmt: skip
    assert covered == [list(range(8))] * 3


def test_arrays_too_large_for_its_offsets_go_to_the_other_kernels(monkeypatch):
    monkeypatch.setattr(gpu_packed, "MOST_ELEMENTS", 100)
    q, k, v, _ = arrays(8)
    ones = jnp.ones((2, 8), jnp.int32)
    said: list[Any] = []

    def other(*given: Any) -> Any:
        said.append(given[4])
        return given[0]

    out = cudnn(q, k, v, ones, PLAIN, attend=None, otherwise=other)
    assert said == [PLAIN] and out is q


def test_a_jax_without_the_private_function_is_noticed(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.cudnn", None)
    monkeypatch.setitem(sys.modules, "jax._src.cudnn.fused_attention_stablehlo", None)
    assert cudnn_attention.__wrapped__() is None
