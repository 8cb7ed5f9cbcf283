"""Compare asynchronous with synchronous learning, and what new weights may do to running answers.

    python benchmarks/asynchrony.py [--swaps] [--computed] [--seeds 0 1 2] [--steps 60]

Each run is the main job on the small addition task of benchmarks/algorithms.py; all runs of a seed
start from the same warm-started policy, whose answers have a long tail (a third work the sum out,
the others give it at once). The device's times are dictated (benchmarks/dictated.py) so that
drawing a step's answers takes as long as learning from them, which is about the split that the
plan of Qwen3-8B on v6e-8 + 24 chooses (docs/plans.md); `--computed` takes the model's own times on
shared cores instead.

setting       in turns: max_staleness 0, each slice waits for the other; staleness N; in turns,
              both chips: one policy on both chips (mesh.colocated), sampling with half the rows
              on each and learns in half the time, so that only tails and changeovers are lost.
              With --swaps: sampler.on_new_weights at staleness 4, 128 slots and a device whose
              sampler takes the time, so that an answer of 32 tokens outlives several updates.
accuracy      held-out, after the last update: mean of the seeds, their standard deviation, least
              and most. start: before the first update.
reached_s     until the first evaluation with at least --level, of the seeds that reached it; nan if
              none did. Evaluations' own time is not counted.
update_s      median, least and most over updates and seeds, without those that evaluate.
per_chip      trained tokens a second and chip (two chips in every row).
idle          share of time in which the trainer's, the sampler's chip had nothing to do.
lost          sampled tokens that are not trained on: discarded by a restart, or too old.
cpu_s         CPU seconds of the process for 1,000 trained tokens (median update).
lag           mean staleness of the trained tokens, versions.
apart         |sampler - trainer log-prob| of all trained tokens, nats: what the weights have moved
              since, and KV of older weights.
mismatch      the same of tokens sampled by the weights that train on them, mean and most:
              what is above rounding comes from KV of older weights. nan: there was no such token.
pause_ms      longest pause of decoding caused by a swap; again: tokens prefilled again after swaps,
              as a share of the sampled ones.
"""

import math
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithms import WARM
from algorithms import run as run_job
from common import Row, force_cpu_devices, options, parser, report, spread
from dictated import Dictated, sleep_until, timed_blocks

from jaxrl_async.run.assemble import Parts
from jaxrl_async.testing.fault_injection import injected

SLICES = Dictated(step_s=0.004, row_s=1e-4, update_s=0.33)
"""One chip samples, one trains: 32 steps of 64 rows take as long as an update."""
BOTH = Dictated(step_s=0.004, row_s=0.5e-4, update_s=0.165)
"""Both do both: half the rows on each, half the update; a step reads all weights as before."""
SLOW = Dictated(step_s=0.025, row_s=0.0, update_s=0.12)
"""The sampler is what takes the time, and an answer outlives several updates."""
CHIPS = 2
SETTLED = 5
"""Updates that may still compile something, left out of times and shares."""
ALGORITHM = {"group_size": 8, "groups_per_step": 8, "loss": "ppo_clip", "advantage": "group_mean"}

Line = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table."""

    name: str
    overrides: dict[str, str]
    device: Dictated | None = SLICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished run."""

    lines: list[Line]
    cpu_s: list[float]  # of the process, when each update began


def against_sync(computed: bool) -> list[Setting]:
    """Return the settings that differ in how old the data may be."""
    device = None if computed else SLICES
    in_turns = Setting(name="in turns", overrides={"staleness.max_staleness": "0"}, device=device)
    later = [
        Setting(name=f"staleness {n}", overrides={"staleness.max_staleness": str(n)}, device=device)
        for n in (1, 2, 4)
    ]
    if computed:
        return [in_turns, *later]
    colocated = {**in_turns.overrides, "mesh.colocated": "true"}
    both = Setting(name="in turns, both chips", overrides=colocated, device=BOTH)
    return [both, in_turns, *later]


def of_swaps(computed: bool) -> list[Setting]:
    """Return the settings that differ in what a swap does to running answers."""
    return [
        Setting(
            name=policy,
            overrides={
                "staleness.max_staleness": "4",
                "sampler.slots": "128",
                "sampler.on_new_weights": policy,
            },
            device=None if computed else SLOW,
        )
        for policy in ("continue", "recompute", "drain", "restart")
    ]


def main() -> None:
    """Run every setting with every seed and print one row for each setting."""
    made = parser(__doc__ or "")
    made.add_argument("--swaps", action="store_true", help="compare sampler.on_new_weights")
    made.add_argument("--computed", action="store_true", help="the model's own times")
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--steps", type=int, default=60, help="updates of each run")
    made.add_argument("--level", type=float, default=0.8, help="accuracy to be reached")
    made.add_argument("--learning-rate", type=float, default=3e-4)
    args = options(made)
    settings = of_swaps(args.computed) if args.swaps else against_sync(args.computed)
    if args.quick:
        settings, args.seeds, args.steps = settings[:1], [0], SETTLED + 4
    force_cpu_devices(CHIPS, collectives=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            warm_up(folder, seed, args.quick)
        done: dict[str, list[Done]] = {s.name: [] for s in settings}
        for seed in args.seeds:  # in turns, so that a slow hour is everybody's
            for setting in settings:
                done[setting.name].append(one(folder, setting, seed, args))
        rows = [row_of(name, runs, args.level) for name, runs in done.items()]
    report("asynchrony", rows, args)


def warm_up(folder: str, seed: int, quick: bool) -> None:
    """Make the policy from which all runs of a seed start."""
    short = {"warm_start.steps": "4"} if quick else {}
    settings = {**WARM, **short, "trainer.warmup_steps": "0", "run.steps": "1"}
    settings |= {"run.seed": str(seed), "algorithm.learning_rate": "0.0"}
    run_job(folder, f"warm{seed}", {}, settings)


def one(folder: str, setting: Setting, seed: int, args: Any) -> Done:
    """Run the job in a setting."""
    settings = {
        "model.path": str(Path(folder) / f"warm{seed}" / "policy"),
        "run.seed": str(seed),
        "run.steps": str(args.steps),
        "algorithm.learning_rate": str(args.learning_rate),
        "eval.every": str(max(args.steps // 6, 3)),
        **setting.overrides,
    }
    cpu_s: list[float] = []
    with ExitStack() as stack:
        stack.enter_context(injected(lambda parts: slow_updates(parts, setting.device, cpu_s)))
        stack.enter_context(timed_blocks(setting.device))
        lines = run_job(folder, "run", {"algorithm": ALGORITHM}, settings)
    print(setting.name, seed, lines[-1]["eval/accuracy"], file=sys.stderr, flush=True)
    return Done(lines=lines, cpu_s=cpu_s)


def slow_updates(parts: Parts, device: Dictated | None, cpu_s: list[float]) -> None:
    """Let an update take the device's time, and note the process's CPU seconds as it begins."""
    learner: Any = parts.trainer.learner
    learn = learner.learn

    def slow_learn(groups: Any, *more: Any) -> Any:
        start = time.perf_counter()
        cpu_s.append(time.process_time())
        stats = learn(groups, *more)
        if device is not None:
            sleep_until(start + device.update_s)
        return stats

    learner.learn = slow_learn


def row_of(name: str, runs: list[Done], level: float) -> Row:
    """Put the runs of all seeds into one row of the table."""
    ends = [run.lines[-1]["eval/accuracy"] for run in runs]
    plain = [line for run in runs for line in run.lines if is_plain(line)]
    steps = spread([line["time/step_s"] for line in plain])
    wall_s = sum(line["time/step_s"] for line in plain)
    tokens = sum(line["train/tokens"] for line in plain)
    sampled = sum(line["throughput/generated_tokens_per_s"] * line["time/step_s"] for line in plain)
    cpu_s = [b - a for run in runs for a, b in between(run)]
    exact = [line["mismatch/mean"] for line in plain if "mismatch/mean" in line]
    again = sum(line.get("sampler/recomputed_tokens", 0.0) for line in plain)
    lost = sum(
        line.get("sampler/discarded_tokens", 0.0) + line.get("staleness/wasted_tokens", 0.0)
        for line in plain
    )
    return {
        "setting": name,
        "start": statistics.fmean(run.lines[0]["eval/accuracy"] for run in runs),
        "accuracy": statistics.fmean(ends),
        "sd": statistics.stdev(ends) if len(ends) > 1 else 0.0,
        "least": min(ends),
        "most": max(ends),
        "reached_s": mean_or_nan([s for run in runs if (s := reached_s(run.lines, level))]),
        "median_s": steps.median,
        "least_s": steps.least,
        "most_s": steps.most,
        "per_chip": tokens / wall_s / CHIPS,
        "trainer_idle": sum(x["trainer/idle_share"] * x["time/step_s"] for x in plain) / wall_s,
        "sampler_idle": 1
        - sum(min(x["sampler/busy_share"], 1.0) * x["time/step_s"] for x in plain) / wall_s,
        "lost": lost / max(sampled, 1.0),
        "cpu_s": statistics.median(cpu_s) / (tokens / len(plain)) * 1000,
        "lag": statistics.fmean(line["staleness/mean"] for line in plain),
        "apart": statistics.fmean(line["mismatch/all_mean"] for line in plain),
        "mismatch": mean_or_nan(exact),
        "mismatch_most": max(
            (x["mismatch/max"] for x in plain if "mismatch/max" in x), default=0.0
        ),
        "pause_ms": max(line.get("weights/swap_pause_s", 0.0) for line in plain) * 1000,
        "again": again / max(sampled, 1.0),
    }


def is_plain(line: Line) -> bool:
    """Return whether the step neither compiles nor evaluates."""
    return line["step"] > SETTLED and "eval/accuracy" not in line


def between(run: Done) -> list[tuple[float, float]]:
    """Return the CPU seconds at the begin of each plain update and of the next."""
    plain = {int(line["step"]) for line in run.lines if is_plain(line)}
    return [
        (run.cpu_s[step - 1], run.cpu_s[step]) for step in sorted(plain) if step < len(run.cpu_s)
    ]


def reached_s(lines: list[Line], level: float) -> float:
    """Return the seconds of all steps up to the first evaluation at the level; 0: never."""
    taken_s = 0.0
    for line in lines:
        taken_s += line.get("time/step_s", 0.0) - line.get("time/eval_s", 0.0)
        if line.get("eval/accuracy", 0.0) >= level and line["step"]:
            return taken_s
    return 0.0


def mean_or_nan(values: list[float]) -> float:
    """Return the mean, nan of nothing."""
    return statistics.fmean(values) if values else math.nan


if __name__ == "__main__":
    main()
