"""Inject each fault into a tiny run: measure the outcome, the time to recover and what is lost.

A run of two samplers on the embedded task, once for each fault (`--faults NAME ...`: only those),
which strikes halfway. Prints the outcome, the median time between two steps, the longest time
between two steps from the fault on (if the run is stopped: until it has ended), and what the
metrics count as survived, redone or given up.
"""

import argparse
import contextlib
import io
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Row, force_cpu_devices, report

from jaxrl_async.config.load import load
from jaxrl_async.errors import JaxrlError
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.ports.rollout import Reply
from jaxrl_async.run import loop, threads
from jaxrl_async.run.assemble import Parts
from jaxrl_async.testing import fault_injection as faults
from jaxrl_async.testing.fault_injection import Fault, Hits, injected

CONFIG = Path(__file__).parent.parent / "configs" / "addition.yaml"
SETTINGS = (
    "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition.eval_size=8",
    "warm_start.steps=0",
    "sampler.slots=16",
    "sampler.max_new_tokens=16",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=4",
    "trainer.micro_batch_tokens=512",
    "eval.every=0",
    "checkpoint.every=0",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
    "mesh.samplers=2",
    "faults={backoff_s: 1.0, scorer_timeout_s: 1, env_timeout_s: 1, watchdog_s: 60}",
)
LOST = ("redone_requests", "failed_groups")
"""Counters of work that was redone or given up."""


async def two_rows() -> Reply:
    """Return a reply of the wrong shape."""
    return Reply(token_ids=np.zeros((2, 2), np.int32), done=True)


BLOCKS, SCORES, REPLIES, COMPLETIONS, STEPS = 1, 4, 1, 16, 1
"""Least calls in a step: of a sampler, the scorer, environments, the router, the rest."""
FAULTS: dict[str, tuple[Callable[[Hits], Fault], int]] = {
    "sampler dies": (faults.sampler_dies, BLOCKS),
    "sampler hangs": (faults.sampler_hangs, BLOCKS),
    "log-probs are NaN": (faults.completions_are_nan, COMPLETIONS),
    "scorer raises": (faults.scorer_raises, SCORES),
    "scorer hangs": (faults.scorer_hangs, SCORES),
    "scores of the wrong number": (lambda hits: faults.scores_are(hits, lambda s: s[:-1]), SCORES),
    "environment hangs": (lambda hits: faults.env_replies(hits, faults.forever), REPLIES),
    "reply of the wrong shape": (lambda hits: faults.env_replies(hits, two_rows), REPLIES),
    "transfer fails": (faults.transfer_fails, STEPS),
    "transfer is torn": (faults.transfer_tears, STEPS),
    "trainer out of memory": (faults.out_of_memory, STEPS),
    "update hangs": (faults.trainer_stalls, STEPS),
}


def main() -> None:
    """Measure and print."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--quick", action="store_true", help="smoke test: two faults, short runs")
    words.add_argument("--faults", nargs="+", choices=sorted(FAULTS), default=list(FAULTS))
    words.add_argument("--steps", type=int, default=30, help="updates in each run")
    words.add_argument("--json", nargs="?", const="-", metavar="FILE", help="as the others")
    args = words.parse_args()
    if args.quick:
        args.steps, args.faults = 6, ["sampler dies", "scorer raises"]
    force_cpu_devices(3)
    logging.getLogger("jaxrl_async").setLevel(logging.CRITICAL)
    threads.JOIN_S = 5.0
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), args.steps)  # compile
        report("faults", [measure(name, Path(folder), args.steps) for name in args.faults], args)


def train(folder: Path, steps: int) -> None:
    """Run the job once. Raises kinds of JaxrlError."""
    settings = [*SETTINGS, f"run.dir={folder}", f"run.steps={steps}", "run.overwrite=true"]
    with contextlib.redirect_stdout(io.StringIO()):
        loop.train(load(CONFIG, settings))


def measure(name: str, folder: Path, steps: int) -> Row:
    """Measure one fault's row."""
    fault, per_step = FAULTS[name]
    hits, trained_at = Hits(after=per_step * steps // 2), list[float]()
    outcome = "survived"
    with injected(fault(hits), _timed(trained_at)):
        try:
            train(folder, steps)
        except JaxrlError as error:
            outcome = f"stopped: {type(error).__name__}"
            trained_at.append(time.monotonic())
    assert hits.at, f"{name}: the run ended before it"
    gaps = np.diff(trained_at)
    lines = read_lines(folder / "addition" / "metrics.jsonl")
    counts, saved = _counts(lines), (folder / "addition" / "checkpoints").glob("[0-9]*")
    unsaved = int(lines[-1]["step"]) - max((int(path.name) for path in saved), default=0)
    lost = [_words(counts, lambda key: key in LOST), f"{unsaved} updates" if unsaved else ""]
    return {
        "fault": name,
        "outcome": outcome,
        "step_s": float(np.median(gaps)),
        "longest_s": float(gaps[np.array(trained_at[1:]) >= hits.at[0]].max()),
        "counted": _words(counts, lambda key: key not in LOST) or "in the error",
        "lost": ", ".join(filter(None, lost)) or "nothing",
    }


def _timed(trained_at: list[float]) -> Fault:
    """Inject no fault; record when each step was reported."""

    def fault(parts: Parts) -> None:
        learner: Any = parts.trainer.learner
        learn = learner.learn

        def timed(*args: Any) -> Any:
            stats = learn(*args)
            trained_at.append(time.monotonic())
            return stats

        learner.learn = timed

    return fault


def _counts(lines: list[dict[str, Any]]) -> dict[str, int]:
    keys = {k for line in lines for k in line if k.startswith("faults/")}
    sums = {k.removeprefix("faults/"): int(sum(x.get(k, 0) for x in lines)) for k in sorted(keys)}
    return {k: n for k, n in sums.items() if n}


def _words(counts: dict[str, int], selects: Callable[[str], bool]) -> str:
    return ", ".join(f"{n} {key.replace('_', ' ')}" for key, n in counts.items() if selects(key))


if __name__ == "__main__":
    main()
