"""Layers whose weights are kept in fewer bits, by the CPU's own kernels and by XLA's products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec
from numpy.typing import NDArray

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.cpu.kernel_library import SAMPLING, kernels_are_there
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import TRAINER_RULES, shardings
from jaxrl_async.model.decoder import init_table
from jaxrl_async.model.frozen_base import BaseForm, base_table, quantized_base, sent_base
from jaxrl_async.model.lora import adapter_table, joined, lora_of
from jaxrl_async.model.quantize import quantize
from jaxrl_async.model.spec import ModelSpec, Params, weight_table
from jaxrl_async.sampler.setup import SamplerSettings, build_setup

pytestmark = pytest.mark.full

SIZES = {"layers": 2, "mlp": 64, "tied": False}  # outputs that fill panels of 32
MODELS = {
    "dense": tiny_spec(96, **SIZES),
    "odd": tiny_spec(40, layers=2, mlp=25, tied=True),
    "experts": tiny_spec(96, **SIZES, family="qwen3_moe", experts=4),
    "latent": tiny_spec(
        96, layers=2, family="deepseek_v3", experts=4, kv_heads=4, head_dim=12, tied=False
    ),
    "biases": tiny_spec(96, **SIZES, family="qwen2"),
}
IDS = np.arange(24, dtype=np.int32) % 30


def logprobs(
    spec: ModelSpec, params: Params, *, matmul: str = "full", own: bool = True
) -> NDArray[np.float32]:
    """Log-probs of IDS by a sampler's prepared weights."""
    section = schema.SamplerSection(matmul=matmul, cpu_kernels=own)
    engine = build_setup(spec, section, None, 0, SamplerSettings()).engine
    assert engine.spec.cpu_products == own
    return np.asarray(engine.probe(engine.prepare(params), IDS))


def in_form(spec: ModelSpec, params: Params, form: str) -> Params:
    """The weights as they are sent: in float32, in bfloat16 or quantised."""
    if form == "bfloat16":
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    if form == "float32":
        return params
    return quantize(weight_table(spec), params, form, jnp.float32)


@pytest.fixture(autouse=True)
def kernels() -> None:
    if not kernels_are_there(SAMPLING):
        pytest.skip("needs g++ or clang++ and a processor with AVX2")


@pytest.mark.parametrize(
    ("model", "form", "matmul"),
    [
        ("dense", "int8", "full"),
        *(
            pytest.param(model, form, matmul, marks=[pytest.mark.exhaustive])
            for model in MODELS
            for form in ("float32", "bfloat16", "int8", "float8_e4m3fn")
            for matmul in ("full", "bfloat16")
            if (model, form, matmul) != ("dense", "int8", "full")
            and (model == "dense" or (form in ("float32", "int8")) == (matmul == "full"))
        ),
    ],
)
def test_kernels_multiply_with_what_xla_multiplies_with(model, form, matmul) -> None:
    spec = MODELS[model]
    sent = in_form(spec, tiny_params(spec), form)
    wanted = logprobs(spec, sent, matmul=matmul, own=False)
    # what is rounded to bfloat16 in between falls to either side now and then
    limit = 3e-6 if matmul == "full" else 2e-2
    np.testing.assert_allclose(logprobs(spec, sent, matmul=matmul), wanted, atol=limit)


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("dense", "float32"),
        *(
            pytest.param(model, form, marks=[pytest.mark.exhaustive])
            for model in MODELS
            for form in ("float32", "int8")
            if (model, form) != ("dense", "float32")
        ),
    ],
)
def test_products_in_eight_bits_differ_by_rounding_alone(model, form) -> None:
    """As far from the exact weights as those rounded to 8 bits alone, and as much again."""
    spec = MODELS[model]
    params = tiny_params(spec)
    exact = logprobs(spec, params, own=False)
    weights_alone = np.abs(logprobs(spec, in_form(spec, params, "int8")) - exact).mean()
    both = logprobs(spec, in_form(spec, params, form), matmul="int8")
    assert 0 < np.abs(both - exact).mean() < 2 * weights_alone + 1e-2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *((model, kind) for model in ("dense", "experts", "latent") for kind in ("int8", "nf4")),
        ("odd", "int8"),  # gate and up fill no whole panels
    ],
)
def test_an_adapter_on_a_quantised_base_is_that_of_xla(model, kind) -> None:
    spec = MODELS[model]
    lora = lora_of(spec, LoraSection(rank=2))
    adapter = init_table(adapter_table(spec, lora), jax.random.key(1), jnp.float32)
    adapter = jax.tree.map(lambda a: a + 0.05, adapter)
    form = BaseForm(kind=kind, group=8)
    where = shardings(base_table(weight_table(spec), form), mesh_of(), TRAINER_RULES)
    base = sent_base(quantized_base(spec, tiny_params(spec), form, where), jnp.float32)
    whole = joined(lora, base, adapter)
    wanted = logprobs(spec, whole, own=False)
    np.testing.assert_allclose(logprobs(spec, whole), wanted, rtol=1e-5)
    assert np.abs(wanted - logprobs(spec, base)).max() > 1e-3


def test_eight_bits_need_the_kernels() -> None:
    section = schema.SamplerSection(matmul="int8", cpu_kernels=False)
    with pytest.raises(ConfigError, match=r"sampler\.matmul=int8 multiplies by kernels for CPUs"):
        build_setup(MODELS["dense"], section, None, 0, SamplerSettings())
