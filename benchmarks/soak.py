"""Run for long with random faults: do memory, threads, files and device buffers stay flat?

    python benchmarks/soak.py [--minutes 60] [--seed 0] [--job NAME] [--curves FILE.csv]

A tiny decoder and two samplers, in this process, with evaluations and checkpoints, while faults
strike about every twenty seconds: a sampler dies, a completion is not finite, a scorer fails, the
number of scores is wrong, a transfer cannot be started or arrives torn. Beside these,

    addition   (the embedded task) the user's reward raises, and hangs in its process
    functions  async programs leave a child process or a call behind, swallow their cancellation,
               hang, exit, send what is too long, return what is no reward
    commands   the same of commands; they also detach a child, ignore signals, print megabytes
    served     the server of environments hangs, closes, sends nonsense or too much, and is killed
    all        each of these for a quarter of the time, in processes of their own

A thread that hangs is left behind with all that it holds: hangs are where they can be ended.
Each resource is read nine hundred times; the means of each minute are printed, and written to
--curves while the run lasts. The slope is that of a line through the means of twenty equal parts of
the last two thirds, with a 95 % interval (Student's t). `flat`: the interval contains 0, or the
slope adds less than a hundredth of the level in an hour. Audited, and counted by fault, at the end.
A job whose groups mostly fail measures its failures alone, and ends with exit code 1.
"""

import argparse
import csv
import ctypes
import gc
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path

import jax
import numpy as np
from common import Row, force_cpu_devices, report, table
from faults import CONFIG, SETTINGS

from jaxrl_async.audit import audit_run
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.host import limit_arenas
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run import loop
from jaxrl_async.testing import fault_injection as faults
from jaxrl_async.testing.fault_injection import Hits, injected

READINGS = 900
PARTS = 20
T_95 = 2.101
"""Student's t, 95 %, for PARTS - 2 degrees of freedom."""
COMPILED: list[str] = []
"""Names of compiled programs. A new prompt length or batch size compiles one more, which stays in
memory. The number of shapes is bounded, and prompts here have one length, so that the last program
comes early; late ones are named at the end."""
MEAN_S = 60.0
"""Mean time between two strikes of one fault, in addition to SOONEST_S."""
SOONEST_S = 5.0


class AtRandom(Hits):
    """Strikes repeatedly after random times, but not twice in quick succession: a transfer torn
    twice, for example, ends the run, as it should."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._next = time.monotonic() + self._rng.expovariate(1 / MEAN_S)

    def strikes(self) -> bool:
        """Return whether the fault strikes this call."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return False
            self._next = now + SOONEST_S + self._rng.expovariate(1 / MEAN_S)
            self.at.append(now)
            return True


FAULTS = {
    "sampler dies": faults.sampler_dies,
    "log-probs are NaN": faults.completions_are_nan,
    "scorer raises": faults.scorer_raises,
    "scores of the wrong number": lambda hits: faults.scores_are(hits, lambda s: s[:-1]),
    "transfer fails": faults.transfer_fails,
    "transfer is torn": faults.transfer_tears,
}


GROUPS = 4
"""Groups of an update, in every job."""
MOST_FAILED = 0.5
"""Largest share of a job's groups that may fail, of those learned from and those that failed: about
one episode in 25 misbehaves, in groups of four."""
MISBEHAVING = Path(__file__).with_name("misbehaving.py")
EVERY = (
    "staleness.max_staleness=2",
    "metrics.samples_every=0",
    "faults={backoff_s: 0.2, sampler_restarts: 1000000, max_failures: 1000, watchdog_s: 600}",
)
GAMES = (
    "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start.steps=0",
    "sampler.slots=16",
    f"algorithm={{group_size: 4, groups_per_step: {GROUPS}}}",
    "trainer={micro_batch_tokens: 512, warmup_steps: 1}",
    "eval.every=20",
    "checkpoint={every: 40, keep: 2}",
    "metrics={peak_flops: 1e9, tensorboard: false}",
    "mesh.samplers=2",
    "env={program_timeout_s: 10, program_idle_s: 10}",
    "faults.env_timeout_s=30",
)
JOBS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "addition": (
        CONFIG,
        (
            *SETTINGS,
            "data.addition.digits=1",
            "eval.every=50",
            "checkpoint={every: 100, keep: 2}",
            f"reward={{function: {MISBEHAVING}:reward, processes: 1, timeout_s: 2}}",
        ),
    ),
    **{
        name: (CONFIG.with_name("guess_number.yaml"), (*GAMES, f"task={MISBEHAVING}:{name}"))
        for name in ("functions", "commands", "served")
    },
}
"""Configuration and settings of each job."""
AWAY_S = 5.0
"""Longest time for which the server of environments is away, seconds."""


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--quick", action="store_true", help="smoke test: twenty seconds")
    words.add_argument("--minutes", type=float, default=60.0)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--job", choices=[*JOBS, "all"], default="addition")
    words.add_argument("--without-faults", action="store_true", help="the run alone")
    words.add_argument("--curves", metavar="FILE", help="write each minute's means, as CSV")
    words.add_argument("--json", nargs="?", const="-", metavar="FILE", help="as the others")
    args = words.parse_args()
    minutes = 0.3 if args.quick else args.minutes
    if args.job == "all":
        rows, failed = rows_of_all(args)
        report("soak", rows, args)
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
    limit_arenas()  # as a run does, but before the thread that reads
    force_cpu_devices(3)
    logging.getLogger("jaxrl_async").setLevel(logging.CRITICAL)
    jax.monitoring.register_event_duration_secs_listener(count_compiled)
    struck_by = () if args.without_faults else FAULTS
    hits = {name: AtRandom(args.seed + i) for i, name in enumerate(struck_by)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if args.job == "served":
            stack.enter_context(server_that_dies(random.Random(args.seed)))
        config = configuration(args.job, folder)
        root = Path(folder) / "soak"
        watch = Watch(root / "metrics.jsonl", minutes * 60, args.curves)
        watch.start()
        broken = [FAULTS[name](hit) for name, hit in hits.items()]
        with injected(*broken), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            loop.train(config)
        watch.join()
        lines = read_lines(root / "metrics.jsonl")
        found = audit_run(root)
    struck = ", ".join(f"{len(hit.at)} x {name}" for name, hit in hits.items()) or "no faults"
    print(table(watch.curve), file=sys.stderr)
    print(
        f"# {args.job}: {minutes:g} minutes, {lines[-1]['step']} updates; {struck}", file=sys.stderr
    )
    print(f"# counted: {counted(lines)}", file=sys.stderr)
    share = failed_share(lines)
    print(f"# {share:.0%} of the groups failed", file=sys.stderr)
    verdict = f"# audit: {len(found.problems)} problems, dropped {dict(found.dropped)}"
    print(verdict, file=sys.stderr)
    first, *_, last = map(int, watch.late["programs compiled"])
    print(f"# compiled late: {', '.join(COMPILED[first:last]) or 'nothing'}", file=sys.stderr)
    report("soak", [{**row, "job": args.job} for row in watch.rows()], args)
    if share > MOST_FAILED:
        sys.exit(f"{args.job}: {share:.0%} of the groups failed: correct {MISBEHAVING.name}")


def rows_of_all(args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Run each job for its share of the time in a process of its own; return all rows, and the jobs
    that failed."""
    rows: list[Row] = []
    failed: list[str] = []
    for name in JOBS:
        command = [sys.executable, __file__, "--job", name, "--seed", str(args.seed), "--json"]
        command += ["--minutes", str(0.3 if args.quick else args.minutes / len(JOBS))]
        if args.without_faults:
            command.append("--without-faults")
        if args.curves:
            file = Path(args.curves)
            command += ["--curves", str(file.with_name(f"{file.stem}-{name}{file.suffix}"))]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        rows += json.loads(done.stdout)["rows"] if done.stdout else []
        failed += [name] if done.returncode else []
    return rows, failed


def counted(lines: list[dict[str, float]]) -> str:
    """Return what the metrics count as faults, in words."""
    sums: Counter[str] = Counter()
    for line in lines:
        sums.update({k: int(v) for k, v in line.items() if k.startswith("faults/") and v})
    return ", ".join(f"{n} {key.removeprefix('faults/')}" for key, n in sorted(sums.items()))


def failed_share(lines: list[dict[str, float]]) -> float:
    """Return which share of the groups of a run failed, by its metrics."""
    failed = sum(line.get("faults/failed_groups", 0.0) for line in lines)
    learned = GROUPS * sum("train/grad_norm" in line for line in lines)
    return float(failed / max(failed + learned, 1.0))


@contextmanager
def server_that_dies(rng: random.Random) -> Iterator[None]:
    """Have a server of environments that is killed about once a minute, and comes back."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    os.environ["SOAK_SERVER"] = f"http://127.0.0.1:{port}"
    over = threading.Event()

    def keep() -> None:
        while not over.is_set():
            command = [sys.executable, str(MISBEHAVING), "serve", str(port)]
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
                over.wait(SOONEST_S + rng.expovariate(1 / MEAN_S))
                process.kill()
            over.wait(rng.uniform(0.0, AWAY_S))

    thread = threading.Thread(target=keep, name="server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def count_compiled(event: str, duration_secs: float, **about: str | int) -> None:
    """Listen to the durations that JAX reports, and count compiles."""
    if "backend_compile" in event:
        COMPILED.append(str(about.get("fun_name", "?")))


def configuration(job: str, folder: str) -> Config:
    """Return a job's configuration; it runs until it is stopped."""
    config, settings = JOBS[job]
    run_setting = f"run={{name: soak, dir: {folder}, steps: 1000000000, overwrite: false}}"
    return load(config, [*settings, *EVERY, run_setting])


class Watch(threading.Thread):
    """Reads the resources until the time is over, then asks the run to stop."""

    def __init__(self, metrics: Path, seconds: float, curves: str | None = None) -> None:
        """Prepare to read.

        Args:
            metrics: the run's; the time counts from its first line, programs are compiled before.
            seconds: of the run.
            curves: a file for the means of each minute.
        """
        super().__init__(daemon=True)
        self._metrics = metrics
        self._seconds, self._curves = seconds, None if curves is None else Path(curves)
        self._names: tuple[str, ...] = ()
        self._values = array("d")  # one block of memory: the readings must not be what grows

    def run(self) -> None:
        while not read_lines(self._metrics):
            time.sleep(0.2)
        start = time.monotonic()
        while (now := time.monotonic() - start) < self._seconds:
            found = {"seconds": now, **resources()}
            minutes = int(now / 60) - int(self._values[-len(found)] / 60) if self._values else 0
            if minutes and self._curves is not None:
                self._write(self._curves)
            self._names = tuple(found)
            self._values.extend(found.values())
            time.sleep(self._seconds / READINGS)
        if self._curves is not None:
            self._write(self._curves)
        os.kill(os.getpid(), signal.SIGINT)

    def _write(self, file: Path) -> None:
        """Write the curve up to now."""
        with file.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([list(self.curve[0]), *(r.values() for r in self.curve)])

    @property
    def curve(self) -> list[Row]:
        """Return the means of each minute, by resource."""
        rows = self._readings
        minute = (rows[:, 0] // 60).astype(int)
        means = [(m, rows[minute == m].mean(axis=0)) for m in np.unique(minute)]
        return [
            {
                "minute": int(m),
                **{k: float(v) for k, v in zip(self._names[1:], mean[1:], strict=True)},
            }
            for m, mean in means
        ]

    def rows(self) -> list[Row]:
        """Return one row for each resource, over the last two thirds."""
        late = self.late
        hours = late.pop("seconds") / 3600
        return [slope(name, hours, values) for name, values in late.items()]

    @property
    def late(self) -> dict[str, np.ndarray]:
        """Return the readings of the last two thirds, by resource, and their times in seconds."""
        rows = self._readings
        counts = rows[:, 0] > self._seconds / 3
        return dict(zip(self._names, rows[counts].T, strict=True))

    @property
    def _readings(self) -> np.ndarray:
        return np.array(self._values).reshape(-1, len(self._names))


def children() -> int:
    """Return how many processes this one has, those that its children left to it included."""
    found = 0
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # that thread has ended
            found += len(file.read_text(encoding="utf-8").split())
    return found


def resources() -> dict[str, float]:
    """Read the resources of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    arrays = jax.live_arrays()
    return {
        "resident memory, MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        **allocated(),
        "Python's blocks": float(sys.getallocatedblocks()),
        "threads": float(threading.active_count()),
        "processes": float(children()),
        "open files": float(len(os.listdir("/proc/self/fd"))),
        "device buffers": float(len(arrays)),
        "device buffers, MB": sum(a.nbytes for a in arrays) / 1e6,
        "programs compiled": float(len(COMPILED)),
    }


class MallInfo(ctypes.Structure):
    """The struct that glibc's mallinfo2() returns."""

    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]


def allocated() -> dict[str, float]:
    """Read the bytes allocated and not freed in all of malloc's arenas, where a leak grows, and
    those that malloc holds, which have room for more.

    What threads keep for their next allocations counts as allocated, unless the process starts with
    GLIBC_TUNABLES=glibc.malloc.tcache_count=0. Empty if malloc is not glibc's.
    """
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return {}
    read.restype = MallInfo
    found = read()
    alone, arenas, used = found.field4, found.field0, found.field7  # mapped alone; of all arenas
    return {"allocated, MB": (alone + used) / 1e6, "held by malloc, MB": (alone + arenas) / 1e6}


def slope(name: str, hours: np.ndarray, values: np.ndarray) -> Row:
    """Fit a line through the means of PARTS equal parts."""
    parts = min(PARTS, len(values))
    if parts < 3:
        sys.exit(f"{len(values)} readings say nothing of a slope: run it for longer (--minutes)")
    x = np.array([part.mean() for part in np.array_split(hours, parts)])
    y = np.array([part.mean() for part in np.array_split(values, parts)])
    dx = x - x.mean()
    per_hour = float((dx * y).sum() / (dx**2).sum())
    rest = y - y.mean() - per_hour * dx
    error = float(np.sqrt((rest**2).sum() / (parts - 2) / (dx**2).sum()))
    low, high = per_hour - T_95 * error, per_hour + T_95 * error
    return {
        "resource": name,
        "mean": float(values.mean()),
        "least": float(values.min()),
        "most": float(values.max()),
        "slope_per_hour": per_hour,
        "low": low,
        "high": high,
        "flat": bool(low <= 0 <= high or abs(per_hour) < values.mean() / 100),
    }


if __name__ == "__main__":
    main()
