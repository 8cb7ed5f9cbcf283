"""The warm start from its first update to its last: signals, saving, resuming, what is recorded;
and what a start says and leaves behind. Real processes, tiny models."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from compile_flags import QUICK_COMPILE
from safetensors.numpy import load_file

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import Preempted
from jaxrl_async.metrics.metric import comparable, metric_of
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.loop import train
from jaxrl_async.run.warm_start import WarmUpdates

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 8}",
    "algorithm={group_size: 2, groups_per_step: 4, learning_rate: 1e-2}",
    "trainer={row_length: 32, micro_batch_tokens: 256}",
    "staleness.max_staleness=0",
    "warm_start={steps: 6, batch_size: 8}",
    "run.steps=1",
    "eval.every=0",
    "checkpoint.every=4",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
JOBS = {"rl": (), "preference": ("run.job=preference", "preference.batch_size=8")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs: what one has compiled, the next one finds."""
    return tmp_path_factory.mktemp("runs")


def words(folder: Path, *overrides: str) -> list[str]:
    (folder / "empty.yaml").write_text("")
    return [str(folder / "empty.yaml"), *TINY, f"run.dir={folder / 'runs'}", *overrides]


def config_of(folder: Path, *overrides: str) -> Config:
    file, *rest = words(folder, *overrides)
    return load(file, rest)


def results(root: Path) -> tuple[list[dict], list[dict], dict[str, np.ndarray]]:
    """Metrics of the warm start and of the run, without times, and the final weights."""
    lines = [read_lines(folder / "metrics.jsonl") for folder in (root / "warm_start", root)]
    warm, own = ([comparable(line) for line in part] for part in lines)
    return warm, own, load_file(root / "policy" / "model.safetensors")


def assert_same(one: tuple, other: tuple) -> None:
    assert one[:2] == other[:2]
    for name, values in one[2].items():
        np.testing.assert_array_equal(values, other[2][name], err_msg=name)


def after_update(number: int, monkeypatch: pytest.MonkeyPatch, what: signal.Signals) -> None:
    """The signal comes in this update of the warm start."""
    step = WarmUpdates.step

    def interrupted(work):
        report = step(work)
        if work.made == number:
            signal.raise_signal(what)
        return report

    monkeypatch.setattr(WarmUpdates, "step", interrupted)


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=[pytest.mark.exhaustive] * (job != "rl")) for job in JOBS]
)
def test_a_warm_start_stopped_at_any_update_and_resumed_equals_one_that_was_not(
    runs: Path, job: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """By SIGTERM after update 2, by Ctrl-C after update 5."""
    train(config_of(runs, f"run.name={job}_whole", *JOBS[job]))
    root, again = runs / "runs" / job, (f"run.name={job}", *JOBS[job], "run.resume_or_start=true")
    with monkeypatch.context() as patched:
        after_update(2, patched, signal.SIGTERM)
        with pytest.raises(Preempted, match=r"update 2 of 6 of the warm start was saved .* later"):
            train(config_of(runs, *again))
    assert [p.name for p in (root / "warm_start" / "checkpoints").iterdir()] == ["2"]
    with monkeypatch.context() as patched:
        after_update(5, patched, signal.SIGINT)
        train(config_of(runs, *again))
    output = capfd.readouterr()
    assert "stopping after this update of the warm start and saving" in output.err
    assert "SIGINT after update 5 of 6 of the warm start: everything is saved" in output.out
    assert not (root / "policy").exists() and "Warm start" in (root / "report.html").read_text()
    train(config_of(runs, *again))
    assert_same(results(runs / "runs" / f"{job}_whole"), results(root))
    warm, own, _ = results(root)
    assert [line["step"] for line in warm] == list(range(1, 7))
    assert own[0]["warm/updates"] == 6 and own[0]["warm/loss"] == warm[-1]["train/loss"]
    assert metric_of("time/warm_start_s") and read_lines(root / "metrics.jsonl")[0][
        "time/warm_start_s"
    ] == pytest.approx(read_lines(root / "warm_start/metrics.jsonl")[-1]["time/elapsed_s"])
    assert not (root / "warm_start" / "checkpoints").exists(), "the run has its own by now"


@pytest.mark.exhaustive
def test_a_killed_warm_start_continues_from_its_newest_checkpoint(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Update 5 of 6 dies; update 4 was saved."""
    step = WarmUpdates.step

    def killed(work):
        if work.made == 4:
            raise OSError("the machine is gone")
        return step(work)

    job = ("run.job=preference", "run.name=killed")
    with monkeypatch.context() as patched:
        patched.setattr(WarmUpdates, "step", killed)
        with pytest.raises(OSError, match="gone"):
            train(config_of(runs, *job))
    train(config_of(runs, *job, "run.resume=true"))
    train(config_of(runs, "run.job=preference", "run.name=never_killed"))
    assert_same(results(runs / "runs" / "never_killed"), results(runs / "runs" / "killed"))


def test_train_works_on_another_thread_than_the_main_one(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(runs, "run.job=preference", "run.name=thread", "warm_start.steps=1")
    with ThreadPoolExecutor(1) as other:
        other.submit(train, config).result(timeout=120)
    assert (runs / "runs" / "thread" / "policy").is_dir()
    assert "not on the main thread" in caplog.text


# ---- real processes


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "PJRT_NPROC")}
    env |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_COMPILE}
    command = [sys.executable, "-m", "jaxrl_async.train", *words(folder, *overrides)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )


@pytest.mark.exhaustive
def test_a_healthy_run_in_a_fresh_process_says_nothing_on_stderr(runs: Path) -> None:
    """Whatever is installed beside it: libtpu, orbax, absl, transformers."""
    out, err = start(runs, "run.name=quiet", "warm_start.steps=1000").communicate(timeout=300)
    assert err == "" and "report.html" in out


NO_TORCH = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name)
import jaxrl_async.data.tokenizer
import os, transformers
assert not transformers.utils.is_torch_available()
assert "TRANSFORMERS_NO_ADVISORY_WARNINGS" not in os.environ
"""


def test_transformers_does_not_advise_to_install_pytorch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 75)])
def test_a_real_signal_in_the_warm_start_ends_it_at_once_with_the_codes_of_training(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start(tmp_path, "run.name=long", "warm_start.steps=1000000")
    metrics = tmp_path / "runs" / "long" / "warm_start" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while len(read_lines(metrics)) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    requests = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert time.monotonic() - requests < 20
    made = read_lines(metrics)[-1]["step"]
    saved = [p.name for p in (metrics.parent / "checkpoints").iterdir()]
    assert saved == [str(made)] and f"update {made} of 1000000" in out + err


REFUSED = {
    "a model that is not there": ("model.path=Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B"),
    "a tokenizer that is not there": ("data.tokenizer=./none", "there is no such folder here"),
    "records that are not there": (
        "data={addition: null, jsonl: {path: openai/gsm8k}}",
        "hf download openai/gsm8k --repo-type dataset",
    ),
    "an unknown loss": ("algorithm.loss=ppo_clp", "did you mean 'ppo_clip'"),
    "an unknown reward": ("reward.function=exat", "did you mean 'exact'"),
}


@pytest.mark.parametrize(
    "what",
    [
        *(pytest.param(w, marks=pytest.mark.exhaustive) for w in REFUSED),
    ],
)
def test_an_error_at_the_start_is_one_message_and_leaves_nothing_behind(
    tmp_path: Path, what: str
) -> None:
    setting, output = REFUSED[what]
    process = start(tmp_path, setting)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.count("\n") == 1 and err.startswith("config error: ") and output in err
    assert [p.name for p in tmp_path.iterdir()] == ["empty.yaml"]
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    process = start(tmp_path, setting, "run.overwrite=true")
    process.communicate(timeout=120)
    assert [str(p.relative_to(tmp_path)) for p in (tmp_path / "runs").rglob("*")] == [
        "runs/run",
        "runs/run/metrics.jsonl",
    ]
