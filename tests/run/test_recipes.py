"""Every recipe in configs/ that makes up its own data runs for a few updates."""

from pathlib import Path

import numpy as np
import pytest
from runs import many_digits, run_job

from jaxrl_async.metrics.metric import metric_of

pytestmark = pytest.mark.full

RECIPES = (
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "ppo_critic",
    "decoupled_ppo",
    "opd",
    "self_distill",
    "online_dpo",
    "flash_reinforce",
)
OFTEN: tuple[str, ...] = ()
SMALL = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 16}",
    "warm_start.steps=4",
    "warm_start.batch_size=8",
    "sampler.slots=16",
    "sampler.max_new_tokens=16",
    "algorithm.groups_per_step=4",
    "trainer.micro_batch_tokens=512",
    "trainer.warmup_steps=1",
    "run.steps=3",
    "eval.every=0",
    "checkpoint.every=2",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all runs, which share their compiled programs."""
    return tmp_path_factory.mktemp("runs")


def run(name: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    return run_job(name, folder, *SMALL, many_digits(folder), *overrides)


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Path:
    run("grpo", folder, "run.steps=1", "run.name=teacher")
    return folder / "teacher" / "policy"


@pytest.mark.parametrize(
    "name",
    [n if n in OFTEN else pytest.param(n, marks=pytest.mark.exhaustive) for n in RECIPES],
)
def test_the_recipe_runs(name: str, folder: Path, teacher: Path) -> None:
    extra = [f"teacher.path={teacher}"] if name == "opd" else []
    extra += ["algorithm.group_size=4"] if name not in ("opd", "flash_reinforce") else []
    extra += ["critic.warmup_steps=1"] if name == "ppo_critic" else []
    shaping = (
        "algorithm.shaping=[mask_truncated, {soft_overlong: {max_tokens: 16, cache_tokens: 8}}]"
    )
    extra += [shaping] if name == "dapo" else []  # SMALL's answers are shorter
    lines = run(name, folder, *extra)
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(np.isfinite(v) for line in steps for v in line.values())
    assert all(metric_of(key) for line in steps for key in line if key != "step")
    assert all(line["train/skipped"] == 0 for line in steps)
    assert steps[-1]["train/grad_norm"] > 0
    if name == "ppo_critic":
        assert steps[0]["critic/warming"] == 1 and steps[-1]["train/updates"] >= 2
    if name == "decoupled_ppo":
        assert steps[-1]["train/updates"] > 1
    if name == "self_distill":
        assert "policy/teacher_divergence" in steps[-1]
    if name == "opd":
        assert steps[-1]["policy/teacher_gap"] != 0


@pytest.mark.exhaustive
def test_a_run_with_all_companions_resumes_where_it_stopped(folder: Path) -> None:
    settings = [
        "algorithm.group_size=4",
        "staleness.max_staleness=0",
        "reference.ema=0.9",
        "algorithm.kl_target=0.01",
        "teacher.source=self",
        "teacher.refresh_every=2",
        "critic.warmup_steps=1",
    ]
    parts = [*settings, "run.name=parts"]
    expected = run("ppo_critic", folder, *settings, "run.name=whole", "run.steps=4")
    run("ppo_critic", folder, *parts, "run.steps=2")
    again = ["run.overwrite=false", "run.resume=true", "run.steps=4"]
    found = run("ppo_critic", folder, *parts, *again)
    for key in ("train/loss", "critic/loss", "policy/kl_coefficient", "policy/teacher_gap"):
        assert [x[key] for x in found if key in x] == [x[key] for x in expected if key in x], key
