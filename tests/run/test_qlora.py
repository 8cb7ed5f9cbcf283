"""Adapters of a quantised base in whole runs: on meshes, with experts, resumed, in every job."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of, weights_of
from safetensors.numpy import load_file

from jaxrl_async.config.schema import ArchitectureSection
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.loop import train

TINY = (
    "model.lora={rank: 4, alpha: 8}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 12}",
    "algorithm={group_size: 4, groups_per_step: 2, learning_rate: 1e-2}",
    "trainer={row_length: 32, micro_batch_tokens: 256, warmup_steps: 0}",
    "eval.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
SHAPE = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp": 32}
PAIRS = """{"prompt": "1+1=", "chosen": "2", "rejected": "3"}
{"prompt": "1+2=", "chosen": "3", "rejected": "4"}
{"prompt": "2+2=", "chosen": "4", "rejected": "1"}
{"prompt": "3+1=", "chosen": "4", "rejected": "7"}
"""

pytestmark = [pytest.mark.full, pytest.mark.exhaustive]


def saved(folder: Path, **sizes: Any) -> tuple[str, ...]:
    """Write a model; return the overrides that train an adapter of it without a warm start."""
    tokenizer = addition_tokenizer()
    spec = ModelSpec.from_architecture(
        ArchitectureSection(**{**SHAPE, **sizes}), -(-tokenizer.vocab_size // 8) * 8
    )
    Policy(spec, init_params(spec, jax.random.key(0)), tokenizer).save_pretrained(folder)
    return f"model.path={folder}", f"data.tokenizer={folder}", "warm_start.steps=0"


def rl(folder: Path, *overrides: str) -> Any:
    return config_of("addition", folder, *TINY, many_digits(folder), *overrides)


def adapter_of(config: Any) -> dict[str, np.ndarray]:
    folder = Path(config.run.dir) / config.run.name / "adapter"
    return load_file(folder / "adapter_model.safetensors")


def checked_lines(config: Any, steps: int) -> list[dict[str, Any]]:
    """Return a run's lines. The probe of each push and the drawn tokens show no more mismatch than
    float32 has, and each matrix's adapter has changed."""
    lines = [line for line in metrics_of(config) if "train/loss" in line]
    assert len(lines) == steps and all(np.isfinite(line["train/loss"]) for line in lines)
    probes = [line["weights/probe_error"] for line in lines if "weights/probe_error" in line]
    assert probes and max(probes) < 1e-4
    assert max(line["mismatch/mean"] for line in lines) < 1e-4
    grown = {n: a for n, a in adapter_of(config).items() if "lora_B" in n}
    assert grown and all(np.abs(a).max() > 0 for a in grown.values())
    return lines


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [
        (
            {"family": "qwen3_moe", "experts": 4},
            (
                "model.lora={base: int4, group_size: 8}",
                "mesh={trainer: {expert: 2, tensor: 2}, sampler: {expert: 2}}",
                "model.remat=layer",
            ),
        ),
        ({}, ("model.lora.base=int8", "algorithm.advantage=gae", "mesh.colocated=true")),
    ],
    ids=["int4 experts", "int8 with a critic"],
)
def test_an_adapter_of_a_quantised_base_learns(
    tmp_path: Path, sizes: dict[str, Any], overrides: tuple[str, ...]
) -> None:
    base = saved(tmp_path / "base", **sizes)
    config = rl(tmp_path, *base, *overrides, "run.steps=2", "staleness.max_staleness=0")
    train(config)
    checked_lines(config, 2)


def test_a_resumed_run_quantises_its_base_again_to_the_same_numbers(tmp_path: Path) -> None:
    """On meshes, after a warm start of all weights."""
    exact = (
        *(f"model.architecture.{name}={size}" for name, size in SHAPE.items()),
        "warm_start={steps: 1, batch_size: 4}",
        "model.lora.base=nf4",
        "mesh={trainer: {fsdp: 2, tensor: 2}, sampler: {tensor: 2}}",
        "staleness.max_staleness=0",
        "checkpoint={every: 1}",
        "algorithm.kl_coefficient=0.1",
    )
    whole = rl(tmp_path, *exact, "run.name=whole", "run.steps=2")
    train(whole)
    train(rl(tmp_path, *exact, "run.name=parts", "run.steps=1"))
    again = ("run.resume=true", "run.overwrite=false")
    parts = rl(tmp_path, *exact, *again, "run.name=parts", "run.steps=2")
    train(parts)
    wanted = adapter_of(whole)
    for name, array in adapter_of(parts).items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
    lines = checked_lines(whole, 2)
    assert lines[0]["policy/kl_reference"] == 0 and lines[-1]["policy/kl_reference"] > 0


@pytest.mark.parametrize(
    ("job", "base"), [("sft", "int4"), ("preference", "nf4"), ("reward_model", "int8")]
)
def test_the_other_jobs_train_an_adapter_of_a_quantised_base(
    tmp_path: Path, job: str, base: str
) -> None:
    data: tuple[str, ...] = ("data.addition={digits: 1, eval_size: 8}",)
    if job != "sft":
        (tmp_path / "pairs.jsonl").write_text(PAIRS)
        file = f"data.jsonl={{path: {tmp_path}/pairs.jsonl, eval_size: 1, max_bad_share: 1}}"
        data = ("data.addition=null", file)
    config = config_of(
        "sft" if job == "sft" else "dpo",
        tmp_path,
        f"run={{job: {job}, name: {job}, steps: 4}}",
        f"model.lora={{rank: 4, base: {base}}}",
        *saved(tmp_path / "base"),
        "sampler.max_length=32",
        "trainer={row_length: 32, micro_batch_tokens: 256, warmup_steps: 0}",
        "algorithm.learning_rate=1e-2",
        *data,
        *(("preference.loss=dpo",) if job == "reward_model" else ()),
    )
    train(config)
    losses = [line["train/loss"] for line in metrics_of(config) if "train/loss" in line]
    assert losses[-1] < losses[0]
    assert all(np.isfinite(w).all() for w in weights_of(config).values())
