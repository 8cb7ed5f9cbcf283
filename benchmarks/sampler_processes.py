"""Measure samplers in processes of their own beside one in a thread: tokens/s, weights, staleness.

    decode     1, 2 and 4 samplers sample without end, lengths forced, nothing is trained; in turns:
               no weights are published, one version a second, and each as soon as the last is live
    --updates  whole runs of `jaxrl_async.train`, at max_staleness 1 and 2

fall             of decode tokens/s beside that without transfers in the same turns (medians)
fall_per_second  the same with one version a second
lost_ms          decode time that one transfer to all samplers costs: fall / versions per second
fall_in_cpu      of tokens per CPU second of the samplers' processes, versions back to back: what
                 transfers and swaps take from a sampler's own core, whatever else runs
sampler_ms       CPU time of one sampler for one version: fetching, comparing, the swap
trainer_ms       CPU time of the trainer's process for one version, whatever the number of samplers
live_ms          from publish until every sampler samples from the version, median
gbytes_per_s     what all samplers have received, per second of the window, versions back to back
transfer_gbytes_per_s  of one transfer to one sampler, from offer to complete and checked

The samplers are pinned as a run pins them: on two cores a single one keeps to one core and the
trainer's side has the other; from two samplers on, everything shares both.
"""

import argparse
import itertools
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import (
    MODELS,
    PROMPT_TOKENS,
    Row,
    columns,
    force_cpu_devices,
    make_params,
    options,
    parser,
    random_prompts,
    report,
    spread,
)

from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.config import schema
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.mesh import TRAINER_RULES, shardings
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.remote.run.local_samplers import LocalSamplers
from jaxrl_async.remote.run.remote_samplers import make_remote_sampling
from jaxrl_async.run.builders.inputs import check_inputs
from jaxrl_async.run.builders.samplers import Sampling, make_sampling
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.replay.recording import Recording
from jaxrl_async.run.signals import Stop
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.types import Completion, Request, SamplingParams, VersionedParams

LONGEST = 96
"""Longest answer, tokens; the shortest is a third of it."""
AHEAD = 2
"""Requests under way, as a multiple of all samplers' slots."""
LIVE_S = 60.0
"""Longest wait for a version to be live, seconds."""
WARM_UP = 3
"""Updates of a run that are left out."""
REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Publishing:
    """How often weights are published in a window of time."""

    name: str
    every_s: float  # at least from one publish to the next; inf: never


PUBLISHING = (
    Publishing("never", math.inf),
    Publishing("every second", 1.0),
    Publishing("back to back", 0.0),
)


@dataclass(slots=True)
class Window:
    """What was measured in one window."""

    tokens_per_s: float = 0.0
    versions_per_s: float = 0.0
    gbytes_per_s: float = 0.0
    transfer_gbytes_per_s: float = 0.0
    tokens: float = 0.0
    versions: int = 0
    sampler_cpu_s: float = 0.0  # of all samplers' processes; in a thread: of this one
    trainer_cpu_s: float = 0.0  # of this process
    seconds: float = 0.0
    live_s: list[float] = field(default_factory=list)


def main() -> None:
    """Measure every row and print them."""
    args = _options()
    if args.updates:
        rows = []
        for row in update_rows(args):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
        report("sampler_processes", rows, args)
        return
    force_cpu_devices(2)
    rows = []
    for model in args.models:
        for where, samplers in arrangements(args, threads=[1]):
            rows.append({"model": model, "samplers_in": where, "samplers": samplers})
            with started_sampling(MODELS[model], where, samplers, args) as (sampling, params):
                rows[-1] |= decode_row(MODELS[model], sampling, params, args)
            print(rows[-1], file=sys.stderr, flush=True)
    report("sampler_processes", rows, args)


def arrangements(args: argparse.Namespace, *, threads: list[int]) -> list[tuple[str, int]]:
    """Return where samplers run and how many; threads: how many in threads."""
    counts = {"threads": threads, "processes": args.samplers}
    return [(where, count) for where in args.samplers_in for count in counts[where]]


# ---- decode alone


@contextmanager
def started_sampling(
    spec: ModelSpec, where: str, samplers: int, args: argparse.Namespace
) -> Iterator[tuple[Sampling, Any]]:
    """Start samplers as a run does; return them and the trainer's weights."""
    config = decode_config(spec, where, samplers, args)
    inputs, _ = check_inputs(config, Lockstep())
    table = weight_table(spec)
    params = jax.device_put(
        make_params(spec), shardings(table, inputs.slices.trainer, TRAINER_RULES)
    )
    weights = VersionedParams(version=0, params=params)
    gate = ReplayBuffer(BufferSettings(groups_per_step=1, max_staleness=1))
    with tempfile.TemporaryDirectory() as name, ExitStack() as closing:
        folder = Path(name)
        if where == "threads":
            schedule = Recording(folder / "schedule.jsonl", {"schedule": 1})
            sampling = make_sampling(config, inputs, weights, schedule, gate)
        else:
            sampling = make_remote_sampling(
                config, inputs, weights, gate, Lockstep(), folder, closing
            )
        sampling.router.start()
        try:
            sampling.wait_for_samplers(Stop())
            yield sampling, params
        finally:
            sampling.dismiss()
            sampling.channel.close()
            sampling.router.close()


def decode_config(
    spec: ModelSpec, where: Any, samplers: int, args: argparse.Namespace
) -> schema.Config:
    """Return the configuration of a run whose policy has this shape."""
    return schema.Config(
        mesh=schema.MeshSection(samplers_in=where, samplers=samplers),
        remote=RemoteSection(min_samplers=samplers, wait_s=120.0, transfer=args.transfer),
        model=schema.ModelSection(
            architecture=schema.ArchitectureSection(
                family="llama",
                layers=spec.layers,
                width=spec.width,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                mlp=spec.mlp,
                vocab=spec.vocab,
            )
        ),
        sampler=schema.SamplerSection(
            slots=args.slots,
            max_length=PROMPT_TOKENS + LONGEST,
            max_new_tokens=LONGEST,
            block=args.block,
        ),
        weights=schema.WeightsSection(checksum=not args.without_checksum),
    )


class Load:
    """Keeps requests coming: each answer makes room for the next. One thread starts them."""

    def __init__(self, router: Router, vocab: int, ahead: int) -> None:
        """Begin with `ahead` requests, and keep as many under way."""
        self._router, self.ahead = router, ahead
        self._done: queue.SimpleQueue[Future[Completion] | None] = queue.SimpleQueue()
        self._requests = endless_requests(vocab)
        self._thread = threading.Thread(target=self._run, name="load")
        self.completions = 0

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._start(self.ahead)
        while True:
            done = [self._done.get()]
            time.sleep(0.002)  # many at a time, as groups are
            while not self._done.empty():
                done.append(self._done.get())
            if None in done:
                return
            self.completions += len(done)
            for future in done:
                if future is not None:
                    future.result()
            self._start(len(done))

    def _start(self, count: int) -> None:
        requests = list(itertools.islice(self._requests, count))
        for future in self._router.start_many(requests):
            future.add_done_callback(self._done.put)


def endless_requests(vocab: int) -> Iterator[Request]:
    """Yield requests with lengths spread evenly, so that answers come at all times."""
    lengths = np.random.default_rng(0).integers(LONGEST // 3, LONGEST, 1024)
    prompts = random_prompts(vocab, 1024)
    for i in itertools.count():
        length = int(lengths[i % 1024])
        yield Request(
            request_id=f"r{i}",
            token_ids=prompts[i % 1024],
            max_new_tokens=length,
            sampling=SamplingParams(temperature=1.0),
            key=(i, 0),
            forced_length=length,
        )


def decode_row(spec: ModelSpec, sampling: Sampling, params: Any, args: argparse.Namespace) -> Row:
    """Measure windows with and without transfers, in turns."""
    samplers = len(sampling.router.samplers)
    versions = itertools.count(1)
    windows: dict[str, list[Window]] = {p.name: [] for p in PUBLISHING}
    with Load(sampling.router, spec.vocab, AHEAD * args.slots * samplers) as load:
        while load.completions < 2 * load.ahead:  # until all programs are compiled
            publish_for(sampling, params, versions, PUBLISHING[1], 1.0)
        for _ in range(args.repeats):
            for publishing in PUBLISHING:
                window = one_window(sampling, params, versions, publishing, args.window_s)
                windows[publishing.name].append(window)
    each, always = (windows[p.name] for p in PUBLISHING[1:])
    rate = {p.name: spread([w.tokens_per_s for w in windows[p.name]]) for p in PUBLISHING}
    fall, fall_per_second = (
        1 - rate[p.name].median / rate["never"].median for p in PUBLISHING[:0:-1]
    )
    versions_per_s = statistics.median(w.versions_per_s for w in always)
    per_cpu_s = {n: total(w, "tokens") / total(w, "sampler_cpu_s") for n, w in windows.items()}
    num_versions = total(always, "versions")
    more_s = total(always, "sampler_cpu_s") - total(always, "tokens") / per_cpu_s["never"]
    idle = windows["never"]
    idle_cpu = total(idle, "trainer_cpu_s") / total(idle, "seconds")
    trainer_s = total(always, "trainer_cpu_s") - idle_cpu * total(always, "seconds")
    in_thread = sampling.members is None
    return {
        **columns(rate["never"], "tokens_per_s"),
        "with_weights": rate["back to back"].median,
        "fall": fall,
        "fall_per_second": fall_per_second,
        "versions_per_s": versions_per_s,
        "lost_ms": fall / versions_per_s * 1e3,
        "fall_in_cpu": 1 - per_cpu_s["back to back"] / per_cpu_s["never"],
        "sampler_ms": more_s / num_versions / samplers * 1e3,
        "trainer_ms": 0.0 if in_thread else trainer_s / num_versions * 1e3,
        "live_ms": statistics.median([s for w in always for s in w.live_s]) * 1e3,
        "gbytes_per_s": statistics.median(w.gbytes_per_s for w in always),
        "transfer_gbytes_per_s": statistics.median(w.transfer_gbytes_per_s for w in each),
        "load": os.getloadavg()[0],
    }


def total(windows: list[Window], name: str) -> float:
    """Return the sum of a field."""
    return float(sum(getattr(window, name) for window in windows))


def cpu_of_samplers(sampling: Sampling) -> float:
    """Return the CPU seconds of the samplers' processes so far; of this one if they are threads."""
    if not isinstance(sampling.processes, LocalSamplers):
        return time.process_time()
    ticks = 0
    for child in sampling.processes.children:
        assert child.process is not None, "started"
        stat = Path(f"/proc/{child.process.pid}/stat").read_text(encoding="utf-8")
        ticks += sum(int(n) for n in stat.rpartition(")")[2].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def one_window(
    sampling: Sampling,
    params: Any,
    versions: Iterator[int],
    publishing: Publishing,
    seconds: float,
) -> Window:
    """Publish for some seconds, and count what was sampled and what has come meanwhile."""
    meter = Meter(sampling.router)
    sampler_cpu_s, trainer_cpu_s = cpu_of_samplers(sampling), time.process_time()
    before, began = sampling.channel.stats(), time.perf_counter()
    with meter:
        live_s = publish_for(sampling, params, versions, publishing, seconds)
    taken_s, after = time.perf_counter() - began, sampling.channel.stats()
    traffic, was = after.remote, before.remote
    fetched = float(traffic.fetched_bytes - was.fetched_bytes)
    transfer_s = traffic.transfer_s - was.transfer_s
    if sampling.members is None:  # in a thread: one sampler
        fetched = float(after.transfer_bytes * len(live_s))
        transfer_s = after.transfer_s * len(live_s)
    return Window(
        tokens_per_s=meter.tokens_per_s,
        versions_per_s=len(live_s) / taken_s,
        gbytes_per_s=fetched / taken_s / 1e9,
        transfer_gbytes_per_s=fetched / transfer_s / 1e9 if transfer_s else 0.0,
        tokens=meter.tokens_per_s * taken_s,
        versions=len(live_s),
        sampler_cpu_s=cpu_of_samplers(sampling) - sampler_cpu_s,
        trainer_cpu_s=time.process_time() - trainer_cpu_s,
        seconds=taken_s,
        live_s=live_s,
    )


def publish_for(
    sampling: Sampling,
    params: Any,
    versions: Iterator[int],
    publishing: Publishing,
    seconds: float,
) -> list[float]:
    """Publish versions, each when the last is live; return how long each took to be live."""
    end, live_s = time.perf_counter() + seconds, list[float]()
    while (began := time.perf_counter()) < end:
        if publishing.every_s == math.inf:
            time.sleep(end - began)
            return live_s
        version = next(versions)
        sampling.channel.publish(version, params)
        sampling.channel.wait_live(version, LIVE_S)
        now = time.perf_counter()
        live_s.append(now - began)
        time.sleep(max(0.0, min(end, began + publishing.every_s) - now))
    return live_s


class Meter:
    """Reads each sampler's count of tokens whenever it changes: a context."""

    def __init__(self, router: Router) -> None:
        self._router, self._over = router, threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter")
        self._seen: dict[int, list[tuple[float, int]]] = {}

    def __enter__(self) -> "Meter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all samplers, from the first change to the last."""
        total = 0.0
        for seen in self._seen.values():
            (first_s, first), (last_s, last) = seen[1 if len(seen) > 2 else 0], seen[-1]
            total += (last - first) / max(last_s - first_s, 1e-9)
        return total

    def _run(self) -> None:
        while not self._over.wait(0.01):
            for sampler in self._router.samplers:
                stats: Any = sampler.stats()
                seen = self._seen.setdefault(id(sampler), [])
                if not seen or seen[-1][1] != stats.generated_tokens:
                    seen.append((time.perf_counter(), stats.generated_tokens))


# ---- whole updates


def update_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Run configs/addition.yaml without its warm start, with samplers here and there."""
    kinds = itertools.product(args.max_staleness, arrangements(args, threads=args.samplers))
    for staleness, (where, samplers) in kinds:
        metrics = run_updates(where, samplers, staleness, args)
        yield {
            "model": "1M",
            "samplers_in": where,
            "samplers": samplers,
            "max_staleness": staleness,
        } | update_columns(metrics)


def run_updates(
    where: str, samplers: int, staleness: int, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Run a run in a process of its own; return its metrics, one mapping for each update."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.dir={folder}", f"run.steps={WARM_UP + args.steps}", "run.overwrite=true",
            "warm_start.steps=0", "eval.every=0", "data.addition.eval_size=8",
            "checkpoint.every=0", f"mesh.samplers_in={where}", f"mesh.samplers={samplers}",
            *([f"remote.min_samplers={samplers}"] if where == "processes" else []),
            f"staleness.max_staleness={staleness}", *args.set,
        ]  # fmt: skip
        command = [sys.executable, "-m", "jaxrl_async.train", "configs/addition.yaml", *settings]
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} has failed:\n{done.stdout}\n{done.stderr}")
        (file,) = [p for p in Path(folder).rglob("metrics.jsonl") if "warm" not in str(p)]
        lines = file.read_text(encoding="utf-8").splitlines()
    return [m for m in map(json.loads, lines) if "train/tokens" in m]


def update_columns(metrics: list[dict[str, float]]) -> Row:
    """Return the columns of the updates after WARM_UP."""
    measured = metrics[WARM_UP:]
    times = [m["time/elapsed_s"] for m in metrics[WARM_UP - 1 :]]
    taken = spread([b - a for a, b in itertools.pairwise(times)])

    def mean(key: str) -> float:
        values = [m[key] for m in measured if key in m]
        return statistics.fmean(values) if values else 0.0

    return {
        "updates": len(measured),
        "trained_tokens_per_s": sum(m["train/tokens"] for m in measured) / (times[-1] - times[0]),
        **columns(taken),
        "staleness_mean": mean("staleness/mean"),
        "transfer_ms": mean("weights/transfer_s") * 1e3,
        "live_ms": mean("weights/live_s") * 1e3,
        "transfer_gbytes_per_s": mean("weights/gb_per_s"),
        "sampler_busy": mean("sampler/busy_share"),
        "trainer_waits": mean("time/wait_data_s") / taken.median,
        "load": os.getloadavg()[0],
    }


def _options() -> argparse.Namespace:
    words = parser(__doc__ or "")
    words.add_argument("--samplers", nargs="+", type=int, default=[1, 2, 4], help="processes")
    words.add_argument("--slots", type=int, default=32, help="of each sampler")
    words.add_argument("--block", type=int, default=8, help="decode steps in one dispatch")
    words.add_argument("--window-s", type=float, default=4.0, help="length of a measured window")
    words.add_argument("--transfer", default="auto", help="remote.transfer")
    words.add_argument("--without-checksum", action="store_true", help="weights.checksum=false")
    words.add_argument("--updates", action="store_true", help="whole updates instead")
    words.add_argument("--steps", type=int, default=10, help="measured updates of each run")
    words.add_argument("--max-staleness", nargs="+", type=int, default=[1, 2])
    words.add_argument("--samplers-in", nargs="+", default=["threads", "processes"])
    words.add_argument("--set", nargs="*", default=[], help="more settings of these runs")
    args = options(words)
    if args.quick:
        args.samplers, args.slots, args.window_s = [1], 8, 2.0
        args.steps, args.max_staleness, args.samplers_in = 1, [1], ["processes"]
        args.set = ["sampler.slots=8", "algorithm.groups_per_step=2", "model.architecture.layers=1"]
    return args


if __name__ == "__main__":
    main()
