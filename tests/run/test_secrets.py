"""Keys live in the environment and go nowhere else: no setting holds one."""

import re

import pytest

from jaxrl_async.config.schema import Config
from jaxrl_async.config.setting_fields import all_paths
from jaxrl_async.train_command import main

SECRETS = {
    "HF_TOKEN": "hf_5ecretA",
    "WANDB_API_KEY": "wandb-5ecretB",
    "AWS_SECRET_ACCESS_KEY": "aws-5ecretC",
    "JUDGE_API_KEY": "sk-5ecretD",
}
REWARD = """
import os

KEY = os.environ["JUDGE_API_KEY"]

def judge(prompt, completion, reference):
    assert KEY == "sk-5ecretD"
    return float(len(completion) % 2)
"""


def test_no_setting_holds_a_secret():
    """One that did would be written to config.yaml: it must name an environment variable."""
    words = re.compile(r"(^|(?<!per)_)(key|secret|password|credentials?|token|auth)$")
    found = [".".join(path) for path, _ in all_paths(Config, ()) if words.search(path[-1])]
    assert found == ["remote.tls_key"], "which names a file"


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_run_writes_nothing_of_the_environment_down(tmp_path, monkeypatch, capfd):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "c.yaml").write_text("")
    (tmp_path / "judge.py").write_text(REWARD)
    settings = [
        "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16}",
        f"reward.function={tmp_path / 'judge.py'}:judge",
        f"run.dir={tmp_path / 'runs'}",
        "run.steps=1",
        "data.addition.eval_size=4",
        "sampler={slots: 4, max_length: 32, max_new_tokens: 4}",
        "data.max_prompt_tokens=16",
        "algorithm={group_size: 4, groups_per_step: 2}",
        "trainer.micro_batch_tokens=128",
        "metrics={peak_flops: 1.0e+9, samples_every: 1}",
    ]
    assert main([str(tmp_path / "c.yaml"), *settings]) == 0
    output = "".join(capfd.readouterr())
    files = [f for f in (tmp_path / "runs" / "run").rglob("*") if f.is_file()]
    names = {f.name for f in files}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "report.html"} <= names
    for value in SECRETS.values():
        assert value not in output
        assert [str(f) for f in files if value.encode() in f.read_bytes()] == []
