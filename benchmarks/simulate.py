"""Compare the simulation of the pipeline with real runs: predicted and measured utilisation.

Each setting is a whole run of the main job on the embedded task (`jaxrl_async.train`, random
weights, forced lengths of answers), `--repeats` times after a short run that compiles. The
simulation receives only times and lengths that a run recorded: seconds of a decode step by rows,
of a round's prefill and the host's part, of an update by its tokens, of publishing, a swap, a
report and a scorer; never a share, a rate or a wait. Its results are compared with metrics.jsonl.

device    slept: a decode block and an update end when a formula says so, and the thread sleeps
          until then, so that trainer and samplers do not compete for the cores.
          computed: the model's own time, trainer and sampler on the same cores; each slows the
          other down, and the times come from a run in which they do.
          Samplers in processes (mesh.samplers_in) sleep, too: benchmarks/slept_sampler.py.
error     of the prediction, made from the times of the run with which it is compared.
left_out  steps in which a program was compiled, or that took over five times the median (the
          process was delayed), and max_staleness + 1 steps after each; the numbers are medians
          over the repeats, least and most of the measured values.
"""

import argparse
import asyncio
import contextlib
import io
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from common import Row, force_cpu_devices, long_tail, report
from dictated import Dictated, sleep_until, timed_blocks

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.plan.pipeline import Histogram, Pipeline, Samplers, TransferTree
from jaxrl_async.plan.simulate import simulate
from jaxrl_async.run import loop
from jaxrl_async.run.assemble import Parts
from jaxrl_async.sampler.decode_loop import DecodeLoop
from jaxrl_async.testing.fault_injection import injected

CONFIG = Path(__file__).parent.parent / "configs" / "addition.yaml"
TINY = "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}"
SMALL = "model.architecture={layers: 2, width: 64, heads: 4, kv_heads: 2, head_dim: 16, mlp: 192}"
LARGE = "model.architecture={layers: 4, width: 256, heads: 8, kv_heads: 4, head_dim: 32, mlp: 768}"
COMMON = (
    "run.overwrite=true",
    "warm_start.steps=0",
    "trainer.warmup_steps=0",
    "data.addition.eval_size=8",
    "eval.every=0",
    "checkpoint.every=0",
    "metrics={peak_flops: 1.0e9, tensorboard: false, samples_every: 0}",
    "sampler={max_length: 144, max_new_tokens: 128, prefix_cache: false}",
    "trainer.micro_batch_tokens=2304",
    "algorithm={groups_per_step: 8, group_size: 8}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table."""

    name: str
    overrides: tuple[str, ...]
    lengths: tuple[int, ...]  # of answers, dealt out at random; empty: what the model samples
    device: Dictated | None = None  # None: computed
    score_s: float = 0.0


def processes(count: int) -> tuple[str, ...]:
    """Return overrides for samplers in processes of their own."""
    return (f"mesh.samplers={count}", f"remote.min_samplers={count}", "mesh.samplers_in=processes")


TAIL = tuple(long_tail(512, median=24, most=128))
EVEN = (40, 44, 48, 52, 56)
SETTINGS = (
    Setting(
        name="balanced",
        overrides=(TINY, "sampler.slots=32", "staleness.max_staleness=1"),
        lengths=EVEN,
        device=Dictated(update_s=1.35),
    ),
    Setting(
        name="in turns",
        overrides=(TINY, "sampler.slots=32", "staleness.max_staleness=0"),
        lengths=EVEN,
        device=Dictated(update_s=0.9),
    ),
    Setting(
        name="long tail, in turns",
        overrides=(TINY, "sampler.slots=32", "staleness.max_staleness=0"),
        lengths=TAIL,
        device=Dictated(update_s=0.9),
    ),
    Setting(
        name="long tail, staleness 4",
        overrides=(TINY, "sampler.slots=32", "staleness.max_staleness=4"),
        lengths=TAIL,
        device=Dictated(update_s=0.9),
    ),
    Setting(
        name="long tail, overtaking",
        overrides=(TINY, "sampler.slots=32", "staleness={max_staleness: 2, lookahead: 6}"),
        lengths=TAIL,
        device=Dictated(update_s=0.6),
    ),
    Setting(
        name="slow scorer",
        overrides=(TINY, "sampler.slots=64", "staleness.max_staleness=1"),
        lengths=TAIL,
        device=Dictated(update_s=0.6),
        score_s=1.2,
    ),
    Setting(
        name="two samplers",
        overrides=(TINY, "sampler.slots=32", "staleness.max_staleness=1", "mesh.samplers=2"),
        lengths=TAIL,
        device=Dictated(update_s=0.45, token_s=6e-05),
    ),
    Setting(
        name="two processes",
        overrides=(TINY, "sampler.slots=32", "staleness.max_staleness=1", *processes(2)),
        lengths=TAIL,
        device=Dictated(update_s=0.45, token_s=6e-05),
    ),
    Setting(
        name="two processes, in turns",
        overrides=(TINY, "sampler.slots=32", "staleness.max_staleness=0", *processes(2)),
        lengths=EVEN,
        device=Dictated(update_s=0.6),
    ),
    Setting(
        name="four processes",
        overrides=(TINY, "sampler.slots=16", "staleness.max_staleness=2", *processes(4)),
        lengths=TAIL,
        device=Dictated(step_s=0.012, update_s=0.9),
    ),
    Setting(
        name="few slots, small groups",
        overrides=(
            TINY,
            "sampler.slots=16",
            "staleness.max_staleness=1",
            "algorithm={groups_per_step: 12, group_size: 4}",
        ),
        lengths=TAIL,
        device=Dictated(update_s=0.6),
    ),
    Setting(
        name="trainer is slower",
        overrides=(TINY, "sampler.slots=64", "staleness.max_staleness=1"),
        lengths=TAIL,
        device=Dictated(update_s=0.9, token_s=0.0006),
    ),
    Setting(
        name="small model",
        overrides=(SMALL, "sampler.slots=64", "staleness.max_staleness=1"),
        lengths=TAIL,
    ),
    Setting(
        name="small model, in turns",
        overrides=(SMALL, "sampler.slots=64", "staleness.max_staleness=0"),
        lengths=TAIL,
    ),
    Setting(
        name="small model, staleness 4",
        overrides=(SMALL, "sampler.slots=16", "staleness.max_staleness=4"),
        lengths=EVEN,
    ),
    Setting(
        name="3 M model",
        overrides=(LARGE, "sampler.slots=64", "staleness.max_staleness=1"),
        lengths=TAIL,
    ),
)
HELD_UP = 5.0
"""A step that takes so many times the median was delayed by something else."""
COMPARED = (
    "trainer_busy_share", "sampler_busy_share", "slot_occupancy", "trained_tokens_per_s",
    "staleness_mean",
)  # fmt: skip
COMPILED_S = 0.25
"""A round with a program that comes from the cache, and takes less than this, disturbs nothing."""
SLEPT_SAMPLER = Path(__file__).parent / "slept_sampler.py"


class Disturbed(Exception):
    """Too few steps of a run can be measured."""


def main() -> None:
    """Measure, simulate and print."""
    args = _options()
    force_cpu_devices(3)
    jax.devices()  # before a run asks for as many as it needs itself
    logging.getLogger("jaxrl_async").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for setting in SETTINGS:
            if setting.name not in args.settings:
                continue
            try:
                rows += compare(setting, Path(folder), args)
                message = ", ".join(
                    f"{r['number']} {r['error_percent']:+.1f} %" for r in rows[-len(COMPARED) :]
                )
            except Disturbed as error:
                message = f"left out: {error}"
            print(f"{setting.name}: {message}", file=sys.stderr)
    if not rows:
        raise SystemExit("no setting could be measured")
    report("simulate", rows, args)
    if args.markdown:
        print(markdown(rows))


def compare(setting: Setting, folder: Path, args: argparse.Namespace) -> list[Row]:
    """Return one row for each compared number. Raises Disturbed."""
    run(setting, folder, args.warm_up + 4)  # compiles
    runs = [run(setting, folder, args.steps) for _ in range(args.repeats)]
    predictions = [predicted(r, args) for r in runs]
    seen = [measured(r, args.warm_up) for r in runs]
    return [
        {
            "setting": setting.name,
            "device": "slept" if setting.device else "computed",
            "number": name,
            **_compared([t[name] for t in predictions], [s[name] for s in seen]),
            "left_out": sum(len(disturbed(r, args.warm_up)) for r in runs),
        }
        for name in COMPARED
    ]


def markdown(rows: Sequence[Row]) -> str:
    """Format the table as Markdown: predicted / measured, and the shares' largest error."""
    lines = [
        "| setting | device | trainer busy | sampler busy | slots in use | tokens/s | staleness "
        "| error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for start in range(0, len(rows), len(COMPARED)):
        of_setting = rows[start : start + len(COMPARED)]
        *shares, rate, staleness = of_setting
        cells = [f"{r['predicted']:.2f} / {r['measured']:.2f}" for r in shares]
        cells.append(f"{rate['predicted']:,.0f} / {rate['measured']:,.0f}")
        cells.append(f"{staleness['predicted']:.2f} / {staleness['measured']:.2f}")
        worst = max((r["error_percent"] for r in shares), key=abs)
        names = [rate["setting"], rate["device"]]
        lines.append(f"| {' | '.join([*names, *cells, f'{worst:+.1f} %'])} |")
    return "\n".join(lines)


def _compared(predictions: Sequence[float], seen: Sequence[float]) -> Row:
    errors = [100 * (p / m - 1 if m else p) for p, m in zip(predictions, seen, strict=True)]
    return {
        "predicted": statistics.median(predictions),
        "measured": statistics.median(seen),
        "least": min(seen),
        "most": max(seen),
        "error_percent": statistics.median(errors),
    }


# ---- a run, and what is recorded of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one sampler did between two looks at its queue."""

    busy_s: float
    decode_s: float  # of that, from the block's dispatch to its end
    steps: int
    rows: int
    prefill_tokens: int
    swap_s: float  # 0: no swap
    making: range  # versions that the trainer was making meanwhile
    compiled: bool  # a program was compiled meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run."""

    config: Config
    lines: list[dict[str, Any]]  # metrics.jsonl
    rounds: list[Round]
    lengths: list[int]  # of the answers trained on, tokens
    batch_tokens: list[int]  # of each update, prompts included
    scored_s: list[float]  # of each group
    publish_wait_s: dict[int, float]  # by step: for samplers to take the update before


def run(setting: Setting, folder: Path, steps: int) -> Run:
    """Run the whole job; equal samplers of one process compile once."""
    overrides = [*COMMON, f"run.dir={folder}", f"run.steps={steps}", *setting.overrides]
    config = load(CONFIG, overrides)
    notes = Run(
        config=config,
        lines=[],
        rounds=[],
        lengths=[],
        batch_tokens=[],
        scored_s=[],
        publish_wait_s={},
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        made = stack.enter_context(injected(lambda parts: prepare(parts, setting, notes)))
        took = stack.enter_context(timed_blocks(setting.device))
        noted = noting(DecodeLoop.round, notes.rounds, took, lambda _: made[0].trainer.version)
        stack.enter_context(patch.object(DecodeLoop, "round", noted))
        if config.mesh.remote:
            stack.enter_context(slept_samplers(setting.device, folder))
        loop.train(config)
    for file in folder.glob("*.json"):
        lines = json.loads(file.read_text(encoding="utf-8"))
        ahead = config.staleness.max_staleness  # versions that the trainer may be before a sampler
        for line in lines:
            first, end = line["making"]
            notes.rounds.append(Round(**line | {"making": range(first, end + ahead)}))
        file.unlink()
    return replace(notes, lines=read_lines(folder / "addition" / "metrics.jsonl"))


@contextlib.contextmanager
def slept_samplers(device: Dictated | None, folder: Path) -> Iterator[None]:
    """Let the run's sampler processes be benchmarks/slept_sampler.py."""
    assert device is not None, "samplers in processes are measured with a forced device"
    start = subprocess.Popen

    def slept(command: Any, *, env: Any = None, **more: Any) -> Any:
        if command[1:3] != ["-m", "jaxrl_async.sample"]:
            return start(command, env=env, **more)
        more["env"] = env | {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "SLEPT_DEVICE": json.dumps(asdict(device)),
            "SLEPT_ROUNDS": str(folder),
        }
        return start([command[0], str(SLEPT_SAMPLER), *command[3:]], **more)

    with patch.object(subprocess, "Popen", slept):
        yield


def prepare(parts: Parts, setting: Setting, notes: Run) -> None:
    """Force lengths and the scorer's and the update's time; record what the calibration needs."""
    rollouts: Any = parts.rollouts
    learner: Any = parts.trainer.learner
    channel: Any = parts.channel
    if setting.lengths:
        rollouts._generate = Forced(parts.sampler, setting.lengths)
    score, learn, wait_taken = rollouts._scorer, learner.learn, channel.wait_taken

    async def slow_score(*args: Any) -> Any:
        start = time.perf_counter()
        if setting.score_s:
            await asyncio.sleep(setting.score_s)
        scores = await score(*args)
        notes.scored_s.append(time.perf_counter() - start)
        return scores

    def slow_learn(groups: Any, *args: Any) -> Any:
        start = time.perf_counter()
        stats = learn(groups, *args)
        notes.lengths.extend(e.num_drawn for g in groups for e in g.episodes)
        tokens = sum(len(e.token_ids) for g in groups for e in g.episodes)
        notes.batch_tokens.append(tokens)
        if setting.device is not None:
            sleep_until(start + setting.device.update_s + tokens * setting.device.token_s)
        return stats

    def timed_wait() -> None:
        start = time.perf_counter()
        wait_taken()
        step = parts.trainer.version
        waited_s = notes.publish_wait_s.get(step, 0.0)
        notes.publish_wait_s[step] = waited_s + time.perf_counter() - start

    rollouts._scorer, learner.learn, channel.wait_taken = slow_score, slow_learn, timed_wait


class Forced:
    """ports.Generate with forced lengths by group and member, the same in every run."""

    def __init__(self, inner: Any, lengths: Sequence[int]) -> None:
        self._inner, self._lengths = inner, lengths
        self.seed = None  # it continues no Partial

    def progress(self) -> tuple[Any, ...]:
        """Return nothing: no request is saved here."""
        return ()

    def submit_many(self, requests: Sequence[Any]) -> Any:
        """Queue all requests, each with its forced length."""
        return self._inner.submit_many([replace(r, forced_length=self._of(r)) for r in requests])

    def _of(self, request: Any) -> int:
        index = np.random.default_rng([*request.key, 7]).integers(len(self._lengths))
        return self._lengths[int(index)]


def noting(
    play: Callable[[Any, Any], bool],
    rounds: list[Round],
    took: dict[int, float],
    version: Callable[[Any], int],
) -> Callable[[Any, Any], bool]:
    """DecodeLoop.round, written down."""

    def noted(loop: Any, batch: Any) -> bool:
        before, programs, first = loop.stats, batch.engine.num_compiled, version(loop)
        came = play(loop, batch)
        after = loop.stats
        steps = (after.slot_steps - before.slot_steps) // batch.engine.spec.slots
        busy_s = after.busy_s - before.busy_s
        if busy_s > 0:
            rounds.append(
                Round(
                    busy_s=busy_s,
                    decode_s=took.pop(id(batch), 0.0),
                    steps=steps,
                    rows=(after.row_steps - before.row_steps) // max(steps, 1),
                    prefill_tokens=after.prefill_tokens - before.prefill_tokens,
                    swap_s=after.swap_pause_s if after.swaps > before.swaps else 0.0,
                    making=range(first + 1, version(loop) + 2),
                    compiled=batch.engine.num_compiled > programs,
                )
            )
        return came

    return noted


# ---- from a run to the simulation's input, and to the measured results


def calibrated(found: Run, warm_up: int) -> Pipeline:
    """Derive the simulation's input from a run's times and lengths."""
    config, lines = found.config, found.lines[1:-1]  # the first and the last step evaluate
    bad = disturbed(found, warm_up)
    updates = [x for x in lines[warm_up:] if x["step"] not in bad]
    sequences = config.algorithm.groups_per_step * config.algorithm.group_size
    tokens = np.array([found.batch_tokens[x["step"] - 1] for x in updates], np.float64)
    answers = np.array([x["train/tokens"] for x in updates])
    train_s = np.array([x["time/train_s"] for x in updates])
    slope, start = np.polyfit(tokens, train_s, 1)
    update_token_s = float(slope) if slope > 0 and start > 0 else 0.0
    publish_s = [x["time/publish_s"] - found.publish_wait_s[x["step"]] for x in updates]
    ends = {x["step"]: x["time/elapsed_s"] for x in lines}
    reports_s = [
        x["time/elapsed_s"] - ends[x["step"] - 1] - x["time/step_s"]
        for x in updates
        if x["step"] - 1 in ends
    ]
    transfers_s = [x["weights/transfer_s"] for x in updates if "weights/transfer_s" in x]
    tree = TransferTree(
        num_bytes=0.0,
        trainer_bytes_per_s=1.0,
        sampler_bytes_per_s=1.0,
        fanout=config.mesh.samplers,
        offer_s=statistics.median(transfers_s),
    )
    return Pipeline(
        tree=tree if config.mesh.remote else None,
        samplers=calibrated_samplers(found, bad, warm_up),
        answer_tokens=Histogram.of(found.lengths),
        prompt_tokens=round(float((tokens - answers).mean()) / sequences),
        group_size=config.algorithm.group_size,
        groups_per_step=config.algorithm.groups_per_step,
        max_staleness=config.staleness.max_staleness,
        lookahead=config.staleness.lookahead,
        score_s=Histogram.of(found.scored_s),
        update_s=float(train_s.mean() - update_token_s * tokens.mean()),
        update_token_s=update_token_s,
        publish_s=max(0.0, statistics.mean(publish_s)),
        transfer_s=min(transfers_s),
        report_s=max(0.0, statistics.mean(reports_s)),
    )


def calibrated_samplers(found: Run, bad: set[int], warm_up: int) -> Samplers:
    """Split the time of rounds into a block's steps, a prefill and the rest; the means add up to
    the time of all rounds."""
    section, mesh = found.config.sampler, found.config.mesh
    assert section.slots is not None
    rounds = [r for r in found.rounds if r.making[0] > warm_up and bad.isdisjoint(r.making)]
    by_rows: dict[int, list[Round]] = {}
    for one in rounds:
        if one.steps:
            by_rows.setdefault(one.rows, []).append(one)
    rest_s: dict[bool, list[float]] = {True: [], False: []}  # by whether there was a prefill
    for one in rounds:
        if one.steps:
            rest_s[one.prefill_tokens > 0].append(one.busy_s - one.decode_s - one.swap_s)
    plain_s, prefilled_s = (np.mean(rest_s[key] or [0.0]) for key in (False, True))
    return Samplers(
        count=mesh.samplers,
        slots=section.slots,
        reserve=int(section.slots * section.reserve),
        block=section.block,
        prefill_chunk=section.prefill_chunk,
        rows=tuple(sorted(by_rows)),
        step_s=tuple(
            sum(r.decode_s for r in same) / sum(r.steps for r in same)
            for _, same in sorted(by_rows.items())
        ),
        block_s=float(plain_s),
        prefill_s=max(0.0, float(prefilled_s - plain_s)),
        swap_s=float(np.mean([r.swap_s for r in rounds if r.swap_s])),
    )


def predicted(found: Run, args: argparse.Namespace) -> dict[str, float]:
    """Predict by simulation from a run's times; return medians over seeds."""
    pipeline = calibrated(found, args.warm_up)
    results = [
        simulate(pipeline, updates=args.steps - 1, warm_up=args.warm_up, seed=seed)
        for seed in range(args.seeds)
    ]
    return {name: statistics.median(getattr(t, name) for t in results) for name in COMPARED}


def measured(found: Run, warm_up: int) -> dict[str, float]:
    """Merge the run's own metrics over the steps after the warm-up."""
    lines, bad = found.lines[1:-1], disturbed(found, warm_up)
    pairs = [(a, b) for a, b in pairwise(lines[warm_up - 1 :]) if b["step"] not in bad]
    after = [b for _, b in pairs]
    walls = np.array([b["time/elapsed_s"] - a["time/elapsed_s"] for a, b in pairs])

    def column(key: str) -> np.ndarray:
        return np.array([x[key] for x in after])

    busy, step_s = column("sampler/busy_share"), column("time/step_s")
    tokens = column("throughput/generated_tokens_per_s") * walls
    decoded = tokens > 0
    slot_steps = tokens[decoded] / column("sampler/slot_occupancy")[decoded]
    return {
        "trainer_busy_share": float(np.average(1 - column("trainer/idle_share"), weights=step_s)),
        "sampler_busy_share": float(np.average(busy, weights=walls)),
        "slot_occupancy": float(tokens.sum() / slot_steps.sum()),
        "trained_tokens_per_s": float(column("train/tokens").sum() / walls.sum()),
        "staleness_mean": float(
            np.average(column("staleness/mean"), weights=column("train/tokens"))
        ),
    }


def disturbed(found: Run, warm_up: int) -> set[int]:
    """Return the steps to leave out: those with a compile or a delay, and those after them that
    train on data sampled meanwhile."""
    lines = found.lines[1:-1]
    slow = [r for r in found.rounds if r.compiled and r.busy_s - r.decode_s > COMPILED_S]
    compiled = {version for r in slow for version in r.making}
    walls = {
        b["step"]: b["time/elapsed_s"] - a["time/elapsed_s"]
        for a, b in pairwise(lines[warm_up - 1 :])
    }
    usual_s = statistics.median(walls.values())
    held_up = {n for n, wall_s in walls.items() if wall_s > HELD_UP * usual_s}
    catching_up = range(found.config.staleness.max_staleness + 2)
    bad = {n + later for n in compiled | held_up for later in catching_up} & walls.keys()
    if len(bad) == len(walls):
        raise Disturbed(
            f"all {len(walls)} steps were disturbed: something else keeps the machine "
            "busy, or programs were compiled. Raise --warm-up and --steps, or wait."
        )
    return bad


def _options() -> argparse.Namespace:
    words = argparse.ArgumentParser(description=__doc__)
    names = [s.name for s in SETTINGS]
    words.add_argument("--quick", action="store_true", help="smoke test: one setting, few updates")
    words.add_argument("--settings", nargs="+", choices=names, default=names)
    words.add_argument("--steps", type=int, default=50, help="updates in each run")
    words.add_argument("--warm-up", type=int, default=10, help="of those, not measured")
    words.add_argument("--repeats", type=int, default=2, help="measured runs of each setting")
    words.add_argument("--seeds", type=int, default=5, help="simulations; the median counts")
    words.add_argument("--markdown", action="store_true", help="the table as Markdown, too")
    words.add_argument("--json", nargs="?", const="-", metavar="FILE", help="as the others")
    args = words.parse_args()
    if args.quick:
        args.settings, args.repeats, args.seeds = ["in turns"], 1, 1
        args.steps, args.warm_up = 16, 4
    return args


if __name__ == "__main__":
    main()
