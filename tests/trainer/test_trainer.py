"""The trainer's loop, on scripted parts: order of events, evaluation, skipped steps, stopping."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl_async.algorithms.pacing import Bounds
from jaxrl_async.errors import (
    BadEndpoint,
    CheckpointError,
    Closed,
    EarlierSaveError,
    FolderLost,
    TrainingError,
)
from jaxrl_async.mesh import NO_DEVICE_LOCK
from jaxrl_async.trainer.evaluation import Finish, Outlets, is_due
from jaxrl_async.trainer.trainer import Trainer, TrainerSettings
from jaxrl_async.types import Draw, Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket


def group(number: int, version: int) -> EpisodeGroup:
    episode = Episode(
        token_ids=np.arange(3, dtype=np.int32),
        drawn=np.array([False, True, True]),
        logprobs=np.zeros(3, np.float32),
        versions=np.array([-1, version, version], np.int32),
        stop=StopReason.EOS,
    )
    prompt = Prompt(
        prompt_id=number, position=number, token_ids=np.zeros(1, np.int32), text="", reference=""
    )
    return EpisodeGroup(
        prompt=prompt,
        episodes=(episode, episode),
        scores=(Score(reward=0.0), Score(reward=1.0)),
        ticket=Ticket(group=number, version=version),
    )


class Script:
    """Every part that the trainer talks to; writes down what happens in order."""

    params = None

    def __init__(
        self,
        *,
        skipped: tuple[int, ...] = (),
        stop_after: int = 10**9,
        ess: tuple[float, ...] = (),
        failing_saves: Sequence[int] = (),
        telling_saves: Sequence[int] = (),
        hurries: bool = False,
        evaluate: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self.events: list[str] = []
        self.reports: dict[int, dict[str, float]] = {}
        self.skipped, self.stop_after, self.ess = skipped, stop_after, ess
        self.failing_saves, self.hurries = failing_saves, hurries
        self.telling_saves, self.evaluate = telling_saves, evaluate
        self.asked: list[tuple[int, bool]] = []
        self.learn_begun, self.begun = threading.Condition(), list[tuple[int, dict[str, float]]]()

    def learn(self, groups: Any, version: int, lock: Any) -> dict[str, float]:
        with self.learn_begun:
            self.events.append(f"learn {version}")
            self.learn_begun.notify_all()
        stats = {"train/skipped": float(version in self.skipped)}
        if self.ess:
            stats["offpolicy/ess_share"] = self.ess[version]
        return stats

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        if version >= self.stop_after + 5:
            raise Closed("test")
        return Draw(groups=(group(version, version),), dropped=(), waited_s=0.0)

    def pause(self) -> None:
        self.events.append("pause")

    def resume(self) -> None:
        self.events.append("resume")

    def set_limit(self, limit: int) -> None:
        self.events.append(f"limit {limit}")

    def publish(self, version: int, params: Any, probe_logprobs: Any = None) -> None:
        self.events.append(f"publish {version}")

    def wait_taken(self) -> None:
        pass

    def wait_live(self, version: int, timeout_s: float, given_up: object = None) -> None:
        self.events.append(f"live {version}")

    def save(self, learner: Any, version: int, numbers: Any) -> None:
        if version in self.failing_saves:
            raise CheckpointError("the disk is full.")
        self.events.append(f"save {version}")
        if version in self.telling_saves:
            raise EarlierSaveError("the disk was full.")

    def report(self, version: int, values: Any, groups: Any) -> Finish:
        self.begun.append((version, {**values}))

        def finish(more: Any) -> None:
            self.events.append(f"report {version}")
            self.reports[version] = {**values, **more}

        return finish

    def evaluated(self, version: int, last: bool) -> dict[str, float]:
        self.asked.append((version, last))
        if self.evaluate is not None:
            return self.evaluate()
        self.events.append("evaluate")
        return {"eval/accuracy": 0.5}

    def trainer(
        self,
        slice_lock: Any = NO_DEVICE_LOCK,
        *,
        eval_every: int | tuple[int, ...] = 2,
        **settings: Any,
    ) -> Trainer:
        every = eval_every if isinstance(eval_every, tuple) else (eval_every,)
        outlets = Outlets(
            evaluate=self.evaluated,
            report=self.report,
            save=self.save,
            should_stop=lambda: max(self.reports, default=0) >= self.stop_after,
            should_hurry=lambda: (
                self.hurries and max(self.reports, default=0) + 1 >= self.stop_after
            ),
        )
        return Trainer(
            learner=self,  # type: ignore[arg-type]
            source=self,
            publisher=self,
            outlets=outlets,
            settings=TrainerSettings(
                **{"total_steps": 4, "save_every": 0, **settings, "eval_every": every}
            ),
            slice_lock=slice_lock,
        )


def test_an_evaluation_runs_on_exactly_the_version_it_is_reported_for() -> None:
    script = Script()
    script.trainer().run()
    assert script.events == [
        *["evaluate", "report 0", "resume"],
        *["learn 0", "publish 1", "report 1"],
        *["learn 1", "pause", "publish 2", "live 2", "evaluate", "report 2", "resume"],
        *["learn 2", "publish 3", "report 3"],
        *["learn 3", "pause", "publish 4", "live 4", "evaluate", "report 4"],
        "save 4",
    ]
    assert [v for v, r in script.reports.items() if "eval/accuracy" in r] == [0, 2, 4]


def test_each_evaluation_has_its_own_cadence() -> None:
    script = Script()
    script.trainer(total_steps=7, eval_every=(0, 2, 3)).run()
    assert script.asked == [(0, False), (2, False), (3, False), (4, False), (6, False), (7, True)]
    due = [v for v in range(8) if is_due(3, v, last=v == 7)]
    assert due == [0, 3, 6, 7] and [v for v in range(5) if is_due(0, v, last=False)] == [0]


def evaluated_while_learning(script: Script) -> dict[str, float]:
    """An evaluation that ends only once the next version is trained."""
    asked = [e for e in script.events if e.startswith("learn")]
    script.events.append("begin to evaluate")
    with script.learn_begun:
        known = script.learn_begun.wait_for(
            lambda: [e for e in script.events if e.startswith("learn")] != asked, timeout=60
        )
    assert known, "the next version is trained meanwhile"
    script.events.append("evaluated")
    return {"eval/accuracy": 0.5}


def test_an_evaluation_runs_during_the_next_update_which_is_published_after_it() -> None:
    script = Script()
    evals = iter((*[lambda: evaluated_while_learning(script)] * 2, lambda: {"eval/accuracy": 1.0}))
    script.evaluate = lambda: next(evals)()
    script.trainer(eval_async=True).run()
    order = {event: index for index, event in enumerate(script.events)}
    assert script.events.count("pause") == 1 and order["pause"] > order["learn 3"], "the last's"
    begun = [i for i, e in enumerate(script.events) if e == "begin to evaluate"]
    ended = [i for i, e in enumerate(script.events) if e == "evaluated"]
    for version, begin, end in zip((0, 2), begun, ended, strict=True):
        assert order.get(f"publish {version}", -1) < begin < order[f"learn {version}"] < end
        assert end < order[f"report {version}"] < order[f"publish {version + 1}"]
    assert order["live 2"] < begun[1] and order["live 4"] < order["save 4"]
    assert [v for v, r in script.reports.items() if "eval/accuracy" in r] == [0, 2, 4]
    assert script.reports[4]["eval/accuracy"] == 1.0 and "train/skipped" in script.reports[2]


def test_the_slice_is_not_locked_while_an_asynchronous_evaluation_is_waited_for() -> None:
    """Several runs step on one slice: the others continue meanwhile."""
    slice_lock, finished = threading.Lock(), threading.Event()
    script = Script(evaluate=lambda: {"time/eval_s": float(finished.wait(60))})
    trainer = script.trainer(slice_lock, eval_async=True, total_steps=2)
    thread = threading.Thread(target=trainer.run)
    thread.start()
    until = time.monotonic() + 60
    while trainer.clock.doing != "evaluating" and time.monotonic() < until:
        time.sleep(0.001)
    assert slice_lock.acquire(blocking=False), "it is free for another's step"
    slice_lock.release()
    finished.set()
    thread.join(60)
    assert script.events[-1] == "save 2" and "report 0" in script.events
    assert script.reports[1]["time/wait_eval_s"] > 0 and script.reports[1]["time/train_s"] >= 0


def test_an_error_of_an_asynchronous_evaluation_ends_the_run_saved_and_its_step_reported() -> None:
    def fails() -> dict[str, float]:
        raise BadEndpoint("no such judge.")

    script = Script(evaluate=fails)
    with pytest.raises(BadEndpoint, match="no such judge"):
        script.trainer(eval_async=True).run()
    assert script.events[-2:] == ["report 0", "save 1"] and "publish 1" not in script.events
    (version, values) = script.begun[-1]
    assert version == 1 and "train/skipped" in values and values["time/wait_eval_s"] >= 0, (
        "what is saved has its line of metrics, which no resumed run would write"
    )


def test_a_run_that_is_lost_still_reports_its_asynchronous_evaluation() -> None:
    script = Script(skipped=(0, 1, 2))
    with pytest.raises(TrainingError, match="3 steps in a row"):
        script.trainer(total_steps=10, eval_every=3, eval_async=True).run()
    assert script.reports[3]["eval/accuracy"] == 0.5 and script.events[-1] == "save 3"


def test_a_stop_by_an_asynchronous_evaluation_ends_the_run_with_a_last_one() -> None:
    script = Script(stop_after=2, evaluate=lambda: {"time/eval_s": 1.0})
    script.trainer(total_steps=100, eval_every=2, eval_async=True).run()
    assert script.events[-6:] == [
        *["report 2", "pause", "publish 3", "live 3"],
        *["report 3", "save 3"],
    ]
    assert script.reports[3]["time/eval_s"] == 1.0


def test_skipped_steps_in_a_row_stop_the_run_after_saving() -> None:
    script = Script(skipped=(1, 2, 3))
    with pytest.raises(TrainingError, match="3 steps in a row"):
        script.trainer(total_steps=9, max_skipped_steps=3).run()
    assert script.events[-1] == "save 4"
    assert [script.reports[v]["train/skipped"] for v in (1, 2, 3, 4)] == [0, 1, 1, 1]


def test_skipped_steps_that_are_not_in_a_row_do_not_stop_it() -> None:
    script = Script(skipped=(0, 2, 4))
    script.trainer(total_steps=6, max_skipped_steps=2).run()
    assert max(script.reports) == 6


def test_skipped_steps_before_a_resume_count_in_the_row() -> None:
    script = Script(skipped=(2, 3, 4))
    trainer = script.trainer(total_steps=9, max_skipped_steps=3)
    trainer.restore(2, {"skipped": 2, "limit": 0, "rest": 0})
    with pytest.raises(TrainingError, match="3 steps in a row"):
        trainer.run()
    assert max(script.reports) == 3


def test_groups_of_an_update_that_fails_go_back() -> None:
    script = Script()

    def fails(*_: Any) -> dict[str, float]:
        raise RuntimeError("out of memory")

    script.learn = fails  # type: ignore[method-assign]
    script.give_back = lambda: script.events.append("give back")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="out of memory"):
        script.trainer(eval_every=0).run()
    assert script.events.count("give back") == 1


def test_a_stop_finishes_the_step_publishes_and_saves() -> None:
    script = Script(stop_after=2)
    script.trainer(total_steps=100, eval_every=0).run()
    assert max(script.reports) == 2
    assert script.events[-1] == "save 2"


def test_checkpoints_come_every_so_many_steps_and_once_at_the_end() -> None:
    script = Script()
    script.trainer(total_steps=5, save_every=2, eval_every=0).run()
    saves = [e for e in script.events if e.startswith("save")]
    assert saves == ["save 0", "save 2", "save 4", "save 5"]


def test_a_resumed_trainer_does_not_write_its_checkpoint_again() -> None:
    script = Script()
    numbers = script.trainer().numbers()
    trainer = script.trainer(total_steps=4, save_every=2, eval_every=0)
    trainer.restore(2, numbers)
    trainer.run()
    assert [e for e in script.events if e.startswith("save")] == ["save 4"]


def test_a_checkpoint_that_fails_is_counted_and_the_next_one_is_tried() -> None:
    script = Script(failing_saves=(2,))
    script.trainer(total_steps=5, save_every=2, eval_every=0).run()
    assert [e for e in script.events if e.startswith("save")] == ["save 0", "save 4", "save 5"]
    assert [v for v, r in script.reports.items() if "checkpoint/failed" in r] == [3]
    assert [v for v, r in script.reports.items() if "time/save_s" in r] == [1, 3, 5]


def test_several_that_fail_in_a_row_or_the_last_one_end_the_run() -> None:
    script = Script(failing_saves=range(3, 20))
    with pytest.raises(CheckpointError, match="disk"):
        script.trainer(total_steps=19, save_every=1, eval_every=0).run()
    assert max(script.reports) == 5
    script = Script(failing_saves=(3,))
    with pytest.raises(CheckpointError, match="disk"):
        script.trainer(total_steps=3, eval_every=0).run()


def test_a_failure_reported_by_the_next_save_is_counted_and_that_one_is_kept() -> None:
    script = Script(telling_saves=(2, 5))
    script.trainer(total_steps=5, save_every=2, eval_every=0).run()
    saves = [e for e in script.events if e.startswith("save")]
    assert saves == ["save 0", "save 2", "save 4", "save 5"]
    assert [v for v, r in script.reports.items() if "checkpoint/failed" in r] == [3]
    script = Script(telling_saves=range(3, 20))
    with pytest.raises(EarlierSaveError, match="disk"):
        script.trainer(total_steps=19, save_every=1, eval_every=0).run()
    assert max(script.reports) == 5


def test_where_nothing_may_be_saved_any_more_no_last_save_is_tried() -> None:
    """Of several processes the others are not notified: a last save would wait for them."""
    script, tried = Script(), list[int]()

    def lost(learner: Any, version: int, numbers: Any) -> None:
        tried.append(version)
        if version:
            raise FolderLost("gs://b is written by another trainer now.")

    script.save = lost  # type: ignore[method-assign]
    with pytest.raises(FolderLost):
        script.trainer(total_steps=9, save_every=2, eval_every=0).run()
    assert tried == [0, 2]


def test_in_a_hurry_nothing_is_evaluated_and_all_is_saved() -> None:
    script = Script(stop_after=3, hurries=True)
    script.trainer(total_steps=100, eval_every=1).run()
    assert [v for v, r in script.reports.items() if "eval/accuracy" in r] == [0, 1, 2]
    assert script.events[-1] == "save 3"


def test_a_stop_is_noticed_while_the_trainer_waits_for_groups() -> None:
    script = Script()

    def late(version: int, timeout_s: float | None = None) -> Draw:
        script.stop_after = 0
        raise TimeoutError

    script.draw = late  # type: ignore[method-assign]
    script.trainer().run()
    assert script.events[-1] == "save 0" and list(script.reports) == [0]


def test_the_limit_follows_the_effective_sample_size_before_the_weights_are_published() -> None:
    script = Script(ess=(0.5, 0.5, 0.5, 0.99))
    script.trainer(eval_every=0, pacing=Bounds(target=0.8, lowest=0, highest=2)).run()
    limits = [e for e in script.events if e.startswith("limit")]
    assert limits == ["limit 1", "limit 1", "limit 1", "limit 2"], "two updates of rest"
    assert [script.reports[v]["staleness/limit"] for v in (1, 2, 3, 4)] == [1, 1, 1, 2]
    assert script.events.index("limit 1") < script.events.index("publish 1")
    without = Script(ess=(0.1,) * 4)
    without.trainer().run()
    assert not [e for e in without.events if e.startswith("limit")]
