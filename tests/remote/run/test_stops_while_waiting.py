"""Runs that are stopped while no sampler is there: they end at once, saved, as any other."""

import signal
from pathlib import Path

import pytest
from joined_run import TINY, JoinedRun, joined_run

from jaxrl_async.train_command import RESUME

pytestmark = pytest.mark.full

SETTINGS = (*TINY, "staleness.max_staleness=2", "eval.every=1", "run.steps=1000")
EVALUATED = ("data.addition={digits: 2, eval_size: 200}", "checkpoint={every: 100, grace_s: 60}")


def saved_versions(run: JoinedRun) -> list[int]:
    return sorted(int(f.name) for f in (run.run / "checkpoints").glob("[0-9]*"))


@pytest.mark.exhaustive
def test_ctrl_c_before_any_sampler_has_come_ends_the_run_saved(tmp_path: Path) -> None:
    with joined_run(tmp_path, *SETTINGS) as run:
        run.train()
        run.until_said("trainer", "waiting for 1 samplers")
        run.signal("trainer", signal.SIGINT)
        assert run.code("trainer") == 0, run.said("trainer")[-3000:]
        output = run.said("trainer")
        assert "an evaluation is skipped" in output and "stopped early by SIGINT" in output
        assert saved_versions(run) == [0] and not run.problems()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 0)])
def test_a_stop_works_while_an_evaluation_has_lost_its_only_sampler(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with joined_run(tmp_path, *SETTINGS, *EVALUATED, "run.steps=1") as run:
        run.train()
        run.sample("first")
        run.until_said("first", "generating for run")  # the first evaluation begins
        run.signal("first", signal.SIGKILL)
        run.until_said("trainer", "no sampler is available")
        assert not any("eval/reward" in x for x in run.lines()), "it was still evaluating"
        run.signal("trainer", number)
        assert run.code("trainer") == code, run.said("trainer")[-3000:]
        output = run.said("trainer")
        assert "an evaluation is skipped" in output and "not ended within" not in output
        assert saved_versions(run) == [0] and not run.problems()
        run.train(*RESUME)
        run.sample("second")
        assert run.code("trainer") == 0, run.said("trainer")[-3000:]
        evaluated = [x["step"] for x in run.lines() if "eval/reward" in x]
        assert 0 in evaluated, "what was left out is made up for"
        assert run.step == 1 and not run.problems()
