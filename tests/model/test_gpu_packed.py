"""cuDNN's attention by offsets: the offsets, and the call, with a reference in cuDNN's place."""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention64 import arrays, assert_close, attention64, got, packed_mask, row_of
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from jaxrl_async.model import gpu_packed
from jaxrl_async.model.decoder import _remat
from jaxrl_async.model.gpu_packed import (
    CUDNN,
    Offsets,
    PackedKernels,
    by_cudnn,
    cudnn,
    cudnn_attention,
    num_runs,
    offsets_of,
)
from jaxrl_async.model.kernels import PLAIN, Scoring
from jaxrl_async.testing.interpreted import interpreted_kernels

Segments = list[tuple[int, int]]  # start and length


def runs(ids: list[int]) -> Segments:
    """The runs of equal ids, token by token."""
    found: Segments = []
    for index, number in enumerate(ids):
        if index and number == ids[index - 1]:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((index, 1))
    return found


@pytest.mark.full
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


@pytest.mark.full
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


def seen_by(offsets: Offsets, T: int, window: int) -> Any:
    """What cuDNN lets a query see: its segment alone, causally: [B, 1, T, T]."""
    index = jnp.arange(T)[:, None]
    begins, lengths = offsets.starts[:, None, :-1], offsets.lengths[:, None, :]
    member = (begins >= 0) & (index >= begins) & (index < begins + lengths)  # [B, T, most]
    same = jnp.einsum("btm,bsm->bts", member, member, preferred_element_type=jnp.int32) > 0
    seen = same & (index >= index.T)
    if window:
        seen &= index - index.T < window
    return seen[:, None]


def in_place_of_cudnn(calls: list[tuple[str, int]]) -> PackedKernels:
    """What cuDNN computes: each segment by itself, causal from its own first token, nothing else;
    and the gradients from the output and the sums that it returned, by their formulas.

    The rows must be whole multiples of 8 tokens, and kv heads as many as query heads.
    """

    def scores_of(q: Any, k: Any, offsets: Offsets, scale: float, window: int) -> Any:
        assert q.shape[1] % 8 == 0 and q.shape[2] == k.shape[2]
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * scale
        return jnp.where(seen_by(offsets, q.shape[1], window), scores, -jnp.inf)

    def forward(
        q: Any, k: Any, v: Any, offsets: Offsets, scale: float, window: int, name: str = "forward"
    ) -> Any:
        calls.append((name, offsets.lengths.shape[1]))
        out, sums = cudnn_forward(scores_of(q, k, offsets, scale, window), v)
        return out, jnp.repeat(sums, gpu_packed.MOST_SEGMENTS, axis=0)

    @jax.jit
    def cudnn_forward(scores: Any, v: Any) -> Any:
        sums = jax.nn.logsumexp(scores, axis=-1)
        return jnp.einsum("bhts,bshk->bthk", jnp.exp(scores - sums[..., None]), v), sums

    def backward(
        q: Any, k: Any, v: Any, offsets: Offsets, scale: float, window: int, *kept: Any
    ) -> Any:
        out, sums, grad = kept
        calls.append(("backward", offsets.lengths.shape[1]))
        sums = sums[:: gpu_packed.MOST_SEGMENTS, :, :, None]
        shares = jnp.exp(scores_of(q, k, offsets, scale, window) - sums)
        inner = jnp.einsum("bthk,bshk->bhts", grad, v)
        expected = jnp.einsum("bthk,bthk->bht", grad, out)[..., None]
        slope = shares * (inner - expected) * scale
        dq, dk = jnp.einsum("bhts,bshk->bthk", slope, k), jnp.einsum("bhts,bthk->bshk", slope, q)
        return dq, dk, jnp.einsum("bhts,bthk->bshk", shares, grad)

    return PackedKernels(lambda *x: forward(*x, name="attend")[0], forward, backward)


@pytest.mark.full
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
    calls: list[tuple[str, int]] = []

    def packed(q: Any, k: Any, v: Any) -> Any:
        kernels = in_place_of_cudnn(calls)
        return cudnn(q, k, v, jnp.asarray(segments), Scoring(window), kernels=kernels)

    assert_close(got(packed, q, k, v, up), wanted)
    assert {("forward", most), ("backward", most)} <= set(calls)
    calls.clear()
    with interpreted_kernels():
        alone = packed(*map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(np.where(up != 0, alone, 0), wanted.out * (up != 0), atol=5e-6)
    assert calls == [("attend", most)], "without a gradient no sums are kept"


def equations(program: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of the programs in them."""
    for equation in program.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.full
@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("layer", 2), ("attention", 1)])
def test_attention_runs_forward_no_more_often_than_a_layer_is_computed(remat, times):
    """In the gradient's program; its two branches are cuDNN's and flash."""
    q, k, v, up = arrays(24)
    segments = jnp.asarray([row_of([9, 8], 24)] * 2)
    kernels = in_place_of_cudnn([])

    def layer(q: Any) -> Any:
        return jnp.sin(cudnn(jnp.sin(q), k, v, segments, kernels=kernels))

    with interpreted_kernels():
        one = _remat(layer, remat)
        program = jax.make_jaxpr(jax.grad(lambda q: jnp.sum(one(q) * up)))(jnp.asarray(q)).jaxpr
    calls = [e.params.get("name", e.params.get("name_and_src_info")) for e in equations(program)]
    names_of = [str(name) for name in calls if name is not None]
    names = "cudnn_forward", "flash_forward", "flash_queries"
    assert [sum(x.startswith(name) for x in names_of) for name in names] == [times, times, 1]


@pytest.fixture
def as_on_hopper(monkeypatch):
    private = cudnn_attention()
    monkeypatch.setattr(private, "check_compute_capability", lambda least: True)
    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91200)
    return private


@pytest.mark.full
@pytest.mark.parametrize("window", [0, 6])
def test_our_backward_pass_is_the_call_that_jax_makes(as_on_hopper, window):
    """By the same rule, with arguments of the same order, shapes and types: operand by operand they
    come from the same inputs."""
    name = as_on_hopper._dot_product_attention_bwd_p_wrapper.name
    q, k, v = (jnp.zeros((2, 16, 4, 32), jnp.bfloat16) for _ in range(3))
    offsets = offsets_of(jnp.asarray([row_of([9, 3], 16)] * 2))
    grad = jnp.ones_like(q)

    def jaxs(q: Any, k: Any, v: Any) -> Any:
        return jax.vjp(lambda *x: by_cudnn(*x, offsets, 0.5, window), q, k, v)[1](grad)

    def own_call(q: Any, k: Any, v: Any) -> Any:
        out, sums = CUDNN.forward(q, k, v, offsets, 0.5, window)
        assert sums.shape == (2 * gpu_packed.MOST_SEGMENTS, 4, 16)
        return CUDNN.backward(q, k, v, offsets, 0.5, window, out, sums, grad)

    (of_jax,), (own,) = (
        [e for e in equations(jax.make_jaxpr(f)(q, k, v).jaxpr) if e.primitive.name == name]
        for f in (jaxs, own_call)
    )
    assert own.params == of_jax.params
    assert [str(x.aval) for x in own.invars] == [str(x.aval) for x in of_jax.invars]


@pytest.mark.full
def test_padding_of_a_row_is_defined():
    """Every token is in a segment, so cuDNN leaves no output or gradient unwritten."""
    ids = jnp.asarray([row_of([3], 8), row_of([], 8), row_of([1] * 7, 8)])
    lengths, starts = offsets_of(ids, 8)
    covered = [[s + i for s, n in zip(r, m, strict=False) if s >= 0 for i in range(n)]
               for r, m in zip(starts.tolist(), lengths.tolist(), strict=True)]  # fmt: skip
    assert covered == [list(range(8))] * 3


@pytest.mark.full
def test_arrays_too_large_for_its_offsets_go_to_the_other_kernels(monkeypatch):
    monkeypatch.setattr(gpu_packed, "MOST_ELEMENTS", 100)
    q, k, v, _ = arrays(8)
    segments = np.ones((2, 8), np.int32)
    wanted = attention64(q, k, v, packed_mask(segments), np.ones_like(q)).out
    none: Any = PackedKernels(None, None, None)  # type: ignore[arg-type]
    with interpreted_kernels():
        out = cudnn(*map(jnp.asarray, (q, k, v, segments)), PLAIN, kernels=none)
    np.testing.assert_allclose(out, wanted, atol=5e-6)


@pytest.mark.parametrize("changed", ["dot_product_attention", "_dot_product_attention_bwd_rule"])
def test_a_jax_whose_function_takes_other_arguments_is_noticed(monkeypatch, changed):
    monkeypatch.setattr(cudnn_attention(), changed, lambda query, something_new: None)
    assert cudnn_attention.__wrapped__() is None


@pytest.mark.full
def test_a_jax_without_the_private_function_is_noticed(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.cudnn", None)
    monkeypatch.setitem(sys.modules, "jax._src.cudnn.fused_attention_stablehlo", None)
    assert cudnn_attention.__wrapped__() is None
