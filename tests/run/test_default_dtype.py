"""model.dtype is chosen by the devices where a configuration leaves it open, once, and kept."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import yaml
from runs import CONFIGS, metrics_of

from jaxrl_async.config.load import load
from jaxrl_async.config.model_section import dtype_on
from jaxrl_async.config.schema import Config
from jaxrl_async.run.builders import devices
from jaxrl_async.run.loop import train
from jaxrl_async.trainer.learning_settings import LearningSettings

TINY = (
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 32}",
    "data.addition={digits: 1, eval_size: 8}",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 8, compile_ahead: false}",
    "algorithm={group_size: 4, groups_per_step: 2, learning_rate: 1e-3}",
    "trainer={row_length: 32, micro_batch_tokens: 512, warmup_steps: 0}",
    "eval.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)


def config_of(folder: Path, *overrides: str) -> Config:
    where = f"run={{name: one, dir: {folder}, steps: 1}}"
    return load(CONFIGS / "addition.yaml", [where, "warm_start.steps=0", *TINY, *overrides])


def written(config: Config) -> Any:
    """model.dtype in the run's folder."""
    file = Path(config.run.dir) / config.run.name / "config.yaml"
    return yaml.safe_load(file.read_text())["model"]["dtype"]


@pytest.fixture
def as_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a run find an accelerator where it looks for its type."""

    def looks_like(platform: str, capability: str | None = None) -> None:
        device = SimpleNamespace(
            platform=platform, compute_capability=capability, device_kind=platform
        )
        monkeypatch.setattr(
            devices, "jax", SimpleNamespace(**{**vars(jax), "local_devices": lambda: [device]})
        )
        monkeypatch.setattr(devices, "claim_devices", lambda config: None)

    return looks_like


@pytest.mark.parametrize(
    ("platform", "capability", "chosen"),
    [
        ("cpu", None, "float32"),
        ("tpu", None, "bfloat16"),
        ("gpu", "9.0", "bfloat16"),
        ("gpu", "10.0", "bfloat16"),
        ("cuda", "8.0", "bfloat16"),
        ("cuda", "7.5", "float32"),
        ("rocm", "gfx942", "bfloat16"),
    ],
)
def test_accelerators_compute_in_bfloat16_where_they_can(
    tmp_path: Path, as_on: Any, platform: str, capability: str | None, chosen: str
) -> None:
    as_on(platform, capability)
    config, nothing = config_of(tmp_path), tmp_path / "config.yaml"
    assert dtype_on(platform, capability) == chosen
    assert devices.with_dtype(config, nothing).model.dtype == chosen
    for override in ("float32", "bfloat16"):
        wished = config_of(tmp_path, f"model.dtype={override}")
        assert devices.with_dtype(wished, nothing) == wished


def test_weights_stay_in_float32(tmp_path: Path, as_on: Any) -> None:
    as_on("tpu")
    model = devices.with_dtype(config_of(tmp_path), tmp_path / "none").model
    assert (model.computes_in, model.param_dtype) == ("bfloat16", "float32")


@pytest.mark.full
@pytest.mark.parametrize("job", ["rl", "sft"])
def test_a_run_writes_what_it_has_chosen_and_computes_in_it(
    tmp_path: Path, as_on: Any, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    as_on("tpu")
    seen, usual = set(), LearningSettings.decoder

    def decoder(self: LearningSettings, *args: Any) -> Any:
        seen.add((self.dtype.name, self.param_dtype.name))
        return usual(self, *args)

    monkeypatch.setattr(LearningSettings, "decoder", decoder)
    config = config_of(tmp_path, f"run.job={job}")
    train(config)
    assert written(config) == "bfloat16" and seen == {("bfloat16", "float32")}


@pytest.mark.full
def test_a_run_on_a_cpu_computes_in_float32_and_a_resumed_one_in_what_it_had(
    tmp_path: Path, as_on: Any
) -> None:
    overrides = ("run.job=sft", "run.overwrite=false")
    config = config_of(tmp_path, *overrides)
    train(config)
    assert written(config) == "float32"
    as_on("tpu")  # as if the machine were another one
    more = config_of(tmp_path, *overrides, "run.resume=true", "run.steps=2")
    train(more)
    assert written(more) == "float32" and metrics_of(more)[-1]["step"] == 2
