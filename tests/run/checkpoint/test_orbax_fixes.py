"""Checkpoints leave nothing behind in the host's memory."""

import gc
import importlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.run.checkpoint.orbax_fixes import ORBAX_WRITES, fix_orbax
from jaxrl_async.run.checkpoint.store import Checkpoints


@pytest.mark.full
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
    assert left < 150, "blocks of memory a checkpoint; 40 to 75, and 343 where orbax is not mended"


def test_an_orbax_with_other_names_is_left_alone(monkeypatch, caplog) -> None:
    orbax = importlib.import_module(ORBAX_WRITES)
    monkeypatch.setattr(orbax, "ts", real := object())
    monkeypatch.delattr(orbax, "get_tensorstore_raw_bytes")
    fix_orbax()
    assert orbax.ts is real
    assert "cannot be patched" in caplog.text and "get_tensorstore_raw_bytes" in caplog.text


def _blocks(checkpoints: Checkpoints) -> int:
    checkpoints.wait()
    gc.collect()
    return sys.getallocatedblocks()
