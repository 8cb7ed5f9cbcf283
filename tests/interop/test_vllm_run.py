"""A run whose answers vLLM samples: a real server of its CPU build, in its own environment."""

import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import ArchitectureSection
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.loop import train

ROOT = Path(__file__).parents[2]
PEERS = os.environ.get("JAXRL_PEERS")
PYTHON = Path(PEERS or "/nowhere") / "vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.full,
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="needs vLLM's CPU build: JAXRL_PEERS=DIR python benchmarks/peers/environments.py "
        "vllm, and JAXRL_PEERS=DIR here",
    ),
]
SHAPE = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "mlp": 128}
START_S = 240.0
"""Longest wait for the server to answer, seconds."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that begins with random weights of the policy's architecture."""
    folder = tmp_path_factory.mktemp("start")
    tokenizer = addition_tokenizer()
    vocab = -(-tokenizer.vocab_size // 8) * 8
    spec = ModelSpec.from_architecture(ArchitectureSection(**SHAPE, tied=False), vocab)
    Policy(spec, init_params(spec, jax.random.key(1)), tokenizer).save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder), "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "64"),
        *("--logprobs-mode", "processed_logprobs", "--enforce-eager", "--enable-scale-out"),
        *("--skip-tokenizer-init", "--generation-config", "vllm"),
    ]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR")}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            words, env=kept | settings, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield _when_up(f"http://127.0.0.1:{port}", process, folder / "server.log")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _when_up(url: str, process: subprocess.Popen[bytes], log: Path) -> str:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")


def overrides(address: str, tmp_path: Path) -> list[str]:
    return [
        f"run.dir={tmp_path}",
        "model.path=null",
        f"model.architecture={{family: qwen3, tied: false, {_words(SHAPE)}}}",
        f'sampler.engine_urls=["{address}"]',
        "sampler.slots=64",
        "sampler.on_new_weights=recompute",  # else later tokens see KV of older weights
        "data.addition={digits: 2, eval_size: 128, worked_share: 0.35}",
        "warm_start={steps: 250, batch_size: 64, learning_rate: 3.0e-3}",
        "algorithm.learning_rate=3e-4",
        "algorithm.groups_per_step=8",
        "run.steps=30",
        "eval.every=0",
        "faults={sampler_restarts: 1, backoff_s: 0.1}",  # a server that fails here is not awaited
        "metrics.peak_flops=1e9",
    ]


def _words(mapping: dict[str, int]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in mapping.items())


def test_a_run_learns_from_what_vllm_samples(address: str, tmp_path: Path) -> None:
    """Its log-probs are the trainer's but for rounding, no token is older than the bound allows,
    and the held-out accuracy rises."""
    train(load(ROOT / "configs" / "vllm.yaml", overrides(address, tmp_path)))
    lines = read_lines(tmp_path / "vllm" / "metrics.jsonl")
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert accuracy[-1] > accuracy[0] + 0.05, accuracy
    steps = [line for line in lines if line["step"] > 0]
    assert max(line["staleness/max"] for line in steps) <= 1
    assert max(line.get("weights/probe_error", 0.0) for line in steps) < 1e-3
    fresh = [line["mismatch/max"] for line in steps if "mismatch/max" in line]
    assert fresh and max(fresh) < 1e-3
    assert sum(line["policy/recomputed_logprob_share"] for line in steps) == 0
    assert np.isfinite([line["reward/mean"] for line in steps if "reward/mean" in line]).all()
    assert not (tmp_path / "vllm" / "engine_weights").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.architecture.vocab=48", "a vocabulary of 24, but the policy's has 48"),
        ("model.architecture.mlp=96", "differs from the policy (mlp 128, not 96)"),
        ("model.architecture.tied=true", "tie_word_embeddings=false"),
        ("model.dtype=bfloat16", "--dtype bfloat16"),
    ],
)
def test_a_server_of_another_model_is_refused_before_the_run(
    address: str, tmp_path: Path, override: str, message: str
) -> None:
    config = load(ROOT / "configs" / "vllm.yaml", [*overrides(address, tmp_path), override])
    with pytest.raises(ConfigError, match=re.escape(message)):
        train(config)
    assert not (tmp_path / "vllm").exists()
