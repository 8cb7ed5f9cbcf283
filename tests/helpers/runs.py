"""Run a whole job under a test's folder and read what it leaves."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run import loop

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL_JOB: dict[str, Any] = {
    "model": {
        "architecture": {
            "layers": 1,
            "width": 32,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 16,
            "mlp": 32,
        }
    },
    "data": {"addition": {"digits": 1, "eval_size": 8}},
    "sampler": {"slots": 16, "max_length": 24, "max_new_tokens": 4},
    "algorithm": {"group_size": 2, "groups_per_step": 4},
    "eval": {"every": 0},
    "metrics": {"tensorboard": False},
    "staleness": {"max_staleness": 0},
}
"""A configuration of jr.train whose updates take a moment."""
MANY_DIGITS = """
def many_digits(prompt, completion, reference):
    return sum(c.isdigit() for c in completion) / 16
"""


def many_digits(folder: Path) -> str:
    """Write a reward that a random policy often gets; return the override that chooses it."""
    file = folder / "reward.py"
    file.write_text(MANY_DIGITS, encoding="utf-8")
    return f"reward.function={file}:many_digits"


def config_of(name: str, folder: Path, *overrides: str) -> Config:
    """Load configs/NAME.yaml with these overrides, its runs in `folder`."""
    return load(CONFIGS / f"{name}.yaml", [f"run.dir={folder}", *overrides])


def run_job(name: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run configs/NAME.yaml with these overrides in `folder`; return its metrics."""
    config = config_of(name, folder, *overrides)
    loop.train(config)
    return metrics_of(config)


def metrics_of(config: Config) -> list[dict[str, Any]]:
    """Read the metrics of a run that has ended."""
    return read_lines(Path(config.run.dir) / config.run.name / "metrics.jsonl")


def weights_of(config: Config) -> dict[str, np.ndarray]:
    """Read the final weights of a run that has ended."""
    kind = "reward_model" if config.run.job == "reward_model" else "policy"
    return load_file(Path(config.run.dir) / config.run.name / kind / "model.safetensors")
