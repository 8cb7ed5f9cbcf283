"""Several jobs in one process on a CPU: whichever starts JAX, the next has its devices."""

import json
import os
import subprocess
import sys

import pytest

import jaxrl_async
from jaxrl_async.config.load import load

BEGINNING = """
import jax, json, sys
from jaxrl_async.config.load import load
from jaxrl_async.errors import MeshError
from jaxrl_async.run.builders.devices import claim_devices

def claims(*overrides):
    claim_devices(load("recipe:addition", list(overrides)))
    return len(jax.devices())
"""


def output_of(code):
    """What a process prints in which this runs, without the devices that tests force."""
    forced = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    env = {k: v for k, v in os.environ.items() if k not in forced}
    run = subprocess.run(
        [sys.executable, "-c", BEGINNING + code],
        env={**env, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split("\n")[:-1]


SFT, FOUR = "'run.job=sft', 'warm_start.steps=0'", "'mesh.samplers=3'"


def test_the_recipe_needs_two_devices():
    assert load("recipe:addition", []).mesh.num_devices == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "devices"),
    [
        (f"print(claims({SFT}), claims())", "2 2"),
        ("jax.devices(); print(len(jax.devices()), claims())", "1 2"),
        (f"print(claims({SFT}), claims({FOUR}), claims({SFT}))", "2 4 4"),
        ("jax.config.update('jax_num_cpu_devices', 5); print(claims())", "5"),
        ("jax.devices(); print(claims('mesh.colocated=true'))", "1"),
        ("jax.numpy.zeros(3).sum(); print(claims())", "2"),
    ],
)
def test_each_job_has_its_devices(code, devices):
    assert output_of(code) == [devices]


@pytest.mark.full
def test_a_policy_leaves_room_for_a_trainer_and_a_sampler():
    code = """
from jaxrl_async.model.policy import Policy
try:
    Policy.from_pretrained("nowhere")
except Exception:
    keep = jax.numpy.zeros(3)
print(claims())
"""
    assert output_of(code) == ["2"]


@pytest.mark.full
def test_what_lives_on_a_backend_with_too_few_devices_is_kept_and_the_error_says_what_to_do():
    code = """
keep = jax.numpy.arange(7)
try:
    claims()
except MeshError as error:
    print(error)
print(int(keep.sum()))
"""
    words, kept = output_of(code)
    assert "needs 2 devices, and JAX was started before with 1 on the CPU" in words
    assert "1 arrays live, the largest of the shape (7,)" in words
    assert "jax.config.update('jax_num_cpu_devices', 2)" in words and "mesh.colocated" in words
    assert kept == "21"


JOBS = """
import jaxrl_async as jr
data = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(12) for b in range(12)]
pairs = [{"prompt": r["question"], "chosen": r["answer"], "rejected": "0"} for r in data]
given = {"metrics": {"tensorboard": False, "spans": False}, "eval": {"every": 0}}

def right(prompts, completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]

def train(name, **more):
    return jr.train(name=name, config=given, steps=1, max_length=96, **more).path

sft = train("sft", model=sys.argv[1], data=data, job="sft")
better = train("better", model=str(sft / "policy"), data=pairs, job="reward_model")
given["reward"] = {"model": str(better / "reward_model")}
last = train(
    "rl", model=str(sft / "policy"), data=data, reward=right, max_new_tokens=8, group_size=2,
    groups_per_step=2,
)
print(json.dumps([json.loads(line)["step"] for line in open(last / "metrics.jsonl")]))
"""


@pytest.mark.full
@pytest.mark.exhaustive
def test_sft_then_a_reward_model_then_rl(tmp_path):
    model = tmp_path / "model"
    made = jaxrl_async.train(
        config={
            "run": {"dir": str(tmp_path), "name": "made", "job": "sft", "steps": 1},
            "model": {"architecture": {"layers": 1, "width": 16, "heads": 2, "head_dim": 8}},
            "data": {"addition": {}},
            "warm_start": {"steps": 0},
        }
    )
    (made.path / "policy").rename(model)
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, "-c", BEGINNING + JOBS, str(model)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.split("\n")[-2]) == [0, 1]
