"""Kill a run at random moments, resume it each time, and compare it with an undisturbed run.

    python benchmarks/chaos.py [--kills 100] [--seed 0] [--staleness 0 2]
    python benchmarks/chaos.py --samplers 2 --sampler-kills 50 --kills 10 --staleness 2

The main job on the embedded addition task with a tiny decoder runs in a process of its own that
gets SIGKILL: sometimes while it starts, mostly while it trains and writes checkpoints (one after
every update).
With --samplers the samplers are processes of their own, which get SIGKILL, too.
At max_staleness 0 the metrics and the final weights must equal those of the undisturbed run bit for
bit; where samplers get SIGKILL, the texts must, since log-probs differ in their last bits when
fewer draw together. At every staleness `python -m jaxrl_async.audit` must find the ledger clean.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import Row, options, parser, report
from safetensors.numpy import load_file

from jaxrl_async.audit import audit_report, audit_run
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.train_command import RESUME

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
PROCESSES = (
    "mesh.samplers_in=processes",
    "remote.wait_s=120",
    "faults={sampler_restarts: 1000, backoff_s: 0.1}",
)
"""Settings of a run whose samplers are processes, which are killed more often than it forgives."""
LEFT_S = 60.0
"""Longest time for which sampler processes may outlive their run, seconds."""
START_SHARE = 0.15
"""Share of the kills during the start of the process."""


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--kills", type=int, default=100)
    made.add_argument("--samplers", type=int, default=0, help="sampler processes; 0: threads")
    made.add_argument("--sampler-kills", type=int, default=0, help="kills of sampler processes")
    made.add_argument("--staleness", nargs="+", type=int, default=[0, 2])
    made.add_argument("--seed", type=int, default=0, help="of the moments")
    args = options(made)
    if args.quick:
        args.kills, args.staleness = 1, [0]
    kills = args.kills + args.sampler_kills
    steps = 4 * kills if kills < 20 else 2 * kills
    rows = []
    for staleness in args.staleness:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(Path(folder), args, steps, staleness))
            print(rows[-1], file=sys.stderr, flush=True)
    report("chaos", rows, args)


def row(folder: Path, args: argparse.Namespace, steps: int, staleness: int) -> Row:
    """Measure one row of the table: the undisturbed run, then the killed one."""
    settings = [f"run.steps={steps}", f"staleness.max_staleness={staleness}"]
    if args.samplers:
        settings += [f"mesh.samplers={args.samplers}", *PROCESSES]
    start = time.perf_counter()
    whole = process(folder, "whole", settings)
    assert whole.wait() == 0, "the undisturbed run failed"
    whole_s = time.perf_counter() - start
    hunt = Hunt(kills=args.kills, sampler_kills=args.sampler_kills, rng=random.Random(args.seed))
    survive(folder, "killed", settings, hunt)
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
        "kills": args.kills - hunt.kills,
        "sampler_kills": args.sampler_kills - hunt.sampler_kills,
        "while_starting": hunt.starts,
        "updates_redone": hunt.redone,
        "same_metrics": lines[0] == lines[1],
        "same_samples": samples(first) == samples(second),
        "same_weights": all(np.array_equal(weights[0][k], weights[1][k]) for k in weights[0]),
        "audit_problems": len(found.problems),
        "dropped": sum(found.dropped.values()),
        "left_over": left_over(second),
        "undisturbed_s": whole_s,
        "killed_s": time.perf_counter() - start - whole_s,
    }


@dataclass(slots=True, kw_only=True)
class Hunt:
    """Kills that are still to come, and what they have cost."""

    kills: int  # of the whole run
    sampler_kills: int
    rng: random.Random
    starts: int = 0  # kills before an update
    redone: int = 0  # updates that were made twice

    @property
    def over(self) -> bool:
        """Whether all kills have been."""
        return not (self.kills or self.sampler_kills)

    def takes_a_sampler(self) -> bool:
        """Choose the next victim, by how many kills of each kind are left."""
        return self.rng.random() * (self.kills + self.sampler_kills) < self.sampler_kills


def survive(folder: Path, name: str, settings: list[str], hunt: Hunt) -> None:
    """Run through the kills, and to the end."""
    metrics = folder / name / "metrics.jsonl"
    resume: list[str] = []
    while True:
        running = process(folder, name, [*settings, *resume])
        before = last_step(metrics)
        while not hunt.over and hunt.takes_a_sampler():
            wait_for_progress(running, metrics, last_step(metrics))
            time.sleep(hunt.rng.uniform(0.0, 0.5))
            if running.poll() is not None:
                break
            hunt.sampler_kills -= kill_a_child(running, hunt.rng)
        if not hunt.over and hunt.rng.random() < START_SHARE:
            time.sleep(hunt.rng.uniform(0.0, 6.0))
        elif not hunt.over:
            wait_for_progress(running, metrics, before)
            time.sleep(hunt.rng.uniform(0.0, 1.0))
        if hunt.over or running.poll() is not None:
            code = running.wait()
            assert code == 0, f"the run ended with {code}"
            return
        running.send_signal(signal.SIGKILL)
        running.wait()
        hunt.kills -= 1
        hunt.starts += last_step(metrics) == before
        if (folder / name).is_dir():
            resume = list(RESUME)
        hunt.redone += sum(1 for _ in superseded(folder / name))
        with contextlib.suppress(FileNotFoundError):
            (folder / name / "metrics.superseded.jsonl").unlink()


def kill_a_child(running: "subprocess.Popen[bytes]", rng: random.Random) -> bool:
    """Kill one of the run's sampler processes; return whether there was one."""
    children = [
        int(pid)
        for file in Path(f"/proc/{running.pid}/task").glob("*/children")
        for pid in words_of(file)
        if b"jaxrl_async.sample" in words_of(Path(f"/proc/{pid.decode()}/cmdline"), b"\0")
    ]
    if not children:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(children), signal.SIGKILL)
    return True


def words_of(file: Path, between: bytes | None = None) -> list[bytes]:
    """Return the words of a file of /proc; none if the process has ended."""
    with contextlib.suppress(OSError):
        return file.read_bytes().split(between)
    return []


def left_over(folder: Path) -> int:
    """Return how many sampler processes outlive a run by LEFT_S: those that write into its folder
    still."""
    end = time.monotonic() + LEFT_S
    while True:
        outputs = [file.resolve() for file in Path("/proc").glob("[0-9]*/fd/1")]
        left = sum(folder.resolve() in output.parents for output in outputs)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.5)


def samples(folder: Path) -> list[object]:
    """Return the texts that a run has kept, without what is measured on them."""
    return [(x["step"], x.get("completion")) for x in read_lines(folder / "samples.jsonl")]


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
