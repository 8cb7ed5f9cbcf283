"""Adapters in whole runs: what is trained, sent, saved and resumed is the adapter alone."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of, weights_of
from safetensors.numpy import load_file

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.config.schema import ArchitectureSection, ModelSection, WeightsSection
from jaxrl_async.errors import CheckpointError, ConfigError
from jaxrl_async.model.decoder import init_table
from jaxrl_async.model.lora import adapter_table, lora_of
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.builders.samplers import sent_weights
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.loop import train
from jaxrl_async.run.saved_policy import policy_at_step

TINY = (
    "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "model.lora={rank: 4, alpha: 8}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "warm_start={steps: 2, batch_size: 4}",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 12}",
    "algorithm={group_size: 4, groups_per_step: 4, learning_rate: 1e-2}",
    "trainer={row_length: 32, micro_batch_tokens: 512, warmup_steps: 0}",
    "eval.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)


def rl(folder: Path, *overrides: str) -> Any:
    return config_of("addition", folder, *TINY, many_digits(folder), *overrides)


def adapter_of(config: Any) -> dict[str, np.ndarray]:
    folder = Path(config.run.dir) / config.run.name / "adapter"
    return load_file(folder / "adapter_model.safetensors")


def base_of(config: Any) -> dict[str, np.ndarray]:
    return load_file(Path(config.run.dir) / config.run.name / "base" / "model.safetensors")


@pytest.mark.full
@pytest.mark.exhaustive
def test_an_adapter_is_trained_sent_saved_and_resumed_alone(tmp_path: Path) -> None:
    exact = ("staleness.max_staleness=0", "checkpoint={every: 2}", "algorithm.kl_coefficient=0.1")
    whole = rl(tmp_path, *exact, "run.name=whole", "run.steps=4")
    train(whole)
    train(rl(tmp_path, *exact, "run.name=parts", "run.steps=2"))
    parts = rl(
        tmp_path, *exact, "run.name=parts", "run.steps=4", "run.resume=true", "run.overwrite=false"
    )
    train(parts)
    lines = [line for line in metrics_of(whole) if "train/loss" in line]
    assert len(lines) == 4 and all(line["train/grad_norm"] > 0 for line in lines)
    base, adapter, policy = base_of(whole), adapter_of(whole), weights_of(whole)
    sent = sum(a.nbytes for a in adapter.values())
    key = "weights/transfer_bytes"
    assert {line[key] for line in lines if key in line} == {sent}
    assert sent < sum(w.nbytes for w in base.values()) / 4
    assert lines[0]["policy/kl_reference"] == 0, "the reference is the base with the adapter off"
    assert lines[-1]["policy/kl_reference"] > 0
    for name, array in adapter_of(parts).items():
        np.testing.assert_array_equal(array, adapter[name], err_msg=name)
    changed = {n for n in base if not np.array_equal(base[n], policy[n])}
    assert changed == {n for n in base if "_proj" in n}, "nothing but what is adapted has changed"
    read = Policy.from_pretrained(
        tmp_path / "whole" / "base", adapter=tmp_path / "whole" / "adapter"
    )
    merged = Policy.from_pretrained(tmp_path / "whole" / "policy")
    for ours, theirs in zip(
        jax.tree.leaves(read.merged().params), jax.tree.leaves(merged.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh={trainer: {fsdp: 2, tensor: 2}, sampler: {tensor: 2}}",),
        ("mesh.colocated=true", "mesh.trainer.fsdp=2", "mesh.sampler.tensor=2"),
        ("weights.dtype=int8", "weights.probe=false"),
        (
            "model.architecture.family=qwen3_moe",
            "model.architecture.experts=4",
            "model.lora.dropout=0.1",
            "mesh={trainer: {expert: 2, tensor: 2}, sampler: {expert: 2}}",
        ),
        ("mesh.samplers=2", "staleness.max_staleness=2", "algorithm.minibatches=2"),
        (
            "teacher={source: self, refresh_every: 2}",
            "reference.ema=0.5",
            "algorithm.kl_coefficient=0.1",
        ),
        ("algorithm.advantage=gae", "model.param_dtype=bfloat16"),
    ],
    ids=["meshes", "colocated", "int8 base", "experts", "samplers", "older selves", "critic"],
)
def test_an_adapter_learns_in_every_form_of_a_run(tmp_path: Path, overrides: tuple) -> None:
    config = rl(tmp_path, *overrides, "run.steps=3")
    train(config)
    lines = [line for line in metrics_of(config) if "train/loss" in line]
    assert len(lines) == 3 and all(np.isfinite(line["train/loss"]) for line in lines)
    assert all(
        line["weights/probe_error"] < 1e-2 for line in lines if "weights/probe_error" in line
    )
    grown = {n: a for n, a in adapter_of(config).items() if "lora_B" in n}
    assert grown and all(np.abs(a).max() > 0 for a in grown.values())


PAIRS = """{"prompt": "1+1=", "chosen": "2", "rejected": "3"}
{"prompt": "1+2=", "chosen": "3", "rejected": "4"}
{"prompt": "2+2=", "chosen": "4", "rejected": "1"}
{"prompt": "3+1=", "chosen": "4", "rejected": "7"}
"""


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("job", ["sft", "preference", "reward_model"])
def test_the_other_jobs_train_an_adapter(tmp_path: Path, job: str) -> None:
    first = rl(tmp_path, "run.name=first", "run.steps=1", "model.lora=null")
    train(first)
    data: tuple[str, ...] = ("data.addition={digits: 1, eval_size: 8}",)
    if job != "sft":
        (tmp_path / "pairs.jsonl").write_text(PAIRS)
        file = f"data.jsonl={{path: {tmp_path}/pairs.jsonl, eval_size: 1, max_bad_share: 1}}"
        data = ("data.addition=null", file)
    config = config_of(
        "sft" if job == "sft" else "dpo",
        tmp_path,
        f"run.job={job}",
        "run.name=second",
        "run.steps=4",
        f"model.path={tmp_path}/first/policy",
        f"data.tokenizer={tmp_path}/first/policy",
        "model.lora.rank=4",
        "warm_start.steps=0",
        "sampler.max_length=32",
        "trainer={row_length: 32, micro_batch_tokens: 256, warmup_steps: 0}",
        "algorithm.learning_rate=1e-2",
        *data,
        *(("preference.loss=dpo",) if job == "reward_model" else ()),
    )
    train(config)
    losses = [line["train/loss"] for line in metrics_of(config) if "train/loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.full
def test_a_resumed_adapter_is_scaled_as_it_was_trained(tmp_path: Path) -> None:
    """B times another scale is another policy: it is refused, and what was saved is read as it was
    made, although the refused start has left its configuration."""

    def sft(*words: str) -> Any:
        shape = "{layers: 1, width: 16, heads: 2, kv_heads: 2, head_dim: 8, mlp: 32}"
        return config_of(
            "sft",
            tmp_path,
            f"model.architecture={shape}",
            "model.lora={rank: 4, alpha: 8}",
            "data.addition={digits: 1, eval_size: 8}",
            "sft.batch_size=4",
            "run.steps=1",
            "sampler.max_length=32",
            "trainer={row_length: 32, micro_batch_tokens: 256, warmup_steps: 0}",
            *words,
        )

    again = ("run.steps=2", "run.resume=true", "run.overwrite=false")
    first = sft()
    train(first)
    for change in ("model.lora.alpha=16", "model.lora.rslora=true"):
        with pytest.raises(CheckpointError, match=r"times 2 .*alpha=8, rslora=false.*times 4 now"):
            train(sft(*again, change))
    paths = Paths(tmp_path / first.run.name)
    assert policy_at_step(paths, 1, None).lora.scale == 2
    train(sft(*again, "model.lora.alpha=4", "model.lora.rslora=true"))
    assert policy_at_step(paths, 2, None).lora.scale == 2, "the same by another name"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.path=/nowhere",), "run.job=sft with the adapter first"),
        (("model.lora.targets=[q_proj, no_proj]",), "no_proj.* is not a matrix"),
    ],
)
def test_what_an_adapter_cannot_go_with_is_refused(
    tmp_path: Path, overrides: tuple, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        train(rl(tmp_path, *overrides))


def test_targets_that_choose_nothing_are_refused_and_all_may_stand_in_a_list() -> None:
    spec = ModelSpec.from_architecture(ArchitectureSection(layers=2), 64)
    with pytest.raises(ConfigError, match="nothing would be trained"):
        lora_of(spec, LoraSection(rank=4, targets=()))
    one, listed = (
        lora_of(spec, LoraSection(rank=4, targets=t)) for t in ("all-linear", ["all-linear"])
    )
    assert one == listed


@pytest.mark.full
def test_a_base_in_eight_bits_leaves_the_adapter_as_it_is() -> None:
    spec = ModelSpec.from_architecture(ArchitectureSection(layers=2), 64)
    model = ModelSection.model_validate({"lora": {"rank": 4}})
    lora = lora_of(spec, model.lora)
    adapter = init_table(adapter_table(spec, lora), jax.random.key(0), np.float32)
    sent = [
        sent_weights(WeightsSection(dtype=dtype), model, spec).conversion.copied(adapter)
        for dtype in ("int8", "float8_e4m3fn", None)
    ]
    for eight_bits in sent[:2]:
        jax.tree.map(np.testing.assert_array_equal, eight_bits, sent[2])


def test_targets_of_some_layers_are_refused() -> None:
    spec = ModelSpec.from_architecture(ArchitectureSection(layers=2), 64)
    with pytest.raises(ConfigError, match="all layers are adapted alike"):
        lora_of(spec, LoraSection(rank=4, targets=("model.layers.0.self_attn.q_proj",)))
    found = lora_of(spec, LoraSection(rank=4, targets=(r"model\.layers\.\d+\.mlp\..*",)))
    assert found is not None and found.names == ("gate", "up", "down")
