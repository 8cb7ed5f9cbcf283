"""Measure how well each algorithm learns from older data: accuracy by max_staleness, over seeds.

    python benchmarks/algorithms.py [--only grpo tis ...] [--staleness 0 2 8] [--seeds 0 1 2]

Each run is the main job on the embedded addition task, so small that all runs fit into an hour: a
decoder of a quarter of a million parameters, two digits, and small steps with a high learning rate,
so that old data hurts. All runs of one seed start from the same warm-started policy. The table has
one row for each algorithm and staleness: final held-out accuracy of each seed and its mean, the
age of the data, how many tokens the loss clipped or a correction changed, and wall time.

Rows named like a file in configs/ take its algorithm, critic and teacher; the others vary one loss
(REINFORCE with rewards centred in their group) and differ only in the correction, and
ppo_clip_muon differs from ppo_clip in the optimizer.
"""

import contextlib
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import Row, options, parser, report

from jaxrl_async.config.load import load
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.loop import train

CONFIGS = Path(__file__).parent.parent / "configs"
RECIPES = (
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo_critic",
    "decoupled_ppo", "self_distill",
)  # fmt: skip

PLAIN: dict[str, Any] = {"advantage": "group_mean", "loss": "gpg", "correction": "none"}
WEIGHED: dict[str, Any] = {"advantage": "group_mean", "loss": "reinforce"}
CLIPPED: dict[str, Any] = {"advantage": "group_mean", "loss": "ppo_clip", "correction": "none"}
FORKS = {"continuations": 4, "members": 2}  # about as many tokens as four more members
VARIATIONS: dict[str, dict[str, Any]] = {
    "uncorrected": PLAIN,
    "importance": {**WEIGHED, "correction": "none"},
    "tis": {**WEIGHED, "correction": "tis"},
    "mis": {**WEIGHED, "correction": "mis"},
    "seq_mis": {**WEIGHED, "correction": "seq_mis"},
    "icepop": {**WEIGHED, "correction": "icepop"},
    "opsm": {**WEIGHED, "correction": ["tis", "opsm"]},
    "age_limit": {**PLAIN, "correction": {"age_limit": {"max_age": 2}}},
    "ppo_clip": CLIPPED,
    "ppo_clip_muon": CLIPPED,
    "topr": {**WEIGHED, "loss": "topr", "correction": "none"},
    "sapo": {**WEIGHED, "loss": "sapo", "correction": "none"},
    "dppo_tv": {**WEIGHED, "loss": "dppo_tv", "correction": "none"},
    "pivots": {**CLIPPED, "group_size": 4, "pivots": FORKS},
    "pivots_fork": {**CLIPPED, "group_size": 4, "pivots": {**FORKS, "trunk": "fork"}},
    "pivots_random": {**CLIPPED, "group_size": 4, "pivots": {**FORKS, "where": "random"}},
}

BASE = {
    "model.architecture": "{layers: 2, width: 96, heads: 4, kv_heads: 2, head_dim: 24, mlp: 256}",
    "data.max_prompt_tokens": "16",
    "data.addition": "{digits: 2, eval_size: 256, worked_share: 0.35}",
    "sampler": "{slots: 64, max_length: 48, max_new_tokens: 32, block: 8}",
    "trainer": "{warmup_steps: 2, micro_batch_tokens: 1536}",
    "metrics": "{tensorboard: false, samples_every: 0, peak_flops: 1.0e+9}",
    "checkpoint.every": "0",
    "run.overwrite": "true",
}
WARM = {"warm_start": "{steps: 250, batch_size: 64, learning_rate: 2.0e-3}"}


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--only", nargs="+", default=[*VARIATIONS, *RECIPES], help="rows, by name")
    made.add_argument("--staleness", nargs="+", type=int, default=[0, 2, 8])
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--steps", type=int, default=60, help="updates of each run")
    made.add_argument("--learning-rate", type=float, default=3e-4)
    args = options(made)
    if args.quick:
        args.only, args.staleness, args.seeds, args.steps = ["uncorrected"], [1], [0], 2
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            warm = {"warm_start.steps": "4"} if args.quick else {}
            warm |= {"trainer.warmup_steps": "0"}
            run(folder, f"warm{seed}", {}, {**WARM, **warm, "run.steps": "1",
                "run.seed": str(seed), "algorithm.learning_rate": "0.0"})  # fmt: skip
        for name in args.only:
            for staleness in args.staleness:
                done = [one_run(folder, name, staleness, seed, args) for seed in args.seeds]
                rows.append(row_of(name, staleness, done))
                print(rows[-1], file=sys.stderr, flush=True)
    report("algorithms", rows, args)


def one_run(folder: str, name: str, staleness: int, seed: int, args: Any) -> list[dict[str, float]]:
    """Return one run's metrics."""
    sections = sections_of(name)
    start = Path(folder) / f"warm{seed}" / "policy"
    settings = {
        "model.path": str(start),
        "run.seed": str(seed),
        "run.steps": str(args.steps),
        "staleness.max_staleness": str(staleness),
        "algorithm.learning_rate": str(args.learning_rate),
        "eval.every": str(max(args.steps // 4, 1)),
    }
    if name.endswith("_muon"):
        settings["trainer.optimizer"] = "muon"
    if name == "ppo_critic":
        settings["critic.learning_rate"] = str(2 * args.learning_rate)
    begin = time.perf_counter()
    lines = run(folder, name, sections, settings)
    lines[-1]["wall_s"] = time.perf_counter() - begin
    return lines


def sections_of(name: str) -> dict[str, Any]:
    """Return the sections of the algorithm: algorithm, critic, teacher."""
    if name in VARIATIONS:
        return {"algorithm": {"group_size": 8, "groups_per_step": 8, **VARIATIONS[name]}}
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    algorithm = {**config["algorithm"], "group_size": 8, "groups_per_step": 8}
    if "shaping" in algorithm:  # DAPO's lengths, for these shorter answers
        algorithm["shaping"] = ["mask_truncated"]
    if isinstance(algorithm.get("aggregate"), dict):
        algorithm["aggregate"] = {"constant": {"divisor": 32}}
    return {"algorithm": algorithm, **{k: config[k] for k in ("critic", "teacher") if k in config}}


def run(
    folder: str, name: str, sections: dict[str, Any], settings: dict[str, str]
) -> list[dict[str, float]]:
    """Run the main job with these settings and return its metrics."""
    file = Path(folder) / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"run": {"name": name, "dir": folder}, **sections}))
    config = load(file, [f"{k}={v}" for k, v in {**BASE, **settings}.items()])
    with contextlib.redirect_stdout(io.StringIO()):
        train(config)
    return read_lines(Path(folder) / name / "metrics.jsonl")


def row_of(name: str, staleness: int, runs: list[list[dict[str, float]]]) -> Row:
    """Average the runs of all seeds into one row of the table."""

    def of_steps(key: str) -> float:
        return statistics.fmean(line.get(key, 0.0) for lines in runs for line in lines[1:])

    ends = [lines[-1]["eval/accuracy"] for lines in runs]
    return {
        "model": name,
        "max_staleness": staleness,
        "accuracy": statistics.fmean(ends),
        "least": min(ends),
        "most": max(ends),
        "start": statistics.fmean(lines[0]["eval/accuracy"] for lines in runs),
        "tokens": of_steps("train/tokens"),
        "mean_lag": of_steps("staleness/mean"),
        "ess_share": of_steps("offpolicy/ess_share"),
        "clip_share": of_steps("policy/clip_share"),
        "changed_share": of_steps("policy/truncated_share"),
        "wall_s": statistics.median(lines[-1]["wall_s"] for lines in runs),
    }


if __name__ == "__main__":
    main()
