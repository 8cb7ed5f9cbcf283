"""Mathematics compared by math-verify in processes of their own. Needs no JAX.

    reward's thread ──one JSON line──> process: parse, compare ──one JSON line──> verdict
                                          │ more than CPU_S seconds of its CPU, or MEMORY_BYTES
                                          └─ the kernel ends it: no verdict, and another is started

What a policy writes can take a parser or a simplifier for ever, inside of one call that nothing in
Python can interrupt (9^{9^{9^{9}}}): only the end of a process can. math-verify's own time limit is
switched off: it works by signals in the main thread alone.
"""

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from jaxrl_async.errors import RolloutError
from jaxrl_async.scorers.answers import FORMULA, final_line, final_number

log = logging.getLogger(__name__)

CPU_S = 3.0
"""Longest time that one comparison may take, seconds of CPU: the same verdict on a busy machine."""
MEMORY_BYTES = 2 << 30
"""Most memory that a process may ask for."""
MAX_PROCESSES = min(4, os.cpu_count() or 1)
"""Processes, at most; each holds about 90 MB."""
TOO_HARD = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT)
"""Ends of a process that the answer is to blame for."""


def same_mathematics(completion: str, reference: str) -> bool:
    """Whether the completion's final answer is the reference. False, with a warning, where that
    takes too long. Raises RolloutError where the process ends for another reason."""
    with _PROCESSES.one() as process:
        verdict = process.ask(completion, reference)
    if verdict is None:
        log.warning(
            "no verdict on an answer within %g s of CPU and %d MiB: it counts as wrong: %.80r",
            CPU_S,
            MEMORY_BYTES >> 20,
            completion[-80:],
        )
    return bool(verdict)


class _Process:
    """One process, started when it is first asked and again after its end. One thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, completion: str, reference: str) -> bool | None:
        """The verdict; None: the process has come to its end over it."""
        process = self._process = self._process or _started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([completion, reference]) + "\n")
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
            f"lost the process that compares mathematics, with code {process.returncode}. Look at "
            "what it wrote to the screen; is math-verify installed?"
        )

    def close(self) -> None:
        """End it, where it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()  # the process ends when it has nothing to read
            except BrokenPipeError:
                continue
        process.wait()


class _Processes:
    """A few of them, lent one by one; the one given back last is lent next. Thread safe."""

    def __init__(self, most: int) -> None:
        self._places = threading.BoundedSemaphore(most)
        self._free = [_Process() for _ in range(most)]

    @contextmanager
    def one(self) -> Iterator[_Process]:
        """One for this thread alone; waits where all are lent."""
        with self._places:
            process = self._free.pop()
            try:
                yield process
            finally:
                self._free.append(process)

    def close(self) -> None:
        """End those that nobody uses; each starts again when it is asked."""
        for process in list(self._free):
            process.close()


_PROCESSES = _Processes(MAX_PROCESSES)  # of this Python: each takes a second of CPU to start


def _started() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrl_async.scorers.mathprocess"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        start_new_session=True,  # Ctrl-C is for the run, which may still evaluate
    )


# ---- in the process

WORD = re.compile(r"(?<![\\A-Za-z])(?!sqrt|frac|infty|theta|alpha|beta|gamma)[A-Za-z]{4,}")
"""A word of prose, not of a formula."""


def serve(asked: TextIO, told: TextIO) -> None:
    """Answer one line after the other until there are no more; null: too much memory."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    plain, formulas = [ExprExtractionConfig()], [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str, kind: Any) -> list[Any]:
        found: list[Any] = parse(text, kind, parsing_timeout=None)
        return found

    def answer(text: str) -> list[Any]:
        """What the final answer of a text is, parsed in each way that can be meant."""
        final = final_line(text)
        if FORMULA.search(final):
            return parsed(final, formulas)
        if not WORD.search(final):
            return parsed(boxed(final), formulas)
        found = parsed(final, plain)
        is_number = bool(found) and getattr(found[0], "is_Number", False)
        return [] if is_number and final_number(final) is None else found

    def same(completion: str, reference: str) -> bool:
        given = answer(completion)
        right = parsed(reference if FORMULA.search(reference) else boxed(reference), formulas)
        return bool(verify(right, given, timeout_seconds=None)) if right else False

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    for line in asked:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            verdict = same(*json.loads(line))
        except MemoryError:
            verdict = None
        except Exception:
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=told, flush=True)


def boxed(text: str) -> str:
    r"""The text as the content of \boxed{}, which is how the library finds a formula."""
    return f"\\boxed{{{text}}}"


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
