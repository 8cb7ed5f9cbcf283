"""Checkpoints leave nothing behind in the host's memory."""

import ctypes
import gc
import importlib
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.host import give_back_memory
from jaxrl_async.run.checkpoint.orbax_fixes import ORBAX_WRITES, mend_orbax
from jaxrl_async.run.checkpoint.store import Checkpoints


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
from jaxrl_async.run.checkpoint.orbax_fixes import limit_arenas
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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="malloc is not glibc's")
@pytest.mark.parametrize("asked", [None, "7"])
def test_malloc_keeps_few_arenas_for_many_threads(tmp_path, asked) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("MALLOC_ARENA_MAX", "LD_PRELOAD")}
    env |= {"MALLOC_ARENA_MAX": asked} if asked else {}
    words = [sys.executable, "-c", NUM_ARENAS, str(tmp_path / "info.xml")]
    found = int(subprocess.run(words, env=env, check=True, capture_output=True).stdout)
    most = int(asked) if asked else max(4, (os.cpu_count() or 1) // 4)
    assert found == min(most, 13), "twelve threads and the first"


def test_checkpoints_leave_no_python_objects_behind(tmp_path) -> None:
    state = {f"w{i}": jnp.ones((4, 4)) for i in range(16)}
    with Checkpoints(tmp_path / "c") as checkpoints:
        before = 0
        for step in range(20):
            if step == 10:  # what is made once has been made
                before = _blocks(checkpoints)
            checkpoints.save(step, state=state, loop={}, rollouts=lambda: np.ones(9, np.uint8))
        left = (_blocks(checkpoints) - before) / 10
        assert checkpoints.restore(None, state).step == 19
    assert left < 60, "blocks of memory a checkpoint; 343 where orbax is not mended"


def test_an_orbax_with_other_names_is_left_alone(monkeypatch, caplog) -> None:
    orbax = importlib.import_module(ORBAX_WRITES)
    monkeypatch.setattr(orbax, "ts", real := object())
    monkeypatch.delattr(orbax, "get_tensorstore_raw_bytes")
    mend_orbax()
    assert orbax.ts is real
    assert "cannot be patched" in caplog.text and "get_tensorstore_raw_bytes" in caplog.text


def _blocks(checkpoints: Checkpoints) -> int:
    checkpoints.wait()
    gc.collect()
    return sys.getallocatedblocks()
