"""What an adapter's gradient amounts to: against the update of all weights, and with dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.config.schema import ArchitectureSection
from jaxrl_async.model.decoder import TokenRows, init_params, init_table
from jaxrl_async.model.dropout import Noise, dropped, drops
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.lora import Lora, adapter_table, joined, lora_of, merged
from jaxrl_async.model.spec import LORA_A, LORA_B, ModelSpec, contracted, weight_table

pytestmark = pytest.mark.full

WIDTH = 16  # of everything, so that one rank is full for all matrices
RATE, STEPS = 0.05, 4
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 24, (2, 12)))
ROWS = TokenRows(IDS, jnp.arange(12)[None].repeat(2, 0), jnp.ones_like(IDS))


def spec_of(**more) -> ModelSpec:
    sizes = {"layers": 2, "width": WIDTH, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp": WIDTH}
    return ModelSpec.from_architecture(ArchitectureSection(**sizes, **more), 24)


SPEC = spec_of()


def loss(params):
    return -token_logprobs(SPEC, params, ROWS).logprobs[:, 1:].mean()


@jax.jit
def gradient(params):
    """The gradient of all weights."""
    return jax.grad(loss)(params)["layers"]


def lora_gradient(lora: Lora):
    return jax.jit(jax.grad(lambda adapter, base: loss(joined(lora, base, adapter))))


def as_matrix(name: str, array) -> np.ndarray:
    """[layers, in, out] float64."""
    inner = contracted(weight_table(SPEC)["layers"][name])
    array = np.asarray(array, np.float64)
    return array.reshape(SPEC.layers, int(np.prod(array.shape[inner.start : inner.stop])), -1)


def begun(orthogonal: bool):
    """The base, and an adapter of full rank whose A is orthogonal, or as PEFT's."""
    lora = lora_of(SPEC, LoraSection(rank=WIDTH, alpha=2.0 * WIDTH))
    base = init_params(SPEC, jax.random.key(0))
    adapter = init_table(adapter_table(SPEC, lora), jax.random.key(1), jnp.float32)
    if orthogonal:
        for i, name in enumerate(lora.names):
            old = adapter["layers"][name + LORA_A]
            turn = jax.random.orthogonal(jax.random.key(i), WIDTH, (SPEC.layers,))
            adapter["layers"][name + LORA_A] = turn.reshape(old.shape)
    return lora, base, adapter


@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_first_step_of_an_adapter_of_full_rank_is_that_of_all_weights_through_its_input_side(
    orthogonal: bool,
) -> None:
    """W = W0 + s A B with B = 0 has dL/dB = s A^T G and dL/dA = s G B^T = 0, G = dL/dW at W0; so a
    step of SGD gives W0 - rate s^2 A A^T G, which is the full update at rate s^2 if A A^T = I."""
    lora, base, adapter = begun(orthogonal)
    grads = lora_gradient(lora)(adapter, base)["layers"]
    full = gradient(base)
    for name in lora.names:
        assert not np.asarray(grads[name + LORA_A]).any()
    stepped = jax.tree.map(lambda x, g: x - RATE * g, adapter, {"layers": grads})
    whole = merged(SPEC, lora, base, stepped)["layers"]
    for name in lora.names:
        a = as_matrix_of_adapter(adapter["layers"][name + LORA_A])
        through = a @ a.transpose(0, 2, 1)
        if orthogonal:
            np.testing.assert_allclose(through, np.eye(WIDTH)[None].repeat(2, 0), atol=1e-6)
        expected = -RATE * lora.scale**2 * through @ as_matrix(name, full[name])
        change = as_matrix(name, whole[name]) - as_matrix(name, base["layers"][name])
        assert np.abs(expected).max() > 1e-4
        np.testing.assert_allclose(change, expected, atol=1e-6, err_msg=name)


def as_matrix_of_adapter(a) -> np.ndarray:
    return np.asarray(a, np.float64).reshape(SPEC.layers, WIDTH, WIDTH)


def test_with_an_orthogonal_input_side_kept_every_step_is_that_of_all_weights() -> None:
    """With A fixed and A A^T = I each step moves W by -rate s^2 A A^T G(W) = -rate s^2 G(W): by
    induction, W follows the full update at rate s^2 for ever."""
    lora, base, adapter = begun(orthogonal=True)
    descend = lora_gradient(lora)
    followed = base
    for _ in range(STEPS):
        grads = descend(adapter, base)["layers"]
        adapter["layers"] = {
            n: x - RATE * grads[n] if n.endswith(LORA_B) else x
            for n, x in adapter["layers"].items()
        }
        full = gradient(followed)
        layers = {
            n: w - RATE * lora.scale**2 * full[n] if n in lora.names else w
            for n, w in followed["layers"].items()
        }
        followed = {**followed, "layers": layers}
    reached = merged(SPEC, lora, base, adapter)["layers"]
    for name in lora.names:
        moved = np.abs(followed["layers"][name] - base["layers"][name]).max()
        assert moved > 1e-3
        np.testing.assert_allclose(reached[name], followed["layers"][name], atol=2e-6)


# ---- dropout

DROPS = lora_of(SPEC, LoraSection(rank=4, dropout=0.25))


def noise(update: int, micro: int) -> Noise:
    return Noise(jnp.int32(update), jnp.int32(micro))


def test_a_share_of_the_inputs_is_left_out_and_the_mean_stays() -> None:
    drop = drops(0.25, noise(0, 0), "layers", 2)
    x = jnp.full((200, 100), 3.0)
    seen = np.asarray(dropped(x, drop[0], "q"))
    assert set(np.unique(seen)) == {0.0, 4.0}
    assert (seen == 0).mean() == pytest.approx(0.25, abs=0.01)
    others = [dropped(x, drop[1], "q"), dropped(x, drop[0], "k")]
    others += [dropped(x, drops(0.25, noise(*n), "layers", 2)[0], "q") for n in ((1, 0), (0, 1))]
    for other in others:
        both = ((np.asarray(other) == 0) & (seen == 0)).mean()
        assert both == pytest.approx(0.25**2, abs=0.01), "independent of each other"


@pytest.mark.parametrize("experts", [0, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_equal_numbers_drop_equal_inputs_and_only_the_adapter_is_touched(experts: int) -> None:
    spec = spec_of(experts=experts, family="qwen3_moe") if experts else SPEC
    lora = lora_of(spec, LoraSection(rank=4, dropout=0.25))
    base = init_params(spec, jax.random.key(0))
    adapter = init_table(adapter_table(spec, lora), jax.random.key(1), jnp.float32)

    @jax.jit
    def logprobs(adapter, noise):
        return token_logprobs(spec, joined(lora, base, adapter, noise), ROWS).logprobs

    still = logprobs(adapter, None)
    np.testing.assert_array_equal(logprobs(adapter, noise(3, 0)), still, err_msg="B is 0")
    adapter["layers"] = {
        n: x + 0.3 if n.endswith(LORA_B) else x for n, x in adapter["layers"].items()
    }
    first, again, other = (logprobs(adapter, noise(*n)) for n in ((3, 1), (3, 1), (3, 2)))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, logprobs(adapter, None))
