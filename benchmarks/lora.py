"""Compare adapters with the training of all weights on the main job, over seeds: what is learned,
sent and kept.

    python benchmarks/lora.py [--ranks 0 8 32] [--seeds 0 1 2] [--steps 120]

Each run is `configs/addition.yaml` as it stands, with a checkpoint at its end; rank 0 trains all
weights at its learning rate, an adapter at ten times that. The table has one row for each rank:
held-out accuracy at steps 0, 30 and the last (mean of the seeds, and least and most at the last),
bytes of one version as it is sent, memory of the optimizer next to the weights, size of a
checkpoint, and seconds of an update (median over updates and seeds, once everything is compiled).
"""

import contextlib
import io
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Row, options, parser, report

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.lora import lora_of, trained_table
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import num_in
from jaxrl_async.run.loop import train
from jaxrl_async.trainer.optimizer import optimizer_bytes

CONFIG = Path(__file__).parent.parent / "configs" / "addition.yaml"
FASTER = 10.0
"""Learning rate of an adapter, by that of all weights (LoRA Without Regret)."""
EARLY = 30
"""Step in the middle of the curve."""
COMPILED = 3
"""Updates that may still compile something, left out of the times."""

Line = dict[str, float]


def main() -> None:
    """Run every rank with every seed, and print the table."""
    made = parser(__doc__ or "")
    made.add_argument("--ranks", nargs="+", type=int, default=[0, 8, 32], help="0: all weights")
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--steps", type=int, default=120, help="updates of each run")
    args = options(made)
    if args.quick:
        args.ranks, args.seeds, args.steps = [0, 4], [0], 5
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in args.ranks:
            configs = [config_of(folder, rank, seed, args) for seed in args.seeds]
            for config in configs:
                with contextlib.redirect_stdout(io.StringIO()):
                    train(config)
            rows.append(row_of(rank, configs))
            print(rows[-1], file=sys.stderr, flush=True)
    report("lora", rows, args)


def config_of(folder: str, rank: int, seed: int, args: Any) -> Config:
    """Return the configuration of a run."""
    rate = load(CONFIG, []).algorithm.learning_rate
    words = {
        "run.dir": folder,
        "run.name": f"rank{rank}-{seed}",
        "run.seed": seed,
        "run.steps": args.steps,
        "eval.every": 2 if args.quick else 10,
        "checkpoint": f"{{every: {args.steps}, keep: 1}}",
        "metrics": "{tensorboard: false, samples_every: 0, peak_flops: 1.0e+9}",
    }
    if rank:
        words |= {"model.lora.rank": rank, "algorithm.learning_rate": rate * FASTER}
    if args.quick:
        words |= {"warm_start.steps": 2, "sampler.max_new_tokens": 8, "algorithm.group_size": 2}
        words |= {"data.addition.eval_size": 8, "algorithm.groups_per_step": 4}
    return load(CONFIG, [f"{name}={value}" for name, value in words.items()])


def row_of(rank: int, configs: list[Config]) -> Row:
    """Put the runs of all seeds into one row of the table."""
    folders = [Path(config.run.dir) / config.run.name for config in configs]
    runs: list[list[Line]] = [read_lines(folder / "metrics.jsonl") for folder in folders]
    last = int(runs[0][-1]["step"])
    ends = [accuracy(lines, last) for lines in runs]
    times = [update_s(line) for lines in runs for line in lines if line["step"] > COMPILED]
    return {
        "model": f"rank {rank}" if rank else "all weights",
        "accuracy_0": statistics.fmean(accuracy(lines, 0) for lines in runs),
        f"accuracy_{EARLY}": statistics.fmean(accuracy(lines, EARLY) for lines in runs),
        f"accuracy_{last}": statistics.fmean(ends),
        "least": min(ends),
        "most": max(ends),
        "sent_mb": max(line.get("weights/transfer_bytes", 0.0) for line in runs[0]) / 1e6,
        "optimizer_mb": optimizer_size(configs[0], folders[0]) / 1e6,
        "checkpoint_mb": statistics.fmean(checkpoint_size(folder) for folder in folders) / 1e6,
        "median_s": statistics.median(times),
        "least_s": min(times),
        "most_s": max(times),
    }


def accuracy(lines: list[Line], step: int) -> float:
    """Return the held-out accuracy of the last evaluation up to a step."""
    return [x["eval/accuracy"] for x in lines if x["step"] <= step and "eval/accuracy" in x][-1]


def update_s(line: Line) -> float:
    """Return the seconds of an update, without its evaluation and checkpoint."""
    other = ("time/eval_s", "time/save_s")
    return line["time/step_s"] - sum(line.get(key, 0.0) for key in other)


def optimizer_size(config: Config, folder: Path) -> float:
    """Return the bytes that the optimizer keeps in addition to what it trains."""
    spec = Policy.from_pretrained(folder / "policy").spec
    trained = num_in(trained_table(spec, lora_of(spec, config.model.lora)))
    return float(trained * optimizer_bytes(config.trainer, config.model.param_dtype))


def checkpoint_size(folder: Path) -> float:
    """Return the bytes of a run's newest checkpoint on disk."""
    newest = max((p for p in (folder / "checkpoints").iterdir() if p.name.isdigit()), key=_number)
    return float(sum(p.stat().st_size for p in newest.rglob("*") if p.is_file()))


def _number(path: Path) -> int:
    return int(path.name)


if __name__ == "__main__":
    main()
