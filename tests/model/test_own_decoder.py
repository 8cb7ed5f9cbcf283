"""A decoder of the user's own, against an independent forward pass, through every joint that the
built-in layer has."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import CheckpointError, ConfigError
from jaxrl_async.mesh import TRAINER_RULES, make_mesh, shardings
from jaxrl_async.model import own_code
from jaxrl_async.model.decoder import TokenRows, init_params, output_head, settings_on, token_states
from jaxrl_async.model.lora import lora_of
from jaxrl_async.model.own_code import check_unchanged, load_code
from jaxrl_async.model.own_spec import check_numbers, own_spec
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.remote.run.sampler_parts import sent_spec
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Request

FILE = Path(__file__).parents[2] / "configs" / "own_decoder" / "parallel.py"
SHAPE = schema.ArchitectureSection(
    layers=3, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48, tied=False
)
SPEC = own_spec(f"{FILE}:ParallelLayer", SHAPE, 40)


def moved(spec: ModelSpec, seed: int = 0):
    """Random weights of which none is 0 or 1."""
    params = init_params(spec, jax.random.key(seed))
    keys = iter(jax.random.split(jax.random.key(seed + 1), 100))
    return jax.tree.map(lambda w: w + 0.1 * jax.random.normal(next(keys), w.shape), params)


@functools.cache
def params_of_layer():
    return moved(SPEC)


def normed(x, scale, shift):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + shift


def rotated(x):
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    turn = np.exp(1j * angles)[:, None]
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], -1)


def reference_logprobs(params, ids):
    """Log-probs of ids[1:] in float64, one sequence, written without the package."""
    p = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    x, n = p["embed"][ids], len(ids)
    for i in range(p["layers"]["q"].shape[0]):
        w = {name: values[i] for name, values in p["layers"].items()}
        y = normed(x, w["norm"], w["shift"])
        q, k = (rotated(np.einsum("nd,dhk->nhk", y, w[name])) for name in "qk")
        v = np.einsum("nd,dhk->nhk", y, w["v"])
        k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
        scores = np.einsum("nhk,mhk->hnm", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hnm,mhk->nhk", share / share.sum(-1, keepdims=True), v)
        attended = attended * (2 / (1 + np.exp(-(y @ w["gate"]))))[..., None]
        x = (
            x
            + np.einsum("nhk,hkd->nd", attended, w["o"])
            + (np.maximum(y @ w["up"], 0) ** 2) @ w["down"]
        )
    logits = normed(x, p["final_norm"], p["final_shift"]) @ p["lm_head"]
    largest = logits.max(-1, keepdims=True)
    logprobs = logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    return logprobs[np.arange(n - 1), ids[1:]]


def trainer_logprobs(spec, params, ids, settings=None):
    """Log-probs of ids[1:] as the trainer computes them, of two rows that are the same."""
    ids = jnp.asarray(ids)
    rows = TokenRows(*(jnp.stack([a, a]) for a in (ids, jnp.arange(len(ids)), jnp.ones_like(ids))))

    @jax.jit
    def run(params):
        states = token_states(spec, params, rows, *([] if settings is None else [settings]))
        logits = states.hidden @ output_head(spec, params)
        return jax.nn.log_softmax(logits).reshape(2, len(ids), -1)

    out = run(params)[0]
    return np.asarray(out[np.arange(len(ids) - 1), ids[1:]])


IDS = np.random.default_rng(0).integers(0, 40, 16).astype(np.int32)


def sampled(policy, mesh=None, prompt=IDS[:5]):
    """Return a prompt with a completion of 12 tokens, and the completion's log-probs."""
    section = schema.SamplerSection(slots=2, max_length=32, max_new_tokens=16, block=4)
    with Sampler(policy, section=section, mesh=mesh, seed=3) as sampler:
        request = Request(request_id="r", token_ids=prompt, max_new_tokens=12, key=(0, 0))
        (done,) = sampler.generate([request])
    return np.concatenate([prompt, done.token_ids]), np.asarray(done.logprobs)


@pytest.mark.full
def test_the_trainer_computes_what_an_independent_pass_does():
    found = trainer_logprobs(SPEC, params_of_layer(), IDS)
    np.testing.assert_allclose(found, reference_logprobs(params_of_layer(), IDS), atol=1e-5, rtol=0)


@pytest.mark.exhaustive
def test_the_sampler_samples_with_the_trainers_log_probs():
    ids, logprobs = sampled((SPEC, params_of_layer()))
    np.testing.assert_allclose(
        logprobs, trainer_logprobs(SPEC, params_of_layer(), ids)[4:], atol=1e-5, rtol=0
    )
    np.testing.assert_allclose(
        logprobs, reference_logprobs(params_of_layer(), ids)[4:], atol=1e-5, rtol=0
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{"fsdp": 4, "tensor": 2}, {"fsdp": 2, "data": 2, "tensor": 2}])
def test_meshes_of_eight_devices_compute_the_same(axes):
    mesh = make_mesh(schema.AxesSection(**axes), jax.devices()[:8])
    settings = settings_on(mesh, SPEC, dtype=jnp.float32, attention="reference", remat="layer")
    params = jax.device_put(params_of_layer(), shardings(weight_table(SPEC), mesh, TRAINER_RULES))
    assert "tensor" in str(params["layers"]["gate"].sharding.spec)
    found = trainer_logprobs(SPEC, params, IDS, settings)
    np.testing.assert_allclose(found, reference_logprobs(params_of_layer(), IDS), atol=1e-5, rtol=0)
    of_sampler = make_mesh(schema.AxesSection(tensor=2), jax.devices()[:2])
    ids, logprobs = sampled((SPEC, params_of_layer()), of_sampler)
    np.testing.assert_allclose(
        logprobs, reference_logprobs(params_of_layer(), ids)[4:], atol=1e-5, rtol=0
    )


@pytest.mark.exhaustive
def test_an_adapter_and_a_saved_directory_compute_what_the_merged_weights_do(tmp_path, monkeypatch):
    lora = lora_of(SPEC, LoraSection(rank=2, alpha=4))
    assert lora is not None and set(lora.names) == {"q", "k", "v", "gate", "o", "up", "down"}
    policy = Policy(SPEC, params_of_layer()).adapted(lora, jax.random.key(5))
    grown = jax.tree.map(lambda w: w + 0.05, policy.adapter)
    policy = policy.with_trained(grown)
    merged = policy.merged()
    ids, found = sampled(policy)
    np.testing.assert_allclose(found, reference_logprobs(merged.params, ids)[4:], atol=1e-5, rtol=0)
    Policy(SPEC, params_of_layer()).save_pretrained(tmp_path / "base")
    policy.save_adapter(tmp_path / "adapter")
    policy.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole" / "parallel.py").read_bytes() == FILE.read_bytes()
    monkeypatch.setattr(own_code, "_loaded", {})
    with pytest.raises(CheckpointError, match=r"without permission.*parallel.py:ParallelLayer"):
        Policy.from_pretrained(tmp_path / "whole")
    named = f"{tmp_path}/whole/parallel.py:ParallelLayer"
    again = Policy.from_pretrained(tmp_path / "whole", decoder=named)
    assert again.spec.is_like(SPEC)
    jax.tree.map(np.testing.assert_array_equal, again.params, merged.params)
    both = Policy.from_pretrained(tmp_path / "base", adapter=tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, both.adapter, grown)


def test_equal_texts_are_one_class_and_others_are_refused(tmp_path):
    copy = tmp_path / "parallel.py"
    copy.write_bytes(FILE.read_bytes())
    code = load_code(f"{copy}:ParallelLayer")
    assert code == SPEC.own and hash(code) == hash(SPEC.own)
    sent = dataclasses.asdict(SPEC)
    assert sent_spec(sent) == SPEC
    changed = {**sent, "own": {**sent["own"], "sha256": "0" * 64}}
    with pytest.raises(ConfigError, match="not the file that the run was started with"):
        sent_spec(changed)
    missing = {**changed, "own": {**changed["own"], "file": "/nowhere/parallel.py"}}
    with pytest.raises(ConfigError, match=r"not on this machine. Copy it"):
        sent_spec(missing)
    check_unchanged(SPEC.own, tmp_path / "kept", resumed=False)
    check_unchanged(code, tmp_path / "kept", resumed=True)
    (tmp_path / "kept" / "parallel.py").write_text("# another text")
    with pytest.raises(ConfigError, match="has changed since the run began"):
        check_unchanged(SPEC.own, tmp_path / "kept", resumed=True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'weight(spec, "embed", "mlp")',
            'Weight(shape=(spec.width, spec.mlp), axes=("embed",), init="normal", fan_in=32)',
            r"weights: 'up' has 2 dimensions \[32, 48\] and 1 axes .*Name an axis",
        ),
        ('weight(spec, "embed", "mlp")', 'weight(spec, "embed", "wide")', "'wide' is not one of"),
        ('"gate": weight', '"times": weight', "'times' is a reserved name"),
        ("turned(k, angles), v", "turned(k, angles), v[:, :1]", r"qkv returned .*must return"),
        ("    def qkv(", "    def other(", "lacks qkv. Define weights, qkv, finish"),
        ("(OwnLayer)", "", "is not an OwnLayer"),
        ('"gate"))', '"gaet"))', "finish fails: AttributeError"),
    ],
    ids=["axis", "unknown axis", "name", "shape", "method", "base", "typo"],
)
def test_a_mistake_is_named_before_the_run(tmp_path, old, new, message):
    text = FILE.read_text()
    assert old in text
    file = tmp_path / "mine.py"
    file.write_text("from jaxrl_async.model.spec import Weight\n" + text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        own_spec(f"{file}:ParallelLayer", SHAPE, 40)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("jnp.log(self.times(y, 'up'))", "give NaN or infinite numbers"),
        ("jnp.sqrt(0 * self.times(y, 'up'))", "the gradient of .* is NaN"),
    ],
)
def test_nan_is_found_before_the_run(tmp_path, new, message):
    file = tmp_path / "mine.py"
    file.write_text(FILE.read_text().replace('jnp.square(jax.nn.relu(self.times(y, "up")))', new))
    spec = own_spec(f"{file}:ParallelLayer", SHAPE, 40)
    with pytest.raises(ConfigError, match=message):
        check_numbers(spec)
