"""The run: starts the parts, waits, and stops them in order. The drawing of all threads.

    main            train(): assembles, waits for the trainer or the first failure, stops everybody
    trainer         Trainer.run(): draw -> pack -> step -> publish -> report
    sampler         Sampler: poll weights -> plan -> prefill, insert -> decode block, without end
    rollouts        one asyncio loop: RolloutLoop.run(): admit -> play -> score -> put
    (checkpoints are written by orbax's own threads)

        rollouts ──Request──> sampler ──Completion──> rollouts ──EpisodeGroup──> ReplayBuffer
            ^                    ^                                                    │
            └──── Ticket ── gate │ VersionedParams                                    v
                             WeightChannel <──────────── publish ──────────────── trainer

What several threads touch is behind one lock each: ReplayBuffer, WeightChannel, and a Curriculum,
which the rollouts draw from and the trainer saves.
Stopping goes the way of the data: buffer (nobody waits for groups or tickets), channel (nobody
waits for weights), rollouts, sampler.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import Closed
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.metrics.report import write_report
from jaxrl_async.run.assemble import Parts, assemble
from jaxrl_async.run.folder import prepare
from jaxrl_async.run.signals import Stop

JOIN_S = 60.0
"""Longest wait for a thread to end after everything it waits on was closed, seconds."""

log = logging.getLogger(__name__)


class Failure:
    """The first exception of any thread, and the event that one has happened or the work is
    done."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None

    def guard(self, work: Callable[[], None], *, ends_run: bool) -> Callable[[], None]:
        """`work` as a thread's target: its exception is kept and ends the run."""

        def target() -> None:
            try:
                work()
            except Closed:
                log.debug("%s ended: closed", threading.current_thread().name)
            except BaseException as error:
                self.error = self.error or error
                self.done.set()
            finally:
                if ends_run:
                    self.done.set()

        return target


def train(config: Config) -> None:
    """Run a configuration to its end; the results lie in its run folder. Raises JaxrlError
    kinds."""
    paths = prepare(config)
    console = Console(config.run.steps)
    with Stop() as stop, console:
        console.phase("preparing")
        parts = assemble(config, paths, stop, console)
        try:
            run_threads(parts, stop)
        finally:
            parts.recorder.close()
            parts.checkpoints.close()
        console.phase("writing the policy and the report")
        policy_dir = parts.save_policy()
        report = write_report(paths.root)
    console.summary(
        [
            *headline(paths.metrics),
            f"stopped early by {stop.reason}: everything is saved; --resume continues"
            if stop.reason
            else "",
            f"policy (Hugging Face directory)  {policy_dir}",
            f"metrics, samples, checkpoints    {paths.root}",
            f"report                           {report}",
        ]
    )


def headline(metrics: Path) -> list[str]:
    """What the run achieved, in two lines."""
    lines = read_lines(metrics)
    accuracy = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    if not accuracy:
        return []
    (first, start), (last, end) = accuracy[0], accuracy[-1]
    return [
        f"held-out accuracy {start:.3f} at step {first}, {end:.3f} at step {last}",
        f"{last} updates in {lines[-1].get('time/elapsed_s', 0.0):.0f} s",
    ]


def run_threads(parts: Parts, stop: Stop) -> None:
    """Start sampler, rollouts and trainer; wait for the trainer, a failure or a stop; stop in
    order."""
    failure = Failure()
    threads = [
        threading.Thread(
            target=failure.guard(lambda: asyncio.run(parts.rollouts.run()), ends_run=False),
            name="rollouts",
            daemon=True,
        ),
        threading.Thread(
            target=failure.guard(parts.trainer.run, ends_run=True), name="trainer", daemon=True
        ),
    ]
    parts.buffer.pause()  # until the trainer has evaluated the first weights
    parts.sampler.start()
    for thread in threads:
        thread.start()
    try:
        while not failure.done.wait(0.2):
            if parts.sampler.error is not None:
                failure.error = failure.error or parts.sampler.error
                break
    finally:
        parts.buffer.close()
        parts.channel.close()
        for thread in threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                log.error("thread %s did not end within %.0f s", thread.name, JOIN_S)
        parts.sampler.close()
    if failure.error is not None:
        raise failure.error
