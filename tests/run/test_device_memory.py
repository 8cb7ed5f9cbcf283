"""What a run keeps on its devices is added up, and refused with what to set where it cannot fit."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from jaxlib import xla_client

from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError
from jaxrl_async.host import gpu_memory, more_of_a_gpu
from jaxrl_async.model.spec import ModelSpec, num_weights
from jaxrl_async.plan.chips import memory_share
from jaxrl_async.run.builders.device_memory import (
    both_bytes,
    check_devices_hold,
    check_sampler_fits,
    in_transfer_bytes,
    sampler_bytes,
    trainer_bytes,
)

GIB = 2**30
QWEN = [
    "model.architecture={family: qwen3, layers: 28, width: 1024, heads: 16, kv_heads: 8, "
    "head_dim: 128, mlp: 3072, tied: true, vocab: 151936}",
    "model.dtype=bfloat16",
    "sampler.max_length=2048",
    "sampler.max_new_tokens=1536",
    "sampler.slots=256",
    "sampler.reserve=0.25",
    "sampler.block=16",
    "sampler.page_tokens=64",
    "trainer.row_length=2048",
    "trainer.micro_batch_tokens=4096",
]
"""Qwen3-0.6B."""
PYTHON, NEWER = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
EARLY, POOL = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    for name in (PYTHON, NEWER, EARLY, POOL):
        monkeypatch.delenv(name, raising=False)


def a_run(kv_gib: float, *more: str):
    config = load("recipe:addition", [*QWEN, f"sampler.kv_memory_mib={kv_gib * 1024}", *more])
    shape = config.model.architecture
    assert shape.vocab is not None
    return config, ModelSpec.from_architecture(shape, shape.vocab)


def slices_of(limit_gib: float, platform: str = "gpu", *, colocated: bool = True):
    device = SimpleNamespace(
        platform=platform,
        compute_capability="9.0",
        device_kind="H100",
        memory_stats=lambda: {"bytes_limit": int(limit_gib * GIB)},
    )
    mesh = SimpleNamespace(devices=np.asarray([device]), size=1, shape={"tensor": 1})
    return SimpleNamespace(colocated=colocated, sampler=mesh)


def test_trainer_and_sampler_of_one_card_are_added_up() -> None:
    """A weight takes 16 bytes for weights, gradient and AdamW in float32, and 2 in transfer; the
    sampler draws from 2 in bfloat16, and gets those in transfer; and logits of 256 rows and 320
    slots. On slices of their own the sampler has room for those that arrive."""
    config, spec = a_run(24)
    weights, logits = num_weights(spec), 4 * 151936 * (256 + 320)
    assert 595e6 < weights < 597e6
    assert trainer_bytes(config, spec) == 18 * weights
    assert in_transfer_bytes(config.model, config.weights, spec) == 2 * weights
    slices = slices_of(59.0)
    kept = sampler_bytes(config, spec, slices.sampler)
    assert 0 <= 4 * weights + 24 * GIB + logits - kept < 2 * GIB / 256, "but for a part of a page"
    check_devices_hold(config, spec, slices)
    both = 20 * weights + 24 * GIB + logits
    assert 0 <= both - both_bytes(config, spec, slices.sampler) < 2 * GIB / 256
    least = (kept + 16 * weights) / GIB
    check_devices_hold(config, spec, slices_of(least + 0.01))
    with pytest.raises(ConfigError, match=r"24\.0 GiB of KV cache.*with 8\.9 GiB of the trainer"):
        check_devices_hold(config, spec, slices_of(least - 0.01))
    check_devices_hold(config, spec, slices_of(least - 0.01, colocated=False))


def test_of_a_trainer_over_two_processes_each_has_half_beside_its_sampler() -> None:
    """An adapter of rank 8 has 180,224 weights a layer; each takes 16 bytes to learn, and 2 in
    transfer, once. The base takes 4 bytes a weight in the trainer, and 2 in each sampler."""
    config, spec = a_run(4, "mesh={colocated: true, trainer: {fsdp: 2}}", "model.lora.rank=8")
    trained, base = 28 * 180_224, num_weights(spec)
    kv = sampler_bytes(config, spec) - 2 * base - 2 * trained
    assert 0 < kv - 4 * 151936 * (256 + 320) <= 4 * GIB
    expected = (4 * base + 16 * trained) / 2 + 2 * base + 2 * trained + kv
    assert both_bytes(config, spec) == expected


def test_what_does_not_fit_says_how_jax_gets_more_of_the_card(monkeypatch) -> None:
    config, spec = a_run(56)
    with pytest.raises(ConfigError) as refused:
        check_devices_hold(config, spec, slices_of(59.3))
    message = str(refused.value)
    assert "the mesh has 59.3 GiB" in message and "JAX takes 75% of each GPU" in message
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in message and "sampler.kv_memory_mib" in message
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    check_devices_hold(config, spec, slices_of(75.2))
    with pytest.raises(ConfigError) as refused:
        check_devices_hold(*a_run(70), slices_of(75.2))
    assert "MEM_FRACTION" not in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        check_devices_hold(config, spec, slices_of(16, "tpu"))
    assert "GPU" not in str(refused.value)


def test_copies_of_pages_are_counted_where_decoding_works_on_them() -> None:
    """The compiler's 56.5 GiB beside the logits: 256 rows of 2,048 columns and 16 of the block in
    28 layers, 4 KiB each."""
    config, spec = a_run(24, "sampler.attention=gathered")
    with pytest.raises(ConfigError, match=r"56\.4 GiB of them copies of pages"):
        check_sampler_fits(config, spec, slices_of(75.2).sampler)


def test_a_reference_on_the_host_takes_nothing_of_the_devices() -> None:
    config, spec = a_run(24, "algorithm.kl_coefficient=0.1")
    away, _ = a_run(24, "algorithm.kl_coefficient=0.1", "trainer.offload=[reference]")
    assert trainer_bytes(config, spec) - trainer_bytes(away, spec) == 4 * num_weights(spec)


@pytest.mark.parametrize(
    ("message", "share", "planned", "early"),
    [
        ({}, 0.75, 0.95, True),
        ({PYTHON: "0.4"}, 0.4, 0.4, True),
        ({NEWER: ".9"}, 0.9, 0.9, True),
        ({PYTHON: ""}, 0.75, 0.95, True),
        ({EARLY: "false"}, 0.75, 0.95, False),
        ({EARLY: "0", PYTHON: "0.5"}, 0.5, 0.5, False),
        ({EARLY: "true"}, 0.75, 0.95, True),
        ({POOL: "Platform"}, 1.0, 0.95, False),
        ({POOL: "platform", PYTHON: "0.5"}, 1.0, 0.95, False),
        ({POOL: "cuda_async", PYTHON: "0.5"}, 0.5, 0.5, True),
    ],
)
def test_what_jax_takes_of_a_gpu_is_read_in_one_place(
    message, share, planned, early, monkeypatch
) -> None:
    for name, value in message.items():
        monkeypatch.setenv(name, value)
    memory = gpu_memory()
    assert (memory.share, memory.planned_share, memory.problem) == (share, planned, "")
    assert memory.preallocated == early
    assert memory.variable == (NEWER if NEWER in message else PYTHON)
    assert memory_share() == planned


@pytest.mark.parametrize("value", ["much", "0", "-0.1", "1.5", "nan", "inf"])
@pytest.mark.parametrize("name", [PYTHON, NEWER])
def test_a_share_that_is_none_is_reported_wherever_it_is_read(name, value, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    message = f"{name}={value} is not a share of a card's memory: give one such as 0.95."
    assert gpu_memory().problem == message and more_of_a_gpu() == f"{message} "
    with pytest.raises(ConfigError, match=re.escape(message)):
        memory_share()


def test_more_is_asked_for_by_the_variable_that_is_set(monkeypatch) -> None:
    """JAX refuses to start with both."""
    assert "start with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in more_of_a_gpu()
    monkeypatch.setenv(NEWER, "0.5")
    assert "takes 50% of each GPU: start with XLA_CLIENT_MEM_FRACTION=0.95" in more_of_a_gpu()
    monkeypatch.setenv(PYTHON, "0.5")
    assert f"{PYTHON} and {NEWER} are both set" in more_of_a_gpu()
    monkeypatch.delenv(PYTHON)
    monkeypatch.setenv(NEWER, "0.9")
    assert more_of_a_gpu() == ""


@pytest.mark.skipif(not hasattr(xla_client, "generate_pjrt_gpu_plugin_options"), reason="moved")
@pytest.mark.parametrize(
    "message", [{}, {PYTHON: "0.4"}, {NEWER: ".9"}, {EARLY: "False"}, {EARLY: "1"}]
)
def test_the_reading_is_that_of_jaxlib(message, monkeypatch) -> None:
    for name, value in message.items():
        monkeypatch.setenv(name, value)
    options, memory = xla_client.generate_pjrt_gpu_plugin_options(), gpu_memory()
    assert options.get("memory_fraction") == memory.env_share
    assert options.get("preallocate", True) == memory.preallocated
