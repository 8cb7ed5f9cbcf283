"""The gated delta rule and its convolution against a plain float64 recurrence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec
from whole_rows import row_logprobs

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import CheckpointError, ConfigError
from jaxrl_async.model.decoder import TokenRows, settings_on
from jaxrl_async.model.delta import (
    DeltaInputs,
    causal_convolution,
    continued_convolution,
    continued_delta_rule,
    delta_step,
    gated_delta_rule,
)
from jaxrl_async.model.hf_config import hf_config_of, spec_from_hf
from jaxrl_async.model.lora import lora_of, modules_of
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.flops import flops_of_lengths, num_matmul_params

SPEC = tiny_spec(40, family="qwen3_next", layers=4, experts=4, head_dim=8, tied=False)
HEADS, KEYS, VALUES = 4, 6, 5


def inputs(tokens: int, seed: int = 0) -> DeltaInputs:
    """Two key heads, each for two value heads; memories from one to hundreds of tokens."""
    draw = np.random.default_rng(seed)
    q, k = (draw.normal(size=(1, tokens, 2, KEYS)) for _ in range(2))
    v = draw.normal(size=(1, tokens, HEADS, VALUES))
    log_decay = -(10.0 ** draw.uniform(-3, 0.5, size=(1, tokens, HEADS)))
    strength = draw.uniform(size=(1, tokens, HEADS))
    return DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, strength)))


def token_by_token(given: DeltaInputs) -> np.ndarray:
    """What one sequence's tokens read, float64."""
    q, k, v, log_decay, strength = (np.asarray(x, np.float64)[0] for x in given)
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, HEADS // x.shape[1], axis=1) for x in (q, k))
    states, read = np.zeros((HEADS, KEYS, VALUES)), []
    for t in range(len(v)):
        states *= np.exp(log_decay[t])[:, None, None]
        known = np.einsum("hkv,hk->hv", states, k[t])
        states += np.einsum("hk,hv->hkv", k[t], strength[t][:, None] * (v[t] - known))
        read.append(np.einsum("hkv,hk->hv", states, q[t]) / np.sqrt(KEYS))
    return np.stack(read)


def part(given: DeltaInputs, start: int, stop: int) -> DeltaInputs:
    return DeltaInputs(*(x[:, start:stop] for x in given))


@pytest.mark.full
@pytest.mark.parametrize("chunk", [8, 64])
def test_chunks_compute_what_single_tokens_do(chunk) -> None:
    given = inputs(45)
    ones = jnp.ones((1, 45), jnp.int32)
    np.testing.assert_allclose(
        gated_delta_rule(given, ones, chunk=chunk)[0], token_by_token(given), atol=2e-5
    )


SEGMENTS = [0] * 2 + [1] * 13 + [2] * 1 + [0] * 3 + [3] * 21 + [4] * 4 + [0] * 5
"""Padding in front, between and behind; segments within a chunk of 8 and over several."""


def starts() -> list[tuple[int, int]]:
    ids = np.asarray(SEGMENTS)
    return [(int(np.argmax(ids == i)), int((ids == i).sum())) for i in range(1, 5)]


@pytest.mark.full
def test_packed_sequences_are_as_alone_and_gradients_do_not_cross() -> None:
    given, ids = inputs(len(SEGMENTS), seed=1), jnp.asarray([SEGMENTS])
    packed = gated_delta_rule(given, ids, chunk=8)
    for start, length in starts():
        alone = token_by_token(part(given, start, start + length))
        np.testing.assert_allclose(packed[0, start : start + length], alone, atol=2e-5)
    start, length = starts()[2]
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(length, HEADS, VALUES)))

    def of_row(given: DeltaInputs) -> jax.Array:
        read = gated_delta_rule(given, ids, chunk=8)
        return (read[0, start : start + length] * weights).sum()

    def of_one(given: DeltaInputs) -> jax.Array:
        ones = jnp.ones((1, length), jnp.int32)
        return (gated_delta_rule(given, ones, chunk=64)[0] * weights).sum()

    row = jax.grad(of_row)(given)
    one = jax.grad(of_one)(part(given, start, start + length))
    for whole, own in zip(row, one, strict=True):
        np.testing.assert_allclose(whole[:, start : start + length], own, atol=2e-5)
        outside = np.delete(np.asarray(whole), np.s_[start : start + length], axis=1)
        np.testing.assert_allclose(outside, 0, atol=1e-6)


@pytest.mark.full
def test_a_convolution_sees_the_last_tokens_of_its_segment_alone() -> None:
    draw = np.random.default_rng(3)
    x, weights = draw.normal(size=(1, len(SEGMENTS), 3, 2)), draw.normal(size=(3, 2, 4))
    out = causal_convolution(jnp.asarray(x), jnp.asarray(weights), jnp.asarray([SEGMENTS]))
    for start, length in starts():
        for t in range(length):
            seen = range(max(0, t - 3), t + 1)
            total = sum(x[0, start + s] * weights[..., 3 - (t - s)] for s in seen)
            wanted = total / (1 + np.exp(-total))
            np.testing.assert_allclose(out[0, start + t], wanted, atol=1e-5)


def logprobs(params, ids: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    rows = TokenRows(*(jnp.asarray(x)[None] for x in (ids, positions, segments)))
    return np.asarray(row_logprobs(SPEC, params, rows))[0]


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_decoder_gives_packed_sequences_the_log_probs_that_they_have_alone() -> None:
    segments = np.asarray(SEGMENTS)
    ids = np.random.default_rng(4).integers(0, SPEC.vocab, len(segments))
    begins = [int(np.argmax(segments == i)) for i in segments]
    positions = np.arange(len(segments)) - begins
    params = tiny_params(SPEC)
    packed = logprobs(params, ids, positions, segments)
    for start, length in (p for p in starts() if p[1] > 1):
        own = slice(start, start + length)
        alone = logprobs(params, ids[own], np.arange(length), np.ones(length, np.int32))
        np.testing.assert_allclose(packed[own][1:], alone[1:], atol=2e-5)


def test_a_config_is_read_as_it_was_written_and_what_is_missing_is_refused() -> None:
    config = hf_config_of(dataclasses.replace(SPEC, norm_eps=1e-5))
    assert spec_from_hf(config, "config.json") == dataclasses.replace(SPEC, norm_eps=1e-5)
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert ModelSpec.from_fields(dataclasses.asdict(SPEC)) == SPEC
    for change, message in (
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"linear_num_value_heads": 3}, "multiple of linear_num_key_heads"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"model_type": "qwen4_exp"}, "qwen4_exp"),
    ):
        with pytest.raises(CheckpointError, match=message):
            spec_from_hf({**config, **change}, "config.json")


def test_shared_prefixes_are_refused() -> None:
    mesh = mesh_of(data=1)
    with pytest.raises(ConfigError, match="share_prefixes: the gated delta nets"):
        settings_on(mesh, SPEC, dtype=jnp.float32, attention="auto", shares_prefixes=True)


@pytest.mark.full
def test_states_continue_from_part_to_part_as_in_one_sequence() -> None:
    """Parts of 1, 17, 3 and 24 tokens, padded to 24 and with a row of other lengths."""
    given, whole = inputs(45, seed=5), token_by_token(inputs(45, seed=5))
    state, start = jnp.zeros((2, HEADS, KEYS, VALUES)), 0
    for length in (1, 17, 3, 24):
        own = part(given, start, start + length)
        noise = inputs(24, seed=6)
        rows = [
            jnp.concatenate([jnp.concatenate([a, b[:, length:]], axis=1), b])
            for a, b in zip(own, noise, strict=True)
        ]
        lengths = jnp.asarray([length, 24])
        read, state = continued_delta_rule(DeltaInputs(*rows), state, lengths, chunk=8)
        np.testing.assert_allclose(read[0, :length], whole[start : start + length], atol=2e-5)
        start += length
    single = jnp.zeros((1, HEADS, KEYS, VALUES))
    for t in range(45):
        read, single = delta_step(part(given, t, t + 1), single)
        np.testing.assert_allclose(read[0, 0], whole[t], atol=2e-5)
    np.testing.assert_allclose(single[0], state[0], atol=2e-5)


@pytest.mark.full
def test_a_convolution_continues_from_its_last_inputs() -> None:
    draw = np.random.default_rng(3)
    x, weights = draw.normal(size=(1, 12, 3, 2)), draw.normal(size=(3, 2, 4))
    whole = causal_convolution(jnp.asarray(x), jnp.asarray(weights), jnp.ones((1, 12), jnp.int32))
    before, start = jnp.zeros((1, 3, 3, 2)), 0
    for length in (1, 2, 5, 4):
        padded = np.concatenate([x[:, start : start + length], draw.normal(size=(1, 3, 3, 2))], 1)
        out, before = continued_convolution(
            jnp.asarray(padded), jnp.asarray(weights), before, jnp.asarray([length])
        )
        np.testing.assert_allclose(out[:, :length], whole[:, start : start + length], atol=1e-5)
        start += length


def test_adapters_name_the_modules_of_both_kinds_of_layers() -> None:
    targets = ("in_proj_qkvz", "in_proj_ba", "linear_attn.out_proj", "q_proj")
    found = modules_of(SPEC, lora_of(SPEC, LoraSection(rank=2, targets=targets)))
    assert sorted(module.rpartition(".")[2] for module in found.values()) == sorted(
        target.rpartition(".")[2] for target in targets
    )


@pytest.mark.full
def test_flops_of_a_state_grow_with_the_tokens_and_attentions_with_their_squares() -> None:
    """Three of four layers keep a state; one attends."""
    linear = 3 * SPEC.heads * 6 * SPEC.head_dim**2 * 10
    attention = 4 * SPEC.heads * 2 * SPEC.head_dim * 25.0
    whole = flops_of_lengths(SPEC, 10, 25.0)
    assert whole == 2 * num_matmul_params(SPEC) * 10 + linear + attention
