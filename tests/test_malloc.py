"""malloc's memory over a long run: few arenas, and what is freed returns to the system."""

import ctypes
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from jaxrl_async import sample, serve
from jaxrl_async.api import training
from jaxrl_async.config.schema import Config
from jaxrl_async.host import give_back_memory, limit_arenas
from jaxrl_async.run import loop


@pytest.mark.full
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="malloc is not glibc's")
def test_memory_that_malloc_keeps_is_given_back(resident_mib) -> None:
    libc, size = ctypes.CDLL(None), 64 * 1024  # too small to be mapped alone
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(size) for _ in range(3200)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    kept = blocks.pop()  # at the end: what lies before it cannot go back by itself
    for block in blocks:
        libc.free(block)
    before = resident_mib()
    give_back_memory()
    assert resident_mib() < before - 100
    libc.free(kept)


def test_another_malloc_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    give_back_memory()


NUM_ARENAS = """
import ctypes, os, sys, threading
from jaxrl_async.host import limit_arenas
os.cpu_count = lambda: int(sys.argv[2])
limit_arenas()
libc, all_here = ctypes.CDLL(None), threading.Barrier(12)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
def work():
    all_here.wait()
    for _ in range(100):
        libc.malloc(100_000)
threads = [threading.Thread(target=work) for _ in range(12)]
[t.start() for t in threads]
[t.join() for t in threads]
out = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, out)
libc.fclose(out)
print(open(sys.argv[1]).read().count("<heap "))
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="malloc is not glibc's")
@pytest.mark.parametrize(
    ("cores", "limit", "arenas"), [(1, None, 1), (7, None, 1), (12, None, 3), (2, "7", 7)]
)
def test_malloc_has_an_arena_for_four_cores(tmp_path, cores, limit, arenas) -> None:
    """Twelve threads and the first one allocate at the same time."""
    env = {k: v for k, v in os.environ.items() if k not in ("MALLOC_ARENA_MAX", "LD_PRELOAD")}
    env |= {"MALLOC_ARENA_MAX": limit} if limit else {}
    words = [sys.executable, "-c", NUM_ARENAS, str(tmp_path / "info.xml"), str(cores)]
    found = subprocess.run(words, env=env, check=True, capture_output=True).stdout
    assert int(found) == arenas


@pytest.mark.parametrize(("cores", "arenas"), [(None, 1), (2, 1), (7, 1), (8, 2), (20, 5)])
def test_malloc_is_asked_for_its_arenas_unless_the_user_has(cores, arenas, monkeypatch) -> None:
    arguments: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *words: arguments.append(words))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    limit_arenas()
    assert arguments == [(-8, arenas)]
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    limit_arenas()
    assert len(arguments) == 1


class Limited(Exception):
    """Raised in place of limiting the arenas."""


@pytest.mark.parametrize(
    ("part", "begin"),
    [
        (loop, lambda: loop.train(Config())),
        (training, lambda: list(training.Steps())),
        (serve, lambda: serve.main(["a folder"])),
        (sample, lambda: sample.main(["--join", "localhost:1"])),
    ],
)
def test_each_process_limits_its_arenas_before_it_starts_threads(part, begin, monkeypatch) -> None:
    before = threading.active_count()

    def limit() -> None:
        assert threading.active_count() == before
        raise Limited

    monkeypatch.setattr(part, "limit_arenas", limit)
    with pytest.raises(Limited):
        begin()
