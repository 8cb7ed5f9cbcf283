"""A finished run as an object: its results, read from its folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import CheckpointError, DataError
from jaxrl_async.metrics.metric import names_a_known_metric
from jaxrl_async.metrics.notebook import run_svg
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.metrics.series import points
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.shown_answers import read_answers


@dataclass(frozen=True)
class Run:
    """The results of a run, each read when it is accessed. A notebook shows it as a picture."""

    path: Path
    """The run's folder; a text is taken for one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @property
    def config(self) -> Config:
        """The configuration that it was made with."""
        return load(self._paths.config)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each update, by name (docs/metrics.md); `step` 0 is before the first."""
        return read_lines(self._paths.metrics)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Sample episodes with their rewards."""
        return read_lines(self._paths.samples)

    @property
    def answers(self) -> list[dict[str, Any]]:
        """Answers to the first held-out prompts at each evaluation: prompt, completion,
        reference, reward, version, `index` and `seat`."""
        return read_answers(self._paths.answers)

    @property
    def report(self) -> Path:
        """The run on one HTML page."""
        return self._paths.report

    @cached_property
    def policy(self) -> Policy:
        """The policy at the end, an adapter merged. Raises CheckpointError if the run has
        written none."""
        if not self._paths.policy.is_dir():
            raise CheckpointError(
                f"{self._paths.policy} is not there: the run has trained a reward model, or did "
                "not end. Resume it with jaxrl_async.train(..., resume=True)."
            )
        return Policy.from_pretrained(self._paths.policy)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return the steps at which a metric was measured, with its values. Raises DataError for
        a name that no metric has."""
        lines = self.metrics
        measured = points(lines, name)
        if not measured and not names_a_known_metric(name):
            names = sorted({key for line in lines for key in line})
            near = get_close_matches(name, names, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "docs/metrics.md has all names."
            raise DataError(f"{name!r} is no metric of {self.path}. {hint}")
        return measured

    def table(self, names: Sequence[str] = ()) -> dict[str, list[Any]]:
        """Return the metrics by column, for pandas.DataFrame, with None where a step has not
        measured one. names: columns in addition to `step`; none: all."""
        lines = self.metrics
        columns = names or sorted({key for line in lines for key in line} - {"step"})
        return {name: [line.get(name) for line in lines] for name in ("step", *columns)}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_svg_(self) -> str:
        return run_svg(self.metrics)

    @property
    def _paths(self) -> Paths:
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: there is no such run, from {Path.cwd()} on.")
        return Paths(self.path)
