"""The CPU's own attention and log-probs in an update against float64, with their gradients."""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxrl_async.config import schema
from jaxrl_async.cpu.gradients import chosen, flash, tree_flash
from jaxrl_async.cpu.gradients import multiply as in_parts
from jaxrl_async.cpu.kernel_library import TRAINING, kernels_are_there, multiplies_in_parts
from jaxrl_async.mesh import make_mesh
from jaxrl_async.model.attention import (
    reference,
    sequence_attention,
    tree_reference,
    visible_until,
)
from jaxrl_async.model.decoder import (
    DecoderSettings,
    TokenRows,
    hidden_states,
    init_params,
    settings_on,
)
from jaxrl_async.model.kernels import Scoring
from jaxrl_async.model.layers import product
from jaxrl_async.model.logprobs import REFUSED, token_logprobs
from jaxrl_async.model.spec import ModelSpec

pytestmark = pytest.mark.skipif(
    "not has_kernels()", reason="needs g++ or clang++ and a processor with AVX2"
)


def has_kernels() -> bool:
    return kernels_are_there(TRAINING)


def in_float64(function: Any, *inputs: Any) -> Any:
    """Compute the function of the inputs in float64, floats alone."""
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(x, jnp.float64) if x.dtype == np.float32 else jnp.asarray(x) for x in inputs
        ]
        return jax.tree.map(np.asarray, function(*wide))


def assert_close(found: Any, wanted: Any) -> None:
    """Within 3e-6 of the largest number of each array."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * max(np.abs(b).max(), 1e-3))


def segments_of(*rows: list[int]) -> NDArray[np.int32]:
    """Return segment ids: each row is the lengths of its segments; the rest is padding."""
    length = max(map(sum, rows))
    ids = [np.repeat(np.arange(1, len(row) + 1), row) for row in rows]
    return np.stack([np.pad(i, (0, length - len(i))) for i in ids]).astype(np.int32)


def trees_of(*rows: list[tuple[int, int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return segment ids and positions: each row is the lengths of its segments, and where in their
    contexts they begin; the rest is padding."""
    segments = segments_of(*([length for length, _ in row] for row in rows))
    by_row = [np.concatenate([np.arange(n) + begin for n, begin in row]) for row in rows]
    positions = np.stack([np.pad(p, (0, segments.shape[1] - len(p))) for p in by_row])
    return segments, positions.astype(np.int32)


SEGMENTS = [70, 1, 33], [104], [31, 9], [7, 5, 11, 9, 1, 40]
TREES = (
    [(70, 0), (34, 33), (2, 66), (90, 5), (30, 0), (3, 29)],  # a panel that one half sees
    [(200, 0), (5, 199), (20, 3)],
    [(3, 0), (2, 2), (6, 1), (4, 0), (64, 0), (64, 31), (64, 31)],
)


@pytest.mark.full
@pytest.mark.parametrize("in_tree", [False, True], ids=["segments", "trees"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "scoring", "has_sinks"),
    [
        (4, 2, 32, Scoring(), False),
        (3, 1, 20, Scoring(window=13), True),
        (2, 2, 64, Scoring(cap=2.0), False),
        (6, 3, 40, Scoring(window=40, cap=1.5), True),
    ],
)
def test_attention_and_its_gradients_are_those_of_float64(
    heads: int, kv_heads: int, width: int, scoring: Scoring, has_sinks: bool, in_tree: bool
) -> None:
    """Segments of one token, of a part of a block, of several; contexts that leave each other there
    or share a prefix; and padding."""
    rng = np.random.default_rng(heads)
    if in_tree:
        segments, positions = trees_of(*TREES)
        extent = np.asarray(visible_until(jnp.asarray(positions), jnp.asarray(segments)))
        if scoring.window:
            extent = np.stack([extent, positions], axis=-1)
    else:
        segments = extent = segments_of(*SEGMENTS)
    B, T = segments.shape

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.normal(size=shape).astype(np.float32)

    keys = (normal(B, T, kv_heads, width), normal(B, T, kv_heads, width))
    inputs = (normal(B, T, heads, width), *keys, *([normal(heads)] if has_sinks else []))
    above = normal(B, T, heads, width) * (segments > 0)[:, :, None, None]

    def gradients(attention: Any, *inputs: Any) -> Any:
        def loss(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
            out = attention(q, k, v, extent, scoring, sinks)
            return jnp.sum(out * above), out * (segments > 0)[:, :, None, None]

        return jax.value_and_grad(loss, tuple(range(len(inputs))), has_aux=True)(*inputs)

    ours, wanted = (tree_flash, tree_reference) if in_tree else (flash, reference)
    found = jax.jit(functools.partial(gradients, ours))(*inputs)
    (_, out), grads = in_float64(functools.partial(gradients, wanted), *inputs)
    assert_close((found[0][1], found[1]), (out, grads))


@pytest.mark.full
@pytest.mark.parametrize("vocab", [7, 301])
def test_log_probs_and_their_gradients_are_those_of_float64(vocab: int) -> None:
    """Some rows may not draw most of the vocabulary; some entropies have no gradient."""
    rng = np.random.default_rng(vocab)
    logits = 3 * rng.normal(size=(21, vocab)).astype(np.float32)
    logits[3, :-2] = REFUSED
    targets = np.full(21, vocab - 1, np.int32)
    targets[5:] = rng.integers(0, vocab, 16)
    above = rng.normal(size=(2, 21)).astype(np.float32)
    above[1, 10:] = 0

    def reference_of(logits: Any, targets: Any) -> Any:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        target_logprobs = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
        return target_logprobs, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)

    def gradients(function: Any, logits: Any) -> Any:
        def loss(logits: Any) -> Any:
            logprobs, entropies = function(logits, targets)
            return jnp.sum(above[0] * logprobs + above[1] * entropies), (logprobs, entropies)

        (_, values), grads = jax.value_and_grad(loss, has_aux=True)(logits)
        return values, grads

    found = jax.jit(functools.partial(gradients, chosen))(logits)
    assert_close(found, in_float64(functools.partial(gradients, reference_of), logits))


def test_log_probs_of_large_logits_are_as_exact_as_their_differences() -> None:
    rng = np.random.default_rng(0)
    logits = (4000 + 3 * rng.normal(size=(9, 77))).astype(np.float32)
    targets = rng.integers(0, 77, 9).astype(np.int32)
    wide = logits.astype(np.float64) - 4000
    wanted = wide[np.arange(9), targets] - np.log(np.exp(wide).sum(-1))
    (found, _), back = jax.vjp(lambda x: chosen(x, targets), jnp.asarray(logits))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6)
    (grads,) = back((jnp.ones(9), jnp.zeros(9)))
    odds = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    np.testing.assert_allclose(grads, np.eye(77)[targets] - odds, rtol=0, atol=1e-6)


def test_a_target_outside_the_vocabulary_is_not_taken_for_another() -> None:
    """As XLA's program has it, and no other row or logit is touched."""
    logits = np.ones((3, 5), np.float32)
    targets = np.array([5, 1, -7], np.int32)
    (logprobs, entropies), back = jax.vjp(lambda x: chosen(x, targets), jnp.asarray(logits))
    assert np.isnan(logprobs).tolist() == [True, False, True]
    assert np.isfinite(entropies).all()
    (grads,) = back((jnp.array([0.0, 1.0, 0.0]), jnp.zeros(3)))
    np.testing.assert_allclose(grads[1], np.eye(5)[1] - 0.2, atol=1e-6)
    assert (np.asarray(grads)[[0, 2]] == 0).all()


@pytest.mark.parametrize("wrong", ["values", "segments", "sinks"])
def test_attention_refuses_arrays_that_do_not_fit(wrong: str) -> None:
    """It would read behind them otherwise."""
    shapes = {"values": (1, 8, 2, 4), "segments": (1, 8), "sinks": (2,)}
    shapes |= {wrong: {"values": (1, 8, 2, 0), "segments": (1, 7), "sinks": (1,)}[wrong]}
    q = jnp.ones((1, 8, 2, 4))
    values, sinks = jnp.ones(shapes["values"]), jnp.ones(shapes["sinks"])
    segments = jnp.ones(shapes["segments"], jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="flash: shapes do not fit"):
        flash(q, q, values, segments, sinks_H=sinks).block_until_ready()


def test_a_window_in_a_tree_is_refused_without_positions() -> None:
    q = jnp.ones((1, 8, 2, 4))
    until = jnp.full((1, 8), 8, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="flash: shapes do not fit"):
        tree_flash(q, q, q, until, Scoring(window=3)).block_until_ready()


@pytest.mark.full
def test_a_segment_is_the_same_bits_whatever_lies_beside_it_and_whoever_computes() -> None:
    """In a row with others, by itself (on one thread), and again while the threads are busy."""
    rng = np.random.default_rng(0)
    q, k, v, above = (rng.normal(size=(1, 150, 4, 32)).astype(np.float32) for _ in range(4))

    @jax.jit
    def gradients(segments: Any, *arrays: Any) -> Any:
        out, back = jax.vjp(lambda q, k, v: flash(q, k, v, segments), *arrays[:3])
        return out, back(arrays[3])

    def bits(segments: NDArray[np.int32], *arrays: NDArray[np.float32]) -> list[NDArray[Any]]:
        return [np.asarray(x) for x in jax.tree.leaves(gradients(segments, *arrays))]

    for others in ([60], [5], [1, 1], [3, 20, 9]):
        begin, rest = sum(others), 90 if others == [60] else 20
        given = [x[:, : begin + rest].copy() for x in (q, k, v, above)]
        whole = bits(segments_of([*others, rest]), *given)
        alone = bits(segments_of([rest]), *(x[:, begin:].copy() for x in given))
        assert all((a == b[:, begin:]).all() for a, b in zip(alone, whole, strict=True)), others
        given[2][:, 0] = np.nan
        beside_nan = bits(segments_of([*others, rest]), *given)
        assert all((a == b[:, begin:]).all() for a, b in zip(alone, beside_nan, strict=True))
    whole = bits(segments_of([60, 90]), q, k, v, above)
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))(np.eye(512))
    for _ in range(5):
        again = bits(segments_of([60, 90]), q, k, v, above)
        assert all((a == b).all() for a, b in zip(again, whole, strict=True))
    busy.block_until_ready()


def test_they_are_chosen_on_a_cpu_in_float32() -> None:
    assert sequence_attention("auto", cpu_kernels=True) is flash
    assert sequence_attention("auto") is reference
    assert sequence_attention("reference", cpu_kernels=True) is reference
    assert sequence_attention("auto", cpu_kernels=True, dtype=jnp.bfloat16) is reference
    assert sequence_attention("auto", cpu_kernels=True, shares_prefixes=True) is tree_flash


@pytest.mark.full
@pytest.mark.parametrize("remat", ["layer", "attention", "dots"])
def test_what_the_backward_pass_computes_again_changes_no_gradient(remat: str) -> None:
    spec = ModelSpec.from_architecture(
        schema.ArchitectureSection(layers=2, width=16, heads=4, kv_heads=2, head_dim=8, mlp=16), 16
    )
    rng = np.random.default_rng(0)
    segments = segments_of([20, 12], [25])
    ids = rng.integers(0, 16, segments.shape).astype(np.int32)
    positions = np.tile(np.arange(32, dtype=np.int32), (2, 1))

    @functools.partial(jax.jit, static_argnums=1)
    def gradients(params: Any, remat: str) -> Any:
        def loss(params: Any) -> Any:
            inputs = (ids, positions, segments)
            states = hidden_states(spec, params, *inputs, remat=remat, attention=flash)
            return jnp.sum(jnp.where(segments[..., None] > 0, states, 0.0) ** 3)

        return jax.grad(loss)(params)

    params = init_params(spec, jax.random.key(0))
    assert_close(gradients(params, remat), gradients(params, "none"))


needs_tiles = pytest.mark.skipif("not has_matrix_unit()", reason="needs a processor with AMX")


def has_matrix_unit() -> bool:
    return multiplies_in_parts()


@needs_tiles
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        *((1, 1, 1), (5, 7, 3), (33, 65, 40), (100, 130, 257), (70, 5000, 48), (513, 64, 96)),
        *((40, 0, 40), (0, 40, 40), (3, 1100, 12000)),
    ],
)
def test_products_in_parts_are_as_exact_as_in_float32(rows: int, inputs: int, outputs: int) -> None:
    """Whichever matrix is turned; inputs beyond one stretch, panels beyond what is divided at once,
    none of them; numbers of many magnitudes."""
    rng = np.random.default_rng(inputs)
    x = rng.normal(size=(rows, inputs)) * 10.0 ** rng.uniform(-6, 6, (rows, 1))
    w = rng.normal(size=(inputs, outputs)) * 10.0 ** rng.uniform(-6, 6, outputs)
    x, w = x.astype(np.float32), w.astype(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64)
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            found = in_parts(
                jnp.asarray(x.T.copy() if transpose_a else x),
                jnp.asarray(w.T.copy() if transpose_b else w),
                transpose_a=transpose_a,
                transpose_b=transpose_b,
            )
            assert (np.abs(np.asarray(found) - exact) <= 3e-7 * bound).all()


@needs_tiles
def test_a_rows_product_in_parts_is_its_own_and_what_is_no_number_stays_there() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(90, 300)), rng.normal(size=(300, 70))
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    whole = np.asarray(in_parts(x, w))
    for rows in (slice(0, 1), slice(16, 49), slice(33, 90)):
        assert (np.asarray(in_parts(x[rows], w)) == whole[rows]).all()
    spoilt = np.asarray(in_parts(x.at[40, 7].set(jnp.nan).at[41, 8].set(jnp.inf), w))
    assert not np.isfinite(spoilt[40:42]).any()
    assert (np.delete(spoilt, [40, 41], 0) == np.delete(whole, [40, 41], 0)).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes do not fit"):
        in_parts(x, w, transpose_b=True)


WIDE = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=2, width=256, heads=4, kv_heads=4, head_dim=64, mlp=320), 300
)


@needs_tiles
@pytest.mark.parametrize("remat", ["none", "layer", "dots"])
def test_an_update_in_parts_has_the_gradient_of_one_in_float32(remat: str) -> None:
    """Of a whole policy, head included; with remat=dots products are not made again."""
    params, rng = init_params(WIDE, jax.random.key(0)), np.random.default_rng(0)
    segments = jnp.asarray(segments_of([100, 43], [111, 32]))
    positions = [np.r_[0:100, 0:43], np.r_[0:111, 0:32]]
    rows = TokenRows(
        jnp.asarray(rng.integers(0, 300, segments.shape), jnp.int32),
        jnp.asarray(np.stack(positions), jnp.int32),
        segments,
    )

    def loss(params: Any, *, own: bool) -> jax.Array:
        settings = DecoderSettings(
            remat=remat, attention=flash, cpu_kernels=True, in_parts=own, chunk=286
        )
        return token_logprobs(WIDE, params, rows, settings).logprobs.sum()

    gradients = [jax.jit(jax.value_and_grad(partial(loss, own=own))) for own in (True, False)]
    found, wanted = (gradient(params) for gradient in gradients)
    assert_close(found, wanted)
    calls = gradients[0].lower(params).as_text().count("jaxrl_async.multiply")
    again = 6 if remat == "layer" else 0  # all but the last product of a layer
    assert calls == 3 * 7 + again + 4, "forward, for inputs, for weights; the head's forward twice"
    assert "jaxrl_async.multiply" not in gradients[1].lower(params).as_text()


@needs_tiles
def test_own_layers_may_map_over_what_is_in_parts() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 256, 300)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(300, 256)), jnp.float32)
    each = jax.vmap(partial(product, in_parts=True), in_axes=(0, None))(x, w)
    np.testing.assert_array_equal(each, product(x, w, in_parts=True))


@pytest.mark.full
@needs_tiles
def test_small_products_are_xlas_and_settings_choose_parts_on_one_device() -> None:

    def by_parts(
        rows: int, inputs: int, outputs: int, dtype: Any = jnp.float32, **how: Any
    ) -> bool:
        shapes = (rows, inputs), (inputs, outputs)
        if how.get("outputs_first"):
            shapes = (rows, inputs), (outputs, inputs)
        given = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
        lowered = jax.jit(partial(product, in_parts=True, **how)).lower(*given)
        return "jaxrl_async.multiply" in lowered.as_text()

    assert by_parts(256, 256, 256)
    assert not any(
        by_parts(*shape) for shape in ((255, 256, 256), (256, 255, 256), (256, 256, 255))
    )
    assert not by_parts(300, 300, 300, jnp.bfloat16) and not by_parts(300, 300, 300, mixed=True)
    assert not by_parts(300, 300, 300, outputs_first=True)
    on = partial(settings_on, spec=WIDE, dtype=jnp.float32, attention="auto")
    one, two = (make_mesh(schema.AxesSection(data=n), jax.devices()[:n]) for n in (1, 2))
    assert on(one, cpu_kernels=True).in_parts
    assert not on(one, cpu_kernels=False).in_parts and not on(two, cpu_kernels=True).in_parts
    assert not on(one, cpu_kernels=True, dtype=jnp.bfloat16).in_parts
