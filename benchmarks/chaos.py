"""Kill a run at random moments, resume it each time, and compare it with an undisturbed run.

    python benchmarks/chaos.py [--kills 100] [--seed 0] [--staleness 0 2]

The main job on the embedded addition task with a tiny decoder runs in a process of its own that
gets SIGKILL: sometimes while it starts, mostly while it trains and writes checkpoints (one after
every update).
At max_staleness 0 the metrics and the final weights must equal those of the undisturbed run bit for
bit; at every staleness `python -m jaxrl_async.audit` must find the ledger clean.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import Row, options, parser, report
from safetensors.numpy import load_file

from jaxrl_async.audit import audit_report, audit_run
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.train import RESUME

ROOT = Path(__file__).parent.parent
TINY = (
    "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 16}",
    "warm_start={steps: 20, batch_size: 16}",
    "trainer.warmup_steps=0",
    "sampler={slots: 16, max_new_tokens: 16, max_length: 48}",
    "algorithm={group_size: 4, groups_per_step: 4, learning_rate: 1e-3}",
    "trainer.micro_batch_tokens=512",
    "metrics={peak_flops: 1e9, tensorboard: false}",
    "eval.every=10",
    "checkpoint={every: 1, keep: 2}",
)
REWARD = """
def many_digits(prompt, completion, reference):
    return sum(c.isdigit() for c in completion) / 16
"""
"""A reward that a random policy sometimes gets, so that every update moves the weights."""
START_SHARE = 0.15
"""Share of the kills during the start of the process."""


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--kills", type=int, default=100)
    made.add_argument("--staleness", nargs="+", type=int, default=[0, 2])
    made.add_argument("--seed", type=int, default=0, help="of the moments")
    args = options(made)
    if args.quick:
        args.kills, args.staleness = 1, [0]
    steps = 4 * args.kills if args.kills < 20 else 2 * args.kills
    rows = []
    for staleness in args.staleness:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(Path(folder), args.kills, steps, staleness, args.seed))
            print(rows[-1], file=sys.stderr, flush=True)
    report("chaos", rows, args)


def row(folder: Path, kills: int, steps: int, staleness: int, seed: int) -> Row:
    """Measure one row of the table: the undisturbed run, then the killed one."""
    settings = [f"run.steps={steps}", f"staleness.max_staleness={staleness}"]
    start = time.perf_counter()
    whole = process(folder, "whole", settings)
    assert whole.wait() == 0, "the undisturbed run failed"
    whole_s = time.perf_counter() - start
    done, redone, starts = survive(folder, "killed", settings, kills, steps, random.Random(seed))
    first, second = folder / "whole", folder / "killed"
    lines = [[comparable(x) for x in read_lines(f / "metrics.jsonl")] for f in (first, second)]
    weights = [load_file(f / "policy" / "model.safetensors") for f in (first, second)]
    found = audit_run(second)
    if found.problems:
        print(audit_report(found), file=sys.stderr)
    return {
        "model": "addition, tiny",
        "max_staleness": staleness,
        "updates": steps,
        "kills": done,
        "while_starting": starts,
        "updates_redone": redone,
        "same_metrics": lines[0] == lines[1],
        "same_weights": all(np.array_equal(weights[0][k], weights[1][k]) for k in weights[0]),
        "audit_problems": len(found.problems),
        "dropped": sum(found.dropped.values()),
        "undisturbed_s": whole_s,
        "killed_s": time.perf_counter() - start - whole_s,
    }


def survive(
    folder: Path, name: str, settings: list[str], kills: int, steps: int, rng: random.Random
) -> tuple[int, int, int]:
    """Run through the kills; return kills, updates made twice, kills before an update."""
    metrics = folder / name / "metrics.jsonl"
    done = redone = starts = 0
    resume: list[str] = []
    while True:
        running = process(folder, name, [*settings, *resume])
        early = rng.random() < START_SHARE
        before = last_step(metrics)
        if done < kills:
            if early:
                time.sleep(rng.uniform(0.0, 6.0))
            else:
                wait_for_progress(running, metrics, before)
                time.sleep(rng.uniform(0.0, 1.0))
        if done == kills or running.poll() is not None:
            code = running.wait()
            assert code == 0, f"the run ended with {code}"
            return done, redone, starts
        running.send_signal(signal.SIGKILL)
        running.wait()
        done += 1
        starts += last_step(metrics) == before
        if (folder / name).is_dir():
            resume = list(RESUME)
        redone += sum(1 for _ in superseded(folder / name))
        with contextlib.suppress(FileNotFoundError):
            (folder / name / "metrics.superseded.jsonl").unlink()


def superseded(folder: Path) -> list[dict[str, float]]:
    return read_lines(folder / "metrics.superseded.jsonl")


def wait_for_progress(running: "subprocess.Popen[bytes]", metrics: Path, before: int) -> None:
    """Wait until the run has made another update or has ended."""
    while running.poll() is None and last_step(metrics) <= before:
        time.sleep(0.02)


def last_step(metrics: Path) -> int:
    return max((int(x["step"]) for x in read_lines(metrics)), default=-1)


def process(folder: Path, name: str, settings: list[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "jaxrl_async.train", str(ROOT / "configs" / "addition.yaml")]
    reward = folder / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    place = [f"run.dir={folder}", f"run.name={name}", f"reward.function={reward}:many_digits"]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *TINY, *place, *settings],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )


if __name__ == "__main__":
    main()
