"""A decoder of the user's own in every job and command, as a user of the example starts them."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from runs import config_of, metrics_of, weights_of
from safetensors.numpy import load_file

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import CheckpointError, ConfigError
from jaxrl_async.model import own_code
from jaxrl_async.model.heads import load_head
from jaxrl_async.model.lora import lora_of
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.loop import train

ROOT = Path(__file__).parents[2]
FILE = ROOT / "configs" / "own_decoder" / "parallel.py"
SHAPE = "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}"
TINY = (
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "trainer={row_length: 32, micro_batch_tokens: 256, warmup_steps: 0}",
    "checkpoint.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
    "run.steps=2",
    "eval.every=2",
)
OFFLINE = (*TINY, "sampler.max_length=32", "algorithm.learning_rate=1e-2")
RL = (
    *TINY,
    "sampler={slots: 8, max_length: 32, max_new_tokens: 12}",
    "algorithm={group_size: 4, groups_per_step: 4, learning_rate: 1e-2}",
)
BF16 = ("model.dtype=bfloat16", "model.param_dtype=bfloat16")

pytestmark = [pytest.mark.full, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `job=sft` and `job=reward_model` make, and another policy."""
    folder = tmp_path_factory.mktemp("own")
    run(folder, "sft", "sft", *OFFLINE, SHAPE, "sft.batch_size=8", "run.steps=4")
    pairs = (*OFFLINE, of(folder), "reward_model.batch_size=8")
    run(folder, "scored", "rlhf_three_steps/2_reward_model", *pairs)
    policy = Policy.from_pretrained(folder / "sft" / "policy")
    other = jax.tree.map(lambda w: w * 1.1, policy.params)
    policy.with_params(other).save_pretrained(folder / "other")
    return folder


def of(folder: Path, kind: str = "model.path", name: str = "sft/policy") -> str:
    return f"{kind}={folder}/{name}"


def run(folder: Path, name: str, config: str, *overrides: str) -> tuple[list[Any], Any]:
    """A whole run of the user's class; its metrics and its configuration."""
    file = folder / "mine.py"
    file.write_bytes(FILE.read_bytes())
    own = f"model.decoder={file}:ParallelLayer"
    made = config_of(config, folder, *overrides, own, f"run.name={name}", "run.overwrite=true")
    train(made)
    return metrics_of(made), made


JOBS = {
    "sft in bfloat16, 4 bits": (
        "sft", *OFFLINE, *BF16, "sft.batch_size=8", "model.lora={rank: 2, base: nf4}",
    ),
    "preference": (
        "dpo", *OFFLINE, "preference.batch_size=8", "warm_start.steps=0",
        "model.lora={rank: 2, base: int4}",
        "mesh.trainer={fsdp: 2, context: 2}",
    ),
    "reward model": (
        "rlhf_three_steps/2_reward_model", *OFFLINE, "reward_model.batch_size=8",
        "model.lora={rank: 2, base: int8}",
    ),
    "critic and reward model": (
        "rlhf_three_steps/3_ppo", *RL, "algorithm.advantage={gae: {gamma: 1.0, lam: 0.95}}",
        "critic.warmup_steps=0", "mesh={trainer: {context: 2, fsdp: 2}, sampler: {tensor: 2}}",
    ),
    "teacher, bfloat16": ("opd", *RL, *BF16, "warm_start.steps=0"),
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_an_own_decoder_learns_in_this_job(runs: Path, job: str, caplog) -> None:
    caplog.set_level("INFO")
    config, *overrides = JOBS[job]
    more = {
        "preference": [of(runs, "preference.reference")],
        "critic and reward model": [
            of(runs, "reward.model", "scored/reward_model"),
            of(runs, "critic.path", "scored/reward_model"),
            of(runs, "reference.path"),
        ],
        "teacher, bfloat16": [of(runs, "teacher.path", "other")],
    }.get(job, [])
    name = job.replace(" ", "_").replace(",", "")
    lines, made = run(runs, name, config, *overrides, of(runs), *more)
    assert ("is the dequantised base" in caplog.text) == bool(made.model.lora.rank)
    losses = [v for line in lines for k, v in line.items() if k == "train/loss"]
    assert len(losses) == 2 and np.isfinite(losses).all()
    before = load_file(runs / "sft/policy" / "model.safetensors")
    after = weights_of(made)
    changed = {
        n for n, w in after.items() if n in before and np.any(w != before[n].astype(w.dtype))
    }
    matrices = ("q", "k", "v", "gate", "o", "up", "down")
    assert {f"model.layers.1.{n}.weight" for n in matrices} <= changed
    probes = [line["weights/probe_error"] for line in lines if "weights/probe_error" in line]
    assert max(probes, default=0.0) < 2e-2
    root = Path(made.run.dir) / name
    if made.run.job == "reward_model":
        assert load_head(root / "reward_model", "reward")[0].own is not None
    elif made.model.lora.rank:
        adapter = json.loads((root / "adapter" / "adapter_config.json").read_text())
        assert set(adapter["target_modules"]) == set(matrices)
        read = Policy.from_pretrained(runs / "sft/policy", adapter=root / "adapter")
        grown = [w for n, w in read.adapter["layers"].items() if n.endswith("lora_b")]
        assert len(grown) == 7 and all(np.any(np.asarray(w)) for w in grown)


def test_the_endpoint_serves_it_with_adapters_where_its_class_is_named(runs: Path) -> None:
    folder, own = runs / "sft" / "policy", f"{FILE}:ParallelLayer"
    policy = Policy.from_pretrained(folder, decoder=own)
    lora = lora_of(policy.spec, LoraSection(rank=2))
    assert lora is not None
    policy.adapted(lora, jax.random.key(0)).save_adapter(runs / "extra")
    words = [sys.executable, "-m", "jaxrl_async.serve", str(folder), "--port", "0", "--slots", "2"]
    words += ["--max-length", "32"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAXRL_ASYNC_KEY": "key"}
    made = {"capture_output": True, "text": True, "timeout": 120, "env": env}
    refused = subprocess.run(words, **made)
    assert refused.returncode == 1 and "--decoder" in refused.stderr
    words += ["--decoder", own, "--adapter", f"math={runs}/extra"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as server:
        try:
            line = next(text for text in server.stdout if text.startswith("serving"))
            address = re.search(r"http://\S+", line)[0]
            for model in ("policy", "math"):
                body = {"model": model, "prompt": "1+1=", "max_tokens": 4, "temperature": 0}
                head = {"Authorization": "Bearer key"}
                reply = httpx.post(f"{address}/completions", json=body, headers=head, timeout=120)
                assert reply.status_code == 200, reply.text
                assert reply.json()["usage"]["completion_tokens"] > 0
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)


PLAN = """
run: {name: tiny, steps: 10}
model:
  architecture: {layers: 1, width: 128, heads: 1, kv_heads: 1, head_dim: 128, mlp: 128, vocab: 256}
  dtype: bfloat16
  lora: {rank: 4, base: int8}
mesh: {samplers_in: external, trainer: {fsdp: 4}, sampler: {tensor: 1}, samplers: 4}
data: {max_prompt_tokens: 64}
sampler: {slots: 8, max_length: 256, max_new_tokens: 192, block: 4, prefill_chunk: 128}
algorithm: {groups_per_step: 4, group_size: 2}
trainer: {micro_batch_tokens: 1024}
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_a_plan_is_made_of_it(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(PLAN)
    own = f"model.decoder={FILE}:ParallelLayer"
    reply = ["--topology", "v5e-4", "--json", f"{tmp_path}/plan.json", "--cache", f"{tmp_path}/c"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_async.plan", str(file), *reply, own],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["fits"] and found["learning"]["mfu"] > 0


def test_what_cannot_be_is_refused_before_the_run(runs: Path, monkeypatch) -> None:
    text = FILE.read_text().replace('self.times(y, "up")', 'y @ self.weight("up", y)')
    (runs / "reads.py").write_text(text)
    common = (*OFFLINE, "sft.batch_size=8", "run.name=refused", "model.lora={rank: 2, base: nf4}")
    reads = config_of("sft", runs, *common, SHAPE, f"model.decoder={runs}/reads.py:ParallelLayer")
    with pytest.raises(ConfigError, match=r"reads the matrix up with weight\(\)"):
        train(reads)
    monkeypatch.setattr(own_code, "_loaded", {})
    with pytest.raises(CheckpointError, match="never run without permission"):
        train(config_of("sft", runs, *common, of(runs)))
    assert not (runs / "refused" / "policy").exists()
