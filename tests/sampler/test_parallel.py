"""One device and every mesh that a sampler may have draw the same tokens."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.mesh import make_mesh
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.quantize import Kind, quantize
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.full

VOCAB = 48
SHAPE = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 32}
SPECS = {
    "dense": ModelSpec.from_architecture(schema.ArchitectureSection(**SHAPE), VOCAB),
    "experts": ModelSpec.from_architecture(
        schema.ArchitectureSection(**SHAPE, family="qwen3_moe", experts=4, experts_per_token=2),
        VOCAB,
    ),
}
SECTION = schema.SamplerSection(
    slots=4, reserve=0.0, max_length=32, max_new_tokens=8, block=4, page_tokens=16
)
FEW = [("dense", {"data": 2, "tensor": 2}), ("experts", {"data": 2, "expert": 2, "tensor": 2})]
MORE = [
    *(("dense", {"data": d, "tensor": t}) for d, t in ((1, 4), (2, 4))),
    ("dense", {"fsdp": 2, "tensor": 2}),
    *(
        ("experts", {"data": d, "expert": e, "tensor": t})
        for d, e, t in ((1, 4, 1), (1, 1, 2), (1, 2, 4))
    ),
]
MESHES = [*FEW, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)]


@functools.cache
def params_of(name: str, kind: Kind | None = None) -> Any:
    params = init_params(SPECS[name], jax.random.key(0))
    if kind is None:
        return params
    return jax.jit(lambda p: quantize(weight_table(SPECS[name]), p, kind, np.float32))(params)


def sampled(name: str, kind: Kind | None = None, **axes: int) -> list[Completion]:
    """Four greedy answers to prompts of several lengths, with the experts of each token."""
    section = schema.AxesSection(**axes)
    sampler = Sampler(
        (SPECS[name], params_of(name, kind)),
        section=SECTION,
        mesh=make_mesh(section, jax.devices()[: section.num_devices]),
        settings=SamplerSettings(keep_routing=name == "experts"),
    )
    random = np.random.default_rng(0)
    requests = [
        Request(
            request_id=f"g{n}/m0/t0",
            token_ids=random.integers(0, VOCAB, 3 + 4 * n).astype(np.int32),
            max_new_tokens=8,
            sampling=SamplingParams(temperature=0.0),
            stop_token_ids=(),
            key=(n, 0),
        )
        for n in range(4)
    ]
    try:
        return sampler.generate(requests)
    finally:
        sampler.close()


@functools.cache
def alone(name: str, kind: Kind | None = None) -> list[Completion]:
    return sampled(name, kind)


def assert_same(found: list[Completion], wanted: list[Completion]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        np.testing.assert_array_equal(a.expert_ids, b.expert_ids)  # dense: None


@pytest.mark.parametrize(("name", "axes"), MESHES, ids=str)
def test_every_mesh_draws_what_one_device_does(name, axes):
    assert_same(sampled(name, **axes), alone(name))


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("dense", {"tensor": 2}),
        pytest.param("experts", {"expert": 2, "tensor": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_weights_of_eight_bits_are_divided_with_their_scales(name, axes):
    assert_same(sampled(name, "int8", **axes), alone(name, "int8"))
    assert any(
        a.logprobs.tolist() != b.logprobs.tolist()
        for a, b in zip(alone(name, "int8"), alone(name), strict=True)
    ), "rounding shows"
