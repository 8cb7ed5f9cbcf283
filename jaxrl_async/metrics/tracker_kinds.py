"""The trackers: Weights & Biases, MLflow, trackio; each needs its package, an optional extra."""

import importlib
import importlib.util
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_async.config.load import flattened
from jaxrl_async.config.run_section import MlflowSection, WandbSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.recorder import encode
from jaxrl_async.metrics.trackers import TrackedRun

STEP = "step"
"""W&B's x axis of all metrics: W&B's own steps only increase, but a resumed run repeats some."""
PARAMS_AT_ONCE = 100
METRICS_AT_ONCE = 1000
"""Maximum numbers that MLflow accepts in one call."""
MAX_PARAM = 6000
"""Maximum length of a parameter in MLflow, characters; the artifact config.json has all of it."""


class WandbTracker:
    """Weights & Biases: a separate run in the project, also offline."""

    name = "Weights & Biases"

    def __init__(self, section: WandbSection) -> None:
        """Load the package. Raises ConfigError if the run should be online and there is no key."""
        self._section = section
        self._client: Any = importlib.import_module("wandb")
        mode = section.mode or os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not self._client.login(prompt=False, verify=False):
            raise ConfigError(
                f"metrics.wandb.project={section.project}: no API key of Weights & Biases was "
                "found Set WANDB_API_KEY, run `wandb login`, or set metrics.wandb.mode=offline."
            )

    def open(self, run: TrackedRun) -> str:
        """Begin or continue a run; return its id."""
        self._run = self._client.init(
            project=self._section.project,
            entity=self._section.entity,
            name=self._section.name or run.name,
            mode=self._section.mode,
            dir=str(run.folder),
            id=run.continues,
            resume=None if run.continues is None else "allow",
            reinit="create_new",  # in addition to other runs of this process
            config={**run.config, "jaxrl_async": run.version},
            settings=self._client.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric=STEP)
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a step's metrics."""
        self._run.log({STEP: step, **values})

    def link(self) -> str:
        """Return the run's page, or the command that uploads an offline run."""
        if self._run.offline:
            folder = Path(self._run.settings.sync_dir).parent  # a resumed run writes another one
            return f"wandb sync {folder}/offline-run-*-{self._run.id}"
        return str(self._run.url)

    def close(self, failed: bool) -> None:
        """Send the remaining data and the run's final state."""
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """MLflow: a run in the experiment, which is created if missing."""

    name = "MLflow"

    def __init__(self, section: MlflowSection) -> None:
        """Load the package."""
        self._section = section
        self._api: Any = importlib.import_module("mlflow")
        self._kinds: Any = importlib.import_module("mlflow.entities")

    def open(self, run: TrackedRun) -> str:
        """Begin or continue a run; return its id. Settings are its parameters."""
        self._client = self._api.MlflowClient(tracking_uri=self._section.tracking_uri)
        if run.continues is not None:
            self._info = self._client.get_run(run.continues).info
            self._client.update_run(self._info.run_id, status="RUNNING")
            return str(self._info.run_id)
        existing = self._client.get_experiment_by_name(self._section.experiment)
        experiment = (
            self._client.create_experiment(self._section.experiment)
            if existing is None
            else existing.experiment_id
        )
        tags = {"jaxrl_async": run.version, "folder": str(run.folder.absolute())}
        self._info = self._client.create_run(experiment, run_name=run.name, tags=tags).info
        params = [
            self._kinds.Param(allowed(key), str(value)[:MAX_PARAM])
            for key, value in flattened(run.config).items()
        ]
        for begin in range(0, len(params), PARAMS_AT_ONCE):
            part = params[begin : begin + PARAMS_AT_ONCE]
            self._client.log_batch(self._info.run_id, params=part)
        self._client.log_text(self._info.run_id, encode(run.config), "config.json")
        return str(self._info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a step's metrics."""
        now_ms = int(time.time() * 1000)
        metrics = [
            self._kinds.Metric(allowed(k), float(v), now_ms, step) for k, v in values.items()
        ]
        for begin in range(0, len(metrics), METRICS_AT_ONCE):
            part = metrics[begin : begin + METRICS_AT_ONCE]
            self._client.log_batch(self._info.run_id, metrics=part)

    def link(self) -> str:
        """Return the run's page on a server, or else its store and id."""
        store = self._section.tracking_uri or self._api.get_tracking_uri()
        experiment, run = self._info.experiment_id, self._info.run_id
        if store.startswith(("http://", "https://")):
            return f"{store.rstrip('/')}/#/experiments/{experiment}/runs/{run}"
        return f"run {run} in {store} (mlflow server --backend-store-uri {store})"

    def close(self, failed: bool) -> None:
        """Report how the run ended."""
        self._client.set_terminated(self._info.run_id, "FAILED" if failed else "FINISHED")


class TrackioTracker:
    """trackio: a run in the project, on this machine."""

    name = "trackio"

    def __init__(self, project: str) -> None:
        """Load the package."""
        self._project = project
        self._api: Any = importlib.import_module("trackio")

    def open(self, run: TrackedRun) -> str:
        """Begin or continue a run; return its name, which is its identifier."""
        name = run.continues or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        config = {**run.config, "jaxrl_async": run.version}
        self._run = self._api.init(project=self._project, name=name, config=config, resume="allow")
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a step's metrics."""
        self._run.log(dict(values), step=step)

    def link(self) -> str:
        """Return the command that shows the project."""
        return f"trackio show --project {self._project}"

    def close(self, failed: bool) -> None:
        """Write the remaining data."""
        self._run.finish()


def allowed(name: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)
