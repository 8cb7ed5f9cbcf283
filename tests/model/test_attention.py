"""Attention behind one interface: every kernel against the reference, and who may run where."""

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import make_mesh
from jaxrl_async.model import gpu_packed, kernels
from jaxrl_async.model.attention import (
    SEQUENCE_ATTENTION,
    obstacle,
    ragged_paged_reference,
    reference,
    sequence_attention,
)
from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.kernels import page_head_dim
from jaxrl_async.model.layout import Layout
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.testing.interpreted import interpreted_kernels
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import policy_update

CPU = jax.devices("cpu")[0]
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
H100 = SimpleNamespace(platform="gpu", compute_capability="9.0")
A100 = SimpleNamespace(platform="gpu", compute_capability="8.0")
B200 = SimpleNamespace(platform="gpu", compute_capability="10.0")
B300 = SimpleNamespace(platform="gpu", compute_capability="10.3")
RTX_5090 = SimpleNamespace(platform="gpu", compute_capability="12.0")
T4 = SimpleNamespace(platform="gpu", compute_capability="7.5")
AMD = SimpleNamespace(platform="gpu", compute_capability="gfx942")


def packed(
    *, B: int = 2, T: int = 24, H: int = 4, N: int = 2, K: int = 16, dtype: Any = np.float32
) -> tuple[jax.Array, ...]:
    """q, k, v and segment ids: two segments, and padding behind them, in every row."""
    rng = np.random.default_rng(T + H)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, K)), dtype) for n in (H, N, N))
    segments = np.zeros((B, T), np.int32)
    for row in segments:
        first, second = sorted(rng.choice(np.arange(1, T), 2, replace=False))
        row[:first], row[first:second] = 1, 2
    return q, k, v, jnp.asarray(segments)


def real_tokens(segments: jax.Array) -> Any:
    return np.asarray(segments > 0)[..., None, None]


def outputs_and_gradients(function: Any, q: Any, k: Any, v: Any, segments: Any) -> list[Any]:
    """The output at real tokens, and the gradients of a random projection of it."""
    out, pull = jax.vjp(lambda *x: function(*x, segments), q, k, v)
    upstream = np.random.default_rng(9).normal(size=out.shape) * real_tokens(segments)
    grads = pull(jnp.asarray(upstream, out.dtype))
    return [np.asarray(x, np.float64) for x in (out * real_tokens(segments), *grads)]


# ---- whole sequences


@pytest.mark.full
def test_the_reference_equals_float64_numpy():
    q, k, v, segments = packed(T=7)
    out = reference(q, k, v, segments)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for b, t in zip(*np.nonzero(np.asarray(segments)), strict=True):
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        for h in range(4):
            scores = k[b, seen, h // 2] @ q[b, t, h] / math.sqrt(16)
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ v[b, seen, h // 2]
            np.testing.assert_allclose(out[b, t, h], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"T": 24, "H": 4, "N": 2, "K": 16}, id="grouped"),
        pytest.param({"T": 300, "H": 2, "N": 1, "K": 64}, id="one kv head, length not a block"),
        pytest.param({"T": 640, "H": 2, "N": 2, "K": 8}, id="several blocks"),
    ],
)
def test_splash_and_its_gradient_equal_the_reference(sizes):
    inputs = packed(**sizes)
    expected = outputs_and_gradients(reference, *inputs)
    with interpreted_kernels():
        got = outputs_and_gradients(jax.jit(kernels.splash), *inputs)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("length", "block", "wide"),
    [
        pytest.param(512, 128, 256, id="two of the backward kernels' blocks"),
        pytest.param(640, 128, 128, id="a length that longer blocks do not divide"),
        pytest.param(300, 384, 384, id="a row of one block"),
    ],
)
def test_splash_with_longer_blocks_going_forward_equals_the_reference(length, block, wide):
    sizes = kernels._row_blocks(length, block, (256, 128))
    assert (sizes.block_q, sizes.block_kv_compute, sizes.block_q_dq) == (wide, 128, block)
    inputs = packed(T=length, H=2, N=1, K=16)
    expected = outputs_and_gradients(reference, *inputs)
    with interpreted_kernels():
        tuned = jax.jit(partial(kernels.splash, most=block, forward=(256, 128)))
        got = outputs_and_gradients(tuned, *inputs)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.exhaustive
def test_splash_in_bfloat16_is_as_close_to_float32_as_the_reference_in_bfloat16():
    inputs = packed(T=100)
    exact = outputs_and_gradients(reference, *inputs)[0]
    rounded = (*(x.astype(jnp.bfloat16) for x in inputs[:3]), inputs[3])
    plain = outputs_and_gradients(reference, *rounded)[0]
    with interpreted_kernels():
        assert kernels.splash(*rounded).dtype == jnp.bfloat16
        fast = outputs_and_gradients(kernels.splash, *rounded)[0]
    assert np.abs(fast - exact).max() <= 2 * np.abs(plain - exact).max() + 1e-3


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "kv_heads"),
    [
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, 2, id="rows and heads"),
        pytest.param({"data": 2, "tensor": 4}, 2, id="more devices than kv heads"),
    ],
)
def test_splash_on_a_mesh_equals_the_reference(axes, kv_heads):
    inputs = packed(B=4, H=4, N=kv_heads)
    expected = outputs_and_gradients(reference, *inputs)
    with interpreted_kernels():
        sharded = jax.jit(kernels.per_shard(kernels.splash, mesh_of(**axes), kernels.SPLASH_PART))
        got = outputs_and_gradients(sharded, *inputs)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "dtype", "block"),
    [
        ("TPU v6 lite", "bfloat16", 1024),
        ("TPU v6 lite", "float32", 512),
        ("TPU v5", "bfloat16", 512),
    ],
)
def test_parts_of_rows_have_the_blocks_of_their_chip(kind, dtype, block):
    mesh = make_mesh(schema.AxesSection(context=2), jax.devices()[:2])
    part = kernels.splash_part_on(SimpleNamespace(device_kind=kind), dtype)
    kernel, _ = part.prepare(2, Layout(mesh).order(4096).reshape(2, -1), mesh)
    assert kernel.kwargs["block_sizes"].block_q == block


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"B": 3, "H": 4, "N": 2}, {"B": 4, "H": 3, "N": 1}])
def test_what_the_mesh_does_not_divide_is_computed_whole(sizes):
    inputs = packed(**sizes)
    sharded = jax.jit(kernels.per_shard(reference, mesh_of(fsdp=2, tensor=2), kernels.SPLASH_PART))
    np.testing.assert_allclose(sharded(*inputs), reference(*inputs), atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "remat", ["attention", pytest.param("layer", marks=pytest.mark.exhaustive)]
)
def test_the_training_loss_has_the_same_gradient_with_splash(remat):
    spec = tiny_spec(24, layers=2)
    params = tiny_params(spec)
    segments = packed(T=20)[3]
    ids = jax.random.randint(jax.random.key(1), segments.shape, 0, 24)
    positions = jnp.broadcast_to(jnp.arange(20), ids.shape)

    def loss(params: Any, attention: Any) -> jax.Array:
        tokens = TokenRows(ids, positions, segments)
        settings = DecoderSettings(remat=remat, attention=attention)
        return token_logprobs(spec, params, tokens, settings).logprobs.sum()

    expected = jax.grad(loss)(params, reference)
    with interpreted_kernels():
        got = jax.jit(jax.grad(loss), static_argnums=1)(params, kernels.splash)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), got, expected)


def no_nvidia() -> str:
    """Why cuDNN cannot run here; empty where it can."""
    if not (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        return "no NVIDIA GPU in this machine"
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return "JAX's CUDA plugin is not installed: pip install 'jaxrl_async[cuda]'"
    return ""


@pytest.mark.skipif(bool(no_nvidia()), reason=no_nvidia())
def test_cudnn_on_a_gpu_equals_the_reference():
    """In a process of its own: this one has only a CPU."""
    here = Path(__file__).parent
    env = {**os.environ, "JAX_PLATFORMS": "cuda,cpu", "PYTHONPATH": str(here.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(here / "gpu_programs.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert errors
    # both round to bfloat16 (2 ** -8); the reference's own error here is of the same size
    assert max(errors.values()) < 0.03, errors


# ---- block sizes


@given(st.integers(1, 40_000))
def test_splash_pads_to_whole_blocks_by_an_eighth_at_most(length):
    block = kernels.splash_block(length)
    padding = -length % block
    assert block % 128 == 0 and block <= 512
    assert padding < 128 or padding <= length / 8


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 16))
def test_kv_heads_are_repeated_until_the_devices_divide_them(group, kv_heads, ways):
    heads = group * kv_heads
    copies = kernels.kv_copies(heads, kv_heads, ways)
    if heads % ways:
        assert copies == 1
        return
    assert (kv_heads * copies) % ways == 0 and heads % (kv_heads * copies) == 0
    mine = np.repeat(np.arange(kv_heads), copies)
    before = np.arange(heads) // group
    assert (mine[np.arange(heads) // (heads // len(mine))] == before).all()


@given(
    st.integers(1, 4096),
    st.integers(1, 512),
    st.sampled_from([1, 8, 16, 32, 64, 128]),
    st.sampled_from([2, 4, 8, 16, 32, 64]),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_ragged_blocks_fit_the_sequence_and_the_memory(tokens, pages, page_size, rows, dtype):
    block, queries = kernels.ragged_blocks(tokens, pages, page_size, rows, 128, dtype)
    assert 1 <= block <= pages and 1 <= queries <= tokens
    itemsize = jnp.dtype(dtype).itemsize
    used = 2 * block * page_size * min(rows, 32 // itemsize) * 128 * itemsize
    assert block == 1 or used <= kernels.RAGGED_KV_BYTES


# ---- pages

SEQS, PAGES_PER_SEQ, PAGE, TOKENS = 4, 3, 4, 16


@st.composite
def ragged_batches(draw: Any) -> list[tuple[int, int]]:
    """(queries, kv length) of one to four sequences: decode steps, chunks, whole prompts."""
    lengths, left = [], TOKENS
    for _ in range(draw(st.integers(1, SEQS))):
        if not left:
            break
        kv_len = draw(st.integers(1, PAGES_PER_SEQ * PAGE))
        queries = draw(st.one_of(st.just(1), st.integers(1, min(kv_len, left))))
        lengths.append((queries, kv_len))
        left -= queries
    return lengths


def ragged(
    lengths: list[tuple[int, int]], *, H: int = 4, N: int = 2, K: int = 16, dtype: Any = np.float32
) -> tuple[jax.Array, ...]:
    """Arguments of ragged_paged: pages in random order, entries that do not count are 1."""
    rng = np.random.default_rng(len(lengths))
    queries, kv_lens = (np.array(x) for x in zip(*lengths, strict=True))
    num = len(lengths)
    starts = np.full(SEQS + 1, queries.sum())
    starts[: num + 1] = np.concatenate([[0], np.cumsum(queries)])
    num_pages = SEQS * PAGES_PER_SEQ + 2
    return (
        jnp.asarray(rng.normal(size=(TOKENS, H, K)), dtype),
        jnp.asarray(rng.normal(size=(num_pages, PAGE, 2 * N, K)), dtype),
        jnp.asarray(np.append(kv_lens, np.ones(SEQS - num)), jnp.int32),
        jnp.asarray(
            rng.permutation(num_pages)[: SEQS * PAGES_PER_SEQ].reshape(SEQS, -1), jnp.int32
        ),
        jnp.asarray(starts, jnp.int32),
        jnp.asarray([num], jnp.int32),
    )


_reference, _paged_reference = jax.jit(reference), jax.jit(ragged_paged_reference)
_ragged_paged = jax.jit(kernels.ragged_paged)
MIXED = [(1, 5), (5, 9), (3, 3), (1, 12)]


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(ragged_batches())
def test_the_paged_reference_equals_full_attention(lengths):
    q, pages, kv_lens, tables, starts, num = ragged(lengths)
    out = _paged_reference(q, pages, kv_lens, tables, starts, num)
    longest = PAGES_PER_SEQ * PAGE
    for s, (queries, kv_len) in enumerate(lengths):
        kv = np.asarray(pages)[np.asarray(tables[s])].reshape(1, longest, 4, 16)
        mine = slice(int(starts[s]), int(starts[s + 1]))
        padded = np.zeros((1, longest, 4, 16), np.float32)
        padded[0, kv_len - queries : kv_len] = q[mine]
        whole = _reference(
            padded, kv[:, :, 0::2], kv[:, :, 1::2], np.arange(longest)[None] < kv_len
        )
        np.testing.assert_allclose(out[mine], whole[0, kv_len - queries : kv_len], atol=1e-6)
    assert not np.asarray(out)[int(starts[num[0]]) :].any()


@pytest.mark.full
@settings(max_examples=20, deadline=None)
@given(ragged_batches())
def test_ragged_paged_equals_its_reference_for_any_mix_of_lengths(lengths):
    arguments = ragged(lengths)
    with interpreted_kernels():
        got = _ragged_paged(*arguments)
    np.testing.assert_allclose(got, _paged_reference(*arguments), atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("H", "N"), [(4, 4), (4, 1), (14, 2), (16, 8)])
def test_ragged_paged_equals_its_reference_for_grouped_queries_in_bfloat16(H, N):
    arguments = ragged(MIXED, H=H, N=N, dtype=jnp.bfloat16)
    with interpreted_kernels():
        got = kernels.ragged_paged(*arguments)
    assert got.dtype == jnp.bfloat16
    exact = ragged_paged_reference(*(x.astype(jnp.float32) for x in arguments[:2]), *arguments[2:])
    np.testing.assert_allclose(got.astype(np.float32), exact, atol=0.03)


@pytest.mark.full
def test_pages_wider_than_the_heads_give_the_same():
    q, pages, *tables = ragged(MIXED)
    width = page_head_dim(16)
    wide = jnp.pad(pages, ((0, 0), (0, 0), (0, 0), (0, width - 16)))
    expected = ragged_paged_reference(q, pages, *tables)
    np.testing.assert_allclose(ragged_paged_reference(q, wide, *tables), expected, atol=1e-6)
    with interpreted_kernels():
        np.testing.assert_allclose(kernels.ragged_paged(q, wide, *tables), expected, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_ragged_paged_on_a_mesh_equals_its_reference(kv_heads):
    arguments = ragged(MIXED, N=kv_heads)
    with interpreted_kernels():
        got = jax.jit(partial(kernels.ragged_paged, mesh=mesh_of(data=2, tensor=2)))(*arguments)
    np.testing.assert_allclose(got, ragged_paged_reference(*arguments), atol=1e-5)


# ---- the choice


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "name"),
    [
        (CPU, jnp.float32, 64, "reference"),
        (TPU, jnp.float32, 64, "splash"),
        (TPU, jnp.bfloat16, 80, "splash"),
        (H100, jnp.bfloat16, 128, "cudnn"),
        (H100, jnp.float16, 256, "cudnn"),
        (H100, jnp.bfloat16, 36, "flash"),
        (H100, jnp.float32, 128, "flash"),
        (B200, jnp.bfloat16, 128, "cudnn"),
        (B200, jnp.bfloat16, 136, "flash"),
        (B200, jnp.bfloat16, 256, "flash"),
        (B300, jnp.bfloat16, 256, "flash"),
        (RTX_5090, jnp.bfloat16, 128, "cudnn"),
        (RTX_5090, jnp.bfloat16, 256, "flash"),
        (A100, jnp.bfloat16, 128, "flash"),
        (A100, jnp.float32, 256, "flash"),
        (T4, jnp.bfloat16, 128, "reference"),
        (AMD, jnp.bfloat16, 128, "reference"),
    ],
)
def test_auto_takes_the_platforms_kernel_where_it_can_run(device, dtype, head_dim, name):
    mesh: Any = SimpleNamespace(devices=np.array([device]), size=1)
    chosen = sequence_attention("auto", mesh=mesh, dtype=dtype, head_dim=head_dim)
    assert getattr(chosen, "func", chosen) is SEQUENCE_ATTENTION[name], "or with a chip's blocks"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "message"),
    [
        ("splash", CPU, jnp.float32, 64, "needs a TPU, but the trainer runs on cpu. Set it to"),
        ("splash", H100, jnp.float32, 64, "needs a TPU, but the trainer runs on gpu"),
        ("cudnn", CPU, jnp.bfloat16, 64, "needs an NVIDIA GPU, but the trainer runs on cpu"),
        ("cudnn", AMD, jnp.bfloat16, 64, "needs an NVIDIA GPU, but the trainer runs on gpu"),
        ("cudnn", H100, jnp.float32, 64, "model.dtype is float32. Set model.dtype=bfloat16 or"),
        ("cudnn", A100, jnp.bfloat16, 128, "of compute capability 9.0, but the trainer's has 8.0"),
        ("cudnn", H100, jnp.bfloat16, 264, "at most 256 on compute capability 9.0, but"),
        ("cudnn", H100, jnp.bfloat16, 264, "the model's is 264. Set model.attention=flash"),
        ("cudnn", B200, jnp.bfloat16, 256, "at most 128 on compute capability 10.0, but the mod"),
        ("cudnn", RTX_5090, jnp.bfloat16, 192, "at most 128 on compute capability 12.0, but"),
        ("cudnn", H100, jnp.bfloat16, 36, "Set model.attention=flash"),
        ("flash", CPU, jnp.float32, 64, "needs an NVIDIA GPU, but the trainer runs on cpu"),
        ("flash", T4, jnp.float32, 64, "of compute capability 8.0, but the trainer's has 7.5"),
    ],
)
def test_a_kernel_that_cannot_run_gives_the_reason_and_the_remedy(
    name, device, dtype, head_dim, message
):
    assert message in str(obstacle(name, device, dtype, head_dim))
    mesh: Any = SimpleNamespace(devices=np.array([device]), size=1)
    with pytest.raises(ConfigError, match=f"^model.attention={name} "):
        sequence_attention(name, mesh=mesh, dtype=dtype, head_dim=head_dim)


@pytest.mark.parametrize(
    ("card", "version", "name"),
    [
        (RTX_5090, 91800, "flash"),
        (RTX_5090, 91801, "cudnn"),
        (B300, 91000, "flash"),
        (B300, 91100, "cudnn"),
        (H100, 91000, "cudnn"),
    ],
)
def test_cards_whose_packed_rows_need_a_newer_cudnn_take_our_kernels(
    monkeypatch, card, version, name
):
    private = gpu_packed.cudnn_attention()
    monkeypatch.setattr(private, "check_cudnn_version", lambda: version)
    mesh: Any = SimpleNamespace(devices=np.array([card]), size=1)
    chosen = sequence_attention("auto", mesh=mesh, dtype=jnp.bfloat16, head_dim=128)
    assert chosen is SEQUENCE_ATTENTION[name]
    if name == "flash":
        reason = str(obstacle("cudnn", card, jnp.bfloat16, 128))
        assert re.search(r"needs cuDNN 9\.1\d\.\d on .* but 9\.1\d\.0 is installed", reason)


def test_the_config_names_every_attention():
    names = schema.ModelSection.model_fields["attention"].annotation.__args__
    assert set(names) == {"auto", *SEQUENCE_ATTENTION}


def test_a_train_step_refuses_a_kernel_of_another_platform():
    with pytest.raises(ConfigError, match=r"model\.attention=splash needs a TPU"):
        policy_update(
            ModelSpec.from_architecture(schema.ArchitectureSection(), 24),
            LearningSettings(mesh=mesh_of(), row_length=16, attention="splash"),
            schema.AlgorithmSection(),
            total_steps=1,
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        pytest.param(3, 3, 128, jnp.bfloat16, id="three kv heads"),
        pytest.param(12, 6, 128, jnp.float32, id="six kv heads"),
        pytest.param(8, 8, 128, jnp.float32, id="queries of a part fill no register"),
        pytest.param(8, 4, 256, jnp.bfloat16, id="wide heads"),
    ],
)
def test_ragged_paged_refuses_heads_that_the_kernel_cannot_lay_out(
    heads, kv_heads, head_dim, dtype
):
    arguments = ragged(MIXED, H=heads, N=kv_heads, K=head_dim, dtype=dtype)
    with pytest.raises(ConfigError, match=r"Set sampler\.attention=gathered"):
        kernels.ragged_paged(*arguments)
