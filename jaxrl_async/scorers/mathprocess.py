"""Compare mathematics with math-verify, in separate processes. Needs no JAX.

    reward's thread ──one JSON line──> process: parse, compare ──one JSON line──> verdict
                                          │ more than CPU_S seconds of CPU, or MEMORY_BYTES
                                          └─ the kernel ends it: no verdict; a new one starts

A policy's answer can keep a parser or a simplifier busy forever inside one call that Python cannot
interrupt (9^{9^{9^{9}}}), so only ending the process helps. math-verify's own timeout is switched
off, because it uses signals, which work only in the main thread.
"""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from typing import TextIO

from jaxrl_async.errors import RolloutError
from jaxrl_async.scorers.process_pool import ProcessPool
from jaxrl_async.shown_environment import without_secrets
from jaxrl_async.tasks.function_source import import_path

log = logging.getLogger(__name__)

CPU_S = 3.0
"""Timeout of a comparison, seconds of CPU time, so a busy machine gives the same verdict."""
MEMORY_BYTES = 2 << 30
"""Maximum memory that a process may allocate."""
MAX_PROCESSES = min(4, os.cpu_count() or 1)
"""Maximum number of processes; each takes about 90 MB."""
TOO_HARD = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT)
"""Exit codes of a process that mean that the answer was too hard."""


def same_mathematics(completion: str, reference: str) -> bool:
    """Return whether the completion's final answer equals the reference mathematically.

    Returns False, with a warning, if the comparison takes too much time or memory. Raises
    RolloutError if the process ends for another reason.
    """
    with _PROCESSES.one() as process:
        verdict = process.ask([completion, reference])
    if verdict is None:
        log.warning(
            "no verdict on an answer within %g s of CPU and %d MiB: it counts as wrong: %.80r",
            CPU_S,
            MEMORY_BYTES >> 20,
            completion[-80:],
        )
    return bool(verdict)


def can_be_read(reference: str) -> bool:
    """Return whether a reference can be parsed as mathematics. Raises like same_mathematics."""
    with _PROCESSES.one() as process:
        return bool(process.ask([reference]))


class _Process:
    """One process, started when first needed and restarted after it ended. One thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, texts: list[str]) -> bool | None:
        """Return the verdict; None if the process ended while comparing."""
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(texts) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            verdict: bool | None = json.loads(answer)
            return verdict
        self.close()
        if process.returncode in TOO_HARD:
            return None
        raise RolloutError(
            f"lost the process that compares mathematics, with code {process.returncode}. See "
            "what it wrote to the screen; is math-verify installed?"
        )

    def close(self) -> None:
        """End the process if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()  # the process ends when its input ends
            except BrokenPipeError:
                continue
        process.wait()


# shared, because starting one takes a second of CPU time
_PROCESSES = ProcessPool([_Process() for _ in range(MAX_PROCESSES)])


def _start() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrl_async.scorers.mathprocess"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**without_secrets(os.environ), "PYTHONPATH": import_path()},
        start_new_session=True,  # Ctrl-C is for the run, which may still evaluate
    )


# ---- in the process


def serve_comparisons(questions: TextIO, verdicts: TextIO) -> None:
    """Answer every line of questions: for a pair of texts whether they are equal, for one text
    whether it can be parsed as mathematics; null: out of memory."""
    from jaxrl_async.scorers.mathreading import is_readable, same

    logging.disable(logging.CRITICAL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    for line in questions:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        texts = json.loads(line)
        try:
            verdict = same(*texts) if len(texts) == 2 else is_readable(*texts)
        except MemoryError:
            verdict = None
        except Exception:
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=verdicts, flush=True)


if __name__ == "__main__":
    serve_comparisons(sys.stdin, sys.stdout)
