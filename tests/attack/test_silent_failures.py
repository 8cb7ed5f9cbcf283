"""Training that fails without an error: weights that blow up, functions that end the process."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec
from runs import config_of, many_digits, run_job

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.data.preferences import PreferencePair
from jaxrl_async.errors import ConfigError, ProcessEndRefused, TrainingError, WeightsError
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.decoder import init_table
from jaxrl_async.model.heads import with_head
from jaxrl_async.model.lora import adapter_table, lora_of
from jaxrl_async.run import loop
from jaxrl_async.run.exits import no_user_exits
from jaxrl_async.sampler.probe import Probe, ProbeJudge
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.preference_objective import PreferenceData, preference_update
from jaxrl_async.trainer.objectives.reward_objective import reward_update
from jaxrl_async.trainer.objectives.supervised_objective import supervised_update
from jaxrl_async.trainer.pack import pack_pairs
from jaxrl_async.trainer.pack_pairs import pack_preference
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import Frozen

ROOT = Path(__file__).parents[2]
ROW = 16
TINY = (
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16}",
    "data.addition={digits: 1, eval_size: 4}",
    "data.max_prompt_tokens=16",
    "warm_start.steps=0",
    "trainer.warmup_steps=0",
    "trainer.micro_batch_tokens=128",
    "sampler={slots: 8, max_new_tokens: 4, max_length: 32, compile_ahead: false}",
    "algorithm={group_size: 4, groups_per_step: 2}",
    "metrics={peak_flops: 1e9, tensorboard: false, spans: false}",
)


def batch() -> Any:
    rng = np.random.default_rng(0)
    mask = np.arange(ROW) >= 4
    return pack_pairs([(rng.integers(1, 30, ROW).astype(np.int32), mask) for _ in range(2)], ROW)


def supervised(rate: float, **settings: Any) -> Update[Any]:
    common = LearningSettings(
        mesh=mesh_of(fsdp=2),
        trainer=schema.TrainerSection(warmup_steps=0, micro_batch_tokens=2 * ROW),
        row_length=ROW,
        **settings,
    )
    return supervised_update(tiny_spec(32), common, learning_rate=rate, total_steps=9)


def held(state: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(state)]


@pytest.mark.full
@pytest.mark.parametrize("rate", [1e6, 1e9, 1e20, 1e38])
def test_an_update_that_blows_up_is_skipped_and_the_state_is_that_before_it(rate, caplog):
    step, data = supervised(rate), batch()
    state = step.init(tiny_params(tiny_spec(32)))
    before = held(state)
    state, report = step.update(state, data, at=0.0)
    assert report["train/skipped"] == 1 and report["train/blown_up"] == 1
    assert np.isfinite(report["train/loss"]) and np.isfinite(report["train/grad_norm"])
    for was, now in zip(before, held(state), strict=True):
        np.testing.assert_array_equal(was, now)
    assert "Lower algorithm.learning_rate" in caplog.text


@pytest.mark.full
def test_an_ordinary_update_is_taken_and_a_nan_gradient_is_no_blow_up():
    step, data = supervised(1e-3), batch()
    state = step.init(tiny_params(tiny_spec(32)))
    state, report = step.update(state, data)
    assert report["train/skipped"] == report["train/blown_up"] == 0
    assert int(state.step) == 1
    norm = np.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in held(state.params)))
    assert report["train/param_norm"] == pytest.approx(norm, rel=1e-5)
    bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), state.params)
    _, report = step.update(state._replace(params=bad), data)
    assert report["train/skipped"] == 1 and report["train/blown_up"] == 0


@pytest.mark.full
def test_weights_of_ordinary_size_whose_own_words_are_nan_are_not_taken(monkeypatch):
    step, data = supervised(1e-3), batch()
    monkeypatch.setattr(
        type(step.objective), "probe", lambda self, params, *_: params["embed"][0] * jnp.nan
    )
    state = step.init(tiny_params(tiny_spec(32)))
    before = held(state)
    state, report = step.update(state, data)
    assert report["train/blown_up"] == 1
    for was, now in zip(before, held(state), strict=True):
        np.testing.assert_array_equal(was, now)


@pytest.mark.full
def test_an_adapter_that_blows_up_is_kept_as_it_was():
    spec, base = tiny_spec(32), tiny_params(tiny_spec(32))
    lora = lora_of(spec, LoraSection(rank=2))
    adapter = init_table(adapter_table(spec, lora), jax.random.key(0), jnp.float32)
    for rate, blown_up in ((1e-3, 0), (1e7, 1)):
        step = supervised(rate, lora=lora)
        state, report = step.update(step.init(adapter), batch(), Frozen(base=base), at=0.0)
        assert report["train/blown_up"] == blown_up
        assert all(np.isfinite(x).all() for x in held(state))


def pairs() -> Any:
    ids = np.arange(1, 5, dtype=np.int32)
    pair = PreferencePair(prompt_ids=ids, chosen_ids=ids + 4, rejected_ids=ids + 8)
    return pack_preference([pair], ROW, 2)


@pytest.mark.full
@pytest.mark.parametrize("job", ["preference", "reward_model"])
def test_pairs_that_blow_weights_up_are_skipped_too(job):
    spec, params = tiny_spec(32), tiny_params(tiny_spec(32))
    common = LearningSettings(
        mesh=mesh_of(fsdp=1),
        trainer=schema.TrainerSection(warmup_steps=0, micro_batch_tokens=2 * ROW),
        row_length=ROW,
    )
    frozen, data = Frozen(reference=params), PreferenceData(pairs())
    if job == "reward_model":
        params, data = with_head(spec, params, "reward", jax.random.key(1)), pairs()
    for rate, blown_up in ((1e-3, 0), (1e7, 1)):
        step: Update[Any] = (
            preference_update(spec, common, "dpo", learning_rate=rate, total_steps=9)
            if job == "preference"
            else reward_update(spec, common, learning_rate=rate, total_steps=9)
        )
        state = step.init(params)
        before = held(state)
        state, report = step.update(state, data, frozen, at=0.0)
        assert report["train/blown_up"] == report["train/skipped"] == blown_up
        same = [np.array_equal(a, b) for a, b in zip(before, held(state), strict=True)]
        assert all(same) == bool(blown_up)


@pytest.mark.full
def test_a_run_of_updates_that_blow_up_ends_with_the_learning_rate_and_saves_what_was(tmp_path):
    settings = (*TINY, many_digits(tmp_path), "run.steps=9", "checkpoint.every=1")
    with pytest.raises(TrainingError, match=r"learning rate is too high: lower algorithm\.learn"):
        run_job("addition", tmp_path, *settings, "algorithm.learning_rate=1e6")
    lines = read_lines(tmp_path / "addition" / "metrics.jsonl")
    assert [x["train/skipped"] for x in lines if "train/skipped" in x] == [1.0, 1.0, 1.0]
    norms = {x["train/param_norm"] for x in lines if "train/param_norm" in x}
    assert len(norms) == 1
    more = (*settings, "run.resume=true", "run.overwrite=false", "algorithm.learning_rate=1e-3")
    after = run_job("addition", tmp_path, *more, "run.steps=5")
    assert after[-1]["step"] == 5 and after[-1]["train/skipped"] == 0


def test_weights_that_give_nan_from_the_start_are_not_blamed_on_the_transfer():
    judge = ProbeJudge(Probe(token_ids=np.arange(4, dtype=np.int32)), "a sampler's", "The transfer")
    nan, fine = np.full(3, np.nan, np.float32), np.zeros(3, np.float32)
    for sampler in (nan, fine):
        with pytest.raises(WeightsError, match=r"trainer's own.*learning_rate") as error:
            judge.judge(7, sampler, nan, compared=False)
        assert "The transfer" not in str(error.value)
    with pytest.raises(WeightsError, match=r"the sampler's log-probs.*The transfer"):
        judge.judge(7, nan, fine, compared=False)


# ---- functions that end the process


def test_what_would_end_the_process_raises_while_a_run_goes_on():
    real = os._exit
    with no_user_exits(), no_user_exits():
        for end in (
            lambda: os._exit(0),
            lambda: os.execv("/bin/true", ["true"]),
            lambda: os.execlp("true", "true"),
            lambda: sys.modules["posix"]._exit(0),
        ):
            with pytest.raises(ProcessEndRefused, match="would end the process of the run"):
                end()
        caught: list[BaseException] = []

        def in_a_thread() -> None:
            try:
                os._exit(0)
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        assert isinstance(caught[0], ProcessEndRefused) and __file__ in str(caught[0])
    assert os._exit is real


FORKED = """
import os
import re
from jaxrl_async.run import loop
from jaxrl_async.run.exits import no_user_exits
with no_user_exits():
    if not (child := os.fork()):
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.full
def test_a_child_process_ends_as_it_likes():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["7"], done.stderr


REWARDS = {
    "os._exit": "import os\n    os._exit(0)",
    "exec": "import os\n    os.execv('/bin/true', ['true'])",
    "sys.exit": "import sys\n    sys.exit(0)",
    "SystemExit": "raise SystemExit",
    "abort": "import os\n    os.abort()",
}


@pytest.mark.full
@pytest.mark.parametrize("name", ["os._exit", "SystemExit"])
def test_a_reward_that_ends_the_process_is_no_success(tmp_path, name):
    check_reward(tmp_path, name)


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["exec", "sys.exit", "abort"])
def test_a_reward_that_ends_the_process_otherwise_is_no_success(tmp_path, name):
    check_reward(tmp_path, name)


def check_reward(folder: Path, name: str) -> None:
    file = folder / "r.py"
    file.write_text(f"def right(prompt, completion, reference):\n    {REWARDS[name]}\n")
    settings = (*TINY, "run.steps=3", f"run.dir={folder}", f"reward.function={file}:right")
    faults = "faults={max_failures: 2, scorer_retries: 0, backoff_s: 0.01}"
    config = str(ROOT / "configs" / "addition.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_async.train", config, *settings, faults],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0, done.stderr
    if name in ("os._exit", "exec"):
        assert "would end the process of the run" in done.stderr and "r.py, line" in done.stderr
    assert not (folder / "addition" / "policy").exists()


# ---- sys.exit outside of a reward

EXITS = """
import argparse, dataclasses, sys, threading
from jaxrl_async.tasks.guess_number import guess_number

def loss(*arguments, **named):
    sys.exit(0)

def parsing_loss(*arguments, **named):
    argparse.ArgumentParser().parse_args(["--help"])

class Ending(list):
    def __getitem__(self, i):
        if threading.current_thread().name == "rollouts":
            sys.exit()
        return list.__getitem__(self, i)

game = guess_number(highest=8, guesses=2)
records = Ending(game.records[i] for i in range(20))
task = dataclasses.replace(game, records=records, held_out=[game.held_out[i] for i in range(4)])
"""
EXITING = {
    "loss": (6, r"loss: sys\.exit\(0\)", ("addition", "algorithm.loss=EXITS:loss")),
    "its library": (9, r"parsing_loss: sys", ("addition", "algorithm.loss=EXITS:parsing_loss")),
    "records": (14, r"__getitem__: sys\.exit\(None\)", ("guess_number", "task=EXITS:task")),
}
"""By what exits: the line, the words, and the configuration with its setting."""


@pytest.fixture
def exits(tmp_path):
    """By name, the match of what is raised, and the configuration with its settings."""
    file = tmp_path / "exits.py"
    file.write_text(EXITS)

    def made(name: str) -> tuple[str, str, tuple[str, ...]]:
        line, words, (config, own) = EXITING[name]
        settings = (*TINY, "run.steps=20")
        if config == "guess_number":
            settings = (*(s for s in settings if "data." not in s), "sampler.max_length=128")
        match = rf"exits\.py, line {line}, {words}.* would end the process of the run\. Return, or"
        return match, config, (*settings, own.replace("EXITS", str(file)))

    return made


@pytest.mark.full
@pytest.mark.parametrize("name", EXITING)
def test_what_exits_in_a_run_fails_it(name, exits, tmp_path):
    match, config, settings = exits(name)
    with pytest.raises(ProcessEndRefused, match=match) as error:
        run_job(config, tmp_path, *settings)
    assert isinstance(error.value.__cause__, SystemExit)


@pytest.mark.full
@pytest.mark.parametrize("name", ["loss", "records"])
def test_what_exits_in_a_run_is_no_success_of_the_command(name, exits, tmp_path):
    match, config, settings = exits(name)
    place = (str(ROOT / "configs" / f"{config}.yaml"), f"run.dir={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_async.train", *place, *settings],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert re.search(f"ProcessEndRefused: .*{match}", done.stderr), done.stderr


@pytest.mark.full
@pytest.mark.parametrize("job", ["addition", "sft"])
def test_an_on_step_that_exits_fails_the_run(job, tmp_path):
    def on_step(step, values):
        if step == 2:
            sys.exit(0)

    settings = (*TINY, many_digits(tmp_path))
    if job == "sft":
        settings = (*TINY[:2], "sft.batch_size=2", *TINY[4:5], TINY[-1])
    config = config_of(job, tmp_path, *settings, "run.steps=9")
    match = rf"{Path(__file__).name}, line \d+, on_step: sys\.exit\(0\) .*StopTraining in on_step"
    with pytest.raises(ProcessEndRefused, match=match):
        loop.train(config, on_step)


def test_an_exit_of_the_script_stays_its_own(tmp_path):
    with pytest.raises(SystemExit, match="3"):
        try:
            run_job("addition", tmp_path, *TINY, "task=no.py:one")
        except ConfigError:
            sys.exit(3)
