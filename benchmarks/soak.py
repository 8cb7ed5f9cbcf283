"""Run for long with random faults: do memory, threads, files and device buffers stay flat?

    python benchmarks/soak.py [--minutes 45] [--seed 0] [--without-faults]

The main job on the embedded addition task with a tiny decoder and two samplers, in this process,
with evaluations and checkpoints, while faults strike about every twenty seconds: a sampler dies, a
completion is not finite, a scorer fails, the number of scores is wrong, a transfer cannot be
started or arrives torn. (Hangs are left out: a thread that hangs is left behind with all that it
holds.) Each resource is read nine hundred times; its slope is that of a line through the means of
twenty equal parts of the last two thirds, half an hour, with a 95 % interval (Student's t). `flat`:
the interval contains 0, or the slope adds less than a hundredth of the level in an hour.
"""

import argparse
import ctypes
import gc
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from array import array
from contextlib import redirect_stdout
from pathlib import Path

import jax
import numpy as np
from common import Row, force_cpu_devices, report
from faults import CONFIG, SETTINGS

from jaxrl_async.audit import audit_run
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run import loop
from jaxrl_async.testing import sabotage as faults
from jaxrl_async.testing.sabotage import Hits, injected

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


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--quick", action="store_true", help="smoke test: twenty seconds")
    words.add_argument("--minutes", type=float, default=45.0)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--without-faults", action="store_true", help="the run alone")
    words.add_argument("--json", nargs="?", const="-", metavar="FILE", help="as the others")
    args = words.parse_args()
    minutes = 0.3 if args.quick else args.minutes
    force_cpu_devices(3)
    logging.getLogger("jaxrl_async").setLevel(logging.CRITICAL)
    jax.monitoring.register_event_duration_secs_listener(count_compiled)
    struck_by = () if args.without_faults else FAULTS
    hits = {name: AtRandom(args.seed + i) for i, name in enumerate(struck_by)}
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(minutes * 60)
        watch.start()
        broken = [FAULTS[name](hit) for name, hit in hits.items()]
        with injected(*broken), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            loop.train(configuration(folder))
        watch.join()
        root = Path(folder) / "soak"
        steps = read_lines(root / "metrics.jsonl")[-1]["step"]
        found = audit_run(root)
    struck = ", ".join(f"{len(hit.at)} x {name}" for name, hit in hits.items()) or "no faults"
    print(f"# {minutes:g} minutes, {steps} updates; {struck}", file=sys.stderr)
    verdict = f"# audit: {len(found.problems)} problems, dropped {dict(found.dropped)}"
    print(verdict, file=sys.stderr)
    first, *_, last = map(int, watch.late["programs compiled"])
    print(f"# compiled late: {', '.join(COMPILED[first:last]) or 'nothing'}", file=sys.stderr)
    report("soak", watch.rows(), args)


def count_compiled(event: str, duration_secs: float, **about: str | int) -> None:
    """Listen to the durations that JAX reports, and count compiles."""
    if "backend_compile" in event:
        COMPILED.append(str(about.get("fun_name", "?")))


def configuration(folder: str) -> Config:
    return load(
        CONFIG,
        [
            *SETTINGS,
            f"run={{name: soak, dir: {folder}, steps: 1000000000, overwrite: false}}",
            "data.addition.digits=1",
            "staleness.max_staleness=2",
            "eval.every=50",
            "checkpoint={every: 100, keep: 2}",
            "metrics.samples_every=0",
            "faults={backoff_s: 0.2, sampler_restarts: 1000000, max_failures: 1000, "
            "watchdog_s: 600}",
        ],
    )


class Watch(threading.Thread):
    """Reads the resources until the time is over, then asks the run to stop."""

    def __init__(self, seconds: float) -> None:
        super().__init__(daemon=True)
        self._seconds = seconds
        self._names: tuple[str, ...] = ()
        self._values = array("d")  # one block of memory: the readings must not be what grows

    def run(self) -> None:
        start = time.monotonic()
        while (now := time.monotonic() - start) < self._seconds:
            found = {"seconds": now, **resources()}
            self._names = tuple(found)
            self._values.extend(found.values())
            time.sleep(self._seconds / READINGS)
        os.kill(os.getpid(), signal.SIGINT)

    def rows(self) -> list[Row]:
        """Return one row for each resource, over the last two thirds."""
        late = self.late
        hours = late.pop("seconds") / 3600
        return [slope(name, hours, values) for name, values in late.items()]

    @property
    def late(self) -> dict[str, np.ndarray]:
        """Return the readings of the last two thirds, by resource, and their times in seconds."""
        rows = np.array(self._values).reshape(-1, len(self._names))
        counts = rows[:, 0] > self._seconds / 3
        return dict(zip(self._names, rows[counts].T, strict=True))


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
    x = np.array([part.mean() for part in np.array_split(hours, PARTS)])
    y = np.array([part.mean() for part in np.array_split(values, PARTS)])
    dx = x - x.mean()
    per_hour = float((dx * y).sum() / (dx**2).sum())
    rest = y - y.mean() - per_hour * dx
    error = float(np.sqrt((rest**2).sum() / (PARTS - 2) / (dx**2).sum()))
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
