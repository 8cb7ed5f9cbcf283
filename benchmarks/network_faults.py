"""Break the network between a trainer and its samplers: measure the outcome and what it costs.

    python benchmarks/network_faults.py [--faults NAME ...] [--steps 50]

A trainer and two samplers, each a process of its own, on the embedded task with a tiny decoder. One
sampler is near (in the trainer's network), one is far: all that it sends and gets goes through a
line that delays, loses, throttles or tears packets (packets.py: needs Linux and root). Each fault
strikes after a fifth of the run. Prints the outcome, the median time between two steps before it
and the longest one from then on, what was begun again or continued elsewhere, what else the metrics
count, the problems that the audit finds, and how the samplers ended.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from chaos import ROOT, last_step
from common import Row, report
from packets import HOSTS, Line, inside, missing, network

from jaxrl_async.audit import audit_report, audit_run
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.train_command import RESUME

TRAINER, SAMPLERS = HOSTS
PORT = 7077
SILENCE_S, WAIT_S = 3.0, 45.0
"""remote.silence_s, and the samplers' --wait, seconds."""
HANG_S = 90.0
"""Time without a step after which a run is called hung, seconds."""
REWARD = """
import time

def slow_digits(prompt, completion, reference):
    time.sleep(0.02)
    return sum(c.isdigit() for c in completion) / 16
"""
"""A reward that a random policy sometimes gets, and that makes steps long enough to be hit."""
SETTINGS = (
    "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 16}",
    "warm_start={steps: 20, batch_size: 16}",
    "trainer.warmup_steps=0",
    "sampler={slots: 16, max_new_tokens: 16, max_length: 48}",
    "algorithm={group_size: 4, groups_per_step: 4, learning_rate: 1e-3}",
    "trainer.micro_batch_tokens=512",
    "metrics={peak_flops: 1e9, tensorboard: false}",
    "checkpoint={every: 1, keep: 2}",
    "mesh.samplers_in=external",
    f"remote={{listen: '{HOSTS[TRAINER]}:{PORT}', transfer: tcp, least: 2, wait_s: 60, "
    f"silence_s: {SILENCE_S}, transfer_timeout_s: 10}}",
    "staleness.max_staleness=2",
    "eval.every=0",
)


@dataclass(slots=True, kw_only=True)
class Field:
    """A run that is to be disturbed: its processes, and the line between them."""

    folder: Path
    steps: int
    line: Line
    secret: str = "a secret that both sides know"
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    seen: list[tuple[float, int]] = field(default_factory=list)  # when each step was written
    note: str = ""  # of the fault, for the row

    @property
    def metrics(self) -> Path:
        return self.folder / "run" / "metrics.jsonl"

    def train(self, *more: str) -> None:
        """Start the trainer."""
        reward = self.folder / "reward.py"
        reward.write_text(REWARD, encoding="utf-8")
        config = ROOT / "configs" / "addition.yaml"
        own = [f"run.dir={self.folder}", "run.name=run", f"run.steps={self.steps}"]
        own += [f"reward.function={reward}:slow_digits"]
        self.start("trainer", TRAINER, "jaxrl_async.train", str(config), *SETTINGS, *own, *more)

    def sample(self, name: str, network: str, secret: str | None = None) -> None:
        """Start a sampler."""
        where = f"{HOSTS[TRAINER]}:{PORT}"
        words = ("--join", where, "--name", name, "--wait", str(WAIT_S))
        self.start(name, network, "jaxrl_async.sample", *words, secret=secret)

    def start(
        self, name: str, network: str, module: str, *words: str, secret: str | None = None
    ) -> None:
        """Start a process in a network."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment["JAXRL_ASYNC_SECRET"] = self.secret if secret is None else secret
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*inside(network), sys.executable, "-m", module, *words],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def signal(self, name: str, number: int) -> None:
        self.running[name].send_signal(number)

    def wait_for_step(self, step: int) -> bool:
        """Wait until this step is written; return False if the run ended or hung before."""
        seen_at = time.monotonic()
        while (last := last_step(self.metrics)) < step:
            if not self.seen or last > self.seen[-1][1]:
                seen_at = time.monotonic()
                self.seen.append((seen_at, last))
            if self.running["trainer"].poll() is not None or time.monotonic() - seen_at > HANG_S:
                return False
            time.sleep(0.02)
        self.seen.append((time.monotonic(), last))
        return True

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def nothing(there: Field) -> None:
    """Disturb nothing."""


def delay(there: Field) -> None:
    there.line.delay_s = 0.1


def loss(there: Field) -> None:
    there.line.loss = 0.05


def throttle(there: Field) -> None:
    there.line.bits_per_s = 10e6


def down_for_a_moment(there: Field) -> None:
    there.line.up = False
    time.sleep(1.0)
    there.line.up = True


def down_for_a_while(there: Field) -> None:
    there.line.up = False
    time.sleep(5.0)
    there.line.up = True


def down_for_good(there: Field) -> None:
    there.line.up = False


def stopped(there: Field) -> None:
    there.signal("far", signal.SIGSTOP)
    time.sleep(SILENCE_S + 3.0)
    there.signal("far", signal.SIGCONT)


def slow_reader(there: Field) -> None:
    """Let the far sampler run for a tenth of ten seconds."""
    for _ in range(10):
        there.signal("far", signal.SIGSTOP)
        time.sleep(0.9)
        there.signal("far", signal.SIGCONT)
        time.sleep(0.1)


def torn(there: Field) -> None:
    there.line.tear()
    time.sleep(1.0)
    there.note = f"{there.line.torn} resets"


def wrong_secret(there: Field) -> None:
    there.sample("unauthorized", SAMPLERS, secret="another secret")
    there.note = f"its exit code: {there.running.pop('unauthorized').wait(60)}"


def flood(there: Field) -> None:
    """Open connections to every port of the trainer's network for ten seconds, and send garbage."""
    ports = listening_ports(there.running["trainer"].pid)
    words = (__file__, "--flood", *map(str, ports))
    done = subprocess.run(
        [*inside(SAMPLERS), sys.executable, *words], check=True, capture_output=True, text=True
    )
    there.note = f"{len(ports)} ports, {done.stdout.strip()}"


def trainer_killed(there: Field) -> None:
    there.signal("trainer", signal.SIGKILL)
    there.running["trainer"].wait()
    there.train(*RESUME)


FAULTS: dict[str, Callable[[Field], None]] = {
    "none": nothing,
    "delay 100 ms each way": delay,
    "loss 5 %": loss,
    "10 Mbit/s": throttle,
    "link down for 1 s": down_for_a_moment,
    "link down for 5 s": down_for_a_while,
    "link down for good": down_for_good,
    "sampler stopped for 6 s": stopped,
    "slow reader": slow_reader,
    "connections reset": torn,
    "wrong secret": wrong_secret,
    "garbage on all ports": flood,
    "trainer killed, resumed": trainer_killed,
}


def main() -> None:
    """Measure and print."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--quick", action="store_true", help="smoke test: one fault, a short run")
    words.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    words.add_argument("--steps", type=int, default=60, help="updates in each run")
    words.add_argument("--logs", metavar="FOLDER", help="keep the runs here")
    words.add_argument("--json", nargs="?", const="-", metavar="FILE", help="as the others")
    words.add_argument("--flood", nargs="+", type=int, help=argparse.SUPPRESS)
    args = words.parse_args()
    if args.flood:
        send_garbage(args.flood)
        return
    if args.quick:
        args.steps, args.faults = 12, ["connections reset"]
    if reason := missing():
        print(f"network_faults: skipped: {reason}")
        return
    rows = []
    with tempfile.TemporaryDirectory() as made:
        for number, name in enumerate(args.faults):
            folder = Path(args.logs or made) / str(number)
            folder.mkdir(parents=True)
            with network() as line:
                rows.append(measure(name, Field(folder=folder, steps=args.steps, line=line)))
            print(rows[-1], file=sys.stderr, flush=True)
    report("network_faults", rows, args)


def measure(name: str, there: Field) -> Row:
    """Measure one fault's row."""
    try:
        there.train()
        while not (there.folder / "run" / "join.json").exists():
            assert there.running["trainer"].poll() is None, f"{name}: the trainer did not start"
            time.sleep(0.1)
        there.sample("near", TRAINER)
        there.sample("far", SAMPLERS)
        assert there.wait_for_step(there.steps // 5), f"{name}: the run ended before it"
        struck_at, before = time.monotonic(), list(there.seen)
        striking = threading.Thread(target=FAULTS[name], args=(there,))
        striking.start()
        finished = there.wait_for_step(there.steps)
        striking.join()
        finished = finished or there.wait_for_step(there.steps)  # the trainer that was killed
        outcome = ended(there, "trainer", HANG_S if finished else 0.0)
        left = {n: ended(there, n, SILENCE_S + WAIT_S + 20.0) for n in there.running}
    finally:
        there.end()
    lines, audit = read_lines(there.metrics), audit_run(there.folder / "run")
    if audit.problems:
        print(audit_report(audit), file=sys.stderr)
    counts = {
        key.removeprefix("faults/"): int(sum(x.get(key, 0) for x in lines))
        for key in lines[-1]
        if key.startswith("faults/")
    }
    redone, moved = counts.pop("redone_requests"), counts.pop("moved_requests")
    gaps = np.diff([at for at, _ in there.seen])
    after = np.array([at for at, _ in there.seen[1:]]) >= struck_at
    return {
        "fault": name,
        "outcome": "finished" if outcome == "0" else outcome,
        "step_s": float(np.median(np.diff([at for at, _ in before[1:]]))),
        "longest_s": float(gaps[after].max()),
        "redone": redone,
        "moved": moved,
        "counted": ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in counts.items() if n)
        or "none",
        "audit_problems": len(audit.problems),
        "samplers": f"near {left['near']}, far {left['far']}",
        "note": there.note or "",
    }


def ended(there: Field, name: str, limit_s: float) -> str:
    """Wait for a process; return its exit code, or that it hangs."""
    try:
        return str(there.running[name].wait(limit_s))
    except subprocess.TimeoutExpired:
        return "hangs"


def listening_ports(process: int) -> list[int]:
    """Return the ports on which anybody listens in the network of a process."""
    lines = Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]
    words = [line.split() for line in lines]
    return sorted({int(w[1].split(":")[1], 16) for w in words if w[3] == "0A"})


def send_garbage(ports: list[int], seconds: float = 10.0) -> None:
    """Send random bytes to these ports of the trainer from many connections, and say how much."""
    end, sent, opened = time.monotonic() + seconds, [0], [0]

    def pour(port: int, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.socket() as stream:
                stream.settimeout(1.0)
                stream.connect((HOSTS[TRAINER], port))
                opened[0] += 1
                for _ in range(rng.randint(1, 50)):
                    sent[0] += stream.send(rng.randbytes(rng.choice((1, 9, 4096))))
                    time.sleep(0.002)

    threads = [threading.Thread(target=pour, args=(p, i)) for p in ports for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{opened[0]} connections, {sent[0] / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
