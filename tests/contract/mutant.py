"""Runs tests on the package with one module changed, many changes to a process that starts once.

    lines of JSON on stdin   {module, path, source, tests}  ──fork──>  pytest in the child
    lines of JSON on stdout  {code, output, seconds}        <────────  its exit code, what it wrote

The parent has imported what takes long and is not ours; each child imports the package anew, with
the module's source in place of its file's. No file is changed.
"""

import faulthandler
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[2]
SLOW_IMPORTS = (
    "pytest", "hypothesis", "numpy", "pydantic", "yaml", "jax", "jax.numpy", "optax",
    "orbax.checkpoint", "safetensors", "tokenizers", "jinja2", "httpx",
)  # fmt: skip
LIMIT_S = 150.0
"""Time after which a child is ended; its tests take a few seconds on a machine without other work.
It writes where each of its threads is ten seconds earlier."""
HUNG, BROKEN = 124, 70


class ChangedSource(importlib.machinery.SourceFileLoader):
    """Loads a module from a text, as if it were in its file."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class Changed(importlib.abc.MetaPathFinder):
    """Finds the one changed module before anything else does."""

    def __init__(self, name: str, path: str, source: str) -> None:
        self.name, self.loader = name, ChangedSource(name, path, source)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self.loader.path, loader=self.loader
        )


class Result:
    """The exit code of pytest's session. A failed test can leave a file open, since its traceback
    keeps the file alive; pytest then raises after the session has ended."""

    code = 0

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.code = int(exitstatus)


def run_tests(task: dict[str, Any]) -> int:
    """Run the tests of a task in this process; return pytest's exit code."""
    import pytest

    sys.meta_path.insert(0, Changed(task["module"], task["path"], task["source"]))
    options = ["-n0", "-x", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider"]
    options += ["-m", "not exhaustive"]  # a mutation names its tests, quick or not
    # the same examples on each run: whether a mutation is caught is no matter of chance
    options += ["--hypothesis-profile=mutant", "--hypothesis-seed=0"]
    options += ["--assert=plain"]  # to explain how two long values differ can take minutes
    options += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    arguments = [*options, *(str(name) for name in task["tests"])]
    result = Result()
    try:
        return int(pytest.main(arguments, plugins=[result]))  # type: ignore[attr-defined]
    except pytest.PytestUnraisableExceptionWarning:  # type: ignore[attr-defined]
        if not result.code:
            raise
        return result.code


def in_child(task: dict[str, Any]) -> dict[str, Any]:
    """Run the tests of a task in a child; return its exit code and what it wrote."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as written:
        pid = os.fork()
        if not pid:
            code = BROKEN
            try:
                os.setsid()
                for stream in (1, 2):
                    os.dup2(written.fileno(), stream)
                faulthandler.dump_traceback_later(LIMIT_S - 10, file=written)
                code = run_tests(task)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = waited(pid)
        written.seek(0)
        output = written.read().decode(errors="replace")[-8000:]
    return {"code": code, "output": output, "seconds": round(time.monotonic() - began, 1)}


def waited(pid: int) -> int:
    """Wait for a child, LIMIT_S at most; return its exit code, HUNG if it had to be ended."""
    until = time.monotonic() + LIMIT_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return HUNG
        time.sleep(0.01)


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a fork copies no thread, and the locks of all
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="jaxrl-mutants-") as folder:
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # what is not changed compiles once
            os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
            os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        for line in sys.stdin:
            task = json.loads(line)
            done = in_child(task)
            if done["code"] == HUNG:
                done = in_child(task)
            print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
