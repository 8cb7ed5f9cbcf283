"""Kill runs of each kind at random moments, resume them, and compare with undisturbed runs.

    python benchmarks/chaos.py [--kills 200] [--seed 0] [--stop-s 60] [--jobs NAME ...]

Each run is a process of its own (a tiny decoder, the embedded task) which is struck while it
starts, in its warm start, between updates, while a checkpoint appears, or at its end: by SIGKILL
half of the time, else by SIGTERM, SIGINT or SIGHUP, or it is stopped for --stop-s seconds (SIGSTOP)
and continues. Where samplers are processes, a strike meets the trainer, a sampler, or both. After
each end the run resumes; one that reaches its end before all kills are done is followed by another.

Checked of each run: every end has an exit code that the documentation names, within END_S; each
update is in metrics.jsonl once; `audit` finds the ledger clean (each group trained on once or
dropped for a reason); no sampler process is left over; and where nothing may be stale, metrics and
weights equal those of the undisturbed run bit for bit (Ctrl-C adds an evaluation, which is left
out). A failure is printed with the events before it and the end of the log; the exit code is then
1, and with --keep the folder stays.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common import Row, options, parser, report
from safetensors.numpy import load_file

from jaxrl_async.audit import audit_report, audit_run
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.train_command import RESUME

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
MODEL = (
    "model.architecture={family: qwen3, layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, "
    "mlp: 16}"
)
WARM = "warm_start={steps: 30, batch_size: 4}"
COMMON = (
    "metrics={peak_flops: 1e9, tensorboard: false, spans: false}",
    "run.overwrite=false",
    "eval.every=5",
)
REWARD = """
def many_digits(prompt, completion, reference):
    return sum(c.isdigit() for c in completion) / 16
"""
"""A reward that a random policy sometimes gets, so that every update moves the weights."""
ONLINE = (
    MODEL,
    "data={addition: {digits: 1, eval_size: 8}, max_prompt_tokens: 16}",
    WARM,
    "trainer={warmup_steps: 0, micro_batch_tokens: 128}",
    "sampler={slots: 8, max_new_tokens: 8, max_length: 32, compile_ahead: false}",
    "algorithm={group_size: 2, groups_per_step: 2, learning_rate: 1e-3}",
    "checkpoint={every: 3, keep: 2}",
    *COMMON,
)
OFFLINE = (
    MODEL,
    "data={addition: {digits: 2, eval_size: 8}}",
    "algorithm.learning_rate=1e-3",
    "checkpoint={every: 7, keep: 2}",
    *COMMON,
)
PROCESSES = (
    "mesh.samplers_in=processes",
    "remote={wait_s: 120, silence_s: 10}",
    "faults={sampler_restarts: 1000, backoff_s: 0.1}",
)
"""Settings of a run whose samplers are processes, which are killed more often than it forgives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kind of run."""

    config: str
    settings: tuple[str, ...]
    steps: int
    staleness: int | None = 0  # None: the job samples nothing
    samplers: int = 0  # sampler processes; 0: threads
    runs: tuple[str, ...] = ()  # names of several runs in one

    @property
    def words(self) -> tuple[str, ...]:
        """Its command line, except for the folder."""
        own = [
            f"run.steps={self.steps}",
            *(f"runs.{name}.run.steps={self.steps}" for name in self.runs[1:]),
        ]
        if self.staleness is not None:
            own.append(f"staleness.max_staleness={self.staleness}")
        if self.samplers:
            own += [*PROCESSES, f"mesh.samplers={self.samplers}"]
        return (str(CONFIGS / self.config), *self.settings, *own)


JOBS = {
    "rl": Job(config="addition.yaml", settings=ONLINE, steps=60),
    "rl, stale": Job(config="addition.yaml", settings=ONLINE, steps=60, staleness=2),
    "lora": Job(config="addition.yaml", settings=(*ONLINE, "model.lora={rank: 4}"), steps=40),
    "several adapters": Job(
        config="several_adapters.yaml",
        settings=(*ONLINE, "model.lora={rank: 4}", "runs.brief.data.addition.digits=1"),
        steps=30,
        runs=("exact", "brief"),
    ),
    "sampler process": Job(config="addition.yaml", settings=ONLINE, steps=40, samplers=1),
    "sampler processes, stale": Job(
        config="addition.yaml", settings=ONLINE, steps=60, staleness=2, samplers=2
    ),
    "sft": Job(
        config="sft.yaml", settings=(*OFFLINE, "sft.batch_size=4"), steps=300, staleness=None
    ),
    "preference": Job(
        config="dpo.yaml",
        settings=(*OFFLINE, WARM, "preference.batch_size=4"),
        steps=150,
        staleness=None,
    ),
    "reward model": Job(
        config="rlhf_three_steps/2_reward_model.yaml",
        settings=(*OFFLINE, "model.path=null", "reward_model.batch_size=4"),
        steps=200,
        staleness=None,
    ),
}
MOMENTS = ("start", "warm start", "running", "running", "running", "saving", "end")
SIGNALS = (
    *(signal.SIGKILL,) * 4,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGSTOP,
)
CODES = {
    signal.SIGKILL: (),
    signal.SIGTERM: (75,),
    signal.SIGINT: (130,),
    signal.SIGHUP: (75,),
}
"""Exit codes after each signal, besides 0; and the signal's own where no handler is there."""
START_S = 12.0
"""The process is struck within so many seconds in the moment `start`."""
MOMENT_S = 90.0
"""Longest wait for a moment, seconds; then it is struck wherever it is."""
END_S = 240.0
"""Longest time until a run has ended: after a signal, and the last one by itself, seconds."""
LEFT_S = 60.0
"""Longest time for which sampler processes may outlive their run, seconds."""
LOOK_S = 0.002


def main() -> None:
    """Kill, compare and print."""
    made = parser(__doc__ or "")
    made.add_argument("--kills", type=int, default=100, help="strikes, of all jobs together")
    made.add_argument("--jobs", nargs="+", choices=sorted(JOBS), default=list(JOBS))
    made.add_argument("--seed", type=int, default=0, help="of the moments, signals and victims")
    made.add_argument("--stop-s", type=float, default=60.0, help="how long SIGSTOP lasts, seconds")
    made.add_argument("--keep", metavar="FOLDER", help="work there, and leave the runs there")
    args = options(made)
    if args.quick:
        args.kills, args.jobs, args.stop_s = 2, ["rl", "sft"], 2.0
    rows, failed = [], False
    with contextlib.ExitStack() as stack:
        folder = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        for index, name in enumerate(args.jobs):
            share = len(range(index, args.kills, len(args.jobs)))
            hunt = Hunt(name, folder, share, random.Random(f"{args.seed} {name}"), args.stop_s)
            rows.append(hunt.row())
            failed = failed or bool(hunt.failures)
            print(rows[-1], file=sys.stderr, flush=True)
    report("chaos", rows, args)
    sys.exit(failed)


class Failed(Exception):
    """A run did what it must not do; the message says what."""


@dataclass(slots=True)
class Hunt:
    """The strikes at one kind of run."""

    name: str
    folder: Path
    kills: int  # still to come
    rng: random.Random
    stop_s: float
    struck: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)  # of the current run
    redone: int = 0  # updates that were made twice
    whole: Path | None = None

    def row(self) -> Row:
        """Strike until no kill is left; return the row of the table."""
        start, kills, runs = time.perf_counter(), self.kills, 0
        with self._failing():
            if self.job.staleness in (None, 0):
                self.whole = self._root("whole")
                if (code := self._process("whole").wait()) != 0:
                    raise Failed(f"the undisturbed run ended with {code}")
        while self.kills and not self.failures:
            self.events = []
            with self._failing(f"killed{runs}"):
                self._through(f"killed{runs}")
                self._check(self._root(f"killed{runs}"))
            runs += 1
        return {
            "model": f"{self.name}, {self.job.steps} updates",
            "kills": kills - self.kills,
            "runs": runs,
            **{word: self.struck[word] for word in ("trainer", "sampler", "both", "SIGSTOP")},
            "before_an_update": self.struck["early"],
            "updates_redone": self.redone,
            "compared": "audit" if self.whole is None else "bit for bit",
            "failures": "; ".join(self.failures) or "none",
            "seconds": round(time.perf_counter() - start),
        }

    @property
    def job(self) -> Job:
        """What is run."""
        return JOBS[self.name]

    @contextlib.contextmanager
    def _failing(self, run: str = "whole") -> Iterator[None]:
        """Note a failure, and print what led to it."""
        try:
            yield
        except Failed as error:
            self.failures.append(str(error))
            log = self._root(run).with_suffix(".log")
            tail = log.read_text(encoding="utf-8", errors="replace")[-4000:] if log.exists() else ""
            message = "\n  ".join([f"FAILED: {self.name}: {error}", *self.events])
            print(f"{message}\n{tail}", file=sys.stderr, flush=True)

    def _root(self, run: str) -> Path:
        return self.folder / f"{self.name.replace(' ', '_').replace(',', '')}-{run}"

    def _process(self, run: str) -> "subprocess.Popen[bytes]":
        """Start a run, or continue it if it has a folder."""
        root = self._root(run)
        overrides = [f"run.dir={self.folder}", f"run.name={root.name}"]
        if self.job.staleness is not None:
            overrides.append(f"reward.function={self.folder}/reward.py:many_digits")
        overrides += [
            f"runs.{name}.reward.function={self.folder}/reward.py:many_digits"
            for name in self.job.runs[1:]
        ]
        resume = RESUME if root.is_dir() else ()
        with root.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "jaxrl_async.train", *self.job.words, *overrides, *resume],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={
                    "JAX_PLATFORMS": "cpu",
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "PYTHONFAULTHANDLER": "1",
                },
            )

    # ---- strikes

    def _through(self, run: str) -> None:
        """Bring a run to its end through the strikes. Raises Failed."""
        while True:
            root, process = self._root(run), self._process(run)
            with killed_at_last(process):
                before, struck = last_step(root), False
                while self.kills and not struck and process.poll() is None:
                    struck = self._strike(root, process, before)
                if not struck:
                    self._wait_for_end(process, "left alone")
                    self.events.append(f"it ended by itself with {process.returncode}")
            is_whole = last_step(root) >= self.job.steps and bool(weights(root, self.job))
            if process.returncode == 0 and is_whole:
                return
            if not struck:
                at = f"step {last_step(root)} of {self.job.steps}"
                raise Failed(f"left alone it ended with {process.returncode} at {at}")

    def _strike(self, root: Path, process: "subprocess.Popen[bytes]", before: int) -> bool:
        """Wait for a moment and strike once; return whether that has ended the trainer. Raises
        Failed."""
        moment, number = self.rng.choice(MOMENTS), self.rng.choice(SIGNALS)
        self._wait(moment, root, process, before)
        samplers = sampler_processes(process)
        victim = self.rng.choice(("trainer", "sampler", "both")) if samplers else "trainer"
        if process.poll() is not None:
            return False
        victims = [] if victim == "trainer" else [self.rng.choice(samplers)]
        if victim != "sampler":
            victims.append(process.pid)
        at = last_step(root)
        self.kills -= 1
        self.struck[victim] += 1
        self.struck["early"] += victim != "sampler" and at == before
        what = f"{number.name} of {victim}, {moment}, step {at}"
        self.events.append(what)
        own = () if is_handled(process.pid, number) else (-number,)
        if number == signal.SIGSTOP:
            self.struck["SIGSTOP"] += 1
            self._stop(victims)
        else:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number if pid == process.pid else signal.SIGKILL)
        if victim != "sampler" and number != signal.SIGSTOP:
            self._wait_for_end(process, what)
            code, usual = process.returncode, (0, *own, *CODES[number])
            self.events.append(f"  ended with {code}")
            if code not in usual:
                raise Failed(f"{what}: it ended with {code}, not one of {usual}")
            return True
        return False

    def _stop(self, victims: list[int]) -> None:
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        time.sleep(self.stop_s)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _wait(
        self, moment: str, root: Path, process: "subprocess.Popen[bytes]", before: int
    ) -> None:
        """Wait for the moment, and a random while."""
        if moment == "start":
            time.sleep(self.rng.uniform(0.2, START_S))
            return
        saved = set(checkpoints(root, self.job))
        come, more_s = {
            "warm start": (
                lambda: (
                    (root / "warm_start" / "metrics.jsonl").exists() or last_step(root) > before
                ),
                1.5,
            ),
            "running": (lambda: last_step(root) > before, 1.5),
            "saving": (lambda: bool(set(checkpoints(root, self.job)) - saved), 0.05),
            "end": (lambda: last_step(root) >= self.job.steps, 0.6),
        }[moment]
        until(lambda: come() or process.poll() is not None, MOMENT_S)
        time.sleep(self.rng.uniform(0.0, more_s))

    def _wait_for_end(self, process: "subprocess.Popen[bytes]", what: str) -> None:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # the stacks of all threads go into the log
            process.wait()
            raise Failed(f"{what}: it did not end in {END_S:g} s") from None

    # ---- what must be true at the end

    def _check(self, root: Path) -> None:
        """Raise Failed if the run is not what it has to be."""
        for own in folders(root, self.job):
            self.redone += len(read_lines(own / "metrics.superseded.jsonl"))
            steps = [int(line["step"]) for line in read_lines(own / "metrics.jsonl")]
            if sorted(set(steps)) != steps or steps[-1] != self.job.steps:
                raise Failed(f"{own.name}: metrics.jsonl has the steps {steps}")
            if self.job.staleness is not None:
                found = audit_run(own)
                if found.problems:
                    raise Failed(f"{own.name}: {audit_report(found)}")
            if self.whole is not None:
                same_as(self.whole / own.relative_to(root), own)
        if self.whole is not None and weights(root, self.job) != weights(self.whole, self.job):
            raise Failed("other weights than those of the undisturbed run")
        if left := left_over(root):
            raise Failed(f"{left} processes are left over")
        for own in folders(root, self.job):
            shutil.rmtree(own / "checkpoints", ignore_errors=True)


@contextlib.contextmanager
def killed_at_last(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """End the process if the block is left before it has ended."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def until(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait until something is so, or the time is over."""
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(LOOK_S)


def folders(root: Path, job: Job) -> list[Path]:
    """Return the folders with metrics of a run: of several runs in one, theirs."""
    return [root / name for name in job.runs] if job.runs else [root]


def last_step(root: Path) -> int:
    """Return the last step that a run has recorded, of several runs the least; -1: none."""
    files = [*root.glob("metrics.jsonl"), *root.glob("*/metrics.jsonl")]
    found = [
        max((int(line["step"]) for line in read_lines(file)), default=-1)
        for file in files
        if file.parent.name != "warm_start"
    ]
    return min(found, default=-1)


def checkpoints(root: Path, job: Job) -> list[Path]:
    """Return what is in the folders of checkpoints, unfinished ones included."""
    return [path for own in folders(root, job) for path in (own / "checkpoints").glob("*")]


def weights(root: Path, job: Job) -> dict[str, bytes]:
    """Return the arrays that a run has written at its end, by file and name."""
    files = [
        file
        for own in folders(root, job)
        for kind in ("policy", "reward_model")
        for file in (own / kind).glob("*.safetensors")
    ]
    return {
        f"{file.relative_to(root)} {name}": array.tobytes()
        for file in files
        for name, array in load_file(file).items()
    }


def same_as(whole: Path, killed: Path) -> None:
    """Raise Failed if two runs have other metrics, except for the evaluations of only one."""
    first, second = (
        [comparable(line) for line in read_lines(root / "metrics.jsonl")]
        for root in (whole, killed)
    )
    for one, other in zip(first, second, strict=True):
        evaluated = {k: v for k, v in other.items() if k in one or not k.startswith("eval/")}
        if one != evaluated:
            keys = sorted(k for k in {*one, *other} if one.get(k) != evaluated.get(k))
            found = [(key, one.get(key), other.get(key)) for key in keys[:4]]
            raise Failed(f"{killed.name}: other metrics from step {one['step']} on: {found}")


def sampler_processes(process: "subprocess.Popen[bytes]") -> list[int]:
    """Return the ids of a run's sampler processes."""
    return [
        int(pid)
        for file in Path(f"/proc/{process.pid}/task").glob("*/children")
        for pid in words_of(file)
        if b"jaxrl_async.sample" in words_of(Path(f"/proc/{pid.decode()}/cmdline"), b"\0")
    ]


def is_handled(pid: int, number: int) -> bool:
    """Return whether a process has its own handler for a signal. For SIGINT Python has one from
    the start; a run installs its own for SIGINT and SIGTERM together."""
    number = signal.SIGTERM if number == signal.SIGINT else number
    caught = [w for w in words_of(Path(f"/proc/{pid}/status"), b"\n") if w[:7] == b"SigCgt:"]
    return any(int(word[7:], 16) >> (number - 1) & 1 for word in caught)


def words_of(file: Path, between: bytes | None = None) -> list[bytes]:
    """Return the words of a file of /proc; none if the process has ended."""
    with contextlib.suppress(OSError):
        return file.read_bytes().split(between)
    return []


def left_over(folder: Path) -> int:
    """Return how many processes outlive a run by LEFT_S: those that write into its folder still."""
    end = time.monotonic() + LEFT_S
    while True:
        outputs = [file.resolve() for file in Path("/proc").glob("[0-9]*/fd/1")]
        left = sum(folder.resolve() in output.parents for output in outputs)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.5)


if __name__ == "__main__":
    main()
