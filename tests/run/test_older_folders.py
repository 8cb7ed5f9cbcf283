"""A run that an older version began is gone on with."""

from pathlib import Path

import pytest
import yaml
from runs import SMALL_JOB, metrics_of

from jaxrl_async.config.load import load
from jaxrl_async.run.loop import train
from jaxrl_async.train_command import main

pytestmark = pytest.mark.full


def test_a_run_resumes_by_the_configuration_that_an_older_version_wrote(tmp_path: Path) -> None:
    run = {"dir": str(tmp_path), "name": "old", "steps": 1}
    config = load({**SMALL_JOB, "run": run, "sampler": {**SMALL_JOB["sampler"], "slots": 8}})
    folder = train(config)
    written = folder / "config.yaml"
    tree = yaml.safe_load(written.read_text())
    tree["sampler"]["engine"] = "ours"  # as it was called
    del tree["sampler"]["engine_class"]
    written.write_text(yaml.safe_dump(tree))
    assert main([str(written), "--resume", "run.steps=2"]) == 0
    assert metrics_of(config)[-1]["step"] == 2
    assert yaml.safe_load(written.read_text())["sampler"]["engine"] == "native"
