"""Callbacks at the stages of a run: from a file, as objects, with each kind of job."""

import json
from pathlib import Path

import pytest

import jaxrl_async as jr
from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError
from jaxrl_async.run.callbacks import Callbacks, check_callback, load_callbacks
from jaxrl_async.run.loop import train
from jaxrl_async.run.start_checks import check_names

OWN = """
import json
from pathlib import Path

import jaxrl_async as jr


class Noted(jr.Callback):
    def __init__(self, *, file: str, stop_at: int = 0, fail_in: str = ""):
        self.file, self.stop_at, self.fail_in = Path(file), stop_at, fail_in

    def note(self, *what):
        with self.file.open("a") as opened:
            opened.write(json.dumps(what) + "\\n")
        if what[0] == self.fail_in:
            raise RuntimeError("the disk of my dashboard is full")

    def on_begin(self, config, folder):
        self.note("begin", config.run.name, folder.is_dir())

    def on_step(self, step, metrics):
        self.note("step", step, "train/loss" in metrics)
        if step and step == self.stop_at:
            raise jr.StopTraining("enough")

    def on_evaluation(self, step, metrics):
        self.note("evaluation", step, all(key.startswith("eval/") for key in metrics))

    def on_save(self, step, folder):
        self.note("save", step, any(folder.iterdir()))

    def on_end(self, folder, weights):
        self.note("end", weights is not None)
"""
TINY = {
    "model.architecture": "{layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16}",
    "data.addition": "{digits: 1, eval_size: 4}",
    "sampler": "{slots: 8, max_length: 24, max_new_tokens: 8}",
    "algorithm": "{group_size: 2, groups_per_step: 2}",
    "warm_start": "{steps: 0}",
    "metrics.tensorboard": "false",
    "run.steps": "3",
    "checkpoint.every": "2",
    "eval.every": "2",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (file := tmp_path / "own.py").write_text(OWN)
    return file


def configured(folder: Path, own: Path, arguments: dict, **more: str):
    choice = json.dumps([{f"{own}:Noted": {"file": str(folder / "notes"), **arguments}}])
    settings = {**TINY, "run.dir": str(folder), "run.name": "r", "run.callbacks": choice, **more}
    (file := folder / "run.yaml").write_text("")
    return load(file, [f"{key}={value}" for key, value in settings.items()])


def notes(folder: Path) -> list[list]:
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


@pytest.mark.full
def test_every_stage_is_called_in_its_order(own, tmp_path):
    train(configured(tmp_path, own, {}))
    found = notes(tmp_path)
    saves = [line for line in found if line[0] == "save"]
    assert [line[1] for line in saves] == [0, 2, 3]
    assert [line[2] for line in saves] == [True] * 3
    assert [line for line in found if line[0] != "save"] == [
        ["begin", "r", True],
        ["evaluation", 0, True], ["step", 0, False],
        ["step", 1, True],
        ["evaluation", 2, True], ["step", 2, True],
        ["evaluation", 3, True], ["step", 3, True],
        ["end", True],
    ]  # fmt: skip


@pytest.mark.full
def test_an_object_of_the_caller_can_stop_the_run_and_its_failure_ends_it_saved(own, tmp_path):
    config = configured(tmp_path, own, {"stop_at": 2})
    train(config, callbacks=load_callbacks(config.run.callbacks)[:0])
    assert [line[:2] for line in notes(tmp_path)][-2:] == [["save", 2], ["end", True]]
    (tmp_path / "notes").unlink()
    config = configured(tmp_path, own, {"fail_in": "save"}, **{"run.name": "other"})
    with pytest.raises(RuntimeError, match="the disk of my dashboard is full"):
        train(config)
    assert ["begin", "other", True] in notes(tmp_path)
    assert list((tmp_path / "other" / "checkpoints").glob("[0-9]*"))


class Counting(jr.Callback):
    def __init__(self):
        self.seen: list[tuple] = []

    def on_step(self, step, metrics):
        self.seen.append((step, dict(metrics)))

    def on_save(self, step, folder):
        if step == 1:
            raise jr.StopTraining("saved")
        raise OSError("no room")


def test_a_failure_while_saving_is_raised_by_the_next_step_once(caplog):
    one = Counting()
    calls = Callbacks([one], lambda step, metrics: one.seen.append(("own", step)))
    calls.saved(1, Path("c/1"))
    assert not caplog.records  # it only stops
    with pytest.raises(jr.StopTraining, match="saved"):
        calls.step(2, {"eval/accuracy": 1.0})
    calls.step(2, {"eval/accuracy": 1.0, "reward": 2.0})
    assert one.seen == [(2, {"eval/accuracy": 1.0, "reward": 2.0}), ("own", 2)]
    calls.saved(2, Path("c/2"))
    assert "Counting.on_save failed" in caplog.text
    with pytest.raises(OSError, match="no room"):
        calls.step(3, {})


def test_failures_of_the_last_checkpoint_are_raised_at_the_end_and_the_first_of_them():
    class Failing(jr.Callback):
        ended = False

        def on_save(self, step, folder):
            raise OSError(f"no room for {step}")

        def on_end(self, folder, weights):
            self.ended = True

    one = Failing()
    calls = Callbacks([one], None)
    calls.saved(3, Path("c/3"))
    calls.saved(4, Path("c/4"))
    with pytest.raises(OSError, match="no room for 3"):
        calls.end(Path("c"), None)
    assert one.ended
    calls.end(Path("c"), None)


@pytest.mark.full
def test_stop_training_before_the_first_update_ends_the_run_saved(tmp_path, own):
    class Late(jr.Callback):
        def on_begin(self, config, folder):
            raise jr.StopTraining("the budget is spent")

        def on_end(self, folder, weights):
            raise jr.StopTraining

    config = configured(tmp_path, own, {})
    assert (train(config, callbacks=[Late()]) / "checkpoints").is_dir()
    assert not [line for line in notes(tmp_path) if line[0] == "step" and line[1] > 0]


class Extra(jr.Callback):
    def on_episode(self):
        pass


class Short(jr.Callback):
    def on_step(self, step):
        pass


class Waiting(jr.Callback):
    async def on_end(self, folder, weights):
        pass


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Extra, "on_episode is never called; the stages are on_begin, on_step"),
        (Short, r"on_step is called with \(step, metrics\): too many positional"),
        (Waiting, "on_end must not be async"),
        (dict, "must be a subclass of jaxrl_async.Callback, not dict"),
    ],
)
def test_a_callback_that_would_not_be_called_as_meant_is_refused(made, message):
    with pytest.raises(ConfigError, match=f"train: callbacks.*{message}"):
        check_callback(made(), "train: callbacks")


def test_a_class_in_place_of_an_object_is_named():
    with pytest.raises(ConfigError, match=r"Extra is a class\. Give an object: Extra\(\)"):
        check_callback(Extra, "train: callbacks")


def test_a_class_that_a_file_lacks_is_found_without_a_run(own, tmp_path):
    config = configured(tmp_path, own, {})
    check_names(config)  # makes no object
    run = config.run.model_copy(update={"callbacks": (f"{own}:Other",)})
    with pytest.raises(ConfigError, match=r"has no class Other \(it has: Noted\)"):
        check_names(config.model_copy(update={"run": run}))


def test_a_callback_of_a_file_is_made_with_its_arguments(own, tmp_path):
    (made,) = load_callbacks([{f"{own}:Noted": {"file": "x", "stop_at": 3}}])
    assert made.stop_at == 3
    with pytest.raises(ConfigError, match=r"Noted cannot be made: TypeError.*'file'"):
        load_callbacks([f"{own}:Noted"])
    with pytest.raises(ConfigError, match=r"'wandb' must be FILE\.py:CLASS"):
        load_callbacks(["wandb"])
    with pytest.raises(ConfigError, match="there is no file"):
        load_callbacks([f"{tmp_path}/none.py:Noted"])
