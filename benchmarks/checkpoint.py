"""Measure what a checkpoint costs: how long it stops the trainer, its size, its time to restore.

    python benchmarks/checkpoint.py [--models 1M 25M] [--updates 12]

Real runs of the main job on the embedded addition task with a checkpoint after every update, at
max_staleness 2, so that it contains rollouts in flight. stall: the trainer's own time in the call
(arrays copied off the devices, rollouts and buffer read); share: stall over the time of an update.
With checkpoint.every=50 a run pays a fiftieth of that.
"""

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import jax
from common import MODELS, Row, columns, options, parser, report, spread

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.mesh import make_slices
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.builders.initial_policy import check_model, make_policy, make_tokenizer
from jaxrl_async.run.builders.learning import make_learner
from jaxrl_async.run.checkpoint.store import Checkpoints
from jaxrl_async.run.loop import train

CONFIG = Path(__file__).parent.parent / "configs" / "addition.yaml"


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--updates", type=int, default=12)
    args = options(made)
    if args.quick:
        args.updates = 3
    report("checkpoint", [row(model, args.updates, args.repeats) for model in args.models], args)


def row(model: str, updates: int, repeats: int) -> Row:
    """Measure one row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(model, folder, updates)
        with contextlib.redirect_stdout(io.StringIO()):
            train(config)
        root = Path(folder) / config.run.name
        lines = read_lines(root / "metrics.jsonl")[2:]  # the first updates compile
        stalls = [x["time/save_s"] for x in lines if "time/save_s" in x]
        steps = [x["time/step_s"] for x in lines]
        newest = max((root / "checkpoints").iterdir(), key=lambda p: int(p.name))
        size = sum(p.stat().st_size for p in newest.rglob("*") if p.is_file())
        weights = (root / "policy" / "model.safetensors").stat().st_size
        return {
            "model": model,
            **columns(spread(stalls), "stall_ms", 1e3),
            "update_s": statistics.median(steps),
            "stall_share": statistics.median(stalls) / statistics.median(steps),
            "checkpoint_MB": size / 1e6,
            "weights_MB": weights / 1e6,
            "times_weights": size / weights,
            "restore_s": statistics.median(restored_s(config, root) for _ in range(repeats)),
        }


def configuration(model: str, folder: str, updates: int) -> Config:
    spec = MODELS[model]
    shape = ("layers", "width", "heads", "kv_heads", "head_dim", "mlp")
    architecture = ", ".join(f"{name}: {getattr(spec, name)}" for name in shape)
    return load(
        CONFIG,
        [
            f"model.architecture={{family: llama, {architecture}}}",
            f"run={{name: {model}, dir: {folder}, steps: {updates}, overwrite: false}}",
            "warm_start.steps=0",
            "trainer.warmup_steps=0",
            "staleness.max_staleness=2",
            "metrics={tensorboard: false, samples_every: 0, peak_flops: 1.0e+9}",
            "eval.every=0",
            "data.addition.eval_size=8",
            "checkpoint={every: 1, keep: 2}",
        ],
    )


def restored_s(config: Config, root: Path) -> float:
    """Time the restore of the newest checkpoint onto the devices, checksums included, seconds."""
    tokenizer, slices = make_tokenizer(config.data, config.model), make_slices(config.mesh)
    spec = check_model(config, tokenizer, slices)
    policy = make_policy(config.model, config.run, spec, tokenizer, slices, root / "base")
    learner = make_learner(config, policy, slices, tokenizer)
    with Checkpoints(root / "checkpoints") as checkpoints:
        start = time.perf_counter()
        saved = checkpoints.restore(None, learner.tree())
        jax.block_until_ready(saved.state)
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
