"""Checkpoints survive donation, other meshes, torn files; and say so when they cannot."""

import gc
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1

from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import CheckpointError
from jaxrl_async.mesh import HOST, in_memory
from jaxrl_async.run.checkpoint.array_shapes import shape_mismatch
from jaxrl_async.run.checkpoint.store import SCHEMA, Checkpoints, Saved, check_resumed

# Orbax abandons coroutines when a read or write fails, which the tests here make happen on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def abandoned_coroutines_end_here() -> Iterator[None]:
    yield
    gc.collect()


class State(NamedTuple):
    params: Any
    opt_state: Any
    step: Any


def sharding(shape, names, *spec):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(Mesh(devices, names), PartitionSpec(*spec))


def make_state(value, width=8, where=None):
    where = where or sharding((2, 2), ("fsdp", "tensor"), "fsdp", "tensor")
    scalar = NamedSharding(where.mesh, PartitionSpec())
    params = {"w": jax.device_put(jnp.full((width, 4), float(value)), where)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = State(params, tx.init(params), jnp.int32(value))
    return jax.tree.map(lambda x: x if x.ndim == 2 else jax.device_put(x, scalar), state)


def save(checkpoints, step, state=None):
    state = make_state(step) if state is None else state
    checkpoints.save(step, state=state, loop={"version": step, "seen": [1, 2]})


def tear(folder):
    """Cut every file of the arrays short, as a full disk or a lost page would."""
    files = [f for f in (folder / "state").rglob("*") if f.is_file() and f.parent.name == "d"]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:10])


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_what_was_saved_comes_back_with_its_types(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 3)
        assert checkpoints.restore(None, make_state(0)).step == 3
        saved = checkpoints.restore(3, make_state(0))
    assert saved.loop == {"version": 3, "seen": [1, 2], "schema": SCHEMA}
    assert saved.rollouts is None
    assert isinstance(saved.state, State)
    assert jax.tree.structure(saved.state) == jax.tree.structure(make_state(3))
    same(saved.state, make_state(3))


@pytest.mark.full
def test_it_restores_onto_another_mesh(tmp_path):
    where = sharding((8,), ("fsdp",), "fsdp")
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 3)
        saved = checkpoints.restore(3, make_state(0, where=where))
    assert saved.state.params["w"].sharding == where
    same(saved.state, make_state(3))


@pytest.mark.full
def test_the_state_may_be_donated_right_after_the_call(tmp_path):
    spoil = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    with Checkpoints(tmp_path / "c") as checkpoints:
        state = make_state(5)
        save(checkpoints, 5, state)
        jax.block_until_ready(spoil(state))
        same(checkpoints.restore(5, make_state(0)).state, make_state(5))


@pytest.mark.full
def test_only_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        for step in (1, 2, 3):
            save(checkpoints, step)
        checkpoints.wait()
        assert checkpoints.steps() == (2, 3) and checkpoints.latest() == 3


@pytest.mark.full
def test_a_new_process_finds_what_the_last_one_saved(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.latest() is None
        save(checkpoints, 7)
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.latest() == 7


@pytest.mark.full
def test_a_torn_checkpoint_gives_way_to_the_one_before_with_a_warning(tmp_path, caplog):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    tear(tmp_path / "c" / "2")
    with Checkpoints(tmp_path / "c") as checkpoints, caplog.at_level(logging.WARNING):
        saved = checkpoints.restore(None, make_state(0))
        assert saved.step == 1 and saved.loop["version"] == 1
        assert str(tmp_path / "c" / "2") in caplog.text
        save(checkpoints, 2)  # the run gets there again and replaces the torn one
        assert checkpoints.restore(None, make_state(0)).step == 2


@pytest.mark.full
def test_bytes_of_any_size_come_back(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 70_001).astype(np.uint8)
    with Checkpoints(tmp_path / "c") as checkpoints:
        loop = {"version": 1}
        checkpoints.save(1, state=make_state(1), loop=loop, rollouts=lambda: data)
        np.testing.assert_array_equal(checkpoints.restore(None, make_state(0)).rollouts, data)


@pytest.mark.parametrize("item", ["state", pytest.param("loop", marks=pytest.mark.full)])
def test_one_flipped_bit_gives_way_to_the_checkpoint_before(tmp_path, caplog, item):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    files = [f for f in (tmp_path / "c" / "2" / item).rglob("*") if f.parent.name == "d"]
    largest = max(files, key=lambda f: f.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with Checkpoints(tmp_path / "c") as checkpoints, caplog.at_level(logging.WARNING):
        assert checkpoints.restore(None, make_state(0)).step == 1
    assert "checksum differs" in caplog.text and largest.name in caplog.text


@pytest.mark.full
def test_a_link_out_of_a_checkpoint_is_not_followed(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 1)
    outside = tmp_path / "outside"
    (tmp_path / "c" / "1" / "loop").rename(outside)
    (tmp_path / "c" / "1" / "loop").symlink_to(outside)
    with (
        Checkpoints(tmp_path / "c") as checkpoints,
        pytest.raises(CheckpointError, match="link out of the checkpoint"),
    ):
        checkpoints.restore(None, make_state(0))


def test_what_a_resumed_run_changes_is_logged(tmp_path, caplog):
    before, now = Config(), Config(run={"steps": 7, "resume": True}, sampler={"slots": 8})
    loop = {"job": "rl", "schema": SCHEMA, "config": dump(before)}
    saved = Saved(step=1, state=None, loop=loop)
    check_resumed(saved, now, tmp_path)
    assert "run.steps 100 -> 7" in caplog.text and "sampler.slots" in caplog.text
    assert "resume" not in caplog.text.replace("resumed with", "")
    for wrong, message in (({"job": "sft"}, "run.job=sft"), ({"schema": 1}, "schema 1")):
        with pytest.raises(CheckpointError, match=message):
            check_resumed(Saved(step=1, state=None, loop={**loop, **wrong}), now, tmp_path)


def test_objects_of_a_python_program_are_no_setting_that_has_changed(tmp_path, caplog):
    before, now = (Config(task=f"python:task-{n}") for n in (1, 2))
    loop = {"job": "rl", "schema": SCHEMA, "config": dump(before)}
    check_resumed(Saved(step=1, state=None, loop=loop), now, tmp_path)
    assert not caplog.messages


@pytest.mark.full
def test_a_part_that_the_saved_run_did_not_have_names_its_setting(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 1, {"train": make_state(1)})
    for part, setting in (
        ("reference", r"algorithm\.kl_coefficient"),
        ("critic", r"algorithm\.advantage=gae"),
        ("teacher", r"teacher\.source=self"),
    ):
        expected = {"train": make_state(0), part: make_state(0)}
        with (
            Checkpoints(tmp_path / "c") as checkpoints,
            pytest.raises(CheckpointError, match=f"made without .*{setting}"),
        ):
            checkpoints.restore(None, expected)


@pytest.mark.full
def test_a_folder_that_lost_its_arrays_gives_way_too(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    shutil.rmtree(tmp_path / "c" / "2" / "state")
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.restore(None, make_state(0)).step == 1


@pytest.mark.full
def test_where_none_can_be_read_the_error_says_path_and_advice(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 1)
    tear(tmp_path / "c" / "1")
    with Checkpoints(tmp_path / "c") as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.restore(None, make_state(0))
    assert str(tmp_path / "c") in str(error.value) and "run.overwrite=true" in str(error.value)


@pytest.mark.full
def test_another_models_checkpoint_is_refused_by_name_and_shape(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
        with pytest.raises(CheckpointError, match=r"w is \[8, 4\] there and \[16, 4\] here"):
            checkpoints.restore(None, make_state(0, width=16))


@pytest.mark.full
def test_nothing_to_restore_is_an_error_that_names_what_is_there(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            checkpoints.restore(None, make_state(0))
        save(checkpoints, 2)
        with pytest.raises(
            CheckpointError, match=r"no checkpoint of step 3 \(steps there: \[2\]\)"
        ):
            checkpoints.restore(3, make_state(0))


@pytest.mark.full
def test_a_save_that_was_cut_off_is_invisible_and_swept_away(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 1)
    torn = tmp_path / "c" / "2.orbax-checkpoint-tmp-123"
    shutil.copytree(tmp_path / "c" / "1", torn)
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.steps() == (1,)


FAILING_SAVE = """
import resource, sys, time
from pathlib import Path
import numpy as np
from jaxrl_async.errors import CheckpointError, EarlierSaveError
from jaxrl_async.run.checkpoint.store import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), keep=int(sys.argv[2]))
state = {"w": np.random.default_rng(0).random(100_000)}
ample = resource.RLIM_INFINITY
for step, size in enumerate([ample, ample, 100_000, 100_000, ample, ample]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        checkpoints.save(step, state=state, loop={"version": step})
    except EarlierSaveError as error:
        print(error)
    while checkpoints._pending is not None and not checkpoints._pending.done():
        time.sleep(0.01)
checkpoints.close()
"""
"""In a process of its own: what a limit breaks, such as a compiler's cache, stays here."""


@pytest.mark.full
@pytest.mark.parametrize(("keep", "left"), [(9, ["0", "1", "4", "5"]), (1, ["5"])])
def test_a_save_that_the_disk_cannot_hold_is_reported_by_the_next_and_leaves_nothing(
    tmp_path, keep, left
):
    """Files may have no more than 100 kB while steps 2 and 3 are written."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING_SAVE, str(tmp_path / "c"), str(keep)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.count("Check whether the disk is full") == 2
    assert sorted(f.name for f in (tmp_path / "c").iterdir()) == left


@pytest.mark.full
def test_a_checkpoint_without_something_this_run_needs_names_it(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 1)
        state = make_state(0)
        more = state._replace(params={**state.params, "lm_head": state.params["w"]})
        with pytest.raises(CheckpointError, match="it has no params/lm_head"):
            checkpoints.restore(None, more)


def test_a_folder_that_was_never_used_is_never_made(tmp_path):
    with Checkpoints(tmp_path / "c"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_closing_twice_is_harmless(tmp_path, capsys):
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 1)
    checkpoints.close()
    checkpoints.close()
    assert capsys.readouterr().out == ""


def test_mismatch_names_what_is_missing_on_either_side():
    assert shape_mismatch({"a": (1,)}, {"a": (1,)}) == ""
    assert shape_mismatch({}, {"a": (1,)}) == "it has no a"
    assert "does not know" in shape_mismatch({"b": (2,)}, {})


@pytest.mark.full
def test_what_lies_in_the_hosts_memory_comes_back_there(tmp_path):
    state = make_state(3)
    state = state._replace(opt_state=in_memory(HOST, state.opt_state))
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(state)]
    assert {"pinned_host", "device"} == set(kinds)
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 3, state)
        saved = checkpoints.restore(3, state)
    assert [x.sharding.memory_kind for x in jax.tree.leaves(saved.state)] == kinds
    same(saved.state, make_state(3))


@pytest.mark.full
def test_an_error_of_orbax_is_reported_once(tmp_path, monkeypatch):
    checkpoints, full = Checkpoints(tmp_path / "c"), OSError("no space left")

    def fails(*args, **kwargs):
        raise full

    monkeypatch.setattr(v1, "save_checkpointables_async", fails)
    save(checkpoints, 1)
    with pytest.raises(CheckpointError, match="written: OSError: no space left"):
        checkpoints.close()
    checkpoints.close()
